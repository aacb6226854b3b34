"""How ZeRO cuts a model into units. Arithmetic only.

Stages 1 and 2 cut the model into units of a bucket's size. Stage 3 makes a unit of each repeated
block and of each large layer outside of them; the rest of the model is another unit. Parameters
below a threshold are not worth a message: they stay whole, in buckets as in stage 2.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from drivetrain.cost import TensorSpec
from drivetrain.parts.buckets import plan_buckets
from drivetrain.runtime.precision import Precision
from drivetrain.sharding.layout import (
    ROOT,
    CutStyle,
    FlatLayout,
    UnitLayout,
    arrange,
    arrange_whole,
    block_of,
    in_order_of_backward,
    units_of_keys,
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large units are.

    Attributes:
        bucket_bytes: most bytes of whole parameters in one unit, in the dtype of forward.
        cut: the way in which ranks share parameters.
        shard_from: elements from which a parameter is kept as shards; None keeps all whole.
        own_unit_from: elements from which a layer outside of blocks is a unit of its own.
    """

    bucket_bytes: int
    cut: CutStyle
    shard_from: int | None = None
    own_unit_from: int = 1

    def shards(self, spec: TensorSpec) -> bool:
        """Return whether a parameter is kept as shards."""
        return self.shard_from is not None and spec.numel >= max(self.shard_from, 1)


def cut_model(
    specs: Sequence[TensorSpec],
    precision: Precision,
    sizes: Sizes,
    size: int,
    devices: Sequence[Hashable] | None = None,
) -> list[UnitLayout]:
    """Cut parameters into units, in the order in which backward usually reaches them.

    Args:
        specs: the parameters in registration order.
        precision: which dtypes they get.
        sizes: how large units are.
        size: number of ranks that share them.
        devices: device of each parameter; only equal ones share a unit.
    """
    backwards = range(len(specs))[::-1]
    large = [i for i in backwards if sizes.shards(specs[i])]
    small = [i for i in backwards if not sizes.shards(specs[i])]
    keys, loads = _unit_keys(specs, sizes), [0] * size
    units = []
    for key, kinds in units_of_keys(specs, large, keys, precision, devices):
        flats = [_arrange([specs[i] for i in kind], precision, sizes, loads) for kind in kinds]
        units.append(UnitLayout(key, tuple(flats), sharded=True))
    kinds_of_all = units_of_keys(specs, small, [ROOT] * len(specs), precision, devices)
    for kind in (each for _, kinds in kinds_of_all for each in kinds):
        for bucket in _buckets(specs, kind, precision, sizes):
            flat = _arrange([specs[i] for i in bucket], precision, sizes, loads)
            units.append(UnitLayout(ROOT, (flat,), sharded=False))
    return in_order_of_backward(units, specs)


def _unit_keys(specs: Sequence[TensorSpec], sizes: Sizes) -> list[str]:
    """Return the module prefix that each parameter is gathered with."""
    elements: dict[str, int] = {}
    for spec in specs:
        owner = spec.name.rpartition(".")[0]
        elements[owner] = elements.get(owner, 0) + spec.numel
    keys = []
    for spec in specs:
        owner = spec.name.rpartition(".")[0]
        alone = owner if elements[owner] >= sizes.own_unit_from else ROOT
        keys.append(block_of(spec.name) or alone)
    return keys


def _buckets(
    specs: Sequence[TensorSpec], members: list[int], precision: Precision, sizes: Sizes
) -> list[list[int]]:
    """Cut the whole parameters of one kind by size."""
    first = specs[members[0]]
    dtype = precision.forward_dtype(first.dtype, first.shape)
    layouts = plan_buckets(
        [specs[i].shape for i in members],
        [(dtype, None)] * len(members),
        range(len(members)),
        bucket_bytes=sizes.bucket_bytes,
        first_bytes=sizes.bucket_bytes,
    )
    return [[members[i] for i in layout.members] for layout in layouts]


def _arrange(
    specs: Sequence[TensorSpec], precision: Precision, sizes: Sizes, loads: list[int]
) -> FlatLayout:
    if sizes.cut == "whole":
        return arrange_whole(specs, precision, loads)
    return arrange(specs, precision, len(loads), sizes.cut)
