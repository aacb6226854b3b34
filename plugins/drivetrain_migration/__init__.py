"""Migration: configurations and command lines of other programs in the words of ours.

Each program has a table of its settings, in a TOML file. A row says what a setting does there, what
stands for it here, and which converter carries the value over; a setting that nothing stands for
becomes a comment.

=============  =====================================================================================
converters.py  a translation in the making: rows of the tables applied to the settings of a file
launchers.py   DeepSpeed's JSON, the command lines of torchrun and of DeepSpeed's launcher
accelerate.py  Accelerate's files, and ``accelerate launch``
=============  =====================================================================================

Nothing here imports torch.
"""
