"""Optimizer steps of shards in a store: in memory, or tile by tile over a disk.

``submit`` reads the hyperparameters, counts the step and returns; threads of the stepper do the
arithmetic. Every shard has a counter of its own, as parameters have in torch. A shard has no states
before its first step, which fills them with their initial values: nothing has to be written before,
and ``set_states`` with nothing takes a shard back to there.

A block has a tensor of bytes for each state, and another for masters; the shards lie in each tensor
side by side. Shards whose master the store keeps come first: so every shard has the same offset in
the states as in the shorter tensor of masters.

Steps over shards on a disk, tile by tile (ZeRO-Infinity, Rajbhandari et al. 2021, section 5).

Tile i + 1 is read while tile i is updated and tile i - 1 is written. Three sets of buffers go
round. One thread takes a set whose last tile is on the disk, and starts to read the next tile into
it. Another thread waits for the values, updates them and starts to write them. The reading thread
runs ahead over tiles of other shards, blocks and submissions, as far as there are sets. But before
it reads a block again, the block's last step must have given its writes to the disk, which keeps
the order from there.
"""

import contextlib
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from drivetrain.errors import StorageError, UsageError
from drivetrain.store import Pending, ShardSpec, ShardStep
from drivetrain_offload.options import ALIGNMENT
from drivetrain_offload.tiles import (
    GroupStep,
    ParamGroup,
    Piece,
    Rule,
    ThreadPool,
    Tiler,
    aligned_empty,
    computing_pool,
    padded,
)

# --- optimizer steps of shards in a store, for steppers that say where the tensors lie ---

Then = Callable[[], None] | None
"""Called when a step is done."""
MASTER = "master"
"""The name of a kept master beside those of states; torch has no state called so."""


class Submission:
    """A step of a block in the background, until a future ends: a ``Pending`` of the contract."""

    __slots__ = ("_future",)

    def __init__(self, future: "Future[None]") -> None:
        self._future = future

    def wait(self) -> None:
        """Return when masters and outputs are there; raises the step's error, at every call."""
        self._future.result()

    def done(self) -> bool:
        """Whether it is over, or failed."""
        return self._future.done()


@dataclass(slots=True)
class SteppedShard:
    """A shard of a block, and its counter of steps.

    Attributes:
        index: its place in the block.
        spec: its length and dtype, and whether the store keeps its master.
        offset: its first byte in each of the block's tensors.
        taken: the number of its steps, as torch counts them.
        fresh: whether there are no states yet.
    """

    index: int
    spec: ShardSpec
    offset: int
    taken: float = 0.0
    fresh: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes of each of its tensors."""
        return self.spec.numel * self.spec.dtype.itemsize

    def of(self, whole: Tensor) -> Tensor:
        """Return the shard's part of one of the block's tensors of bytes, (bytes,)."""
        return whole[self.offset : self.offset + self.nbytes].view(self.spec.dtype)


@dataclass(slots=True)
class ShardBlock:
    """The shards that one optimizer steps in one unit.

    Attributes:
        name: of the block.
        shards: in the order of their indices.
        states: the names of the shards' states.
        nbytes: of each state of all shards together, and of the kept masters, by name.
        last: the step that was submitted last.
    """

    name: str
    shards: list[SteppedShard]
    states: frozenset[str]
    nbytes: dict[str, int]
    last: "Future[None] | None" = None

    def names(self, shard: SteppedShard) -> list[str]:
        """Return the names of the tensors that the store keeps for a shard."""
        return [*sorted(self.states), *([MASTER] if shard.spec.kept else [])]


@dataclass(slots=True)
class ShardWork:
    """A step of a shard, as its param group and counter were when it was submitted.

    Attributes:
        shard: the shard.
        wanted: gradient, master and output.
        step: hyperparameters and kernel.
        initial: the values that fill states before a first step, by name; empty later.
        out: the output, once needed.
    """

    shard: SteppedShard
    wanted: ShardStep
    step: GroupStep
    initial: Mapping[str, float]
    out: Tensor | None = None

    def piece(self, tensors: Mapping[str, Tensor], where: slice) -> Piece:
        """Return the tensors that this step reads and writes in a range of the shard's elements.

        The states of the range, and the master if the store keeps the master, come by name.

        Raises:
            UsageError: the output that a function returned does not fit.
        """
        states = {name: tensors[name] for name in self.step.states}
        for name, value in self.initial.items():
            states[name].fill_(value)
        wanted = self.wanted
        master = tensors[MASTER] if wanted.master is None else wanted.master[where]
        out = self._output()
        return Piece(master, wanted.gradient[where], states, None if out is None else out[where])

    def _output(self) -> Tensor | None:
        if self.out is None and self.wanted.out is not None:
            out = self.wanted.out
            self.out = out if isinstance(out, Tensor) else out()
            _check_length(f"out of shard {self.wanted.index}", self.out, self.shard)
        return self.out


class Stepper(ABC):
    """Steps shards: a ``ShardStepper``, whose subclasses say where tensors lie.

    Calls come from one thread at a time. The process lets submitted steps end before it ends. After
    a step that failed, steps and tensors of its block are refused with its error.

    Args:
        rule: how the optimizer updates.
        alignment: bytes; shards begin at multiples.
    """

    def __init__(self, rule: Rule, alignment: int) -> None:
        self._rule = rule
        self._alignment = alignment
        self._blocks: dict[str, ShardBlock] = {}
        self._closed = False
        self._at_exit: weakref.finalize[[weakref.ref[Stepper]], Stepper] | None = None

    def adopt(self, block: str, shards: Sequence[ShardSpec], group: ParamGroup) -> None:
        """Take room for the states of a block's shards; see ``ShardStepper.adopt``.

        Raises:
            UsageError: the name is taken, or the stepper closed.
            StorageError: there is too little room.
        """
        self._check_open()
        if block in self._blocks:
            raise UsageError(f"expected a new block, found {block!r}, which was adopted before")
        placed, end, kept = _place(shards, self._alignment)
        names = frozenset(self._rule.states(group))
        adopted = ShardBlock(block, placed, names, {MASTER: kept} | dict.fromkeys(names, end))
        self._take_room(adopted)
        self._blocks[block] = adopted
        if self._at_exit is None:  # now: finalizers made later run before those of the threads
            self._at_exit = weakref.finalize(self, _close, weakref.ref(self))

    def submit(self, block: str, steps: Sequence[ShardStep], then: Then = None) -> Pending:
        """Take a step for some shards of a block; see ``ShardStepper.submit``.

        Raises:
            KeyError: there is no such block.
            UsageError: a step that does not fit its shard; then none was taken.
            StorageError: the disk failed before.
        """
        self._check_open()
        found = self._blocks[block]
        if found.last is not None and found.last.done():
            found.last.result()
        found.last = self._start(found, self._count(found, steps), then)
        return Submission(found.last)

    def states(self, block: str, index: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the states of a shard and its counter ``step``; see ``ShardStepper.states``."""
        found = self._at_rest(block)
        shard = found.shards[index]
        if shard.fresh:
            return
        if self._rule.counted:
            yield "step", torch.tensor(shard.taken, dtype=torch.float32)
        for name in sorted(found.states):
            yield name, self._fetch(found, shard, name)

    def master(self, block: str, index: int) -> Tensor:
        """Return the master of a shard that the store keeps, 1-D.

        Raises:
            UsageError: the master is not kept.
        """
        found = self._at_rest(block)
        return self._fetch(found, self._keeping(found, index), MASTER)

    def set_states(self, block: str, index: int, states: Mapping[str, Any]) -> None:
        """Replace the states of a shard; none: as before the first step.

        States may have any shape and floating dtype; ``step`` is a number or 0-D. A state that is
        None counts as missing.

        Raises:
            UsageError: other states than this optimizer's, or of another size.
        """
        found = self._at_rest(block)
        shard = found.shards[index]
        given = {name: state for name, state in states.items() if state is not None}
        if given:
            wanted = {*found.states, *(["step"] if self._rule.counted else [])}
            if given.keys() != wanted:
                raise UsageError(
                    f"{block}: expected the states {sorted(wanted)}, found {sorted(given)}: load "
                    "those of the same optimizer, with the same options"
                )
            for name in found.states:
                _check_length(f"{block}: {name}", given[name], shard)
            for name in found.states:
                self._keep(found, shard, name, given[name])
        shard.taken = self._rule.taken(given)
        shard.fresh = not given

    def set_master(self, block: str, index: int, values: Tensor) -> None:
        """Replace the master of a shard that the store keeps.

        Raises:
            UsageError: it is not kept, or of another size.
        """
        found = self._at_rest(block)
        shard = self._keeping(found, index)
        _check_length(f"{block}: master", values, shard)
        self._keep(found, shard, MASTER, values)

    def close(self) -> None:
        """Let submitted steps end, and release memory and threads; may be called again."""
        self._closed = True
        if self._at_exit is not None:
            self._at_exit.detach()
        self._release()
        self._blocks.clear()

    @abstractmethod
    def _take_room(self, block: ShardBlock) -> None:
        """Take room for a new block's tensors."""

    @abstractmethod
    def _start(self, block: ShardBlock, works: Sequence[ShardWork], then: Then) -> "Future[None]":
        """Begin a step; returns at once."""

    @abstractmethod
    def _fetch(self, block: ShardBlock, shard: SteppedShard, name: str) -> Tensor:
        """Return one tensor of a shard."""

    @abstractmethod
    def _keep(self, block: ShardBlock, shard: SteppedShard, name: str, values: Tensor) -> None:
        """Replace one tensor of a shard."""

    @abstractmethod
    def _release(self) -> None:
        """Wait for submitted steps, and give everything up; may be called again."""

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("expected a stepper in use, found one that was closed")

    def _at_rest(self, block: str) -> ShardBlock:
        """Return a block when its submitted steps are over."""
        self._check_open()
        found = self._blocks[block]
        if found.last is not None:
            found.last.result()
        return found

    def _keeping(self, block: ShardBlock, index: int) -> SteppedShard:
        shard = block.shards[index]
        if not shard.spec.kept:
            raise UsageError(
                f"{block.name}: expected a shard whose master the store keeps, found shard "
                f"{index}, whose master stays elsewhere"
            )
        return shard

    def _count(self, block: ShardBlock, steps: Sequence[ShardStep]) -> list[ShardWork]:
        """Return the work of a step; shards of equal group and counter share a ``GroupStep``."""
        for wanted in steps:
            _check_step(block, wanted)
        if len({wanted.index for wanted in steps}) < len(steps):
            raise UsageError(f"{block.name}: expected one step per shard, found several for one")
        begun: dict[tuple[int, float, float], GroupStep] = {}
        works = []
        for wanted in steps:
            shard = block.shards[wanted.index]
            alike = (id(wanted.group), shard.taken, wanted.factor)
            if alike not in begun:
                begun[alike] = self._begin(block, wanted, shard.taken)
            initial = self._rule.states(wanted.group) if shard.fresh else {}
            works.append(ShardWork(shard, wanted, begun[alike], initial))
        for work in works:  # after the last error that a step may raise
            work.shard.taken += 1
            work.shard.fresh = False
        return works

    def _begin(self, block: ShardBlock, wanted: ShardStep, taken: float) -> GroupStep:
        """Begin the next step of shards that have taken so many steps."""
        if self._rule.states(wanted.group).keys() != block.states:
            raise UsageError(
                f"{block.name}: expected a param group with the states {sorted(block.states)}, as "
                f"the block was adopted with, found {sorted(self._rule.states(wanted.group))}"
            )
        return self._rule.step(wanted.group, taken, wanted.factor)


def _close(stepper: "weakref.ref[Stepper]") -> None:
    if (found := stepper()) is not None:
        found.close()


def _place(specs: Sequence[ShardSpec], alignment: int) -> tuple[list[SteppedShard], int, int]:
    """Lay shards out side by side; return them, their end, and the end of shards with a master."""
    placed: dict[int, SteppedShard] = {}
    end = kept = 0
    for index in sorted(range(len(specs)), key=lambda index: not specs[index].kept):
        placed[index] = SteppedShard(index, specs[index], end)
        end += -(-placed[index].nbytes // alignment) * alignment
        kept = end if specs[index].kept else kept
    return [placed[index] for index in range(len(specs))], end, kept


def _check_step(block: ShardBlock, wanted: ShardStep) -> None:
    shard = block.shards[wanted.index]
    if (wanted.master is None) is not shard.spec.kept:
        raise UsageError(
            f"{block.name}: expected {'no' if shard.spec.kept else 'a'} master for shard "
            f"{wanted.index}, whose master the store {'keeps' if shard.spec.kept else 'lacks'}"
        )
    for name in ("gradient", "master", "out"):
        tensor = getattr(wanted, name)
        if isinstance(tensor, Tensor):
            _check_length(f"{block.name}: {name} of shard {wanted.index}", tensor, shard)
    if wanted.master is not None and wanted.master.dtype != shard.spec.dtype:
        raise UsageError(
            f"{block.name}: expected a master of {shard.spec.dtype} for shard {wanted.index}, "
            f"found {wanted.master.dtype}"
        )


def _check_length(name: str, tensor: Tensor, shard: SteppedShard) -> None:
    if tensor.numel() != shard.spec.numel:
        raise UsageError(
            f"{name}: expected {shard.spec.numel:,} elements, found {tensor.numel():,} of shape "
            f"{tuple(tensor.shape)}"
        )


# --- steps over shards on a disk, tile by tile ---

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
        with contextlib.suppress(InvalidStateError):  # the first error counts
            step.future.set_exception(error)


def await_end(transfers: Iterable[Pending]) -> None:
    """Return when transfers are over, failed or not."""
    for transfer in transfers:
        with contextlib.suppress(Exception):  # told elsewhere: by the step, or by the store's check
            transfer.wait()


def _goes_on(tile: Tile, at: int, kept: bool, tile_bytes: int) -> bool:
    """Whether a shard at the byte ``at`` can go on in a tile."""
    return at == tile.stop and kept is tile.kept and at - tile.start < tile_bytes
