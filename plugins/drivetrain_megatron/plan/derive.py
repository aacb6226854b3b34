"""Makes a plan for a block from its structure: proposes, tries, keeps the divisions that are right.

A user's plan, or the model's own, says which layers may be divided and how; without one, every
layer may. In both cases the structure says which layers belong together and where heads begin, and
the trial decides.
"""

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple

from torch import nn

from drivetrain.model.trace import ModelTrace
from drivetrain_megatron.dropout import DropoutLayout, Site
from drivetrain_megatron.plan.divide import AlonePlan, BlockPlan, GroupPlan, SizeAttribute, facts_of
from drivetrain_megatron.plan.groups import (
    LayerGroup,
    LinearUse,
    WeightRegion,
    alike,
    find_groups,
    find_regions,
    linear_uses,
    parent_of,
    rows_of,
    same_in_list,
    ways,
    ways_of,
)
from drivetrain_megatron.plan.trial import Trial, find_layouts, find_misfit, make_trial, verify
from drivetrain_megatron.recording.calls import Call
from drivetrain_megatron.tensor.linear import is_linear
from drivetrain_megatron.tensor.operators import TokenShards
from drivetrain_megatron.tensor.partition import even

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
    return BlockStructure(uses, regions, shared_with_others(model, block), sizes)


def shared_with_others(model: nn.Module, block: nn.Module) -> frozenset[str]:
    """Return the names of a block's parameters that have a name outside of the block, too."""
    everywhere = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    inside = list(block.named_parameters(remove_duplicate=False))
    here = Counter(id(p) for _, p in inside)
    return frozenset(name for name, p in inside if everywhere[id(p)] > here[id(p)])


def derive(
    tryout: "Tryout",
    structure: BlockStructure,
    *,
    layers: set[str] | None = None,
    alone: bool = False,
) -> Derivation:
    """Return the plan for a block of this structure.

    Layers may be divided that ``layers`` names, or modules around them; None lets all, and the
    weights of regions. ``alone`` lets layers be divided by themselves.
    """
    uses, found = structure.uses, Derivation(groups=find_groups(structure.uses))
    allowed = set(uses) if layers is None else {n for n in uses if is_named(n, set(layers))}
    _divide_attentions(found, structure, layers, tryout)
    for group in found.groups:
        divided = {each.row for each in found.plan.groups}
        if {*group.columns, group.row} <= allowed and group.row not in divided:
            _divide_group(found, group, structure, tryout)
            _divide_alike(found, group.row, layers, tryout)
    for region in structure.regions if layers is None and not tryout.sequence_parallel else ():
        _divide_region(found, region, structure, tryout)
    if alone and not tryout.sequence_parallel:
        _divide_alone(found, structure, allowed, tryout)
    if tryout.sequence_parallel and found.plan == BlockPlan():
        plan, found.broken = tryout(found.plan)
        found.plan = plan or found.plan
    return found


def is_named(layer: str, names: Container[str]) -> bool:
    """Whether a layer, or a module around it, is among these names."""
    return layer in names or ("." in layer and is_named(parent_of(layer), names))


@dataclass(frozen=True, slots=True)
class Tryout:
    """How plans are tried; evaluations count, too."""

    trial: Trial
    ranks: int
    sequence_parallel: bool
    evaluations: Sequence[Trial] = ()

    def __call__(self, plan: BlockPlan) -> tuple[BlockPlan | None, str]:
        """Return the plan with its summed parameters; or None, and why the plan is wrong."""
        partial = frozenset[str]()
        for each in (*self.evaluations, self.trial):
            found, reason = verify(each, plan, self.ranks, sequence_parallel=self.sequence_parallel)
            if found is None:
                return None, reason
            partial = found
        return replace(plan, partial=partial), ""


def _divide_attentions(
    found: Derivation,
    structure: BlockStructure,
    layers: Container[str] | None,
    tryout: Tryout,
) -> None:
    """Add torch's attentions to the plan, those whose division gives equal numbers."""
    for name, module in tryout.trial.module.named_modules():
        if isinstance(module, nn.MultiheadAttention) and (layers is None or name in layers):
            if others := _of_others([name], structure):
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


def _divide_group(
    found: Derivation, group: LayerGroup, structure: BlockStructure, tryout: Tryout
) -> None:
    """Add a group to the plan, in the first way that gives equal numbers."""
    if others := _of_others((*group.columns, group.row), structure):
        found.refused[group.row] = others
        return
    if owners := _shared(tryout.trial.module, group):
        found.refused[group.row] = f"a parameter belongs to {' and '.join(owners)}"
        return
    plan, block = found.plan, tryout.trial.module
    plans = (
        replace(plan, groups=(*plan.groups, attempt))
        for division in ways(group, structure.uses, tryout.ranks)
        for attempt in _attempts(block, division, tryout.sequence_parallel)
    )
    if _take_first(found, group.row, plans, tryout):
        found.plan = _with_fewest_numbers(found.plan, tryout)


def _divide_alike(
    found: Derivation, row: str, layers: Iterable[str] | None, tryout: Tryout
) -> None:
    """Divide the experts of a list alike, also without a token; one of them has this row."""
    group = next((each for each in found.plan.groups if each.row == row), None)
    if group is None:
        return
    named = None if layers is None else set(layers)
    divided = {each.row for each in found.plan.groups}
    others = [
        each
        for each in alike(tryout.trial.module, group)
        if each.row not in divided
        and (named is None or all(is_named(name, named) for name in (*each.columns, each.row)))
    ]
    if others:
        plan, _ = tryout(replace(found.plan, groups=(*found.plan.groups, *others)))
        found.plan = plan or found.plan


def _divide_region(
    found: Derivation, region: WeightRegion, structure: BlockStructure, tryout: Tryout
) -> None:
    """Add a region to the plan, in the first way that gives equal numbers."""
    if others := _of_others([use.name for use in (*region.columns, region.row)], structure):
        found.refused[region.row.name] = others
        return
    plan, some = found.plan, islice(ways_of(tryout.trial.module, region, tryout.ranks), _MOST_WAYS)
    plans = (replace(plan, regions=(*plan.regions, way)) for way in some)
    _take_first(found, region.row.name, plans, tryout)


def _divide_alone(
    found: Derivation, structure: BlockStructure, allowed: Container[str], tryout: Tryout
) -> None:
    """Divide large layers by themselves where a block would stay whole for the most part."""
    block, sizes = tryout.trial.module, structure.sizes
    total = sum(sizes.values())
    facts = facts_of(block, found.plan, tryout.ranks)
    cut = [name for name, known in facts.items() if known.partition is not None]
    if sum(sizes[name] for name in cut) >= ENOUGH * total:
        return
    rows, ranks = rows_of(structure.uses), tryout.ranks
    alone = tuple(
        AlonePlan(name, even(-1, use.inputs if name in rows else use.outputs, ranks), name in rows)
        for name, use in structure.uses.items()
        if name in allowed
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
        tryout = Tryout(trial, ranks, sharded, others)
        found = derive(tryout, structure, layers=layers, alone=alone)
        pairs = zip(trial.module.parameters(), block.parameters(), strict=True)
        if any(mine.shape != own.shape for mine, own in pairs) and find_misfit(
            block, call, found.plan, ranks, sequence_parallel=sharded
        ):
            continue
        fits = (sharded or not found.is_whole) and not found.broken
        return found, find_layouts(trial, found.plan, ranks, tokens) if fits else {}
    return Derivation(untried=reason, broken=reason if sharded else ""), {}
