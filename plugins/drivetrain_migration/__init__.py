"""Migration: configurations and command lines of other programs in the words of ours.

Each program has a table in a TOML file: of its settings, its options, and how it is known. A row
says what a setting does there, what stands for it here, and which converter carries the value over;
a setting that nothing stands for becomes a comment. ``launchers.py`` applies the tables: to
Accelerate's files, DeepSpeed's JSON, and the command lines of launchers.

Nothing here imports torch.
"""
