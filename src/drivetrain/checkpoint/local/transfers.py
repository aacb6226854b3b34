"""Files from rank to rank, over a gloo group: in chunks, all pairs of ranks at the same time."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.checkpoint.agreement import Group
from drivetrain.checkpoint.tensorfile import FileRecord, HashedFile
from drivetrain.collectives.meeting import named
from drivetrain.errors import CheckpointError

CHUNK_BYTES = 16 * 2**20
"""Bytes of a file that are under way between two ranks: as many as its writer takes at once."""


@dataclass(frozen=True, slots=True)
class FileTransfer:
    """A file that one rank sends to another.

    Attributes:
        source: the global rank that has the file.
        destination: the global rank that writes it.
        name: of the file, in the folders of both.
        record: its size and digest.
    """

    source: int
    destination: int
    name: str
    record: FileRecord


def exchange(transfers: Sequence[FileTransfer], rank: int, folder: Path, group: Group) -> None:
    """Send and receive the files of this rank. Collective: all ranks give the same transfers.

    After a failure of a file this rank goes on sending and receiving, for the sake of the others.

    Args:
        transfers: of all ranks; those between the same two ranks go in this order.
        rank: this one.
        folder: where this rank has its files, and where it writes the others'; each name is new.
        group: of all ranks, with gloo; None where there are no transfers.

    Raises:
        CheckpointError: a file of this rank cannot be read, or arrived damaged.
        CollectiveError: a rank is gone.
        OSError: a file cannot be written.
    """
    if not transfers:
        return
    pairs: defaultdict[tuple[int, int], list[FileTransfer]] = defaultdict(list)
    for transfer in transfers:
        pairs[transfer.source, transfer.destination].append(transfer)
    failures: list[Exception] = []
    lanes: list[Iterator[Any]] = []
    for (source, destination), files in pairs.items():
        if source == rank:
            lanes.append(_send(files, folder, group, failures))
        if destination == rank:
            lanes.append(_receive(files, folder, group, failures))
    with named("send the files of a checkpoint", group):
        # One chunk of each pair at a time: the pair that is furthest behind can always go on.
        while lanes:
            begun = [(lane, work) for lane in lanes if (work := next(lane, None)) is not None]
            for _, work in begun:
                work.wait()
            lanes = [lane for lane, _ in begun]
    if failures:
        raise failures[0]


def _send(
    files: Sequence[FileTransfer], folder: Path, group: Group, failures: list[Exception]
) -> Iterator[Any]:
    """Yield the handle of each chunk that is being sent."""
    for transfer in files:
        for chunk in _chunks(folder / transfer.name, transfer.record.size, failures):
            yield dist.isend(chunk, transfer.destination, group=group)


def _chunks(path: Path, size: int, failures: list[Exception]) -> Iterator[Tensor]:
    """Yield a file in chunks; zeros in the place of a file that cannot be read."""
    try:
        found = path.stat().st_size
        if found != size:
            raise CheckpointError(f"expected {size} bytes in {path}, found {found}")
        content = _mapped(path, size)
    except (OSError, RuntimeError, CheckpointError) as error:
        failures.append(error)
        content = torch.zeros(1, dtype=torch.uint8).expand(size)
    for chunk in torch.split(content, CHUNK_BYTES) if size else ():
        yield chunk.contiguous()


def _mapped(path: Path, size: int) -> Tensor:
    """Return the bytes of a file without reading them yet."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)


def _receive(
    files: Sequence[FileTransfer], folder: Path, group: Group, failures: list[Exception]
) -> Iterator[Any]:
    """Yield the handle of each chunk that is being received; then write that chunk."""
    memory = bytearray(min(CHUNK_BYTES, max(transfer.record.size for transfer in files)))
    for transfer in files:
        arrival = ArrivingFile(folder / transfer.name, transfer.record, failures)
        left = transfer.record.size
        while left:
            chunk = memoryview(memory)[: min(left, CHUNK_BYTES)]
            yield dist.irecv(
                torch.frombuffer(chunk, dtype=torch.uint8), transfer.source, group=group
            )
            arrival.add(chunk)
            left -= len(chunk)
        arrival.end()


class ArrivingFile:
    """A file that is written chunk by chunk; after a failure, which is noted, no more is written.

    Args:
        path: the file, which does not exist.
        record: its size and digest at the sender.
        failures: the list for a failure.
    """

    def __init__(self, path: Path, record: FileRecord, failures: list[Exception]) -> None:
        self._record, self._failures = record, failures
        self._file: HashedFile | None = None
        try:
            self._file = HashedFile(path)
        except OSError as error:
            failures.append(error)

    def add(self, chunk: memoryview) -> None:
        """Append a chunk."""
        if self._file is not None:
            try:
                self._file.write(chunk)
            except OSError as error:
                self._fail(error)

    def end(self) -> None:
        """Close the file, and compare it with the sender's.

        The record of a file that could not be read there differs, too.
        """
        if self._file is None:
            return
        found, path = self._file.record, self._file.path
        self._file.__exit__(None)
        if found != self._record:
            self._failures.append(
                CheckpointError(
                    f"expected sha256 {self._record.sha256} of {path} after its way from another "
                    f"host, found {found.sha256}; save again"
                )
            )

    def _fail(self, error: OSError) -> None:
        self._failures.append(error)
        if self._file is not None:
            self._file.__exit__(type(error))
        self._file = None
