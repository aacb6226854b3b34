"""Facts cross ranks as JSON that is checked against a type: the run's own words are no pickles.

Objects of a script are another matter: ``communication.gather_object`` takes any of them.
"""

import dataclasses
import json
from typing import Any, TypeVar

import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError

from drivetrain.collectives.digests import Ranks, device_of, group_of, meet_everyone, size_of
from drivetrain.collectives.meeting import named
from drivetrain.errors import CollectiveError
from drivetrain.runtime.texts import gather_texts, share_text

FactsT = TypeVar("FactsT")


def gather_facts(
    facts: FactsT, kind: type[FactsT], *, doing: str, group: Ranks = None
) -> list[FactsT]:
    """Return the facts of all ranks, by rank; every rank receives them. Collective.

    Args:
        facts: plain values, or a dataclass of plain values.
        kind: their type.
        doing: the reason of the exchange in words, the same on all ranks.
        group: the ranks, as a process group or a line of the mesh; None means all.

    Raises:
        CollectiveError: a rank does not come, or sent facts of another type.
    """
    if size_of(group) == 1:
        return [facts]
    meet_everyone(doing, group)
    with named(doing, group_of(group)):
        texts = gather_texts(
            _written(facts), size_of(group), group=group_of(group), device=device_of(group)
        )
    return [_read(text, kind, doing, rank) for rank, text in enumerate(texts)]


def share_facts(
    facts: FactsT, kind: type[FactsT], *, doing: str, source: int = 0, group: Ranks = None
) -> FactsT:
    """Return the facts of one rank on every rank. Collective.

    Args:
        facts: plain values, or a dataclass of plain values; only those of ``source`` count.
        kind: their type.
        doing: the reason of the exchange in words, the same on all ranks.
        source: global rank whose facts are taken.
        group: the ranks, as a process group or a line of the mesh; None means all.

    Raises:
        CollectiveError: a rank does not come, or ``source`` sent facts of another type.
    """
    if size_of(group) == 1:
        return facts
    meet_everyone(doing, group)
    mine = _written(facts) if dist.get_rank() == source else ""
    with named(doing, group_of(group)):
        text = share_text(mine, source, group=group_of(group), device=device_of(group))
    return _read(text, kind, doing, source)


def _written(facts: Any) -> str:
    return json.dumps(facts, default=dataclasses.asdict)


def _read(text: str, kind: type[FactsT], doing: str, rank: int) -> FactsT:
    try:
        return TypeAdapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        raise CollectiveError(
            f"{doing}: expected facts of rank {rank} that all ranks understand, found others "
            f"({error.errors()[0]['msg']}); start the same version on every host"
        ) from error
