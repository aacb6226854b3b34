"""Checkpoints in the memory of hosts: a lost rank or host costs seconds, not a read of storage.

``homes``       whose memory holds what, and which host keeps whose copies
``transfers``   files from rank to rank
``saving``      one save: shards at home, copies at the neighbor, committed everywhere or nowhere
``restoring``   what is left after a restart, and how each host gets what it lacks
``checkpoints`` all checkpoints of a run in memory

The files and the manifest are those of ``drivetrain.checkpoint``. In memory they are spread: each
host has the files of its own ranks, those of the host before it, and the small common ones. The
order follows Gemini (SOSP 2023), with one copy: groups of two in a ring.
"""

from drivetrain.checkpoint.local.checkpoints import MemoryCheckpoints
from drivetrain.checkpoint.local.saving import MemorySave

__all__ = ["MemoryCheckpoints", "MemorySave"]
