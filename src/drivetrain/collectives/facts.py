"""Ranks tell each other facts: first whether all mean the same, then JSON checked against a type.

Before ranks exchange values, eight bytes of each rank, a digest, tell whether all mean the same.
Ranks in different operations, or with data of other shapes, exchange the whole texts then, and all
of them raise the same error. The digests are also where ranks meet: a rank that comes alone learns
which rank is missing, and why. Facts are the run's own words and no pickles. Objects of a script
are another matter: ``communication.gather_object`` takes any of them.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeAlias, TypedDict, TypeVar

import torch
import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError

from drivetrain.collectives.meeting import WAY_OUT, meet, named, script_line
from drivetrain.errors import CollectiveError, RankMismatchError, UsageError
from drivetrain.runtime.mesh import Axis
from drivetrain.runtime.world import collect_texts, gather_texts, share_text

Ranks: TypeAlias = dist.ProcessGroup | Axis | None
"""Who takes part: a process group, a line of the mesh, or None for all ranks."""

_SHOWN_CHARACTERS, _SHOWN_KINDS = 300, 8
"""Characters of a description in a message, and the number of different descriptions."""


def meet_everyone(operation: str, group: Ranks = None, *, doing: str = "", data: str = "") -> None:
    """Return when every rank has come to the same operation. Collective.

    Args:
        operation: the operation, the same text on all ranks.
        group: the ranks, as a process group or a line of the mesh; None means all.
        doing: the reason in words, where ranks may word it differently.
        data: structure, shapes and dtypes, equal on all ranks.

    Raises:
        CollectiveError: a rank does not come, or came to another operation.
        RankMismatchError: the data differ.
    """
    if size_of(group) == 1:
        return
    held = differing((operation, data), group, doing=doing or operation, notes=(script_line(),))
    if held:
        _refuse(operation, held)


def counts_of_everyone(
    operation: str, data: str, counts: Sequence[int], refusal: str, group: Ranks
) -> Sequence[Sequence[int]]:
    """Return the counts of all ranks, which have come to the same operation. Collective.

    Args:
        operation: the operation, the same text on all ranks.
        data: structure, shapes and dtypes, equal on all ranks.
        counts: may differ between ranks.
        refusal: why this rank cannot take part.
        group: the ranks, as a process group or a line of the mesh; None means all.

    Raises:
        CollectiveError: a rank does not come, or came to another operation.
        RankMismatchError: the data differ.
        UsageError: a rank cannot take part.
    """
    facts = (operation, data, json.dumps(counts), refusal)
    held = differing(facts, group, doing=operation, notes=(script_line(),))
    if len({tuple(each[:2]) for each in held}) > 1:
        _refuse(operation, [(*each[:2], each[-1]) for each in held])
    held = held or [facts] * size_of(group)
    if found := next((each[3] for each in held if each[3]), ""):
        raise UsageError(found)
    return [json.loads(each[2]) for each in held]


def differing(
    facts: Sequence[str],
    group: Ranks = None,
    *,
    doing: str = "the comparison of ranks",
    notes: Sequence[str] = (),
) -> list[Sequence[str]]:
    """Return the facts of all ranks if ranks differ, else an empty list. Collective.

    A digest of eight bytes goes first: only ranks that disagree exchange the whole text.

    Args:
        facts: texts that should be equal on all ranks.
        group: the ranks, as a process group or a line of the mesh; None means all.
        doing: the reason of the comparison, for the message of an error.
        notes: texts that may differ; they follow the facts of a rank.

    Raises:
        CollectiveError: a rank does not come; the message says which, and what it did last.
    """
    if size_of(group) == 1:
        return []
    digest = hashlib.sha256("\0".join(facts).encode()).digest()[:8]
    number = int.from_bytes(digest, "big", signed=True)
    mine = torch.tensor([number], dtype=torch.int64, device=device_of(group))
    digests = mine.new_empty(size_of(group), 1)
    ranks = group_of(group)
    with named(doing, ranks) as wait:
        meet(dist.all_gather(list(digests.unbind()), mine, group=ranks, async_op=True), wait, ranks)
    if len(set(digests.flatten().tolist())) == 1:
        return []
    return _texts((*facts, *notes), group, doing)


def refuse_other_operation(operation: str, group: Ranks, doing: str) -> NoReturn:
    """Exchange texts with ranks in other operations, and raise. Collective.

    Raises:
        CollectiveError: names the operations of all ranks.
    """
    _refuse(operation, _texts((operation, "", script_line()), group, doing))


def _texts(texts: Sequence[str], group: Ranks, doing: str) -> list[Sequence[str]]:
    """Return the texts of all ranks. Collective."""
    ranks, size, mine = group_of(group), size_of(group), json.dumps(texts)
    with named(doing, ranks):
        return [
            [str(each) for each in json.loads(held)]
            for held in gather_texts(mine, size, group=ranks, device=device_of(group))
        ]


def group_of(ranks: Ranks) -> dist.ProcessGroup | None:
    """Return the process group of some ranks, None for the default one."""
    return ranks.group if isinstance(ranks, Axis) else ranks


def size_of(group: Ranks) -> int:
    """Return how many ranks take part; 1 without a process group."""
    if isinstance(group, Axis):
        return group.size
    return (
        dist.get_world_size(group_of(group)) if dist.is_available() and dist.is_initialized() else 1
    )


def device_of(group: Ranks, wish: torch.device | None = None) -> torch.device | None:
    """Return the wished device if the group can communicate from there, else another."""
    if size_of(group) == 1:
        return wish
    able = [pair.split(":")[0] for pair in dist.get_backend_config(group_of(group)).split(",")]
    if wish is not None and wish.type in able:
        return wish
    accelerator = torch.accelerator.current_accelerator()
    if "cpu" in able or accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _refuse(operation: str, held: list[Sequence[str]]) -> NoReturn:
    """Raise the error about ranks with other data, or in other operations.

    Args:
        operation: of this rank.
        held: operation, data and line of the script of each rank.
    """
    if len({each for each, *_ in held}) == 1:
        raise RankMismatchError(
            f"{operation} expected the same operation, structure, shapes and dtypes on all ranks, "
            f"found {_grouped([data for _, data, *_ in held])}; pad with pad_across_processes "
            "first, or use gather_object"
        )
    texts = [
        f"{each}{f' of {data}' if data else ''}{f' at {site}' if site else ''}"
        for each, data, site, *_ in held
    ]
    raise CollectiveError(f"ranks came to different collectives: {_grouped(texts)}; {WAY_OUT}")


def _grouped(held: list[str]) -> str:
    """Return the ranks of each text; long ones from shortly before their first difference."""
    letters = enumerate(zip(*held, strict=False))
    difference = next((i for i, each in letters if len(set(each)) > 1), 0)
    start = max(0, difference - _SHOWN_CHARACTERS // 2)
    ranks: dict[str, list[str]] = {}
    for rank, text in enumerate(held):
        ranks.setdefault(text, []).append(str(rank))
    shown = [
        f"{'rank' if len(where) == 1 else 'ranks'} {', '.join(where)}: "
        f"{'...' * (start > 0)}{text[start:][:_SHOWN_CHARACTERS]}"
        for text, where in list(ranks.items())[:_SHOWN_KINDS]
    ]
    return "; ".join([*shown, "..."] if len(ranks) > _SHOWN_KINDS else shown)


# --- facts ---


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
