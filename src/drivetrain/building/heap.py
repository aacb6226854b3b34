"""Returns memory of tensors that were thrown away to the system.

The C library keeps freed blocks of up to 32 MiB. Small blocks that live on settle at their edges,
then the next tensor of the same size does not fit and the heap grows: a process would in the end
take as much memory as the model that it must not hold.
"""

import ctypes

_KEPT_BYTES = 64 * 2**20
"""Bytes that may be thrown away before the heap is asked to return what is free."""


class Heap:
    """Counts bytes that are thrown away, and has them returned now and then.

    Only glibc can be asked to; other C libraries return large blocks by themselves.
    """

    def __init__(self) -> None:
        self._thrown = 0
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def throw(self, size: int) -> None:
        """Count bytes that are free now, or will be at the next call of ``relieve``."""
        self._thrown += size

    def relieve(self, kept: int = _KEPT_BYTES) -> None:
        """Return free memory if more than this was thrown away since the last time."""
        if self._thrown > kept:
            self._thrown = 0
            if self._trim is not None:
                self._trim(0)
