"""Aligned host memory that is handed out again, and threads that finish their tasks at exit.

Threads that take tasks until the end of the process, which waits for the tasks.

The pools of ``concurrent.futures`` take no tasks once the script is over. A step still under way,
which submits its parts in turn, would break off while other ranks wait for its results. So these
pools end later: as the finalizers of the process run, the youngest pool first.
"""

import ctypes
import mmap
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch import Tensor

from drivetrain.log import get_logger
from drivetrain_offload.options import ALIGNMENT

# --- aligned host memory, page-locked for accelerators ---


_PORTABLE = 1
"""``cudaHostRegisterPortable``: page-locked for every device of the process."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>
_LARGE = 1 << 20
"""Bytes from which a block is mapped by itself, and given back to the system when it is freed."""

_logger = get_logger(__name__)


def give_back_memory() -> None:
    """Make the C library give freed blocks of 1 MiB and more back to the system; glibc alone.

    When large blocks are freed, glibc learns to keep such blocks, and does so once per thread: of a
    model whose units come and go it keeps several times the memory in use. A run that offloads to a
    disk has no memory to spare. The setting holds for the whole process, and goes over settings in
    its environment.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt") and hasattr(library, "malloc_trim"):
        library.mallopt(_M_MMAP_THRESHOLD, _LARGE)
        library.mallopt(_M_TRIM_THRESHOLD, _LARGE)
        library.malloc_trim(0)


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
        page_locked: whether accelerators shall copy asynchronously; where pages cannot be locked
            the memory is plain, and a warning says so.

    Returns:
        A tensor of shape (numel,). A forked child does not have its pages.
    """
    nbytes = numel * dtype.itemsize
    return _tensor(_AlignedMapping(nbytes, page_locked))[:nbytes].view(dtype)


class AlignedPool:
    """Aligned memory, handed out again as soon as the last tensor in it is gone.

    A fresh mapping costs a page fault per page, a used one nothing.

    Args:
        page_locked: as in ``aligned_empty``.
        spare: how many free mappings are kept.
    """

    def __init__(self, *, page_locked: bool, spare: int = 4) -> None:
        self._page_locked = page_locked
        self._most = spare
        self._spare: list[_AlignedMapping] = []

    def take(self, nbytes: int) -> Tensor:
        """Return an uninitialized uint8 tensor of ``padded(nbytes)`` bytes at an aligned address.

        Its memory is the caller's until the last tensor in it is gone.
        """
        return _tensor(self._region(padded(nbytes)), self._give_back)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor of shape (numel,) in such memory."""
        nbytes = numel * dtype.itemsize
        return self.take(nbytes)[:nbytes].view(dtype)

    def clear(self) -> None:
        """Give up the free mappings, and keep none from now on."""
        self._most = 0
        self._spare.clear()

    def _region(self, nbytes: int) -> "_AlignedMapping":
        # No lock: a tensor may end, and give its memory back, while this very thread is in here.
        for region in tuple(self._spare):
            if len(region) == max(nbytes, ALIGNMENT):
                with suppress(ValueError):  # another thread was faster
                    self._spare.remove(region)
                    return region
        return _AlignedMapping(nbytes, self._page_locked)

    def _give_back(self, region: "_AlignedMapping") -> None:
        self._spare.append(region)
        while len(self._spare) > self._most:
            with suppress(IndexError):
                self._spare.pop(0)


class _AlignedMapping(mmap.mmap):
    """A private anonymous mapping; its pages are unlocked before it is unmapped."""

    _locked = False

    def __new__(cls, nbytes: int, page_locked: bool) -> "_AlignedMapping":
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


def _tensor(region: _AlignedMapping, give_back: Any = None) -> Tensor:
    """Return a uint8 tensor over a mapping; ``give_back`` is called when its storage is gone."""
    # Torch holds a reference to this array exactly as long as the storage lives.
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
    """Launch an operation: the runtime reports a failed call once more to the next launch."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")


# --- threads that take tasks until the end of the process, which waits for the tasks ---

T = TypeVar("T")

_Tasks = SimpleQueue[Callable[[], None] | None]


class ThreadPool:
    """Threads that take tasks in the order of their submission.

    A thread starts with each of the first tasks. The process lets submitted tasks end before it
    ends: Python stops a thread that still runs then, and a thread that lets go of a tensor in that
    moment is in C++ code, which aborts the process.

    Args:
        threads: how many at most.
        name: the beginning of their names.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._most, self._name = threads, name
        self._tasks: _Tasks = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._changes = threading.Lock()
        parts = (self._tasks, self._threads, self._changes)
        self._end = weakref.finalize(self, _end, weakref.ref(self), *parts)

    def submit(self, function: Callable[..., T], *arguments: Any) -> "Future[T]":
        """Let a thread call a function.

        Raises:
            RuntimeError: the pool was shut down.
        """
        future: Future[T] = Future()

        def task() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(*arguments))
                except BaseException as error:
                    future.set_exception(error)

        with self._changes:
            if not self._end.alive:
                raise RuntimeError(f"expected threads {self._name} in use, found a closed pool")
            self._tasks.put(task)
            if len(self._threads) < self._most:
                name = f"{self._name}-{len(self._threads)}"
                thread = threading.Thread(
                    target=_serve, args=(self._tasks,), name=name, daemon=True
                )
                self._threads.append(thread)
                thread.start()
        return future

    def shutdown(self) -> None:
        """Let submitted tasks end, and join the threads; may be called more than once."""
        self._end()
        for thread in self._threads:
            thread.join()


def _end(
    pool: "weakref.ref[ThreadPool]",
    tasks: _Tasks,
    threads: list[threading.Thread],
    changes: threading.Lock,
) -> None:
    """Let threads end after the tasks before; wait for them, unless the pool was forgotten."""
    with changes:
        for _ in threads:
            tasks.put(None)
    if pool() is not None:
        for thread in threads:
            thread.join()


def _serve(tasks: _Tasks) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # else a finished task would keep its tensors alive until the next one comes


def computing_pool(threads: int, name: str) -> ThreadPool:
    """Return a pool whose threads run torch's operations without helper threads.

    Args:
        threads: how many; all have started when this returns.
        name: the beginning of their names.
    """
    pool = ThreadPool(threads, name)
    everyone = threading.Barrier(threads)

    def compute_alone() -> None:
        # A thread takes torch's number of threads over from the process at its first question,
        # even after set_num_threads: so it asks first, and sets then.
        torch.get_num_threads()
        torch.set_num_threads(1)
        everyone.wait()  # else a quick thread would take the task of one that is not there yet

    # set_num_threads holds for the thread that calls it, and for threads that start later: the
    # latter get back the number that they would have had.
    before = torch.get_num_threads()
    for task in [pool.submit(compute_alone) for _ in range(threads)]:
        task.result()
    torch.set_num_threads(before)
    return pool
