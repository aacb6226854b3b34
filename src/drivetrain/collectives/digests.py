"""Digests: before ranks exchange values, eight bytes of each rank tell whether all mean the same.

Ranks in different operations, or with data of other shapes, exchange the whole texts then, and all
of them raise the same error. The digests are also where ranks meet: a rank that comes alone learns
which rank is missing, and why.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import NoReturn, TypeAlias

import torch
import torch.distributed as dist

from drivetrain.collectives.meeting import WAY_OUT, meet, named
from drivetrain.errors import CollectiveError, RankMismatchError, UsageError
from drivetrain.runtime.mesh import Axis
from drivetrain.runtime.script import script_line
from drivetrain.runtime.texts import gather_texts

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
