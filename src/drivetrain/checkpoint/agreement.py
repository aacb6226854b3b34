"""How ranks fail together: every step of a save or a load ends with one verdict for all of them.

A rank that raised alone would leave the others waiting in their next collective. So a step runs
inside ``together``: all ranks hear how it went everywhere, and all of them raise the same error.

Every function is collective over a process group: the default one of all ranks, one of the ranks
that share a state, or for a thread in the background a group of its own. Two threads must never
speak over one group.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar

import torch.distributed as dist

from drivetrain.collectives.facts import Ranks, collect_facts, gather_facts, share_facts
from drivetrain.errors import CheckpointError
from drivetrain.runtime.world import World

T = TypeVar("T")

Group: TypeAlias = dist.ProcessGroup | None
"""A process group of all ranks; None means the default one."""

_OPERATION = "the exchange of ranks about a checkpoint"
"""The name of every step here, where ranks meet: their words for it may hold different paths."""

SHOWN = 4
"""How many different failures one message quotes."""


def together(world: World, doing: str, work: Callable[[], T], group: Ranks = None) -> T:
    """Run one step on every rank and return this rank's result when all of them succeeded.

    A world of one process needs no process group. ``doing`` names the step in the message, as in
    ``cannot save X: ...``. ``work`` must not communicate after a failure on some ranks only.

    Raises:
        CheckpointError: the step failed on some rank, and every rank raises the same message.
        CollectiveError: not all ranks came here.
    """
    result: T | None = None
    cause: Exception | None = None
    try:
        result = work()
    except Exception as error:
        cause = error
    verdicts = gather(world, "" if cause is None else explain(cause), str, group, doing=doing)
    if any(verdicts):
        raise CheckpointError(f"cannot {doing}: {_summary(verdicts)}") from cause
    return result  # type: ignore[return-value]  # work() returned it: nothing failed


def check_same(world: World, doing: str, facts: Mapping[str, Any], group: Ranks = None) -> None:
    """Raise on every rank when the ranks want different things.

    Args:
        world: all ranks.
        doing: the wish, for the message.
        facts: values that must be equal on all ranks, by their names in the message.
        group: the ranks; None means all.

    Raises:
        CheckpointError: names the first fact that differs, with the values of two ranks.
    """
    told = {what: printable(str(value)) for what, value in facts.items()}
    everyone = gather(world, told, dict[str, str], group, doing=doing)
    for rank, theirs in enumerate(everyone):
        for what, value in everyone[0].items():
            if theirs.get(what) != value:
                raise CheckpointError(
                    f"cannot {doing}: ranks disagree on {what}: rank 0 has {value}, rank {rank} "
                    f"has {theirs.get(what)}; all ranks must call it together, with the same "
                    "arguments"
                )


def gather(
    world: World, value: T, kind: type[T], group: Ranks = None, *, doing: str = "agree"
) -> list[T]:
    """Return the values of all ranks, on all ranks; ``kind`` is their type, as of facts."""
    if world.size == 1:
        return [value]
    return gather_facts(value, kind, doing=doing, operation=_OPERATION, group=group)


def collect(world: World, value: T, kind: type[T], group: Group = None) -> list[T]:
    """Return the values of all ranks on rank 0, and an empty list on the others."""
    if world.size == 1:
        return [value]
    doing = "tell rank 0 what was written"
    return collect_facts(value, kind, doing=doing, operation=_OPERATION, group=group)


def share(world: World, value: T, kind: type[T], group: Group = None) -> T:
    """Return rank 0's value on all ranks."""
    if world.size == 1:
        return value
    doing = "hear what rank 0 has chosen"
    return share_facts(value, kind, doing=doing, operation=_OPERATION, group=group)


def explain(error: Exception) -> str:
    """Return the message of an error, without Python's decoration where possible."""
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    else:
        text = f"{type(error).__name__}: {error}"
    known = isinstance(error, CheckpointError) and str(error)
    return printable(known or text)


def printable(text: str) -> str:
    """Return a text with escapes in the place of bytes that are no UTF-8, as paths may have."""
    return text.encode(errors="backslashreplace").decode()


def _summary(verdicts: list[str]) -> str:
    """Quote each different failure once, with the ranks that failed so."""
    ranks: dict[str, list[int]] = {}
    for rank, verdict in enumerate(verdicts):
        if verdict:
            ranks.setdefault(verdict, []).append(rank)
    if len(ranks) == 1 and len(verdicts) == sum(map(len, ranks.values())):
        return next(iter(ranks))
    quoted = [
        f"rank {', '.join(map(str, who))}: {verdict}"
        for verdict, who in list(ranks.items())[:SHOWN]
    ]
    return "; ".join(quoted) + (f"; and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else "")
