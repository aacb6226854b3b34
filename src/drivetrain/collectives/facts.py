"""Facts cross ranks as JSON that is checked against a type: the run's own words are no pickles.

Objects of a script are another matter: ``communication.gather_object`` takes any of them.
"""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypedDict, TypeVar

import torch
import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError

from drivetrain.collectives.digests import Ranks, device_of, group_of, meet_everyone, size_of
from drivetrain.collectives.meeting import named
from drivetrain.errors import CollectiveError
from drivetrain.runtime.texts import collect_texts, gather_texts, share_text

FactsT = TypeVar("FactsT")


class _Way(TypedDict):
    """How texts cross: over which group, and from which device."""

    group: dist.ProcessGroup | None
    device: torch.device | None


def gather_facts(
    facts: FactsT, kind: type[FactsT], *, doing: str, operation: str = "", group: Ranks = None
) -> list[FactsT]:
    """Return the facts of all ranks, by rank; every rank receives them. Collective.

    Args:
        facts: plain values, or a dataclass of plain values.
        kind: their type.
        doing: the reason of the exchange in words.
        operation: the name of the exchange, the same on all ranks; "" means ``doing``.
        group: the ranks, as a process group or a line of the mesh; None means all.

    Raises:
        CollectiveError: a rank does not come, or sent facts of another type.
    """
    if size_of(group) == 1:
        return [facts]
    with _met(doing, operation, group):
        texts = gather_texts(_written(facts), size_of(group), **_way(group))
    return _read_all(texts, kind, doing)


def collect_facts(
    facts: FactsT, kind: type[FactsT], *, doing: str, operation: str = "", group: Ranks = None
) -> list[FactsT]:
    """Return the facts of all ranks on global rank 0, and an empty list elsewhere. Collective.

    For facts that are too large to be received by every rank. Arguments and errors are those of
    ``gather_facts``; only rank 0 reads the facts, and raises if some are of another type.
    """
    if size_of(group) == 1:
        return [facts]
    with _met(doing, operation, group):
        texts = collect_texts(_written(facts), size_of(group), **_way(group))
    return _read_all(texts, kind, doing)


def share_facts(
    facts: FactsT,
    kind: type[FactsT],
    *,
    doing: str,
    operation: str = "",
    source: int = 0,
    group: Ranks = None,
) -> FactsT:
    """Return the facts of one rank on every rank. Collective.

    Args:
        facts: plain values, or a dataclass of plain values; only those of ``source`` count.
        kind: their type.
        doing: the reason of the exchange in words.
        operation: the name of the exchange, the same on all ranks; "" means ``doing``.
        source: global rank whose facts are taken.
        group: the ranks, as a process group or a line of the mesh; None means all.

    Raises:
        CollectiveError: a rank does not come, or ``source`` sent facts of another type.
    """
    if size_of(group) == 1:
        return facts
    mine = _written(facts) if dist.get_rank() == source else ""
    with _met(doing, operation, group):
        text = share_text(mine, source, **_way(group))
    return _read(text, kind, doing, source)


@contextmanager
def _met(doing: str, operation: str, group: Ranks) -> Iterator[None]:
    """Context that all ranks enter together; a rank alone learns which rank is missing."""
    meet_everyone(operation or doing, group, doing=doing)
    with named(doing, group_of(group)):
        yield


def _way(group: Ranks) -> _Way:
    return {"group": group_of(group), "device": device_of(group)}


def _written(facts: Any) -> str:
    return json.dumps(facts, default=dataclasses.asdict)


def _read_all(texts: Sequence[str], kind: type[FactsT], doing: str) -> list[FactsT]:
    return [_read(text, kind, doing, rank) for rank, text in enumerate(texts)]


def _read(text: str, kind: type[FactsT], doing: str, rank: int) -> FactsT:
    try:
        return TypeAdapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        raise CollectiveError(
            f"{doing}: expected facts of rank {rank} that all ranks understand, found others "
            f"({error.errors()[0]['msg']}); start the same version on every host"
        ) from error
