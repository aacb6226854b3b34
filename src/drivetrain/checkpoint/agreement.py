"""How ranks fail together: every step of a save or a load ends with one verdict for all of them.

A rank that raised alone would leave the others waiting in their next collective. So a step runs
inside ``together``: all ranks hear how it went everywhere, and all of them raise the same error.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from drivetrain.errors import CheckpointError
from drivetrain.runtime.world import World

T = TypeVar("T")

SHOWN = 4
"""How many different failures one message quotes."""


def together(world: World, doing: str, work: Callable[[], T]) -> T:
    """Run one step on every rank and return this rank's result when all of them succeeded.

    Collective over the default process group; a world of one process needs none.

    Args:
        world: this process among all processes.
        doing: what the step is, for the message: ``cannot {doing}: ...``.
        work: the step; it must not communicate after it has failed on some rank only.

    Raises:
        CheckpointError: the step failed on some rank; every rank raises the same message.
    """
    result: T | None = None
    cause: Exception | None = None
    try:
        result = work()
    except Exception as error:
        cause = error
    verdicts = gather(world, None if cause is None else explain(cause))
    if any(verdicts):
        raise CheckpointError(f"cannot {doing}: {_summary(verdicts)}") from cause
    return result  # type: ignore[return-value]  # work() returned it: nothing failed


def gather(world: World, value: T) -> list[T]:
    """Return the values of all ranks, on all ranks."""
    if world.size == 1:
        return [value]
    values: list[Any] = [None] * world.size
    dist.all_gather_object(values, value)
    return values


def collect(world: World, value: T) -> list[T]:
    """Return the values of all ranks on rank 0, and an empty list on the others."""
    if world.size == 1:
        return [value]
    values: list[Any] = [None] * world.size if world.is_main else []
    dist.gather_object(value, values if world.is_main else None, dst=0)
    return values


def share(world: World, value: T) -> T:
    """Return rank 0's value on all ranks."""
    if world.size == 1:
        return value
    box: list[Any] = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]  # type: ignore[no-any-return]


def explain(error: Exception) -> str:
    """Return what an error says, without Python's decoration where it needs none."""
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"


def _summary(verdicts: list[str | None]) -> str:
    """Quote each different failure once, with the ranks that had it."""
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
