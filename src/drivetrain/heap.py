"""Freed memory in the C library's heap, and ways for the system to get it back.

A block of less than 32 MiB stays with the process when it is freed, for the next one of its size.
Small blocks that live on settle at its edges, then the next tensor does not fit and the heap grows:
a process that gathers one unit after the other would take as much memory as the whole model.

Only glibc on Linux is asked for anything here; other C libraries return large blocks by themselves.
"""

import ctypes
import mmap
from typing import ClassVar

import torch

_KEPT_BYTES = 64 * 2**20
"""Bytes that may be thrown away, or by which the heap may grow, before it is asked to return free
memory: a search through the whole heap, and the next step needs a part of the memory again."""

_WORTH_A_CALL = 2**20
"""Smaller blocks are not offered to the system: a call takes as long as a copy of some of them."""

_LIBRARY = ctypes.CDLL(None)
_ADVICE = getattr(mmap, "MADV_FREE", None)


class _Counts(ctypes.Structure):
    """The result of glibc's ``mallinfo2``."""

    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd",
            "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


class Heap:
    """Has the C library return its free memory to the system, when there is enough of it."""

    def __init__(self) -> None:
        self._thrown = 0
        self._size = 0
        self._trim = getattr(_LIBRARY, "malloc_trim", None)
        self._count = getattr(_LIBRARY, "mallinfo2", None)
        if self._count is not None:
            self._count.restype = _Counts

    def throw(self, size: int) -> None:
        """Count bytes that are free now, or will be at the next call of ``relieve``."""
        self._thrown += size

    def relieve(self, kept: int = _KEPT_BYTES) -> None:
        """Return free memory if more than this was thrown away since the last time."""
        if self._thrown > kept:
            self._thrown = 0
            if self._trim is not None:
                self._trim(0)

    def relieve_growth(self) -> None:
        """Return free memory if the heap has grown since the last time, as in the first steps.

        In steps that are all alike it does not grow, so they pay for no page twice.
        """
        if self._trim is None or self._count is None:
            return
        if self._count().arena > self._size + _KEPT_BYTES:
            self._trim(0)
            self._size = self._count().arena


def offer(memory: torch.UntypedStorage) -> None:
    """Let the system take a storage's pages when memory is short; the storage is freed next.

    Its values are lost. Pages that the system did not take serve the next tensor at once, without a
    page fault; until then the process's resident size counts them.
    """
    if _ADVICE is None or memory.device.type != "cpu" or memory.nbytes() < _WORTH_A_CALL:
        return
    first = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (memory.data_ptr() + memory.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
    # A refusal (a locked page, an old kernel) costs nothing but the memory that stays.
    _LIBRARY.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _ADVICE)
