"""Memory: what is left, batch sizes that fit, unused objects, freed memory kept back."""

import ctypes
import functools
import gc
import inspect
import mmap
import resource
import shutil
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar

import psutil
import torch

from drivetrain.errors import UsageError

_SHRINK = 0.9
"""Factor of the batch size after each failure, rounded down."""

tries_again: ContextVar[bool] = ContextVar("tries_again", default=False)
"""Whether an allocator's error makes ``find_executable_batch_size`` try again: it means nothing."""


class CallError(UsageError, TypeError):
    """The arguments of a call do not fit its function."""


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Callable[..., Any]:
    """Decorate a function to be called again with a smaller batch size while memory runs out.

    All ranks must run out of memory together, as they do when their batches are equally large: a
    rank that fails alone leaves the others waiting in a collective.

    Args:
        function: takes the batch size as its first argument; callers leave it out.
        starting_batch_size: the first size tried, by every call.
        reduce_batch_size_fn: returns the next size; None means nine tenths of the last.

    Raises:
        CallError: the caller passed the batch size, or other arguments do not fit.
        UsageError: the next size is no smaller than the last.
        RuntimeError: not even one sample fits.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    inner = function

    @functools.wraps(inner)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        _check_call(inner, starting_batch_size, args, kwargs)
        batch_size = starting_batch_size
        while batch_size > 0:
            token = tries_again.set(True)
            try:
                return inner(batch_size, *args, **kwargs)
            except Exception as error:
                if not (is_out_of_memory(error) or _may_be_too_large(error)):
                    raise
            finally:
                tries_again.reset(token)
            # Out of the except clause: there the traceback keeps the failed try's tensors alive.
            release_memory()
            batch_size = _next_size(batch_size, reduce_batch_size_fn)
        raise RuntimeError(
            f"no batch size fits: started with {starting_batch_size}, ended at zero; make the "
            "model smaller or divide it with another strategy"
        )

    return wrapper


def release_memory(*objects: Any) -> list[None]:
    """Collect garbage and empty the accelerator's cache.

    Returns:
        A None for each object, so that ``a, b = release_memory(a, b)`` drops the references.
    """
    released = [None for _ in objects]
    del objects
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
    return released


def _next_size(batch_size: int, rule: Callable[[], int] | None) -> int:
    smaller = rule() if rule is not None else int(batch_size * _SHRINK)
    if smaller >= batch_size:
        raise UsageError(
            f"expected reduce_batch_size_fn to return a batch size less than {batch_size}, "
            f"found {smaller}; training would never end"
        )
    return smaller


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that an allocator got no memory, of a device or of the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    texts = ("out of memory", "can't allocate memory")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


def _may_be_too_large(error: Exception) -> bool:
    return isinstance(error, RuntimeError) and "CUDNN_STATUS_NOT_SUPPORTED" in str(error)


def _check_call(
    function: Callable[..., Any], size: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    try:
        inspect.signature(function).bind(size, *args, **kwargs)
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise CallError(
            f"the decorator passes the batch size to {name}() itself, as the first argument; "
            f"with it the call does not fit: {error}; call {name}() without a batch size"
        ) from None


# --- freed memory in the C library's heap, and ways for the system to get it back ---

# A block of less than 32 MiB stays with the process when it is freed, for the next one of its size.
# Small blocks that live on settle at its edges, then the next tensor does not fit and the heap
# grows: a process that gathers one unit after the other would take as much memory as the whole
# model.
#
# Only glibc on Linux is asked for anything here; other C libraries return large blocks by
# themselves.


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


# --- how many bytes this machine has left ---


GROUPS = Path("/sys/fs/cgroup")
"""Where Linux shows the limits of control groups."""

MEMBERSHIP = Path("/proc/self/cgroup")
"""The file that names the control groups of this process."""

_KINDS = {
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    "": ("memory.max", "memory.current", "inactive_file"),
}
"""By controller (version 1; version 2 has none): limit, use, and the part of use to give back."""


def host_room() -> int:
    """Return the bytes of host memory that this process may still take.

    The machine has them available, and neither a control group nor ``ulimit -v`` sets a lower
    limit.
    """
    rooms = [psutil.virtual_memory().available, *group_rooms(GROUPS, MEMBERSHIP)]
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        rooms.append(max(0, limit - psutil.Process().memory_info().vms))
    return min(rooms)


def disk_room(path: str | Path) -> int:
    """Return the free bytes of the file system that a directory lies on."""
    return shutil.disk_usage(path).free


def device_room(device: torch.device) -> int | None:
    """Return the bytes that this process may still take on an accelerator; None: unknown."""
    if not hasattr(torch.get_device_module(device), "mem_get_info"):
        return None
    free, _ = torch.accelerator.get_memory_info(device)
    reserved = torch.accelerator.memory_reserved(device)
    return free + reserved - torch.accelerator.memory_allocated(device)


def group_rooms(groups: Path, membership: Path) -> Iterator[int]:
    """Yield the room that the limits of the control groups above this process leave.

    Args:
        groups: the directory of all groups.
        membership: the file with a line ``number:controllers:path`` for each group.
    """
    for controllers, place in _memberships(membership):
        for kind, names in _KINDS.items():
            if kind in controllers:
                root = groups / kind
                inner = root / place
                for directory in (inner, *inner.parents):
                    if directory.is_relative_to(root):
                        yield from _room(directory, *names)


def _memberships(membership: Path) -> Iterator[tuple[list[str], str]]:
    lines = membership.read_text().splitlines() if membership.is_file() else []
    for line in lines:
        _, controllers, place = line.split(":", 2)
        yield controllers.split(","), place.lstrip("/")


def _room(directory: Path, limit: str, use: str, reclaimable: str) -> Iterator[int]:
    most, taken = _number(directory / limit), _number(directory / use)
    if most is None or taken is None:
        return  # no limit, or a group that cannot be seen from inside of a container
    facts = directory / "memory.stat"
    cached = 0
    for line in facts.read_text().splitlines() if facts.is_file() else []:
        name, _, value = line.partition(" ")
        cached += int(value) if name == reclaimable else 0
    yield max(most - taken + cached, 0)


def _number(file: Path) -> int | None:
    text = file.read_text().strip() if file.is_file() else ""
    return int(text) if text.isdecimal() else None
