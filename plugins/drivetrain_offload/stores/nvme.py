"""The store ``nvme``: tensors on a disk (ZeRO-Infinity, Rajbhandari et al. 2021, section 5).

Each rank has one file, in which a tensor keeps its offset.
"""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from drivetrain.config.option import option
from drivetrain.errors import ConfigError, UsageError
from drivetrain_offload.buffers import (
    ALIGNMENT,
    AlignedPool,
    can_page_lock,
    give_back_memory,
    padded,
)
from drivetrain_offload.steps.pipeline import WORKING_BYTES, NvmeStepper
from drivetrain_offload.steps.rules import update_rule
from drivetrain_offload.stores.files import DiskFile, Transfer, check_directory

MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class NvmeConfig:
    """Options of the store ``nvme``."""

    path: str = option("", help="directory on a local disk where each rank's file lies")
    request_mib: float = option(
        4.0,
        help="MiB of one request to the disk; drivetrain disk-bench suggests a value",
        minimum=ALIGNMENT / MIB,
        maximum=1024,
    )
    threads: int = option(
        8,
        help="requests in flight, of reads and of writes each; drivetrain disk-bench suggests a "
        "value",
        minimum=1,
        maximum=256,
    )
    staging_mib: float = option(
        256.0, help="MiB of host memory for tensors that are on their way to the disk", minimum=1
    )
    release_memory: bool = option(
        True,
        help="whether the process gives freed memory back to the system at once, which takes some "
        "time; otherwise it may keep several times what it uses",
    )
    verify: bool = option(
        False,
        help="whether each block that is read must have the sum of the block that was written; "
        "needs host memory for 1 of 512 bytes of the file",
    )

    def __post_init__(self) -> None:
        """Check numbers that come from Python and not from a file.

        Raises:
            ConfigError: a number is out of its range, or a request is no whole number of blocks.
        """
        if not ALIGNMENT / MIB <= self.request_mib <= 1024 or self.request_bytes % ALIGNMENT:
            raise ConfigError(
                f"request_mib: expected a multiple of {ALIGNMENT} bytes up to 1024 MiB, found "
                f"{self.request_mib:g} MiB; 1, 4 and 16 are common"
            )
        if not 1 <= self.threads <= 256:
            raise ConfigError(f"threads: expected 1 to 256, found {self.threads}")
        if self.staging_mib < 1:
            raise ConfigError(f"staging_mib: expected 1 or more, found {self.staging_mib:g}")

    @property
    def request_bytes(self) -> int:
        """Bytes of one request."""
        return int(self.request_mib * MIB)


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
