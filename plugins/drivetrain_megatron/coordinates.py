"""Between a cell and the user's whole model: where a piece of a local tensor lies in the global.

The data-parallel strategy inside of a cell knows local parameters only. What it saves is put into
global coordinates here, and what it loads is read from there, so that a checkpoint does not show
how the model was divided.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from drivetrain.checkpoint.assembly import boxes
from drivetrain.errors import CheckpointError
from drivetrain.shards import Part, Reader, Shard
from drivetrain_megatron.facts import ParameterFacts
from drivetrain_megatron.tensor.partition import Partition


def globally(
    part: Part, tensor: Tensor, partition: Partition, rank: int
) -> Iterator[tuple[Part, Tensor]]:
    """Yield the pieces of a part of a local tensor, in coordinates of the global one.

    Args:
        part: which part of the local tensor.
        tensor: the part's values: of shape ``part.sizes``, or 1-D for a flat range.
        partition: how the global tensor is divided.
        rank: whose local tensor.

    Yields:
        (global part, view of the values that belong there).
    """
    ranges = partition.ranges[rank]
    if len(ranges) == 1:  # the local tensor is one box, and a flat range of it stays one
        yield Part(_moved(part.offsets, partition.dim, ranges[0][0]), part.sizes, part.flat), tensor
        return
    flat = tensor.reshape(-1)
    for box in boxes(part):
        values = flat.as_strided(box.sizes, _strides(box.sizes), flat.storage_offset() + box.start)
        for offset, size, to in _cut(ranges, box.offsets[partition.dim], box.sizes[partition.dim]):
            piece = values.narrow(partition.dim, offset - box.offsets[partition.dim], size)
            at = list(box.offsets)
            at[partition.dim] = to
            yield Part(tuple(at), tuple(piece.shape)), piece


class GlobalShards:
    """Puts what a cell's strategy saves into global coordinates.

    Args:
        facts: of the cell's parameters, by name; what is not there is replicated.
        rank: this rank's index on the tensor-parallel axis.
    """

    def __init__(self, facts: Mapping[str, ParameterFacts], rank: int) -> None:
        self._facts = facts
        self._rank = rank

    def of(self, shards: Iterable[Shard]) -> Iterator[Shard]:
        """Yield the global shards that this rank saves: of what several ranks hold, one does.

        Raises:
            CheckpointError: an optimizer keeps state of a divided parameter that has neither its
                shape nor is a single number.
        """
        for shard in shards:
            facts = self._facts.get(shard.name)
            if facts is None or facts.partition is None:
                if self._rank == 0:
                    yield shard
            elif not shard.shape:
                if self._rank == 0:  # a count of steps
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
    """Shows a checkpoint of the whole model as one of this cell: what it asks for is cut out.

    Args:
        reader: the checkpoint of the whole model.
        facts: of the cell's parameters, by name.
        names: of the cell's parameters and buffers; others are not shown.
        rank: this rank's index on the tensor-parallel axis.
    """

    def __init__(
        self,
        reader: Reader,
        facts: Mapping[str, ParameterFacts],
        names: Iterable[str],
        rank: int,
    ) -> None:
        self._reader = reader
        self._facts = facts
        self._names = frozenset(names)
        self._rank = rank

    def keys(self) -> Iterable[tuple[str, str]]:
        """The (name, state) pairs of this cell."""
        return [key for key in self._reader.keys() if key[0] in self._names]  # noqa: SIM118 - no dict

    def shape(self, name: str, state: str = "") -> tuple[int, ...]:
        """Shape of the part that this cell holds."""
        shape = self._reader.shape(name, state)
        facts = self._divided(name, shape)
        return shape if facts is None else facts.local_shape(self._rank)

    def read(self, name: str, state: str = "", part: Part | None = None) -> Tensor:
        """Return one part of the cell's tensor, on the CPU, in the saved dtype."""
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
        divided = facts is not None and facts.partition is not None and shape == facts.shape
        return facts if divided else None


def _cut(
    ranges: Iterable[tuple[int, int]], offset: int, size: int
) -> Iterator[tuple[int, int, int]]:
    """Yield (local offset, size, global offset) of what a local interval has of each range."""
    begin = 0
    for start, stop in ranges:
        end = begin + stop - start
        low, high = max(offset, begin), min(offset + size, end)
        if low < high:
            yield low, high - low, start + low - begin
        begin = end


def _moved(offsets: tuple[int, ...], dim: int, by: int) -> tuple[int, ...]:
    return tuple(offset + by * (index == dim) for index, offset in enumerate(offsets))


def _strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1] * len(sizes)
    for dim in range(len(sizes) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * sizes[dim + 1]
    return tuple(strides)
