"""Divides one block over the ranks as a plan says: parameters are cut, layers compute in parts.

The block stays the user's object and computes the user's code; only its linear layers change.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from drivetrain.collectives import Communicator
from drivetrain_megatron.tensor.attention import attach_heads, head_partitions
from drivetrain_megatron.tensor.behavior import PaddedBias, RegionEnds, Resized, attach, with_first
from drivetrain_megatron.tensor.linear import (
    attach_alone,
    attach_column,
    attach_row,
    enter_group,
    is_transposed,
)
from drivetrain_megatron.tensor.operators import Edges, TokenShards, Uncopied, gather, scatter
from drivetrain_megatron.tensor.partition import Partition, ShardingSpec


class SizeAttribute(NamedTuple):
    """A size that the block's code counts with: the module's name, and the attribute.

    The attribute may be that of a configuration in the module: ``config.NAME``.
    """

    module: str
    attribute: str


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """How a group of linear layers is divided.

    Attributes:
        columns: how the output features of each column-parallel layer are cut, by its name.
        row: name of the row-parallel layer.
        inputs: how its input features are cut.
        entrance: name of the module whose input enters all ranks; "" for the columns' own inputs.
        numbers: sizes of attributes that the code counts with, on each rank.
        sizes: sizes that reshapes may ask for, and their values on each rank.
        place: tells several fitting sizes of a reshape apart, see ``local_sizes``; None to leave
            reshapes alone.
    """

    columns: Mapping[str, Partition]
    row: str
    inputs: Partition
    entrance: str = ""
    numbers: Mapping[SizeAttribute, tuple[int, ...]] = field(default_factory=dict)
    sizes: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    place: int | None = None


@dataclass(frozen=True, slots=True)
class RegionPlan:
    """How weights are divided that modules multiply by themselves, see ``tensor/region``.

    Attributes:
        weights: how each weight, and each bias of a column, is cut, by its name.
        row: name of the row-parallel weight.
        summed: how the biases are cut that are added before the sum, by name.
        entrance: name of the module whose inputs enter all ranks.
        leaving: name of the module whose result is summed.
        numbers: sizes of attributes that the code counts with, on each rank.
    """

    weights: Mapping[str, Partition]
    row: str
    summed: Mapping[str, Partition]
    entrance: str
    leaving: str
    numbers: Mapping[SizeAttribute, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AlonePlan:
    """How a linear layer is divided by itself, see ``tensor/alone``.

    Attributes:
        layer: its name.
        features: how its output features are cut, or its input features.
        by_rows: whether the input features are.
    """

    layer: str
    features: Partition
    by_rows: bool


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """How a block is divided; names are names inside of the block.

    Attributes:
        groups: its groups of layers.
        regions: its weights that are in no layer.
        attentions: its ``nn.MultiheadAttention``, which are divided by heads.
        alone: its layers that are divided by themselves.
        partial: parameters that stay whole and whose gradients are summed over ranks.
    """

    groups: tuple[GroupPlan, ...] = ()
    regions: tuple[RegionPlan, ...] = ()
    attentions: tuple[str, ...] = ()
    alone: tuple[AlonePlan, ...] = ()
    partial: frozenset[str] = frozenset()


def divide(block: nn.Module, plan: BlockPlan, edges: Edges) -> dict[str, ShardingSpec]:
    """Cut a block's parameters to this rank's share and let its layers compute in parts.

    Edges say how activations are cut outside of the block's groups. The block is changed in place.

    Returns:
        The facts of every parameter, by its name in the block.
    """
    facts = facts_of(block, plan, edges.ranks.size)
    for name, known in facts.items():
        if known.partition is not None:
            cut(block.get_parameter(name), known.partition, edges.ranks.rank)
    compute_in_parts(block, plan, edges)
    return facts


def compute_in_parts(block: nn.Module, plan: BlockPlan, edges: Edges) -> None:
    """Let the layers of a block compute with this rank's share of parameters."""
    for group in plan.groups:
        _attach(block, group, edges)
    for region in plan.regions:
        _attach_region(block, region, edges)
    for attention in plan.attentions:
        attach_heads(block.get_submodule(attention), edges)
    for each in plan.alone:
        layer = block.get_submodule(each.layer)
        attach_alone(layer, edges, each.features, by_rows=each.by_rows)
    _resize(block, plan, edges)


def facts_of(block: nn.Module, plan: BlockPlan, ranks: int) -> dict[str, ShardingSpec]:
    """Return the facts of every parameter of a divided block, by its name; nothing is changed."""
    cuts = dict(_cuts(block, plan, ranks))
    return {
        name: ShardingSpec(tuple(parameter.shape), cuts.get(name), name in plan.partial)
        for name, parameter in block.named_parameters()
    }


def cut(parameter: nn.Parameter, partition: Partition, rank: int) -> None:
    """Leave a parameter its rank's share; the object stays."""
    if parameter.is_meta:
        shape = partition.local_shape(rank, parameter.shape)
        parameter.data = torch.empty(shape, dtype=parameter.dtype, device="meta")
    else:
        parameter.data = partition.take(parameter.data, rank)


def _cuts(block: nn.Module, plan: BlockPlan, ranks: int) -> Iterator[tuple[str, Partition]]:
    """Yield how each parameter is cut, by its name in the block."""
    for group in plan.groups:
        for name, outputs in group.columns.items():
            yield from _by_columns(block, name, outputs)
        yield from _by_rows(block, group.row, group.inputs)
    for region in plan.regions:
        yield from (*region.weights.items(), *region.summed.items())
    for each in plan.alone:
        yield from (_by_rows if each.by_rows else _by_columns)(block, each.layer, each.features)
    for attention in plan.attentions:
        module: Any = block.get_submodule(attention)
        for name, partition in head_partitions(module, ranks).items():
            yield f"{attention}.{name}".lstrip("."), partition


def _by_columns(block: nn.Module, name: str, outputs: Partition) -> Iterator[tuple[str, Partition]]:
    """Yield how the parameters of a layer are cut that has a share of its output features."""
    layer = block.get_submodule(name)
    yield f"{name}.weight", replace(outputs, dim=1 if is_transposed(layer) else 0)
    if layer.bias is not None:
        yield f"{name}.bias", replace(outputs, dim=0)


def _by_rows(block: nn.Module, name: str, inputs: Partition) -> Iterator[tuple[str, Partition]]:
    """Yield the same for a layer with a share of its input features: the bias is whole."""
    transposed = is_transposed(block.get_submodule(name))
    yield f"{name}.weight", replace(inputs, dim=0 if transposed else 1)


def _attach(block: nn.Module, group: GroupPlan, edges: Edges) -> None:
    rank = edges.ranks.rank
    inside = replace(edges, prepared=True)
    entrance = block.get_submodule(group.entrance) if group.entrance else None
    layers = [block.get_submodule(name) for name in group.columns]
    alone = len(layers) == 1 and entrance is None
    shared = SharedEntrance(edges, layers)
    for layer, outputs in zip(layers, group.columns.values(), strict=True):
        attach_column(layer, edges if alone else inside, replace(outputs, dim=-1))
        if entrance is None and not alone:
            layer.register_forward_pre_hook(shared, with_kwargs=True)
    if entrance is not None:
        entrance.register_forward_pre_hook(ModuleEntrance(edges, layers), with_kwargs=True)
    attach_row(block.get_submodule(group.row), edges, replace(group.inputs, dim=-1))
    _set_numbers(block, group.numbers, rank)


def _attach_region(block: nn.Module, region: RegionPlan, edges: Edges) -> None:
    entrance, leaving = map(block.get_submodule, (region.entrance, region.leaving))
    ends = RegionEnds(edges.ranks)
    entrance.register_forward_pre_hook(ends.enter, with_kwargs=True)
    leaving.register_forward_hook(ends.leave)
    for full, partition in region.summed.items():
        owner, _, name = full.rpartition(".")
        bias = PaddedBias(name, partition, edges.ranks.rank)
        block.get_submodule(owner).register_forward_pre_hook(bias.begin)
        block.get_submodule(owner).register_forward_hook(bias.end, always_call=True)
    _set_numbers(block, region.numbers, edges.ranks.rank)


def _set_numbers(
    block: nn.Module, numbers: Mapping[SizeAttribute, tuple[int, ...]], rank: int
) -> None:
    for number, values in numbers.items():
        owner: Any = block.get_submodule(number.module)
        holder, _, name = number.attribute.rpartition(".")
        if holder:  # other modules keep the same configuration: this one gets its own
            setattr(owner, holder, copy.copy(getattr(owner, holder)))
            owner = getattr(owner, holder)
        setattr(owner, name, values[rank])


def _resize(block: nn.Module, plan: BlockPlan, edges: Edges) -> None:
    groups = [group for group in plan.groups if group.place is not None]
    rank = edges.ranks.rank
    sizes = {size: local[rank] for group in groups for size, local in group.sizes.items()}
    if sizes:
        attach(block, Resized(sizes, max(group.place or 0 for group in groups), edges))


class ModuleEntrance(Uncopied):
    """A forward pre-hook: the first activation among a module's arguments enters a group's layers.

    Where layers get the very activation that entered, the gradients of their weights are computed
    while the sum of its gradient travels.
    """

    def __init__(self, edges: Edges, layers: Sequence[nn.Module]) -> None:
        self._edges = edges
        self._layers = layers

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments that the module sees."""
        return _with_activation(args, kwargs, self._enter)

    def _enter(self, x: Tensor) -> Tensor:
        return enter_group(x, self._edges, self._layers)


class SharedEntrance(ModuleEntrance):
    """The same for several layers with one input: it enters once, so backward sums it once."""

    def __init__(self, edges: Edges, layers: Sequence[nn.Module]) -> None:
        super().__init__(edges, layers)
        self._given: Tensor | None = None
        self._entered: Tensor | None = None
        self._left = 0

    def _enter(self, x: Tensor) -> Tensor:
        if self._given is not x or self._entered is None:
            self._given, self._entered, self._left = x, super()._enter(x), len(self._layers)
        entered = self._entered
        self._left -= 1
        if not self._left:  # nothing must outlive its use
            self._given = self._entered = None
        return entered


class SequenceRegion:
    """The part of a model in which activations are shards of the sequence."""

    def __init__(self, ranks: Communicator, tokens: TokenShards) -> None:
        self._ranks = ranks
        self._tokens = tokens

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Cut the first activation among a block's arguments."""
        return _with_activation(args, kwargs, self._cut)

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Join the first activation of a block's output."""
        partition = self._tokens.partition(self._ranks.size)
        return with_first(output, lambda x: gather(x, self._ranks, partition))

    def _cut(self, x: Tensor) -> Tensor:
        self._tokens.begin(x.shape[self._tokens.dim])
        return scatter(x, self._ranks, self._tokens.partition(self._ranks.size))


def _with_activation(
    args: Any, kwargs: Any, function: Callable[[Tensor], Tensor]
) -> tuple[Any, Any]:
    """Return arguments in which the first activation is replaced by a function of it."""
    for index, value in enumerate(args):
        if _is_activation(value):
            return (*args[:index], function(value), *args[index + 1 :]), kwargs
    for name, value in kwargs.items():
        if _is_activation(value):
            return args, {**kwargs, name: function(value)}
    return args, kwargs


def _is_activation(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1
