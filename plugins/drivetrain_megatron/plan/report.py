"""Says in a few lines how a model was divided, which layers stayed whole, and why."""

from collections.abc import Iterator, Mapping

from drivetrain_megatron.cell import ParameterFacts
from drivetrain_megatron.plan.derive import Derivation
from drivetrain_megatron.plan.model import ModelPlan

SHOWN = 3
"""How many of the parameters that stay whole are named, the largest."""


def describe(
    plan: ModelPlan, facts: Mapping[str, ParameterFacts], nbytes: Mapping[str, int], ranks: int
) -> Iterator[str]:
    """Yield lines for the user, who sees bytes of whole parameters and their facts, by name."""
    whole = [name for name, known in facts.items() if known.partition is None]
    total, kept = sum(nbytes.values()), sum(nbytes[name] for name in whole)
    yield (
        f"tensor parallel over {ranks} ranks: {len(facts) - len(whole)} of {len(facts)} parameters "
        f"divided, {kept / max(total, 1):.1%} of the bytes stay whole on each rank"
    )
    kinds: dict[int, tuple[Derivation, list[str]]] = {}
    for name, derivation in plan.blocks.items():
        kinds.setdefault(id(derivation), (derivation, []))[1].append(name)
    for derivation, names in kinds.values():
        rest = "whole, but for its words" if names == [""] and plan.vocabulary else "whole"
        yield f"{_span(names)}: {_groups(derivation) or rest}"
        if derivation.untried:
            yield f"{_span(names)} stays whole: {derivation.untried[:200]}"
        for row, reason in derivation.refused.items():
            if f"{names[0]}.{row}".strip(".") not in plan.vocabulary:
                yield f"{_span(names)}: {row} stays whole: {reason[:200]}"
    yield from _uneven(facts, ranks)
    if kept:
        largest = sorted(whole, key=lambda name: -nbytes[name])[:SHOWN]
        rest = f" and {len(whole) - SHOWN} more" if len(whole) > SHOWN else ""
        named = ", ".join(f"{name} ({nbytes[name]:,} bytes)" for name in largest)
        yield f"whole on each rank: {named}{rest}"
    if plan.note:
        yield plan.note[:300]
    if plan.vocabulary:
        yield f"by words: {', '.join(plan.vocabulary)}"


def _uneven(facts: Mapping[str, ParameterFacts], ranks: int) -> Iterator[str]:
    """Yield a line about parameters of which some ranks hold more than others, if there are."""
    found = {
        name: known.partition
        for name, known in facts.items()
        if known.partition is not None and len(set(known.partition.local_sizes)) > 1
    }
    if found:
        name, partition = next(iter(found.items()))
        sizes = ", ".join(map(str, partition.local_sizes))
        yield (
            f"not even over {ranks} ranks: {len(found)} parameters, such as {name}, of whose "
            f"{partition.size} indices of dim {partition.dim} ranks hold {sizes}"
        )


def _groups(derivation: Derivation) -> str:
    groups = [f"{', '.join(group.columns)} -> {group.row}" for group in derivation.plan.groups]
    for region in derivation.plan.regions:
        columns = [name for name in region.weights if name != region.row]
        groups.append(f"{', '.join(columns)} -> {region.row}")
    if derivation.plan.alone:
        groups.append(f"by itself {', '.join(each.layer for each in derivation.plan.alone)}")
    return "; ".join([*groups, *(f"heads of {name}" for name in derivation.plan.attentions)])


def _span(names: list[str]) -> str:
    named = [name or "the model" for name in names]
    return named[0] if len(named) == 1 else f"{len(named)} blocks {named[0]} to {named[-1]}"
