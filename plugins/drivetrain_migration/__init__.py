"""Migration: configurations and command lines of other programs in the words of ours.

Each program has a table of its settings. A row says what a setting does there, what stands for it
here, and how the value is carried over; a setting that nothing stands for becomes a comment. The
tables of docs/importing.md are made from these rows.

===============  ===================================================================
draft.py         a translation in the making; the rows of the tables
zero.py          the settings of ZeRO, which two programs have
deepspeed.py     DeepSpeed's JSON
sharding.py      the sections of Accelerate's files on DeepSpeed and FSDP
layers.py        their sections on Megatron and parallel dimensions
accelerate.py    Accelerate's files as a whole, and ``accelerate launch``
launchers.py     the command lines of torchrun and of DeepSpeed's launcher
command_line.py  options of a command line, as a program's own parser would read them
===============  ===================================================================

Nothing here imports torch.
"""
