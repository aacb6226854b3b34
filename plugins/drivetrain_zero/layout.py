"""Where every parameter lies, and which range of each flat unit a rank owns. Arithmetic only.

A unit is one flat tensor with parameters side by side, cut into one chunk per rank::

    | p0 | p1      | p2   | p3         |
    | rank 0     | rank 1    | rank 2  |      partition: flat
    | rank 0       | rank 1| rank 2    |      partition: parameter

Stages 1 and 2 cut the model into units of a bucket's size. Stage 3 makes a unit of each repeated
block and of each large layer outside of them; the rest of the model is another unit. Parameters
below a threshold are not worth a message: they stay whole, in buckets as in stage 2.

Strategy and cost estimate call the same function, so the estimate is exact.
"""

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from drivetrain.cost import TensorSpec
from drivetrain.parts.buckets import plan_buckets
from drivetrain.parts.collectives.volume import chunk_bounds
from drivetrain.runtime.precision import Precision

ROOT = ""
"""The unit of what belongs to no repeated block and is not large."""

_BLOCK = re.compile(r"^(?:.*?\.)??\d+(?=\.)")
"""The shortest prefix of a parameter's name that ends in a number: a member of a list of blocks."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How a model is cut into units.

    Attributes:
        bucket_bytes: most bytes of whole parameters in one unit, in the dtype of forward.
        whole_parameters: whether a parameter belongs to one rank as a whole.
        shard_from: elements from which a parameter is kept as shards; None keeps all whole.
        own_unit_from: elements from which a layer outside of blocks is a unit by itself.
    """

    bucket_bytes: int
    whole_parameters: bool
    shard_from: int | None = None
    own_unit_from: int = 1


@dataclass(frozen=True, slots=True)
class Place:
    """One parameter's place in its unit.

    Attributes:
        name: the parameter's name.
        shape: its shape.
        offset: where it begins in the flat tensor.
        numel: how many elements it has.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    numel: int


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """One unit.

    Attributes:
        key: the module it belongs to, as its name begins; a bucket's is that of the root.
        places: its parameters, in order of offset.
        chunks: the (start, stop) that each rank owns of the flat tensor.
        dtype: what forward reads.
        master: what the optimizer updates.
        trainable: whether its parameters require gradients.
        sharded: whether the flat tensor is freed between uses.
        whole_parameters: whether each parameter belongs to one rank as a whole.
    """

    key: str
    places: tuple[Place, ...]
    chunks: tuple[tuple[int, int], ...]
    dtype: torch.dtype
    master: torch.dtype
    trainable: bool
    sharded: bool
    whole_parameters: bool

    @property
    def numel(self) -> int:
        """Elements of the flat tensor."""
        return self.chunks[-1][1]

    def owned(self, rank: int) -> int:
        """Return how many elements a rank owns."""
        start, stop = self.chunks[rank]
        return stop - start


def plan(
    specs: Sequence[TensorSpec],
    precision: Precision,
    cut: Cut,
    size: int,
    devices: Sequence[Hashable] | None = None,
) -> list[UnitLayout]:
    """Cut parameters into units, in the order in which backward usually reaches them.

    Args:
        specs: the parameters in registration order.
        precision: which dtypes they get.
        cut: how large units are.
        size: number of ranks that share them.
        devices: device of each parameter; only equal ones share a unit.
    """
    keys = _unit_keys(specs, cut)
    groups: dict[tuple[Hashable, ...], list[int]] = {}
    for index in reversed(range(len(specs))):
        spec = specs[index]
        sharded = cut.shard_from is not None and spec.numel >= max(cut.shard_from, 1)
        kind = (
            keys[index] if sharded else ROOT,
            sharded,
            spec.trainable,
            precision.forward_dtype(spec.dtype, spec.shape),
            precision.master_dtype(spec.dtype, spec.shape),
            None if devices is None else devices[index],
        )
        groups.setdefault(kind, []).append(index)
    units = []
    loads = [0] * size
    for (key, is_sharded, trainable, _, _, _), members in groups.items():
        dtype = precision.forward_dtype(specs[members[0]].dtype, specs[members[0]].shape)
        master = precision.master_dtype(specs[members[0]].dtype, specs[members[0]].shape)
        for bucket in _buckets(specs, members, dtype, cut, sharded=bool(is_sharded)):
            places, chunks = _arrange([specs[i] for i in bucket], size, cut, loads)
            layout = UnitLayout(
                key=str(key),
                places=places,
                chunks=chunks,
                dtype=dtype,
                master=master,
                trainable=bool(trainable),
                sharded=bool(is_sharded),
                whole_parameters=cut.whole_parameters,
            )
            units.append((min(bucket), layout))
    # The unit whose earliest parameter comes last is complete first.
    return [unit for _, unit in sorted(units, key=lambda pair: -pair[0])]


def is_block(key: str) -> bool:
    """Return whether a unit's key names a member of a list of blocks."""
    return key.rpartition(".")[2].isdecimal()


def _unit_keys(specs: Sequence[TensorSpec], cut: Cut) -> list[str]:
    """Return the module prefix that each parameter is gathered with."""
    sizes: dict[str, int] = {}
    for spec in specs:
        owner = spec.name.rpartition(".")[0]
        sizes[owner] = sizes.get(owner, 0) + spec.numel
    keys = []
    for spec in specs:
        block = _BLOCK.match(spec.name)
        owner = spec.name.rpartition(".")[0]
        large = sizes[owner] >= cut.own_unit_from
        keys.append(block.group() if block else owner if large else ROOT)
    return keys


def _buckets(
    specs: Sequence[TensorSpec],
    members: list[int],
    dtype: torch.dtype,
    cut: Cut,
    *,
    sharded: bool,
) -> list[list[int]]:
    """Cut the whole parameters of one kind by size; what is gathered together stays together."""
    if sharded:
        return [members]
    layouts = plan_buckets(
        [specs[i].shape for i in members],
        [(dtype, None)] * len(members),
        range(len(members)),
        bucket_bytes=cut.bucket_bytes,
        first_bytes=cut.bucket_bytes,
    )
    return [[members[i] for i in layout.members] for layout in layouts]


def _arrange(
    specs: Sequence[TensorSpec], size: int, cut: Cut, loads: list[int]
) -> tuple[tuple[Place, ...], tuple[tuple[int, int], ...]]:
    """Put parameters side by side and cut them; ``loads`` is how much each rank owns so far."""
    if not cut.whole_parameters:
        places = _places(specs)
        numel = places[-1].offset + places[-1].numel
        return places, tuple(chunk_bounds(numel, size))
    owners: list[list[TensorSpec]] = [[] for _ in range(size)]
    for spec in sorted(specs, key=lambda spec: -spec.numel):
        owner = loads.index(min(loads))
        loads[owner] += spec.numel
        owners[owner].append(spec)
    chunks, start = [], 0
    for owned in owners:
        stop = start + sum(spec.numel for spec in owned)
        chunks.append((start, stop))
        start = stop
    return _places([spec for owned in owners for spec in owned]), tuple(chunks)


def _places(specs: Sequence[TensorSpec]) -> tuple[Place, ...]:
    places, offset = [], 0
    for spec in specs:
        places.append(Place(spec.name, spec.shape, offset, spec.numel))
        offset += spec.numel
    return tuple(places)
