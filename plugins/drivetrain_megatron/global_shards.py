"""Between a rank's parts and whole tensors: shards of a checkpoint, saved and loaded.

A rank holds a part of some tensors, a pipeline stage holds some of the tensors. The data-parallel
strategy inside of a cell knows these local tensors only. ``GlobalShards`` puts the shards that this
strategy saves into global coordinates, and ``LocalReader`` cuts parts to be loaded out of whole
tensors: a checkpoint does not show how the ranks shared the model.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.collectives import Communicator
from drivetrain.errors import CheckpointError
from drivetrain.parts.naming import named_parameters, persistent_buffers
from drivetrain.parts.saved_state import LINKS, OWN_MARK
from drivetrain.shards import Part, Reader, Shard, boxes
from drivetrain_megatron.cell import DataParallelCell, ParameterFacts
from drivetrain_megatron.shares import on_shares
from drivetrain_megatron.state import Original
from drivetrain_megatron.tensor.partition import Partition


def globally(
    part: Part, tensor: Tensor, partition: Partition, rank: int
) -> Iterator[tuple[Part, Tensor]]:
    """Yield the pieces of a part of a local tensor, in coordinates of the global one.

    Args:
        part: of the local tensor of a rank.
        tensor: the part's values: of shape ``part.sizes``, or 1-D for a flat range.
        partition: of the global tensor.
        rank: the one with the local tensor.

    Yields:
        (global part, view of the values that belong there).
    """
    ranges = partition.ranges[rank]
    if len(ranges) == 1:  # the local tensor is one box, and a flat range of it stays one
        yield Part(_moved(part.offsets, partition.dim, ranges[0][0]), part.sizes, part.flat), tensor
        return
    flat = tensor.reshape(-1)
    for box in boxes(part):
        values = flat[box.start : box.start + prod(box.sizes)].view(box.sizes)
        for offset, size, to in _cut(ranges, box.offsets[partition.dim], box.sizes[partition.dim]):
            piece = values.narrow(partition.dim, offset - box.offsets[partition.dim], size)
            at = list(box.offsets)
            at[partition.dim] = to
            yield Part(tuple(at), tuple(piece.shape)), piece


class GlobalShards:
    """Puts the shards that a cell's strategy saves into global coordinates.

    Tensors without facts are replicated. The rank is that of the tensor-parallel axis.
    """

    def __init__(self, facts: Mapping[str, ParameterFacts], rank: int) -> None:
        self._facts = facts
        self._rank = rank

    def of(self, shards: Iterable[Shard]) -> Iterator[Shard]:
        """Yield the global shards that this rank saves; a part that several ranks hold comes once.

        Raises:
            CheckpointError: an optimizer keeps state of a divided parameter that has neither its
                shape nor is a single number.
        """
        for shard in shards:
            facts = self._facts.get(shard.name)
            if facts is not None and facts.partition and shard.state.startswith(LINKS):
                yield replace(shard, state=f"{shard.state}{_mark(facts, self._rank)}")
            elif facts is None or facts.partition is None or not shard.shape:  # a count of steps
                if self._rank == 0:
                    yield shard
            elif shard.shape != facts.local_shape(self._rank):
                raise CheckpointError(
                    f"expected state of {shard.name!r} with the shape of its part, "
                    f"{facts.local_shape(self._rank)}, found {shard.state!r} with {shard.shape}; "
                    "this optimizer cannot be saved under tensor parallelism"
                )
            elif facts.saves(self._rank):
                for part, piece in globally(shard.part, shard.tensor, facts.partition, self._rank):
                    yield replace(shard, tensor=piece, shape=facts.shape, part=part)


class LocalReader:
    """Shows a checkpoint of the whole model as if it had this rank's part of each tensor only.

    Only the cell's parameters and buffers (``names``) are shown; and of the state that sums over
    slow links keep, for parts of a parameter, the state for parts cut like this rank's.
    """

    def __init__(
        self, reader: Reader, facts: Mapping[str, ParameterFacts], names: Iterable[str], rank: int
    ) -> None:
        self._reader, self._facts, self._rank = reader, facts, rank
        self.partial = reader.partial
        self._names = frozenset(names)

    def keys(self) -> Iterable[tuple[str, str]]:
        """The (name, state) pairs of this cell."""
        found = []
        for name, state in self._reader.keys():  # noqa: SIM118 - no dict
            plain, marked, _ = state.partition(OWN_MARK)
            of_part = marked and state.startswith(LINKS)
            if name in self._names and (not of_part or self._saved(name, plain) == state):
                found.append((name, plain if of_part else state))
        return found

    def _saved(self, name: str, state: str) -> str:
        """Return the key of a state in the checkpoint."""
        facts = self._facts.get(name)
        of_part = facts is not None and facts.partition and state.startswith(LINKS)
        return f"{state}{_mark(facts, self._rank)}" if facts and of_part else state

    def shape(self, name: str, state: str = "") -> tuple[int, ...]:
        """Shape of the part that this cell holds."""
        state = self._saved(name, state)
        shape = self._reader.shape(name, state)
        facts = self._divided(name, shape)
        return shape if facts is None else facts.local_shape(self._rank)

    def read(self, name: str, state: str = "", part: Part | None = None) -> Tensor:
        """Return one part of the cell's tensor, on the CPU, in the saved dtype."""
        state = self._saved(name, state)
        shape = self._reader.shape(name, state)
        facts = self._divided(name, shape)
        if facts is None or facts.partition is None:
            return self._reader.read(name, state, part)
        wanted = part or Part.whole(facts.local_shape(self._rank))
        if len(facts.partition.ranges[self._rank]) == 1:
            ((where, _),) = globally(wanted, torch.empty(0), facts.partition, self._rank)
            return self._reader.read(name, state, where)
        nothing = Part((0,) * len(shape), (0,) * len(shape))
        dtype = self._reader.read(name, state, nothing).dtype
        sizes = wanted.sizes if wanted.flat is None else (wanted.flat[1] - wanted.flat[0],)
        values = torch.empty(sizes, dtype=dtype, device="cpu")
        for where, piece in globally(wanted, values, facts.partition, self._rank):
            piece.copy_(self._reader.read(name, state, where))
        return values

    def scalars(self, name: str, optimizer: int) -> Mapping[str, Any]:
        """Return the optimizer state of a parameter that is no tensor."""
        return self._reader.scalars(name, optimizer)

    def _divided(self, name: str, shape: tuple[int, ...]) -> ParameterFacts | None:
        facts = self._facts.get(name)
        return facts if facts is not None and facts.partition and shape == facts.shape else None


class StatesOfCell(DataParallelCell):
    """The methods of a cell about optimizers' state, of which each rank has its part."""

    _pp: Communicator
    _model: nn.Module
    _original: Original

    @property
    def divides_states(self) -> bool:
        """Whether ranks hold parts of parameters, or some of the parameters."""
        return self._tp.size * self._pp.size > 1 or self._inner.divides_states

    @on_shares
    def check_load(self, reader: Reader) -> None:
        """Compare names and shapes of the whole model, and those of this cell's parts."""
        self._original.check_loads(reader, self._facts)
        self._inner.check_load(self._local(reader))

    @on_shares
    def load(self, reader: Reader) -> None:
        """Load this cell's parts of a checkpoint of the whole model."""
        self._original.check_loads(reader, self._facts)
        if self._pipeline is not None:
            self._pipeline.stages.outdate()
        self._inner.load(self._local(reader))
        self._shares.steps += 1

    def states(self, index: int, names: Collection[str]) -> Iterator[Shard]:
        """Yield this rank's share of an optimizer's state, in coordinates of the whole model."""
        return GlobalShards(self._facts, self._tp.rank).of(self._inner.states(index, names))

    def load_states(self, index: int, reader: Reader, names: Collection[str]) -> None:
        """Take this cell's parts of an optimizer's state."""
        self.check_load(reader)
        self._inner.load_states(index, self._local(reader), names)

    def _local(self, reader: Reader) -> LocalReader:
        """Return a reader of this cell's parts."""
        names = {**named_parameters(self._model), **persistent_buffers(self._model)}
        return LocalReader(reader, self._facts, names, self._tp.rank)


def _mark(facts: ParameterFacts, rank: int) -> str:
    """Return the end of the keys of state for one part of a parameter."""
    ranges = () if facts.partition is None else facts.partition.ranges
    return f"{OWN_MARK}{rank}of{len(ranges)}"


def _cut(
    ranges: Iterable[tuple[int, int]], offset: int, size: int
) -> Iterator[tuple[int, int, int]]:
    """Yield (local offset, size, global offset) of each intersection of an interval and a range."""
    begin = 0
    for start, stop in ranges:
        end = begin + stop - start
        low, high = max(offset, begin), min(offset + size, end)
        if low < high:
            yield low, high - low, start + low - begin
        begin = end


def _moved(offsets: tuple[int, ...], dim: int, by: int) -> tuple[int, ...]:
    return tuple(offset + by * (index == dim) for index, offset in enumerate(offsets))
