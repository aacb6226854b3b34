"""Finds which layers and weights of a block can be divided together, and the ways to try it.

A group is one row-parallel layer and the column-parallel layers whose features flow into it: query,
key and value into the output projection, gate and up into down (Shoeybi et al. 2019, arXiv
1909.08053, section 3). Between them the ranks need no communication if each feature of the row's
input depends on features of the same rank only. Every way that the shapes allow is proposed; the
trial tells which is right.

A trace shows which layers feed which: each tensor remembers the linear layers whose outputs have
gone into it since the last linear layer. A layer's own output also remembers into how many heads
its features are reshaped, and into which packed parts (query, key and value in one matrix) cut.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import Any

import torch
from torch import nn

from drivetrain.model.trace import ModelOperation, ModelTrace, ModuleCall
from drivetrain.model.valueless import Facts
from drivetrain_megatron.plan.divide import GroupPlan, RegionPlan, SizeAttribute
from drivetrain_megatron.recording.calls import kind_of
from drivetrain_megatron.tensor.linear import features_of, is_linear
from drivetrain_megatron.tensor.partition import Partition, even, grouped_heads, joined, units


@dataclass(slots=True)
class LinearUse:
    """One linear layer of a block, in the order of first calls.

    Attributes:
        name: of the module, inside of the block.
        inputs: its input features.
        outputs: its output features.
        fed_by: the linear layers whose outputs have gone into its input.
        heads: the dims to which its output's features, or those of a part, are reshaped, such as
            (heads, features of a head) or (3, heads, features of a head); else empty.
        parts: (start, stop) of the parts into which its output is cut; else empty.
        calls: how often it is called in one forward of the block.
    """

    name: str
    inputs: int
    outputs: int
    fed_by: frozenset[str]
    heads: tuple[int, ...] = ()
    parts: list[tuple[int, int]] = field(default_factory=list)
    calls: int = 1


@dataclass(frozen=True, slots=True)
class _Features:
    """Says that a tensor's last dim is a range of a linear layer's output features, in order."""

    name: str
    start: int
    stop: int


def linear_uses(
    trace: ModelTrace, model: nn.Module, block: nn.Module, operations: range
) -> dict[str, LinearUse]:
    """Return the linear layers of a block by name, in the order of their first calls.

    The operations are those of one call of the block, which may be the model itself.
    """
    names = {id(module): name for name, module in model.named_modules()}
    linear = {names[id(m)]: name for name, m in block.named_modules() if is_linear(m)}
    ends: dict[int, list[ModuleCall]] = defaultdict(list)
    for call in trace.modules:
        if call.name in linear:
            ends[call.operations.stop].append(call)
    notes = _Notes(trace)
    for index in operations:
        notes.follow(trace.operations[index])
        for call in ends[index + 1]:
            notes.linear(linear[call.name], block.get_submodule(linear[call.name]), call)
    return notes.uses


class _Notes:
    """Carries tags of tensors, known by their numbers, through the operations of a trace."""

    def __init__(self, trace: ModelTrace) -> None:
        self.uses: dict[str, LinearUse] = {}
        self._trace = trace
        self._sources: dict[int, frozenset[str]] = {}
        self._features: dict[int, _Features] = {}

    def linear(self, name: str, module: nn.Module, call: ModuleCall) -> None:
        """Note a call of a linear layer."""
        given, made = call.inputs[0], call.outputs[0]
        if name in self.uses:
            self.uses[name].calls += 1
        else:
            inputs, outputs = features_of(module)
            sources = self._sources.get(given, frozenset())
            self.uses[name] = LinearUse(name, inputs, outputs, sources)
        self._sources[made] = frozenset([name])
        self._features[made] = _Features(name, 0, self._facts(made).shape[-1])

    def follow(self, operation: ModelOperation) -> None:
        """Tag the results of an operation."""
        given = operation.inputs
        sources = frozenset[str]().union(*(self._sources.get(n, frozenset()) for n in given))
        if sources:
            for made in (*operation.outputs, *operation.changed):
                if not self._facts(made).dtype.is_floating_point:
                    continue  # a choice: its features are not those of the layer
                self._sources[made] = self._sources.get(made, frozenset()) | sources
                for source in given:
                    self._reshape(source, made, operation)

    def _facts(self, number: int) -> Facts:
        return self._trace.tensors[number].facts

    def _reshape(self, source: int, made: int, operation: ModelOperation) -> None:
        """Note how an operation changed features: kept, cut, or reshaped to heads."""
        features = self._features.get(source)
        if features is None or made == source:
            return
        width = features.stop - features.start
        use = self.uses[features.name]
        before, after = self._facts(source), self._facts(made)
        kept = len(before.shape) - 1
        equal = prod(after.shape) == prod(before.shape)
        if after.shape == before.shape:
            self._features.setdefault(made, features)
        elif len(after.shape) > len(before.shape) and equal:
            became = after.shape[kept:]
            if after.shape[:kept] == before.shape[:-1] and prod(became) == width:
                use.heads = use.heads or became
        elif equal and after.shape[-1] == width:
            self._features.setdefault(made, features)
        elif after.shape[:-1] == before.shape[:-1]:
            for view in operation.views:
                if (view.made, view.base) == (made, source):
                    start = features.start + view.offset // before.stride[-1]
                    part = (start, start + after.shape[-1])
                    if part not in use.parts:
                        use.parts.append(part)
                    self._features[made] = _Features(features.name, *part)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that are divided together: columns in the order of their calls, and a row."""

    columns: tuple[str, ...]
    row: str


def find_groups(uses: Mapping[str, LinearUse]) -> list[LayerGroup]:
    """Return the groups of a block.

    A layer that others feed becomes their row, unless a member of the group is in a group already.
    Layers with more feeding layers come first, then the order of calls decides: a summand of a
    query (LoRA) is a column with the query, not a pair by itself. Layers that a block calls
    unequally often stay whole.
    """
    groups: list[LayerGroup] = []
    taken: set[str] = set()
    for use in sorted(uses.values(), key=lambda use: -len(use.fed_by)):
        members = {*use.fed_by, use.name}
        alike = len({uses[name].calls for name in members}) == 1
        if use.fed_by and alike and not members & taken:
            groups.append(LayerGroup(tuple(name for name in uses if name in use.fed_by), use.name))
            taken |= members
    order = list(uses)
    return sorted(groups, key=lambda group: order.index(group.row))


def rows_of(uses: Mapping[str, LinearUse]) -> set[str]:
    """Return the names of the layers that may be cut by rows."""
    return {group.row for group in find_groups(uses)}


def ways(group: LayerGroup, uses: Mapping[str, LinearUse], ranks: int) -> Iterator[GroupPlan]:
    """Yield the ways to divide a group that its shapes allow, the most specific first.

    Raises:
        ConfigError: key-value heads do not fit the number of ranks.
    """
    yield from _by_queries(group, uses, ranks)
    yield from _by_heads(group, uses, ranks)
    # Features that are independent of each other, as after an activation.
    width, segments = uses[group.row].inputs, _segments(group, uses)
    if all(segment.size == width for segment in segments):
        row = even(0, width, ranks)
        yield _assembled(group, segments, {width: row}, row, _local({width: row}, {}))


@dataclass(frozen=True, slots=True)
class _Segment:
    """A part of a column-parallel layer's output that stands for one projection."""

    layer: str
    size: int


def _segments(group: LayerGroup, uses: Mapping[str, LinearUse]) -> list[_Segment]:
    """Return the projections of a group: a packed layer has several."""
    found = []
    for name in group.columns:
        use = uses[name]
        sizes = [stop - start for start, stop in sorted(use.parts)]
        covered = sum(sizes) == use.outputs and len(sizes) > 1
        found += [_Segment(name, size) for size in (sizes if covered else [use.outputs])]
    return found


def _by_queries(
    group: LayerGroup, uses: Mapping[str, LinearUse], ranks: int
) -> Iterator[GroupPlan]:
    """Divide grouped-query attention: some projections have the row's width, others fewer heads."""
    width = uses[group.row].inputs
    segments = _segments(group, uses)
    sizes = {segment.size for segment in segments}
    features = {uses[name].heads[-1] for name in group.columns if uses[name].heads}
    if len(sizes) != 2 or max(sizes) != width or width % min(sizes) or len(features) != 1:
        return
    (head_dim,) = features
    if min(sizes) % head_dim:
        return
    heads, kv_heads = width // head_dim, min(sizes) // head_dim
    if kv_heads < ranks and len(segments) > len(group.columns):
        return  # ranks that share a kv head would share a part of a packed weight
    q, kv = grouped_heads(0, heads, kv_heads, head_dim, ranks)
    numbers = _local({width: q, min(sizes): kv}, {heads: (q, head_dim), kv_heads: (kv, head_dim)})
    if kv_heads < ranks:
        numbers[heads // kv_heads] = tuple(size // head_dim for size in q.local_sizes)
    yield _assembled(group, segments, {width: q, min(sizes): kv}, q, numbers)


def _by_heads(group: LayerGroup, uses: Mapping[str, LinearUse], ranks: int) -> Iterator[GroupPlan]:
    """Divide by heads: each projection has the row's width, or a multiple of it inside a head."""
    width = uses[group.row].inputs
    segments = _segments(group, uses)
    shapes = {uses[name].heads for name in group.columns if uses[name].heads}
    counts = {n for shape in shapes for n in shape[:-1] if n > 1 and width % n == 0}
    for count in sorted(counts, reverse=True):
        if any(segment.size % count for segment in segments):
            continue
        row = units(0, width, width // count, ranks)
        whole = {size: units(0, size, size // count, ranks) for size in {s.size for s in segments}}
        numbers = _local({**whole, width: row}, {count: (row, width // count)})
        yield _assembled(group, segments, whole, row, numbers)
        # Or several parts one after the other, each with all heads.
        parts = {size: joined([row] * (size // width)) for size in whole if size % width == 0}
        if parts.keys() - {width}:
            yield _assembled(group, segments, {**whole, **parts}, row, numbers)


def _assembled(
    group: LayerGroup,
    segments: Sequence[_Segment],
    partitions: Mapping[int, Partition],
    inputs: Partition,
    sizes: Mapping[int, tuple[int, ...]],
) -> GroupPlan:
    """Return the plan in which projections of one size are divided alike."""
    layers: dict[str, list[Partition]] = {}
    for segment in segments:
        layers.setdefault(segment.layer, []).append(partitions[segment.size])
    columns = {
        name: parts[0] if len(parts) == 1 else joined(parts) for name, parts in layers.items()
    }
    return GroupPlan(columns, group.row, inputs, sizes=sizes)


def _local(
    widths: Mapping[int, Partition], counts: Mapping[int, tuple[Partition, int]]
) -> dict[int, tuple[int, ...]]:
    """Return sizes and numbers of heads, each with its values on the ranks."""
    local = {size: partition.local_sizes for size, partition in widths.items()}
    for count, (partition, unit) in counts.items():
        local[count] = tuple(size // unit for size in partition.local_sizes)
    return local


# --- weights that modules multiply without a linear layer, as experts do ---

# Experts keep weights of shape (experts, outputs, inputs), transposed, or all below each other. A
# trace tells which product feeds which. A region is one row-parallel weight and the column-parallel
# weights whose products feed it: inputs enter at the module of the columns, and the module of the
# row returns parts of a sum (Shoeybi et al. 2019, arXiv 1909.08053, section 3). Every way that the
# shapes allow is proposed; the trial tells which is right.


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
    trace: ModelTrace, model: nn.Module, block: nn.Module, operations: range
) -> list[WeightRegion]:
    """Return the regions of a block, from the operations of one call."""
    notes = _Products(trace, model, block)
    for index in operations:
        notes.follow(trace.operations[index])
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
    """Follows weights and their products through the operations of a trace."""

    def __init__(self, trace: ModelTrace, model: nn.Module, block: nn.Module) -> None:
        self.uses: dict[str, WeightUse] = {}
        self._trace = trace
        first = {id(p): trace.parameters[n] for n, p in model.named_parameters()}
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
        return self._trace.tensors[number].facts.shape

    def _is_float(self, number: int) -> bool:
        return self._trace.tensors[number].facts.dtype.is_floating_point


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
        counting = {  # the attributes of modules that count the inner features
            SizeAttribute(owner, attribute): inner.local_sizes
            for owner in dict.fromkeys((entrance, leaving, parent_of(region.row.name)))
            for attribute, value in vars(block.get_submodule(owner)).items()
            if type(value) is int and value == inner.size
        }
        for numbers in ({}, counting) if counting else ({},):
            yield RegionPlan(weights, region.row.name, summed, entrance, leaving, numbers)
        if "." not in entrance or "." not in leaving:
            return
        entrance, leaving = parent_of(entrance), parent_of(leaving)


def parent_of(name: str) -> str:
    """Return the name of the module around a module or parameter."""
    return name.rpartition(".")[0]


# --- the plan of one module of a list, such as an expert, for those that are alike ---

# A trace sees only the experts that some token has chosen. One that is not called has the code and
# the shapes of the others, so the layers in it are divided as theirs.


def alike(block: nn.Module, group: GroupPlan) -> Iterator[GroupPlan]:
    """Yield the plans of the same layers in alike modules of the innermost list around them."""
    name = group.row
    while name:
        around, _, _ = name.rpartition(".")
        if isinstance(block.get_submodule(around), nn.ModuleList):
            break
        name = around
    members = [*group.columns, *(number.module for number in group.numbers)]
    if not name or not all(f"{member}.".startswith(f"{name}.") for member in members):
        return
    model = block.get_submodule(name)
    for index, other in block.get_submodule(around).named_children():
        if other is not model and kind_of(other) == kind_of(model):
            yield _renamed(group, name, f"{around}.{index}".strip("."))


def same_in_list(block: nn.Module, layer: str) -> Iterator[str]:
    """Yield the names of a layer and of its equals in alike modules of a list (experts)."""
    yield layer
    for name, module in block.named_modules():
        index, _, rest = layer.removeprefix(f"{name}." if name else "").partition(".")
        children = dict(module.named_children())
        if isinstance(module, nn.ModuleList) and f"{layer}.".startswith(f"{name}.".lstrip(".")):
            mine = children.get(index)
            for other, child in children.items():
                if mine is not None and child is not mine and kind_of(child) == kind_of(mine):
                    yield ".".join(part for part in (name, other, rest) if part)


def _renamed(group: GroupPlan, before: str, after: str) -> GroupPlan:
    """Return the plan with the name of one module in place of that of another."""

    def named(name: str) -> str:
        return after + name.removeprefix(before)

    return replace(
        group,
        columns={named(name): partition for name, partition in group.columns.items()},
        row=named(group.row),
        entrance=group.entrance and named(group.entrance),
        numbers={
            SizeAttribute(named(number.module), number.attribute): values
            for number, values in group.numbers.items()
        },
    )
