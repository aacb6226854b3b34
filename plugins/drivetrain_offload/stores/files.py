"""One preallocated file, read and written by several requests at once (ZeRO-Infinity, section 6.3).

Bytes go between the disk and aligned buffers, past the page cache where the file system allows it
(O_DIRECT). The file has no name: nothing is left of it when the process ends, even by SIGKILL.

Paper: Rajbhandari et al., "ZeRO-Infinity", SC 2021 (DeepNVMe: many requests in flight, past the
page cache).
"""

import errno
import fcntl
import mmap
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor

from drivetrain.errors import ConfigError, PreflightError, StorageError, UsageError
from drivetrain.log import get_logger
from drivetrain_offload.buffers import ALIGNMENT, padded
from drivetrain_offload.threads import ThreadPool

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
