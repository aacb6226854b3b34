"""Steps over shards on a disk, tile by tile (ZeRO-Infinity, Rajbhandari et al. 2021, section 5).

Tile i + 1 is read while tile i is updated and tile i - 1 is written. Three sets of buffers go
round. One thread takes a set whose last tile is on the disk, and starts to read the next tile into
it. Another thread waits for the values, updates them and starts to write them. The reading thread
runs ahead over tiles of other shards, blocks and submissions, as far as there are sets. But before
it reads a block again, the block's last step must have given its writes to the disk, which keeps
the order from there.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from drivetrain.errors import StorageError
from drivetrain.store import Pending
from drivetrain_offload.buffers import ALIGNMENT, aligned_empty, padded
from drivetrain_offload.steps.rules import GroupStep, Rule
from drivetrain_offload.steps.stepping import (
    MASTER,
    ShardBlock,
    ShardWork,
    SteppedShard,
    Stepper,
    Then,
)
from drivetrain_offload.steps.tiles import Piece, Tiler
from drivetrain_offload.threads import ThreadPool, computing_pool

SETS = 3
"""Of buffers: one is read, one updated, one written."""

TILE_BYTES = 8 << 20
"""Of each state and of masters in a tile on its way from and to a disk."""

WORKING_BYTES = SETS * 3 * TILE_BYTES
"""Sets of buffers for the masters and two states of Adam."""


class TileStore(Protocol):
    """A store on a disk, as the pipeline sees it: ranges of tensors, by key.

    Reads and writes of the same bytes take effect in the order of the calls.
    """

    def check(self) -> None:
        """Return when the store can be used; raises otherwise."""

    def reserve(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the room of tensors, by key, whose values come later."""

    def read_into(self, key: str, buffer: Tensor, start: int, stop: int) -> Pending:
        """Start to read the elements start to stop of a tensor into a buffer."""

    def write_from(self, key: str, buffer: Tensor, start: int, stop: int) -> Pending:
        """Start to write a buffer to the elements start to stop of a tensor."""


class TilePart(NamedTuple):
    """The range of one shard within a tile.

    Attributes:
        work: the step of the shard.
        first: the shard's first element in the range.
        offset: where the range begins in the tile, in bytes.
        nbytes: its length, without the padding of the shard's end to 4096 bytes.
    """

    work: ShardWork
    first: int
    offset: int
    nbytes: int


@dataclass(slots=True)
class Tile:
    """A range of a block's tensors on the disk: whole shards, and parts of the first and last.

    Attributes:
        kept: whether the tile has masters.
        start: first byte, a multiple of 4096.
        stop: the byte behind the last, a multiple of 4096.
        parts: the ranges of shards within.
    """

    kept: bool
    start: int
    stop: int
    parts: list[TilePart] = field(default_factory=list)


def cut(works: Sequence[ShardWork], tile_bytes: int) -> Iterator[Tile]:
    """Cut the steps of a block into tiles of at most ``tile_bytes``, a multiple of 4096.

    Shards begin at multiples of 4096 bytes; neighbors may share a tile.
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
            tile.parts.append(TilePart(work, first, at - tile.start, nbytes))
            tile.stop += padded(nbytes)
            done += nbytes
    if tile is not None:
        yield tile


class TileBuffers:
    """One set of buffers of so many bytes: one for each state, and one for masters."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._tensors: dict[str, Tensor] = {}
        self._writes: list[Pending] = []

    def provide(self, names: Sequence[str]) -> None:
        """Make the buffers of these names that are not there yet."""
        for name in names:
            if name not in self._tensors:
                self._tensors[name] = aligned_empty(self._nbytes, torch.uint8)

    def read(self, store: TileStore, keys: Mapping[str, str], tile: Tile) -> list[Pending]:
        """Start to fill the buffers with a tile, once their last tile is on the disk."""
        for write in self._writes:
            write.wait()
        self._writes.clear()
        reads: list[Pending] = []
        try:
            for name, key in keys.items():
                reads.append(store.read_into(key, self._tensors[name], tile.start, tile.stop))
        except BaseException:
            await_end(reads)  # the disk still writes into these buffers
            raise
        return reads

    def write(self, store: TileStore, keys: Mapping[str, str], tile: Tile) -> None:
        """Start to write a tile."""
        for name, key in keys.items():
            write = store.write_from(key, self._tensors[name], tile.start, tile.stop)
            self._writes.append(write)

    def await_writes(self) -> None:
        """Return when all writes are over, failed or not."""
        await_end(self._writes)

    def updates(self, keys: Mapping[str, str], tile: Tile) -> list[tuple[GroupStep, Piece]]:
        """Return the updates of a tile, for ``Tiler.update_all``."""
        return [self._update(keys, part) for part in tile.parts]

    def _update(self, keys: Mapping[str, str], part: TilePart) -> tuple[GroupStep, Piece]:
        dtype = part.work.shard.spec.dtype
        here = slice(part.offset, part.offset + part.nbytes)
        tensors = {name: self._tensors[name][here].view(dtype) for name in keys}
        where = slice(part.first, part.first + part.nbytes // dtype.itemsize)
        return part.work.step, part.work.piece(tensors, where)


@dataclass(frozen=True, slots=True, eq=False)
class PipelinedStep:
    """A step of one block on its way through the pipeline.

    Attributes:
        keys: the keys of the tensors in the store, by their names; for tiles without masters
            (False) and with masters (True).
        tiles: the tiles of the block.
        after: the block's step before this one, if there is one; its writes come before our reads.
        then: called when masters and outputs in memory are there.
        future: ends when ``then`` has returned.
    """

    keys: Mapping[bool, Mapping[str, str]]
    tiles: Iterable[Tile]
    after: "Future[None] | None"
    then: Then
    future: "Future[None]" = field(default_factory=Future)

    def fail(self, error: BaseException) -> None:
        """End the step with an error; the first error counts."""
        with contextlib.suppress(InvalidStateError):
            self.future.set_exception(error)


class NvmeStepper(Stepper):
    """Keeps states, and masters if asked, in the file of a store.

    A step reads and writes them once: 12 bytes per parameter each way for AdamW with fp32 masters,
    8 bytes where masters stay in memory, and the padding of every shard to 4096 bytes. A step is
    over when memory holds its results; the writes go on. Two threads take steps in their order,
    beside the threads of store and tiler. An error ends the stepper: the steps under way and later
    steps raise the error, since half-written states are of no use.

    Args:
        rule: how the optimizer updates.
        store: keeps the file.
        prefix: of the stepper's keys there; no other keys begin so.
        request_bytes: of one request to the disk.
    """

    def __init__(self, rule: Rule, store: TileStore, prefix: str, request_bytes: int) -> None:
        super().__init__(rule, ALIGNMENT)
        self._store = store
        self._prefix = prefix
        # A tile is whole requests; a request that is longer than a tile is cut to the tile.
        self._tile_bytes = TILE_BYTES // request_bytes * request_bytes or TILE_BYTES
        self._tiler = Tiler()
        self._reading = ThreadPool(1, "drivetrain-ahead")
        self._updating = computing_pool(1, "drivetrain-step")
        self._sets = [TileBuffers(self._tile_bytes) for _ in range(SETS)]
        self._free: SimpleQueue[TileBuffers] = SimpleQueue()
        for buffers in self._sets:
            self._free.put(buffers)
        self._error: BaseException | None = None

    # --- the contract of ``Stepper`` ---

    @override
    def _take_room(self, block: ShardBlock) -> None:
        room = {
            self._key(block, name): torch.empty(nbytes, dtype=torch.uint8, device="meta")
            for name, nbytes in block.nbytes.items()
        }
        self._store.reserve(room)
        for buffers in self._sets:
            buffers.provide([name for name, nbytes in block.nbytes.items() if nbytes])

    @override
    def _start(self, block: ShardBlock, works: Sequence[ShardWork], then: Then) -> "Future[None]":
        self._check()
        states = {name: self._key(block, name) for name in sorted(block.states)}
        keys = {False: states, True: states | {MASTER: self._key(block, MASTER)}}
        step = PipelinedStep(keys, cut(works, self._tile_bytes), block.last, then)
        self._reading.submit(self._read, step)
        return step.future

    @override
    def _fetch(self, block: ShardBlock, shard: SteppedShard, name: str) -> Tensor:
        buffer = aligned_empty(padded(shard.nbytes), torch.uint8)
        stop = shard.offset + len(buffer)
        self._store.read_into(self._key(block, name), buffer, shard.offset, stop).wait()
        return buffer[: shard.nbytes].view(shard.spec.dtype)

    @override
    def _keep(self, block: ShardBlock, shard: SteppedShard, name: str, values: Tensor) -> None:
        buffer = aligned_empty(padded(shard.nbytes), torch.uint8)
        copy = buffer[: shard.nbytes].view(shard.spec.dtype)
        copy.copy_(values.detach().reshape(-1))
        stop = shard.offset + len(buffer)
        self._store.write_from(self._key(block, name), buffer, shard.offset, stop).wait()

    @override
    def _release(self) -> None:
        self._reading.shutdown()
        self._updating.shutdown()
        for buffers in self._sets:
            buffers.await_writes()
        self._sets.clear()
        self._tiler.close()

    def _key(self, block: ShardBlock, name: str) -> str:
        return f"{self._prefix}/{block.name}/{name}"

    # --- the pipeline: read ahead on one thread, update and write on another ---

    def _check(self) -> None:
        if self._error is not None:
            raise StorageError(
                f"expected states on the disk that can be stepped, found that a step failed "
                f"before: {self._error}"
            ) from self._error
        self._store.check()

    def _read(self, step: PipelinedStep) -> None:
        try:
            if step.after is not None:
                wait([step.after])
            for tile in step.tiles:
                self._read_tile(step, tile)
            self._updating.submit(self._finish, step)
        except BaseException as error:  # whoever waits for the step gets it
            self._fail(step, error)

    def _read_tile(self, step: PipelinedStep, tile: Tile) -> None:
        buffers = self._free.get()
        try:
            self._check()
            reads = buffers.read(self._store, step.keys[tile.kept], tile)
        except BaseException:
            self._free.put(buffers)
            raise
        self._updating.submit(self._update, step, tile, buffers, reads)

    def _update(
        self, step: PipelinedStep, tile: Tile, buffers: TileBuffers, reads: Sequence[Pending]
    ) -> None:
        try:
            if not step.future.done():
                for read in reads:
                    read.wait()
                keys = step.keys[tile.kept]
                with torch.no_grad():
                    self._tiler.update_all(buffers.updates(keys, tile))
                buffers.write(self._store, keys, tile)
        except BaseException as error:
            self._fail(step, error)
        finally:
            # After an error reads may go on: the set is free only when the disk has left it alone.
            await_end(read for read in reads if not read.done())
            self._free.put(buffers)

    def _finish(self, step: PipelinedStep) -> None:
        if step.future.done():  # it failed
            return
        try:
            if step.then is not None:
                step.then()
            step.future.set_result(None)
        except BaseException as error:
            self._fail(step, error)

    def _fail(self, step: PipelinedStep, error: BaseException) -> None:
        self._error = self._error or error
        step.fail(error)


def await_end(transfers: Iterable[Pending]) -> None:
    """Return when transfers are over, failed or not."""
    for transfer in transfers:
        with contextlib.suppress(Exception):  # told elsewhere: by the step, or by the store's check
            transfer.wait()


def _goes_on(tile: Tile, at: int, kept: bool, tile_bytes: int) -> bool:
    """Whether a shard at the byte ``at`` can go on in a tile."""
    return at == tile.stop and kept is tile.kept and at - tile.start < tile_bytes
