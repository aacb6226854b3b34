"""Aligned host memory, page-locked for accelerators, and a pool that hands it out again."""

import ctypes
import mmap
import sys
import weakref
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from drivetrain.log import get_logger

ALIGNMENT = 4096
"""Bytes; what direct I/O asks of addresses, offsets and lengths on every common disk."""

_PORTABLE = 1
"""``cudaHostRegisterPortable``: page-locked for every device of the process."""

_logger = get_logger(__name__)


def padded(nbytes: int) -> int:
    """Return a number of bytes, rounded up to a multiple of the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def can_page_lock() -> bool:
    """Return whether there is an accelerator whose runtime locks pages that are already mapped."""
    return torch.cuda.is_available()


def aligned_empty(
    numel: int, dtype: torch.dtype = torch.float32, *, page_locked: bool = False
) -> Tensor:
    """Return an uninitialized tensor at an aligned address, in a mapping of its own.

    Args:
        numel: elements.
        dtype: of the elements.
        page_locked: whether an accelerator shall copy from and to it asynchronously; where pages
            cannot be locked it is plain memory, and a warning says so.

    Returns:
        A tensor of shape (numel,). Its pages are not there in a forked child.
    """
    nbytes = numel * dtype.itemsize
    return _tensor(_Region(nbytes, page_locked))[:nbytes].view(dtype)


class BufferPool:
    """Aligned memory that is handed out again as soon as no tensor lies in it any more.

    A fresh mapping costs a page fault per page; one that was used before costs nothing.

    Args:
        page_locked: as in ``aligned_empty``.
        spare: how many mappings that nobody uses are kept.
    """

    def __init__(self, *, page_locked: bool, spare: int = 4) -> None:
        self._page_locked = page_locked
        self._most = spare
        self._spare: list[_Region] = []

    def take(self, nbytes: int) -> Tensor:
        """Return an uninitialized uint8 tensor of ``padded(nbytes)`` bytes at an aligned address.

        Its memory is the caller's until the last tensor in it is gone.
        """
        return _tensor(self._region(padded(nbytes)), self._give_back)

    def clear(self) -> None:
        """Give up the mappings that nobody uses, and keep none from now on."""
        self._most = 0
        self._spare.clear()

    def _region(self, nbytes: int) -> "_Region":
        # No lock: a tensor may end, and give its memory back, while this very thread is in here.
        for region in tuple(self._spare):
            if len(region) == max(nbytes, ALIGNMENT):
                with suppress(ValueError):  # another thread was faster
                    self._spare.remove(region)
                    return region
        return _Region(nbytes, self._page_locked)

    def _give_back(self, region: "_Region") -> None:
        self._spare.append(region)
        while len(self._spare) > self._most:
            with suppress(IndexError):
                self._spare.pop(0)


class _Region(mmap.mmap):
    """A private anonymous mapping; its pages are unlocked before it is unmapped."""

    _locked = False

    def __new__(cls, nbytes: int, page_locked: bool) -> "_Region":
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        return super().__new__(cls, -1, max(padded(nbytes), ALIGNMENT), flags=flags)

    def __init__(self, nbytes: int, page_locked: bool) -> None:
        # A fork while the disk writes into a page would leave the data in the child's copy of it.
        self.madvise(mmap.MADV_DONTFORK)
        with suppress(OSError):  # a kernel without huge pages
            self.madvise(mmap.MADV_HUGEPAGE)
        if page_locked:
            self._locked = _page_lock(self._address(), len(self))

    def _address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self))

    def __del__(self) -> None:
        if self._locked and not sys.is_finalizing():
            _runtime().cudaHostUnregister(self._address())


def _tensor(region: _Region, give_back: Any = None) -> Tensor:
    """Return a uint8 tensor over a whole mapping; ``give_back`` hears when its storage is gone."""
    # Torch holds on to what it was given: this array lives exactly as long as the storage.
    holder = (ctypes.c_char * len(region)).from_buffer(region)
    if give_back is not None:
        weakref.finalize(holder, give_back, region).atexit = False
    with torch.inference_mode(False):  # else the tensor could be written in inference mode alone
        return torch.frombuffer(holder, dtype=torch.uint8)


def _page_lock(address: int, nbytes: int) -> bool:
    try:
        torch.cuda.check_error(_runtime().cudaHostRegister(address, nbytes, _PORTABLE))
    except RuntimeError as error:
        _forget_failure()
        _logger.warning_once(
            f"host memory could not be page-locked ({error}); copies from and to the accelerator "
            "are slower and wait for each other; see 'ulimit -l'"
        )
        return False
    return True


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _forget_failure() -> None:
    """Launch something: the runtime reports a failed call once more to the next launch."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")
