"""The store ``nvme``: tensors on a disk (ZeRO-Infinity, Rajbhandari et al. 2021, section 5).

Each rank has one file, in which a tensor keeps its offset.

One preallocated file, read and written by several requests at once (ZeRO-Infinity, section 6.3).

Bytes go between the disk and aligned buffers, past the page cache where the file system allows it
(O_DIRECT). The file has no name: nothing is left of it when the process ends, even by SIGKILL.

Paper: Rajbhandari et al., "ZeRO-Infinity", SC 2021 (DeepNVMe: many requests in flight, past the
page cache). The speed of a disk is measured with the same code.
"""

import errno
import fcntl
import itertools
import mmap
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from drivetrain.errors import ConfigError, PreflightError, StorageError, UsageError
from drivetrain.hardware.sizes import MIB
from drivetrain.log import get_logger
from drivetrain_offload.options import ALIGNMENT, NvmeConfig
from drivetrain_offload.stepping import WORKING_BYTES, NvmeStepper
from drivetrain_offload.tiles import (
    AlignedPool,
    ThreadPool,
    aligned_empty,
    can_page_lock,
    give_back_memory,
    padded,
    update_rule,
)

# --- sums of blocks, in memory: a block that the disk gives back changed is noticed ---

# The sum of a block is that of its words of 64 bits, modulo 2^64, which takes a small part of the
# time of a transfer. Each change within one word is seen, and a block of other bytes but for one
# chance in 2^64; words that have changed places are not.

WORDS = ALIGNMENT // 8


class BlockSums:
    """The sums of a file's blocks; threads may share them. New blocks are zeros."""

    def __init__(self) -> None:
        self._sums: NDArray[np.uint64] = np.zeros(0, np.uint64)
        self._changes = threading.Lock()

    def grow(self, nbytes: int) -> None:
        """Add the blocks up to the file's new length."""
        with self._changes:
            more = np.zeros(nbytes // ALIGNMENT - len(self._sums), np.uint64)
            self._sums = np.concatenate([self._sums, more])

    def keep(self, offset: int, blocks: memoryview) -> None:
        """Note the sums of whole blocks that are about to be written at an offset."""
        found, first = sums_of(blocks), offset // ALIGNMENT
        with self._changes:
            self._sums[first : first + len(found)] = found

    def changed(self, offset: int, blocks: memoryview) -> int | None:
        """Return the offset of the first block that the disk has changed; None without any.

        Args:
            offset: of the first block in the file.
            blocks: whole blocks, as they were read.
        """
        found, first = sums_of(blocks), offset // ALIGNMENT
        with self._changes:
            (places,) = np.nonzero(self._sums[first : first + len(found)] != found)
        return offset + int(places[0]) * ALIGNMENT if len(places) else None


def sums_of(blocks: memoryview) -> NDArray[np.uint64]:
    """Return the sum of each block, (blocks,)."""
    words: NDArray[np.uint64] = np.frombuffer(blocks, np.uint64).reshape(-1, WORDS)
    sums: NDArray[np.uint64] = np.add.reduce(words, axis=1)
    return sums


# --- checks of a store's directory: it is there, writable, on a disk, and has room ---


_IN_MEMORY = ("tmpfs", "ramfs")

_logger = get_logger(__name__)


def check_directory(path: str | Path) -> Path:
    """Return the absolute path of a directory in which files can be made; warn of tmpfs.

    Raises:
        ConfigError: the path is empty.
        PreflightError: there is no such directory, or no file can be made in it.
    """
    if not str(path):
        raise ConfigError(
            "expected the path of a directory on a disk, found none; name one, such as "
            "path: /mnt/nvme"
        )
    directory = Path(path).absolute()
    if not directory.exists():
        raise PreflightError(
            f"{directory}: expected a directory, found nothing; create it or name another path"
        )
    if not directory.is_dir():
        raise PreflightError(
            f"{directory}: expected a directory, found a file; name the directory that holds it"
        )
    if not os.access(directory, os.W_OK | os.X_OK):
        raise PreflightError(
            f"{directory}: expected a directory that this user can write to, found one that it "
            "cannot; change its permissions or name another path"
        )
    kind = file_system(directory)
    if kind in _IN_MEMORY:
        _logger.warning_once(
            f"{directory} is a {kind}: what is kept there takes host memory, as the store 'cpu' "
            "does with less work; name a directory on a disk"
        )
    return directory


def file_system(directory: Path) -> str:
    """Return the type of the file system of a directory, such as ``ext4``; "" when unknown."""
    place = directory.resolve()
    # Of two mounts on one point the later hides the earlier.
    mounts = [
        (len(Path(mount.mountpoint).parts), index, mount.fstype)
        for index, mount in enumerate(psutil.disk_partitions(all=True))
        if place.is_relative_to(mount.mountpoint)
    ]
    return max(mounts)[2] if mounts else ""


def check_room(directory: Path, needed: int) -> None:
    """Check that a directory's file system has room for so many bytes.

    Raises:
        StorageError: it has not.
    """
    if needed > shutil.disk_usage(directory).free:
        raise no_room(directory, needed)


def no_room(directory: Path, needed: int) -> StorageError:
    """Return the error for a directory with too little room; it says how much there is."""
    free = shutil.disk_usage(directory).free
    return StorageError(
        f"{directory}: expected {needed:,} free bytes, found {free:,}; make room, name another "
        "path, or keep less there"
    )


# --- the file ---

_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)
"""Answers of file systems and kernels that cannot make a file without a name."""

_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)
"""Answers of file systems without direct I/O."""

_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Answers of a full disk, or of a used-up quota."""


class Transfer:
    """A read or write under way, as its submitter holds it.

    Args:
        requests: to the disk, all together.
        start: offset of the first byte in the file.
        stop: offset behind the last byte.
        writes: whether the file changes.
    """

    __slots__ = ("_requests", "_start", "_stop", "_writes")

    def __init__(
        self, requests: list["Future[None]"], start: int, stop: int, *, writes: bool
    ) -> None:
        self._requests = requests
        self._start, self._stop, self._writes = start, stop, writes

    def wait(self) -> None:
        """Return when all of it is done; raises StorageError when a request failed."""
        self.await_end()  # of all requests, before the first error leaves: the buffer is free then
        for request in self._requests:
            request.result()

    def done(self) -> bool:
        """Whether all of it is done or failed."""
        return all(request.done() for request in self._requests)

    def await_end(self) -> None:
        """Return when all of it is done or failed."""
        wait(self._requests)

    def conflicts(self, other: "Transfer") -> bool:
        """Whether the two touch the same bytes and one of them changes them."""
        overlaps = self._start < other._stop and other._start < self._stop
        return overlaps and (self._writes or other._writes)


class DiskFile:
    """A file without a name: offsets are multiples of 4096, lengths are free.

    Transfers of the same bytes take effect in the order in which they were submitted; others go
    side by side. A write that failed breaks the file: every later call raises its error.

    Args:
        directory: where the file lies.
        request_bytes: the longest request that a transfer is cut into; a multiple of 4096.
        threads: requests in flight, of reads and of writes each.
        verify: whether blocks that are read are compared with the sums of those that were written.

    Raises:
        PreflightError: no file can be made there.
        StorageError: the first block cannot be written or read.
    """

    def __init__(
        self, directory: Path, *, request_bytes: int, threads: int, verify: bool = False
    ) -> None:
        self._directory = directory
        self._sums = BlockSums() if verify else None
        self._request_bytes = request_bytes
        self._fd, named = _open(directory)
        self._free = weakref.finalize(self, _release, self._fd, named)
        try:
            self.direct = probe_direct(self._fd)
        except OSError as error:
            self._free()
            raise self._failure("write and read", ALIGNMENT, 0, error) from error
        self.nbytes = 0
        self._pools = {
            writes: ThreadPool(threads, f"drivetrain-{'write' if writes else 'read'}")
            for writes in (False, True)
        }
        self._order = threading.Lock()
        self._under_way: list[Transfer] = []
        self._broken: StorageError | None = None
        if not self.direct:
            _logger.warning_once(
                f"{directory}: the file system refuses O_DIRECT; reads and writes go through the "
                "page cache, which takes host memory and time"
            )

    def grow(self, nbytes: int) -> None:
        """Make the file so long, with room on the disk for all of it; new bytes are zeros.

        Raises:
            StorageError: there is too little room; the file is as it was.
        """
        more = nbytes - self.nbytes
        if more <= 0:
            return
        check_room(self._directory, more)
        try:
            os.posix_fallocate(self._fd, self.nbytes, more)
        except OSError as error:
            os.ftruncate(self._fd, self.nbytes)
            if error.errno in _FULL:
                raise no_room(self._directory, more) from error
            raise self._failure("make room for", more, self.nbytes, error) from error
        self.nbytes = nbytes
        if self._sums is not None:
            self._sums.grow(nbytes)

    def read(self, offset: int, buffer: Tensor) -> Transfer:
        """Start to fill a buffer with the bytes at an offset.

        Args:
            offset: in bytes, a multiple of 4096.
            buffer: contiguous host tensor at an address that is a multiple of 4096.

        Raises:
            UsageError: the offset or buffer is not aligned, or ends after the file.
            StorageError: an earlier write failed.
        """
        return self._submit(offset, buffer, self._read, writes=False)

    def write(
        self, offset: int, buffer: Tensor, ready: Callable[[], object] | None = None
    ) -> Transfer:
        """Start to write a buffer, which must stay as it is until the transfer is done.

        The bytes up to the next multiple of 4096 become zeros.

        Arguments and errors as in ``read``; ``ready`` returns when the buffer holds its values, and
        runs before each request.
        """
        return self._submit(offset, buffer, partial(self._write, ready), writes=True)

    def flush(self) -> None:
        """Return when every write so far is on the disk; raises StorageError otherwise."""
        with self._order:
            for transfer in self._under_way:
                transfer.await_end()
            self._under_way.clear()
        self.check()
        if not self.direct:
            # Only fdatasync reports a failed write of the page cache itself.
            try:
                os.fdatasync(self._fd)
            except OSError as error:
                self._broken = self._failure("sync", self.nbytes, 0, error)
                raise self._broken from error

    def check(self) -> None:
        """Return when the file can be used.

        Raises:
            UsageError: it was closed.
            StorageError: a write failed before.
        """
        if not self._free.alive:
            raise UsageError(f"{self._directory}: expected an open file, found a closed one")
        if self._broken is not None:
            raise StorageError(
                f"{self._directory}: a write failed before: {self._broken}"
            ) from self._broken

    def forget(self) -> None:
        """Drop the file from the page cache, so that the next read comes from the disk."""
        self.flush()
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Let transfers end, then give up the file; may be called more than once."""
        for pool in self._pools.values():
            pool.shutdown()
        self._free()

    def _submit(
        self, offset: int, buffer: Tensor, move: Callable[[memoryview, int], None], *, writes: bool
    ) -> Transfer:
        view = self._bytes(offset, buffer)
        with self._order:
            self.check()
            stop = offset + padded(len(view))
            requests: list[Future[None]] = []
            transfer = Transfer(requests, offset, stop, writes=writes)
            for other in self._under_way:
                if transfer.conflicts(other):
                    other.await_end()
            self._under_way = [other for other in self._under_way if not other.done()]
            self.check()
            for start, end in self._cut(len(view)):
                job = self._pools[writes].submit(move, view[start:end], offset + start)
                requests.append(job)
            self._under_way.append(transfer)
        return transfer

    def _bytes(self, offset: int, buffer: Tensor) -> memoryview:
        address = buffer.data_ptr()
        if offset % ALIGNMENT or (address % ALIGNMENT and buffer.numel()):
            raise UsageError(
                f"expected an offset and an address that are multiples of {ALIGNMENT}, found "
                f"{offset} and {address:#x}; aligned_empty() makes such a buffer"
            )
        if buffer.device.type != "cpu" or not buffer.is_contiguous():
            raise UsageError(
                f"expected a contiguous host tensor, found strides {buffer.stride()} of shape "
                f"{tuple(buffer.shape)} on {buffer.device}"
            )
        if offset < 0 or offset + buffer.nbytes > self.nbytes:
            raise UsageError(
                f"expected bytes within the {self.nbytes:,} of the file, found {buffer.nbytes:,} "
                f"at {offset:,}; grow() it first"
            )
        return buffer.detach().reshape(-1).view(torch.uint8).numpy().data

    def _cut(self, nbytes: int) -> Iterator[tuple[int, int]]:
        """Yield the requests of a transfer: whole blocks, then the part of a last block."""
        whole = nbytes - nbytes % ALIGNMENT
        for start in range(0, whole, self._request_bytes):
            yield start, min(start + self._request_bytes, whole)
        if whole < nbytes:
            yield whole, nbytes

    def _read(self, view: memoryview, offset: int) -> None:
        if len(view) % ALIGNMENT == 0:
            self._read_blocks(view, offset)
        else:
            with memoryview(mmap.mmap(-1, ALIGNMENT)) as block:
                self._read_blocks(block, offset)
                view[:] = block[: len(view)]

    def _read_blocks(self, blocks: memoryview, offset: int) -> None:
        self._move(os.preadv, blocks, offset, "read")
        if self._sums is not None and (at := self._sums.changed(offset, blocks)) is not None:
            raise StorageError(
                f"{self._directory}: expected the block at offset {at:,} of the file there as it "
                "was written, found other bytes; look at the disk and the kernel's log, name "
                "another path, and resume from a checkpoint"
            )

    def _write(self, ready: Callable[[], object] | None, view: memoryview, offset: int) -> None:
        try:
            self.check()
            if ready is not None:
                ready()
            if len(view) % ALIGNMENT:
                block = memoryview(mmap.mmap(-1, ALIGNMENT))
                block[: len(view)] = view
                view = block
            if self._sums is not None:
                self._sums.keep(offset, view)
            self._move(os.pwritev, view, offset, "write")
        except StorageError as error:
            self._broken = self._broken or error
            raise

    def _move(
        self,
        call: Callable[[int, list[memoryview], int], int],
        view: memoryview,
        at: int,
        verb: str,
    ) -> None:
        """Read or write all of a view; the system call may do less at once.

        An interrupted call (EINTR) is repeated by the interpreter itself.
        """
        done = 0
        while done < len(view):
            try:
                moved = call(self._fd, [view[done:]], at + done)
            except OSError as error:
                raise self._failure(verb, len(view), at, error, done) from error
            # The part of a block is moved again: the next address must be aligned.
            moved -= moved % ALIGNMENT
            if moved <= 0:
                raise self._failure(verb, len(view), at, None, done)
            done += moved

    def _failure(
        self, verb: str, nbytes: int, at: int, error: OSError | None, done: int = 0
    ) -> StorageError:
        cause = f" ({errno.errorcode.get(error.errno or 0)}: {error.strerror})" if error else ""
        return StorageError(
            f"{self._directory}: expected to {verb} {nbytes:,} bytes at offset {at:,} of the file "
            f"there, found that {done:,} could be{cause}; look at the disk and the kernel's log, "
            "or name another path"
        )


def probe_direct(fd: int) -> bool:
    """Switch a new, empty file to O_DIRECT; return whether it can be allocated and used so.

    Some file systems refuse the flag, others the first request.

    Raises:
        OSError: the disk cannot be written or read at all.
    """
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    block = memoryview(mmap.mmap(-1, ALIGNMENT))
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        os.posix_fallocate(fd, 0, ALIGNMENT)
        direct = os.pwritev(fd, [block], 0) == os.preadv(fd, [block], 0) == ALIGNMENT
    except OSError as error:
        if error.errno not in (*_REFUSED, *_FULL):
            raise
        direct = error.errno in _FULL  # no refusal: the first grow() reports the lack of room
    if not direct:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    return direct


def _open(directory: Path) -> tuple[int, Path | None]:
    """Return a new file, and its path when it could not be made nameless."""
    try:
        try:
            return os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600), None
        except OSError as error:
            if error.errno not in _NO_TMPFILE:
                raise
        fd, name = tempfile.mkstemp(dir=directory, prefix=f"drivetrain-{os.getpid()}-")
    except OSError as error:
        raise PreflightError(
            f"{directory}: expected to make a file there, found {error.strerror}; change the "
            "permissions or name another path"
        ) from error
    try:
        Path(name).unlink()
    except OSError as error:
        _logger.warning_once(
            f"{directory}: a file that is open cannot be removed here ({error.strerror}); {name} "
            "goes at exit, but stays after kill -9"
        )
        return fd, Path(name)
    return fd, None


def _release(fd: int, named: Path | None) -> None:
    os.close(fd)
    if named is not None:
        named.unlink(missing_ok=True)


# --- the store ``nvme`` ---


@dataclass(frozen=True, slots=True)
class _Extent:
    """The bytes of the file that a tensor has, with its shape and dtype."""

    offset: int
    room: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return self.shape.numel()

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def holds(self, tensor: Tensor) -> bool:
        return (self.shape, self.dtype) == (tensor.shape, tensor.dtype)


class NvmeStore:
    """Keeps tensors in a file that no other process sees, and that ends with this process.

    ``put`` copies, and writes in the background; the next call raises the error of a failed write.
    ``read_into`` and ``write_from`` move ranges of a tensor between the disk and the caller's own
    buffers, for pipelines. Calls for the same bytes take effect in their order. Threads may share a
    store.

    Args:
        config: the options; ``path`` is needed.

    Raises:
        ConfigError: no path is given.
        PreflightError: the path is no directory in which a file can be made.
    """

    Config = NvmeConfig
    in_memory: ClassVar[bool] = False
    working_bytes: ClassVar[int] = WORKING_BYTES

    def __init__(self, config: NvmeConfig) -> None:
        directory = check_directory(config.path)
        if config.release_memory:
            give_back_memory()
        self._file = DiskFile(
            directory,
            request_bytes=config.request_bytes,
            threads=config.threads,
            verify=config.verify,
        )
        self._changes = threading.Lock()
        self._extents: dict[str, _Extent] = {}
        self._ahead: dict[str, tuple[Tensor, Transfer]] = {}
        self._pool = AlignedPool(page_locked=can_page_lock())
        self._staged: deque[tuple[Transfer, int]] = deque()
        self._staging_bytes = int(config.staging_mib * MIB)
        self._request_bytes = config.request_bytes
        self._steppers = itertools.count()

    @property
    def device(self) -> torch.device:
        """The device of the tensors that ``fetch`` returns: the processor."""
        return torch.device("cpu")

    @property
    def nbytes(self) -> int:
        """Bytes of disk that are taken."""
        return self._file.nbytes

    def stepper(self, optimizer: Optimizer) -> NvmeStepper | None:
        """Return a stepper of an optimizer's shards on this disk; to be closed before the store.

        Returns:
            None for optimizers that only torch can step; see ``rules.update_rule``.
        """
        rule = update_rule(optimizer)
        if rule is None:
            return None
        return NvmeStepper(rule, self, f"stepper{next(self._steppers)}", self._request_bytes)

    def check(self) -> None:
        """Return when the store can be used.

        Raises:
            UsageError: it was closed.
            StorageError: a write failed before.
        """
        self._file.check()

    def reserve(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the room of tensors that will be put or written later, all at once.

        Values are zeros until then: a fresh optimizer state needs no write. Of the tensors only
        shape and dtype count; they may be on the device ``meta``.

        Raises:
            UsageError: a key is there already.
            StorageError: there is too little room; says how much is needed and how much is free.
        """
        with self._changes:
            taken = sorted(self._extents.keys() & tensors.keys())
            if taken:
                raise UsageError(f"expected new keys, found {taken[:3]} in the store already")
            end, extents = self._file.nbytes, {}
            for key, tensor in tensors.items():
                extents[key] = _Extent(end, padded(tensor.nbytes), tensor.shape, tensor.dtype)
                end += extents[key].room
            self._file.grow(end)
            self._extents |= extents

    def put(self, key: str, tensor: Tensor) -> None:
        """Keep a tensor's values under a key; the write goes on after this returns.

        A tensor that fits takes the place of the key's last tensor; else the file grows.

        Raises:
            StorageError: the disk is full, or an earlier write failed.
        """
        tensor = tensor.detach()
        with self._changes:
            extent = self._extent(key, tensor)
            self._ahead.pop(key, None)
            self._make_way(extent.room)
            buffer = self._pool.take(extent.nbytes)[: padded(extent.nbytes)]
            copy = buffer[: extent.nbytes].view(extent.dtype).view(extent.shape)
            ready = _copy(tensor, copy)
            self._staged.append((self._file.write(extent.offset, buffer, ready), extent.room))

    def fetch(self, key: str) -> Tensor:
        """Return a tensor's values in aligned memory; raises KeyError when it was never put.

        The memory is the caller's alone: changes there change nothing in the store. It is used
        again when the last tensor in it is gone: hold the tensor until asynchronous copies to an
        accelerator are done.

        Raises:
            StorageError: the disk cannot be read, or an earlier write failed.
        """
        extent = self._extents[key]
        ahead = self._ahead.pop(key, None)
        buffer, transfer = ahead or self._start(extent)
        transfer.wait()
        return buffer[: extent.nbytes].view(extent.dtype).view(extent.shape)

    def prefetch(self, keys: Iterable[str]) -> None:
        """Start to read tensors; each takes memory until it is fetched or put."""
        with self._changes:
            for key in keys:
                extent = self._extents[key]
                if key not in self._ahead:
                    self._ahead[key] = self._start(extent)

    def read_into(
        self, key: str, buffer: Tensor, start: int = 0, stop: int | None = None
    ) -> Transfer:
        """Start to read the elements start to stop of a tensor, counted as if it had one dim.

        Args:
            key: of a tensor that was put or reserved.
            buffer: (>= stop - start,) of its dtype, in host memory at an aligned address, such as
                ``aligned_empty`` returns.
            start: first element; at a multiple of 4096 bytes.
            stop: element behind the last; None for the tensor's end.

        Returns:
            The handle; the values are there after its ``wait()``.

        Raises:
            KeyError: there is no such tensor.
            UsageError: the range or buffer does not fit.
        """
        offset, part = self._range(key, buffer, start, stop)
        return self._file.read(offset, part)

    def write_from(
        self, key: str, buffer: Tensor, start: int = 0, stop: int | None = None
    ) -> Transfer:
        """Start to write the elements start to stop of a tensor; arguments as in ``read_into``.

        The buffer must not change until the handle's ``wait()``; ``stop`` is at a multiple of 4096
        bytes, or the tensor's end.

        Raises:
            KeyError: there is no such tensor.
            UsageError: the range or buffer does not fit.
            StorageError: an earlier write failed.
        """
        offset, part = self._range(key, buffer, start, stop)
        extent = self._extents[key]
        if part.nbytes % ALIGNMENT and offset + part.nbytes != extent.offset + extent.nbytes:
            raise _misaligned("stop", start + part.numel(), extent)
        self._ahead.pop(key, None)  # a value that was read ahead is an old one now
        return self._file.write(offset, part)

    def flush(self) -> None:
        """Return when everything put so far is on the disk; raises StorageError otherwise."""
        self._file.flush()
        self._staged.clear()

    def close(self) -> None:
        """Let transfers end, and give up file and memory; may be called more than once."""
        self._file.close()
        self._extents.clear()
        self._ahead.clear()
        self._staged.clear()
        self._pool.clear()

    def _extent(self, key: str, tensor: Tensor) -> _Extent:
        extent = self._extents.get(key)
        if extent is not None and extent.holds(tensor):
            return extent
        if extent is not None and tensor.nbytes <= extent.room:
            extent = _Extent(extent.offset, extent.room, tensor.shape, tensor.dtype)
        else:
            end, room = self._file.nbytes, padded(tensor.nbytes)
            self._file.grow(end + room)
            extent = _Extent(end, room, tensor.shape, tensor.dtype)
        self._extents[key] = extent
        return extent

    def _make_way(self, nbytes: int) -> None:
        """Wait until the copies on their way to the disk leave room for one more."""
        while self._staged and self._staged[0][0].done():
            self._staged.popleft()
        waiting = sum(size for _, size in self._staged)
        while self._staged and waiting + nbytes > self._staging_bytes:
            transfer, size = self._staged.popleft()
            transfer.wait()
            waiting -= size

    def _start(self, extent: _Extent) -> tuple[Tensor, Transfer]:
        buffer = self._pool.take(extent.nbytes)
        return buffer, self._file.read(extent.offset, buffer[: padded(extent.nbytes)])

    def _range(self, key: str, buffer: Tensor, start: int, stop: int | None) -> tuple[int, Tensor]:
        """Return the offset in the file of a range, and its part of the buffer."""
        extent = self._extents[key]
        stop = extent.numel if stop is None else stop
        if not 0 <= start <= stop <= extent.numel:
            raise UsageError(
                f"{key}: expected a range within {extent.numel:,} elements, found {start:,} to "
                f"{stop:,}"
            )
        if start * extent.dtype.itemsize % ALIGNMENT:
            raise _misaligned("start", start, extent)
        if buffer.dim() != 1 or buffer.dtype != extent.dtype or buffer.numel() < stop - start:
            raise UsageError(
                f"{key}: expected a buffer of one dim, {extent.dtype} and {stop - start:,} or more "
                f"elements, found {buffer.dtype} of shape {tuple(buffer.shape)}"
            )
        return extent.offset + start * extent.dtype.itemsize, buffer[: stop - start]


def _copy(source: Tensor, copy: Tensor) -> Callable[[], object] | None:
    """Copy a tensor to host memory; return a function that awaits the copy, None if done."""
    if source.device.type == "cpu":
        copy.copy_(source)
        return None
    copy.copy_(source, non_blocking=True)
    event = torch.Event(source.device)
    event.record(torch.accelerator.current_stream(source.device))
    return event.synchronize


def _misaligned(name: str, value: int, extent: _Extent) -> UsageError:
    step = ALIGNMENT // extent.dtype.itemsize
    return UsageError(
        f"expected a {name} that is a multiple of {step} elements of {extent.dtype}, which are "
        f"{ALIGNMENT} bytes, or a stop at the tensor's end, {extent.numel:,}; found {value:,}"
    )


ADAM_BYTES = 12
"""Per parameter and direction: master weight and two moments, 4 bytes each (ZeRO-Infinity, 3)."""

_BUFFER_BYTES = 32 * MIB
_CLOSE = 0.95
"""Speeds that differ by less are taken for equal: fewer threads are then the better choice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """Bytes per second of a disk, for one size and number of requests.

    Attributes:
        request_mib: MiB of one request.
        threads: requests in flight, of reads and of writes each.
        read: bytes per second, reading alone.
        write: bytes per second, writing alone.
        both: bytes per second of each direction, at once as in an optimizer step.
    """

    request_mib: float
    threads: int
    read: float
    write: float
    both: float

    def step_s(self, parameters: float) -> float:
        """Return the least seconds of an Adam step of so many parameters."""
        return ADAM_BYTES * parameters / self.both


def measure(directory: Path, nbytes: int, request_mib: float, threads: int) -> Speed:
    """Measure a disk with one size and number of requests; the file is gone afterwards.

    Writes and reads ``nbytes``, a multiple of 8192; for the rest see ``Speed``.

    Raises:
        PreflightError: no file can be made there.
        StorageError: there is too little room, or the disk cannot be read or written.
    """
    half = nbytes // 2
    source, target = (aligned_empty(min(half, _BUFFER_BYTES), torch.uint8) for _ in range(2))
    source.random_(256)  # some disks compress
    file = DiskFile(directory, request_bytes=int(request_mib * MIB), threads=threads)

    def writing(stop: int) -> list[Transfer]:
        return [file.write(at, part) for at, part in _parts(source, 0, stop)]

    def reading(start: int) -> list[Transfer]:
        return [file.read(at, part) for at, part in _parts(target, start, nbytes)]

    try:
        file.grow(nbytes)
        # The first write of preallocated blocks is slower than every other one.
        writing(nbytes)
        write = _seconds(file, lambda: writing(nbytes))
        read = _seconds(file, lambda: reading(0))
        both = _seconds(file, lambda: writing(half) + reading(half))
    finally:
        file.close()
    return Speed(
        request_mib=request_mib,
        threads=threads,
        read=nbytes / read,
        write=nbytes / write,
        both=half / both,
    )


def suggest(speeds: Sequence[Speed]) -> Speed:
    """Return the fastest speed in both directions at once, by few threads and small requests."""
    enough = _CLOSE * max(speed.both for speed in speeds)
    good = [speed for speed in speeds if speed.both >= enough]
    return min(good, key=lambda speed: (speed.threads, speed.request_mib))


def usable_bytes(asked: int, free: int) -> int:
    """Return how many bytes to measure with: as many as asked for, or 9/10 of the free room."""
    return max(min(asked, free * 9 // 10) // (2 * ALIGNMENT) * (2 * ALIGNMENT), 2 * ALIGNMENT)


def _seconds(file: DiskFile, start: Callable[[], list[Transfer]]) -> float:
    """Return the seconds that transfers take, to the disk and not to the page cache."""
    file.forget()
    began = time.perf_counter()
    for transfer in start():
        transfer.wait()
    file.flush()
    return time.perf_counter() - began


def _parts(buffer: Tensor, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the offsets in a range where a buffer is written or read, with its part there."""
    for at in range(start, stop, len(buffer)):
        yield at, buffer[: min(len(buffer), stop - at)]
