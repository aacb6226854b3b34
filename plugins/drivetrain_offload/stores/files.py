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
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from drivetrain.errors import PreflightError, StorageError, UsageError
from drivetrain.log import get_logger
from drivetrain_offload.buffers import ALIGNMENT, padded
from drivetrain_offload.stores.block_sums import BlockSums
from drivetrain_offload.stores.directory import check_room, no_room
from drivetrain_offload.threads import ThreadPool

_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)
"""Answers of file systems and kernels that cannot make a file without a name."""

_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)
"""Answers of file systems without direct I/O."""

_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Answers of a full disk, or of a used-up quota."""

_logger = get_logger(__name__)


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
