"""Makes a plan for a block from its structure: proposes, tries, keeps the divisions that are right.

A user's plan, or the model's own, says which layers may be divided and how; without one, every
layer may. In both cases the structure says which layers belong together and where heads begin, and
the trial decides.

A group is one row-parallel layer and the column-parallel layers whose features flow into it: query,
key and value into the output projection, gate and up into down (Shoeybi et al. 2019, arXiv
1909.08053, section 3). Between them the ranks need no communication if each feature of the row's
input depends on features of the same rank only. Every way that the shapes allow is proposed; the
trial tells which is right.

A trace shows which layers feed which: each tensor remembers the linear layers whose outputs have
gone into it since the last linear layer. A layer's own output also remembers into how many heads
its features are reshaped, and into which packed parts (query, key and value in one matrix) cut.
"""

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn

from drivetrain.model.trace import ModelOperation, ModelTrace, ModuleCall
from drivetrain.model.valueless import Facts
from drivetrain_megatron.dropout import DropoutLayout, Site
from drivetrain_megatron.plan.divide import (
    AlonePlan,
    BlockPlan,
    GroupPlan,
    RegionPlan,
    SizeAttribute,
    facts_of,
)
from drivetrain_megatron.plan.trial import Trial, find_layouts, find_misfit, make_trial, verify
from drivetrain_megatron.recording.calls import Call, kind_of
from drivetrain_megatron.tensor.linear import features_of, is_linear
from drivetrain_megatron.tensor.operators import TokenShards
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


def _alike_in_lists(block: nn.Module, name: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the modules of lists around a layer, the innermost first, each with its equals."""
    while name:
        name, item = parent_of(name), name
        around, own = block.get_submodule(name), block.get_submodule(item)
        if isinstance(around, nn.ModuleList):
            others = [index for index, m in around.named_children() if m is not own]
            alike = [i for i in others if kind_of(around.get_submodule(i)) == kind_of(own)]
            yield item, [f"{name}.{index}".strip(".") for index in alike]


def alike(block: nn.Module, group: GroupPlan) -> Iterator[GroupPlan]:
    """Yield the plans of the same layers in alike modules of the innermost list around them."""
    name, others = next(_alike_in_lists(block, group.row), ("", []))
    members = [*group.columns, *(number.module for number in group.numbers)]
    if all(f"{member}.".startswith(f"{name}.") for member in members):
        yield from (_renamed(group, name, other) for other in others)


def same_in_list(block: nn.Module, layer: str) -> Iterator[str]:
    """Yield the names of a layer and of its equals in alike modules of a list (experts)."""
    yield layer
    for item, others in _alike_in_lists(block, layer):
        yield from (other + layer.removeprefix(item) for other in others)


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


_CONFIGURATIONS = ("config", "cfg", "args")
"""Under which names modules keep the configuration of their model."""

ENOUGH = 0.6
"""Share of a block's parameters that groups divide; below, large layers are divided by themselves,
although each of them then sends activations."""

_LARGE = 0.01
"""Share of a block's parameters in such a layer; a smaller one would send more than it saves."""

_MOST_WAYS = 24
"""How many ways to divide a region are tried."""

_MOST_MIXED = 8
"""How many choices of attributes are tried together with reshapes: every trial takes time."""


@dataclass(slots=True)
class Derivation:
    """The outcome for one block.

    Attributes:
        plan: how to divide it.
        refused: why groups stay whole, by the name of their row-parallel layer.
        groups: all groups that the structure shows, also those that no plan lets divide.
        broken: why not even the whole block may work on shards of the sequence; "" if it may.
        untried: why it could not be tried, and stays whole; "" if it was.
    """

    plan: BlockPlan = field(default_factory=BlockPlan)
    refused: dict[str, str] = field(default_factory=dict)
    groups: list[LayerGroup] = field(default_factory=list)
    broken: str = ""
    untried: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether every rank computes the whole block."""
        plan = self.plan
        return not (plan.groups or plan.regions or plan.attentions or plan.alone)


class BlockStructure(NamedTuple):
    """The structure of a block in a trace: its linear layers, and its weights in no layer.

    Attributes:
        uses: the linear layers by name, in the order of first calls.
        regions: the weights that modules multiply by themselves.
        shared: names of the parameters that are used outside of the block, too.
        sizes: elements of each parameter, by name.
    """

    uses: Mapping[str, LinearUse]
    regions: Sequence[WeightRegion]
    shared: frozenset[str]
    sizes: Mapping[str, int]


def structure_of(
    trace: ModelTrace, model: nn.Module, block: nn.Module, operations: range
) -> BlockStructure:
    """Return the structure in one call of a block, which may be the model itself."""
    uses = linear_uses(trace, model, block, operations)
    regions = find_regions(trace, model, block, operations)
    sizes = {name: parameter.numel() for name, parameter in block.named_parameters()}
    return BlockStructure(uses, regions, shared_with_others(names_of(model), block), sizes)


def names_of(module: nn.Module) -> Counter[int]:
    """Return how many names each parameter has in a module, by the parameter's ``id``."""
    return Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))


def shared_with_others(everywhere: Counter[int], block: nn.Module) -> frozenset[str]:
    """Return which names of a block's parameters are not all: the model has others outside."""
    here = names_of(block)
    inside = block.named_parameters(remove_duplicate=False)
    return frozenset(name for name, p in inside if everywhere[id(p)] > here[id(p)])


def derive(tryout: "Tryout", *, alone: bool) -> Derivation:
    """Return the plan for a block; ``alone`` lets layers be divided by themselves."""
    structure = tryout.structure
    found = Derivation(groups=find_groups(structure.uses))
    _divide_attentions(found, tryout)
    for group in found.groups:
        divided = {each.row for each in found.plan.groups}
        if tryout.lets(*group.columns, group.row) and group.row not in divided:
            _divide_group(found, group, tryout)
            _divide_alike(found, group.row, tryout)
    for region in structure.regions if tryout.layers is None and not tryout.sharded else ():
        _divide_region(found, region, tryout)
    if alone and not tryout.sharded:
        _divide_alone(found, tryout)
    if tryout.sharded and found.plan == BlockPlan():
        plan, found.broken = tryout(found.plan)
        found.plan = plan or found.plan
    return found


def is_named(layer: str, names: Container[str]) -> bool:
    """Whether a layer, or a module around it, is among these names."""
    return layer in names or ("." in layer and is_named(parent_of(layer), names))


@dataclass(frozen=True, slots=True)
class Tryout:
    """How plans are tried; evaluations count, too.

    Attributes:
        structure: of the block.
        layers: names of layers that may be divided, or of modules around them; None lets all, and
            the weights of regions.
        sharded: whether activations between groups are shards of the sequence.
    """

    structure: BlockStructure
    layers: Container[str] | None
    trial: Trial
    ranks: int
    sharded: bool
    evaluations: Sequence[Trial] = ()

    def lets(self, *names: str) -> bool:
        """Whether all of these layers may be divided."""
        return self.layers is None or all(is_named(name, self.layers) for name in names)

    def __call__(self, plan: BlockPlan) -> tuple[BlockPlan | None, str]:
        """Return the plan with its summed parameters; or None, and why the plan is wrong."""
        partial = frozenset[str]()
        for each in (*self.evaluations, self.trial):
            found, reason = verify(each, plan, self.ranks, sequence_parallel=self.sharded)
            if found is None:
                return None, reason
            partial = found
        return replace(plan, partial=partial), ""


def _divide_attentions(found: Derivation, tryout: Tryout) -> None:
    """Add torch's attentions to the plan, those whose division gives equal numbers."""
    for name, module in tryout.trial.module.named_modules():
        lets = tryout.layers is None or name in tryout.layers
        if isinstance(module, nn.MultiheadAttention) and lets:
            if others := _of_others([name], tryout.structure):
                found.refused[name] = others
            else:
                attentions = (*found.plan.attentions, name)
                _take_first(found, name, [replace(found.plan, attentions=attentions)], tryout)


def _take_first(found: Derivation, name: str, plans: Iterable[BlockPlan], tryout: Tryout) -> bool:
    """Take the first of some plans that gives equal numbers; else note why there is none."""
    reasons = []
    for each in plans:
        plan, reason = tryout(each)
        if plan is not None:
            found.plan = plan
            return True
        reasons.append(reason)
    found.refused[name] = "; ".join(dict.fromkeys(reasons)) or "no way to divide it"
    return False


def _divide_group(found: Derivation, group: LayerGroup, tryout: Tryout) -> None:
    """Add a group to the plan, in the first way that gives equal numbers."""
    if others := _of_others((*group.columns, group.row), tryout.structure):
        found.refused[group.row] = others
        return
    if owners := _shared(tryout.trial.module, group):
        found.refused[group.row] = f"a parameter belongs to {' and '.join(owners)}"
        return
    plan, block = found.plan, tryout.trial.module
    plans = (
        replace(plan, groups=(*plan.groups, attempt))
        for division in ways(group, tryout.structure.uses, tryout.ranks)
        for attempt in _attempts(block, division, tryout.sharded)
    )
    if _take_first(found, group.row, plans, tryout):
        found.plan = _with_fewest_numbers(found.plan, tryout)


def _divide_alike(found: Derivation, row: str, tryout: Tryout) -> None:
    """Divide the experts of a list alike, also without a token; one of them has this row."""
    group = next((each for each in found.plan.groups if each.row == row), None)
    if group is None:
        return
    divided = {each.row for each in found.plan.groups}
    others = [
        each
        for each in alike(tryout.trial.module, group)
        if each.row not in divided and tryout.lets(*each.columns, each.row)
    ]
    if others:
        plan, _ = tryout(replace(found.plan, groups=(*found.plan.groups, *others)))
        found.plan = plan or found.plan


def _divide_region(found: Derivation, region: WeightRegion, tryout: Tryout) -> None:
    """Add a region to the plan, in the first way that gives equal numbers."""
    if others := _of_others([use.name for use in (*region.columns, region.row)], tryout.structure):
        found.refused[region.row.name] = others
        return
    plan, some = found.plan, islice(ways_of(tryout.trial.module, region, tryout.ranks), _MOST_WAYS)
    plans = (replace(plan, regions=(*plan.regions, way)) for way in some)
    _take_first(found, region.row.name, plans, tryout)


def _divide_alone(found: Derivation, tryout: Tryout) -> None:
    """Divide large layers by themselves where a block would stay whole for the most part."""
    block, structure = tryout.trial.module, tryout.structure
    sizes = structure.sizes
    total = sum(sizes.values())
    facts = facts_of(block, found.plan, tryout.ranks)
    cut = [name for name, known in facts.items() if known.partition is not None]
    if sum(sizes[name] for name in cut) >= ENOUGH * total:
        return
    rows, ranks = rows_of(structure.uses), tryout.ranks
    alone = tuple(
        AlonePlan(name, even(-1, use.inputs if name in rows else use.outputs, ranks), name in rows)
        for name, use in structure.uses.items()
        if tryout.lets(name)
        and f"{name}.weight" not in cut
        and use.inputs * use.outputs >= _LARGE * total
        and not _of_others([name], structure)
        and not _shared(block, LayerGroup((), name))
    )
    for some in (alone, *((each,) for each in alone)):  # all of them, or else those that can be
        plan = replace(found.plan, alone=(*found.plan.alone, *some))
        divided, _ = tryout(plan) if some else (None, "")
        if divided is not None:
            found.plan = divided
            for each in some:
                found.refused.pop(each.layer, None)
        if divided is not None and some == alone:
            return


def _of_others(members: Iterable[str], structure: BlockStructure) -> str:
    """Return why layers or weights stay whole that are used outside of the block; "" if none is."""
    inside = tuple(f"{member}." for member in members)
    found = sorted(name for name in structure.shared if f"{name}.".startswith(inside))
    return f"other blocks use {', '.join(found[:3])} too" if found else ""


def _shared(block: nn.Module, group: LayerGroup) -> list[str]:
    """Return the names of modules that share a parameter of a group; empty if none is shared."""
    owners = [(id(p), name) for name, m in block.named_modules() for p in m.parameters(False)]
    for member in (*group.columns, group.row):
        for parameter in block.get_submodule(member).parameters(False):
            names = [name for identity, name in owners if identity == id(parameter)]
            if len(names) > 1:
                return names
    return []


def _with_fewest_numbers(plan: BlockPlan, tryout: Tryout) -> BlockPlan:
    """Return the plan without changed attributes that its last group does not need."""
    *before, last = plan.groups
    for number in last.numbers if len(last.numbers) > 1 else ():
        numbers = {key: value for key, value in last.numbers.items() if key != number}
        groups = (*before, replace(last, numbers=numbers))
        smaller, _ = tryout(replace(plan, groups=groups))
        if smaller is not None:
            plan, last = smaller, smaller.groups[-1]
    return plan


def _attempts(block: nn.Module, group: GroupPlan, sequence_parallel: bool) -> Iterator[GroupPlan]:
    """Yield plans for a group: which numbers of the block's code change, and where it begins."""
    entrances = [""]
    if sequence_parallel:
        inner = _common(group.columns)
        around = parent_of(inner) if len(group.columns) == 1 else inner
        if around:
            # Code that counts the tokens of its input must see all of them: so several layers
            # enter together, early. One alone can compute while its gradient travels.
            entrances = ["", around] if len(group.columns) == 1 else [around, ""]
    for numbers, place in _changes(block, group):
        for entrance in entrances:
            yield replace(group, entrance=entrance, numbers=numbers, place=place)


def _changes(
    block: nn.Module, group: GroupPlan
) -> Iterator[tuple[Mapping[SizeAttribute, tuple[int, ...]], int | None]]:
    """Yield changes of the sizes in the block's code: none, attributes, reshapes, or both.

    Code that splits by an attribute may reshape to the sizes of its input: that needs both.
    """
    found = _numbers(block, group)
    alone = [{number: values} for number, values in found.items()]
    choices = [{}, *alone, *([found] if len(found) > 1 else [])]  # none, one, or all
    for numbers in choices:
        yield numbers, None
    for place in (0, 1):
        yield {}, place
    for place in (0, 1):
        for numbers in choices[1 : 1 + _MOST_MIXED]:
            yield numbers, place


def _numbers(block: nn.Module, group: GroupPlan) -> dict[SizeAttribute, tuple[int, ...]]:
    """Return the attributes that count a divided size, with their values on each rank."""
    owners = {parent_of(name) for name in (*group.columns, group.row)} | {_common(group.columns)}
    return {
        SizeAttribute(owner, attribute): group.sizes[value]
        for owner in sorted(owners)
        if not is_linear(block.get_submodule(owner))
        for attribute, value in _counts(block.get_submodule(owner))
        if value in group.sizes
    }


def _counts(module: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield the named whole numbers of a module, and of the configuration in the module."""
    for name, value in vars(module).items():
        if type(value) is int:
            yield name, value
        elif name in _CONFIGURATIONS and not isinstance(value, dict):
            yield from ((f"{name}.{k}", v) for k, v in vars(value).items() if type(v) is int)


def _common(names: Iterable[str]) -> str:
    """Return the innermost module that holds all of these layers, or the one layer itself."""
    split = [name.split(".") for name in names]
    if len(split) == 1:
        return ".".join(split[0])
    same = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        same.append(parts[0])
    return ".".join(same)


# --- one block as trials allow: first with thin matrices, then, if need be, as it is ---


def divide_block(
    block: nn.Module,
    called: Sequence[Call],
    structure: BlockStructure,
    layers: set[str] | None,
    tokens: TokenShards | None,
    ranks: int,
    *,
    alone: bool = False,
) -> tuple[Derivation, Mapping[Site, DropoutLayout]]:
    """Return how a block is divided, and the layouts of its dropouts' inputs.

    The block is called in one way in training, and perhaps in another in evaluation. Large matrices
    are thin in the trial. If the plan does not fit the block itself, or a thin block cannot run, it
    is tried as it is.
    """
    call, sharded = called[0], tokens is not None
    rows = {name for row in rows_of(structure.uses) for name in same_in_list(block, row)}
    for few in (rows, None):
        try:
            trial, *others = [make_trial(block, c, few, trains=c is call) for c in called]
        except Exception as error:  # whatever the user's code raises in fp64: it stays whole
            reason = f"it cannot be tried in fp64: {type(error).__name__}: {error}"
            continue
        tryout = Tryout(structure, layers, trial, ranks, sharded, others)
        found = derive(tryout, alone=alone)
        pairs = zip(trial.module.parameters(), block.parameters(), strict=True)
        if any(mine.shape != own.shape for mine, own in pairs) and find_misfit(
            block, call, found.plan, ranks, sequence_parallel=sharded
        ):
            continue
        fits = (sharded or not found.is_whole) and not found.broken
        return found, find_layouts(trial, found.plan, ranks, tokens) if fits else {}
    return Derivation(untried=reason, broken=reason if sharded else ""), {}
