"""Finds weights that modules multiply without a linear layer, as experts do, and ways to cut them.

Experts keep weights of shape (experts, outputs, inputs), transposed, or all below each other. A
look tells which product feeds which. A region is one row-parallel weight and the column-parallel
weights whose products feed it: inputs enter at the module of the columns, and the module of the row
returns parts of a sum (Shoeybi et al. 2019, arXiv 1909.08053, section 3). Every way that the shapes
allow is proposed; the trial tells which is right.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from torch import nn

from drivetrain.model.look import Look, ModelOperation
from drivetrain_megatron.plan.divide import RegionPlan, SizeAttribute
from drivetrain_megatron.tensor.linear import is_linear
from drivetrain_megatron.tensor.partition import Partition, even, joined, units

_ALIGNED = 8
"""Numbers of a row, if they can be divided so: kernels of grouped products want 16 bytes."""


@dataclass(slots=True)
class WeightUse:
    """One weight that a module of the block multiplies, or a linear layer.

    Attributes:
        name: of the parameter, in the block.
        shape: of the parameter.
        width: the last dim of its first input.
        module: the innermost module of its products, in the block.
        fed_by: weights whose products have gone into its input.
        biases: parameters that are added to its product.
    """

    name: str
    shape: tuple[int, ...]
    width: int
    module: str
    fed_by: set[str] = field(default_factory=set)
    biases: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class WeightRegion:
    """Weights that are divided together: columns in the order of their products, and a row."""

    columns: tuple[WeightUse, ...]
    row: WeightUse


def find_regions(
    look: Look, model: nn.Module, block: nn.Module, operations: range
) -> list[WeightRegion]:
    """Return the regions of a block, from the operations of one call."""
    notes = _Products(look, model, block)
    for index in operations:
        notes.follow(look.operations[index])
    own = {
        f"{owner}.{name}".strip(".")
        for owner, module in block.named_modules()
        if not is_linear(module) and not isinstance(module, nn.Embedding)
        for name, _ in module.named_parameters(recurse=False)
    }
    return [
        WeightRegion(tuple(notes.uses[name] for name in notes.uses if name in use.fed_by), use)
        for use in notes.uses.values()
        if use.fed_by and {use.name, *use.fed_by} <= own
    ]


class _Products:
    """Follows weights and their products through the operations of a look."""

    def __init__(self, look: Look, model: nn.Module, block: nn.Module) -> None:
        self.uses: dict[str, WeightUse] = {}
        self._look = look
        first = {id(p): look.parameters[n] for n, p in model.named_parameters()}
        self._weights = {first[id(p)]: n for n, p in block.named_parameters() if p.dim() > 1}
        self._shapes = {n: tuple(p.shape) for n, p in block.named_parameters()}
        self._sources: dict[int, frozenset[str]] = {}
        names = {id(module): name for name, module in model.named_modules()}
        self._prefix = names[id(block)] + "." if names[id(block)] else ""

    def follow(self, operation: ModelOperation) -> None:
        """Tag the results of an operation: a weight in another form, or the products in it."""
        made = [n for n in (*operation.outputs, *operation.changed) if self._is_float(n)]
        weights = [n for n in operation.inputs if n in self._weights]
        given = [n for n in operation.inputs if n not in self._weights and self._is_float(n)]
        if weights and not given:
            self._weights.update(dict.fromkeys(made, self._weights[weights[0]]))
            return
        sources = frozenset[str]().union(*(self._sources.get(n, frozenset()) for n in given))
        if weights and made and self._multiplies(operation, made[0]):
            weight = max(weights, key=lambda number: len(self._shape(number)))
            self._note(self._weights[weight], given[0], sources, operation.module)
            sources = frozenset([self._weights[weight]])
            weights.remove(weight)
        if len(sources) == 1:
            use = self.uses[next(iter(sources))]
            added = (self._weights[number] for number in weights)
            use.biases += [name for name in added if name not in use.biases]
        for number in made if sources else ():
            self._sources[number] = self._sources.get(number, frozenset()) | sources
            self._weights.pop(number, None)

    def _multiplies(self, operation: ModelOperation, made: int) -> bool:
        """Return whether this is a product, and not an element-wise operation."""
        try:
            # torch's function has no types.
            whole = torch.broadcast_shapes(*(self._shape(n) for n in operation.inputs))  # type: ignore[no-untyped-call]
        except RuntimeError:
            return True
        return bool(operation.work) or tuple(whole) != self._shape(made)

    def _note(self, name: str, given: int, sources: frozenset[str], module: str) -> None:
        inside = module.removeprefix(self._prefix) if module != self._prefix[:-1] else ""
        width = self._shape(given)[-1]
        use = self.uses.setdefault(name, WeightUse(name, self._shapes[name], width, inside))
        use.fed_by |= sources - {name}

    def _shape(self, number: int) -> tuple[int, ...]:
        return self._look.tensors[number].facts.shape

    def _is_float(self, number: int) -> bool:
        return self._look.tensors[number].facts.dtype.is_floating_point


def ways_of(block: nn.Module, region: WeightRegion, ranks: int) -> Iterator[RegionPlan]:
    """Yield plans for a region that its shapes allow, the most likely first."""
    uses = (*region.columns, region.row)
    sizes = dict.fromkeys((region.row.width, *reversed(region.row.shape)))
    for size, packed in product([s for s in sizes if s >= ranks], (joined, _interleaved)):
        inner = units(0, size, _ALIGNED if size % _ALIGNED == 0 else 1, ranks)
        choices = [list(_cuts(use.shape, inner, packed)) for use in uses]
        for cuts in product(*choices):
            weights = {use.name: cut for use, cut in zip(uses, cuts, strict=True)}
            yield from _at_modules(block, region, weights, inner, ranks)


def _cuts(shape: Sequence[int], inner: Partition, packed: Any) -> Iterator[Partition]:
    """Yield cuts of the dims that count inner features; the first of three counts experts."""
    for dim in range(len(shape) - 1, max(len(shape) - 3, -1), -1):
        if shape[dim] % inner.size == 0:
            parts = packed([inner] * (shape[dim] // inner.size))
            yield Partition(dim, parts.size, parts.ranges)


def _interleaved(parts: Sequence[Partition]) -> Partition:
    """Return the cut of features of which several neighbors belong to one inner feature."""
    inner, times = parts[0], len(parts)
    ranges = (tuple((a * times, b * times) for a, b in mine) for mine in inner.ranges)
    return Partition(inner.dim, inner.size * times, tuple(ranges))


def _at_modules(
    block: nn.Module,
    region: WeightRegion,
    weights: Mapping[str, Partition],
    inner: Partition,
    ranks: int,
) -> Iterator[RegionPlan]:
    """Yield plans with these cuts: at the modules of the products, and around them."""
    shapes = {name: tuple(parameter.shape) for name, parameter in block.named_parameters()}
    weights = dict(weights)
    for use in region.columns:
        cut = weights[use.name]
        for name in use.biases:
            if shapes[name][-1] == cut.size:
                weights[name] = replace(cut, dim=len(shapes[name]) - 1)
    summed = {
        name: even(len(shapes[name]) - 1, shapes[name][-1], ranks) for name in region.row.biases
    }
    entrance, leaving = region.columns[0].module, region.row.module
    while True:
        modules = (entrance, leaving, _parent(region.row.name))
        for numbers in dict.fromkeys(((), tuple(_numbers(block, modules, inner).items()))):
            yield RegionPlan(weights, region.row.name, summed, entrance, leaving, dict(numbers))
        if "." not in entrance or "." not in leaving:
            return
        entrance, leaving = _parent(entrance), _parent(leaving)


def _numbers(
    block: nn.Module, modules: Sequence[str], inner: Partition
) -> dict[SizeAttribute, tuple[int, ...]]:
    """Return the attributes of modules that count the inner features."""
    return {
        SizeAttribute(owner, attribute): inner.local_sizes
        for owner in dict.fromkeys(modules)
        for attribute, value in vars(block.get_submodule(owner)).items()
        if type(value) is int and value == inner.size
    }


def _parent(name: str) -> str:
    return name.rpartition(".")[0]
