"""The speed of a disk, measured with the code that the store ``nvme`` uses."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from drivetrain.hardware.sizes import MIB
from drivetrain_offload.buffers import aligned_empty
from drivetrain_offload.nvme import DiskFile, Transfer
from drivetrain_offload.options import ALIGNMENT

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
