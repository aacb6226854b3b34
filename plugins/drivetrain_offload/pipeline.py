"""Reads tile i + 1, updates tile i, writes tile i - 1: steps over shards that lie on a disk.

Three sets of buffers go round. One thread takes a set whose last tile is on the disk, and starts
to read the next tile into it; another waits for the values, updates them and starts to write
them. The first runs ahead over tiles of other shards, blocks and submissions, as far as there are
sets. It waits for one thing more: a block that is stepped again is read after its last step was
given to the disk, which keeps the order from there.

Sources: Rajbhandari et al., "ZeRO-Infinity", SC 2021, section 5 (the infinity offload engine).
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from drivetrain.errors import StorageError
from drivetrain_offload.buffers import aligned_empty, padded
from drivetrain_offload.files import Transfer
from drivetrain_offload.rules import Step
from drivetrain_offload.stepping import Then, Work
from drivetrain_offload.threads import Pool, computing_pool
from drivetrain_offload.tiles import Piece, Tiler

if TYPE_CHECKING:
    from drivetrain_offload.nvme import NvmeStore

SETS = 3
"""Of buffers: one is read, one updated, one written."""


class Part(NamedTuple):
    """A range of one shard in a tile.

    Attributes:
        work: the step of the shard.
        first: its first element there.
        offset: where it begins in the tile, in bytes.
        nbytes: its length, without what fills up the shard's last block of the disk.
    """

    work: Work
    first: int
    offset: int
    nbytes: int


@dataclass(slots=True)
class Tile:
    """A range of a block's tensors on the disk: whole shards, and parts of the first and last.

    Attributes:
        kept: whether it has masters.
        start: its first byte, a multiple of 4096.
        stop: the byte after its last, another one.
        parts: what lies in it.
    """

    kept: bool
    start: int
    stop: int
    parts: list[Part] = field(default_factory=list)


def cut(works: Sequence[Work], tile_bytes: int) -> Iterator[Tile]:
    """Cut the steps of a block into tiles.

    Args:
        works: of shards at multiples of 4096 bytes; those next to each other may share a tile.
        tile_bytes: the longest tile, a multiple of 4096.
    """
    tile: Tile | None = None
    for work in sorted(works, key=lambda work: work.shard.offset):
        shard = work.shard
        done = 0
        while done < shard.nbytes:
            at = shard.offset + done
            if tile is None or not _goes_on(tile, at, shard.spec.kept, tile_bytes):
                if tile is not None:
                    yield tile
                tile = Tile(shard.spec.kept, at, at)
            room = tile_bytes - (tile.stop - tile.start)
            nbytes = min(shard.nbytes - done, room)
            first = done // shard.spec.dtype.itemsize
            tile.parts.append(Part(work, first, at - tile.start, nbytes))
            tile.stop += padded(nbytes)
            done += nbytes
    if tile is not None:
        yield tile


class Buffers:
    """One set: a buffer for each state, and for masters.

    Args:
        nbytes: of each buffer.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._tensors: dict[str, Tensor] = {}
        self._writes: list[Transfer] = []

    def provide(self, names: Sequence[str]) -> None:
        """Have buffers of these names."""
        for name in names:
            if name not in self._tensors:
                self._tensors[name] = aligned_empty(self._nbytes, torch.uint8)

    def read(self, store: "NvmeStore", keys: Mapping[str, str], tile: Tile) -> list[Transfer]:
        """Start to fill them with a tile, after what they hold is on the disk."""
        for write in self._writes:
            write.wait()
        self._writes.clear()
        reads: list[Transfer] = []
        try:
            for name, key in keys.items():
                reads.append(store.read_into(key, self._tensors[name], tile.start, tile.stop))
        except BaseException:
            settle(reads)
            raise
        return reads

    def write(self, store: "NvmeStore", keys: Mapping[str, str], tile: Tile) -> None:
        """Start to write a tile."""
        for name, key in keys.items():
            write = store.write_from(key, self._tensors[name], tile.start, tile.stop)
            self._writes.append(write)

    def settle(self) -> None:
        """Return when nothing is written any more, failed or not."""
        settle(self._writes)

    def updates(self, keys: Mapping[str, str], tile: Tile) -> list[tuple[Step, Piece]]:
        """Return what is to be done with a tile."""
        return [self._update(keys, part) for part in tile.parts]

    def _update(self, keys: Mapping[str, str], part: Part) -> tuple[Step, Piece]:
        dtype = part.work.shard.spec.dtype
        here = slice(part.offset, part.offset + part.nbytes)
        tensors = {name: self._tensors[name][here].view(dtype) for name in keys}
        where = slice(part.first, part.first + part.nbytes // dtype.itemsize)
        return part.work.step, part.work.piece(tensors, where)


class Job:
    """One submission on its way through the pipeline.

    Args:
        keys: where the store has the tensors, by their names; for tiles without masters and with.
        tiles: what to do.
        after: a submission that was given before and must have gone through.
        then: called when masters and outputs in memory are there.

    Attributes:
        future: ends when that has returned.
    """

    def __init__(
        self,
        keys: Mapping[bool, Mapping[str, str]],
        tiles: Iterable[Tile],
        after: "Future[None] | None",
        then: Then,
    ) -> None:
        self.keys = keys
        self.tiles = tiles
        self.after = after
        self.then = then
        self.future: Future[None] = Future()

    def fail(self, error: BaseException) -> None:
        """Say that it failed; the first error counts."""
        with contextlib.suppress(InvalidStateError):
            self.future.set_exception(error)


class Pipeline:
    """Takes jobs in their order, on two threads beside those of store and tiler.

    An error ends it: jobs that are under way and later ones raise it, since states that were
    half written are of no use.

    Args:
        store: where tensors are read and written.
        tile_bytes: of each state in a tile, a multiple of 4096.
        threads: that compute; None means as many as torch uses in the calling thread.
    """

    def __init__(self, store: "NvmeStore", tile_bytes: int, threads: int | None = None) -> None:
        self._store = store
        self._tiler = Tiler(threads)
        self._reading = Pool(1, "drivetrain-ahead")
        self._updating = computing_pool(1, "drivetrain-step")
        self._sets = [Buffers(tile_bytes) for _ in range(SETS)]
        self._free: SimpleQueue[Buffers] = SimpleQueue()
        for buffers in self._sets:
            self._free.put(buffers)
        self._error: BaseException | None = None

    def provide(self, names: Sequence[str]) -> None:
        """Have buffers for tensors of these names."""
        for buffers in self._sets:
            buffers.provide(names)

    def submit(self, job: Job) -> None:
        """Take a job; returns at once.

        Raises:
            StorageError: a step or a write failed before.
        """
        self._check()
        self._reading.submit(self._read, job)

    def close(self) -> None:
        """Let jobs and writes end, and give up threads and buffers; may be called again."""
        self._reading.shutdown()
        self._updating.shutdown()
        for buffers in self._sets:
            buffers.settle()
        self._sets.clear()
        self._tiler.close()

    def _check(self) -> None:
        if self._error is not None:
            raise StorageError(
                f"expected states on the disk that can be stepped, found that a step failed "
                f"before: {self._error}"
            ) from self._error
        self._store.check()

    def _read(self, job: Job) -> None:
        try:
            if job.after is not None:
                wait([job.after])
            for tile in job.tiles:
                self._read_tile(job, tile)
            self._updating.submit(self._finish, job)
        except BaseException as error:  # whoever waits for the job gets it
            self._fail(job, error)

    def _read_tile(self, job: Job, tile: Tile) -> None:
        buffers = self._free.get()
        try:
            self._check()
            reads = buffers.read(self._store, job.keys[tile.kept], tile)
        except BaseException:
            self._free.put(buffers)
            raise
        self._updating.submit(self._update, job, tile, buffers, reads)

    def _update(self, job: Job, tile: Tile, buffers: Buffers, reads: Sequence[Transfer]) -> None:
        try:
            if not job.future.done():
                for read in reads:
                    read.wait()
                keys = job.keys[tile.kept]
                with torch.no_grad():
                    self._tiler.update_all(buffers.updates(keys, tile))
                buffers.write(self._store, keys, tile)
        except BaseException as error:
            self._fail(job, error)
        finally:
            settle(read for read in reads if not read.done())
            self._free.put(buffers)

    def _finish(self, job: Job) -> None:
        if job.future.done():  # it failed
            return
        try:
            if job.then is not None:
                job.then()
            job.future.set_result(None)
        except BaseException as error:
            self._fail(job, error)

    def _fail(self, job: Job, error: BaseException) -> None:
        self._error = self._error or error
        job.fail(error)


def settle(transfers: Iterable[Transfer]) -> None:
    """Return when transfers are over, failed or not."""
    for transfer in transfers:
        transfer.settle()


def _goes_on(tile: Tile, at: int, kept: bool, tile_bytes: int) -> bool:
    """Whether the byte ``at`` belongs to a tile, too."""
    return at == tile.stop and kept is tile.kept and at - tile.start < tile_bytes
