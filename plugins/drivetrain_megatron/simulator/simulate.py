"""Runs a schedule on paper, and has the makespans that the papers promise.

The simulation proves the schedule's end, and tells its time, idle time and memory. The generators
are unknown here: the lists of actions are read, and the data that flows between stages. Receives
wait; sends do not. Formulas: Narayanan et al. 2021 (section 2.2), Qi et al. 2023 (section 2.3).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from drivetrain.errors import UsageError
from drivetrain_megatron.pipeline.schedules import (
    Action,
    ActionKind,
    Schedule,
    Span,
    Timeline,
    needs,
)

UNIT_DURATIONS: Mapping[ActionKind, float] = {
    ActionKind.FORWARD: 1.0,
    ActionKind.BACKWARD: 2.0,
    ActionKind.INPUT: 1.0,
    ActionKind.WEIGHT: 1.0,
}
"""Backward multiplies matrices twice as often as forward, once for each of its halves."""


def simulate(
    schedule: Schedule,
    durations: Mapping[ActionKind, float] = UNIT_DURATIONS,
    *,
    travel: float = 0.0,
) -> Timeline:
    """Run a schedule on paper, on stages of equal durations by kind of action.

    A message between two ranks is under way for ``travel``.

    Raises:
        UsageError: the schedule is not one: the ranks wait for each other for ever, or an action is
            missing, comes twice, or belongs to another rank.
    """
    _check_complete(schedule)
    ended: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in schedule.ranks]
    waiting = True
    while waiting:
        progress = False
        waiting = False
        for rank, actions in enumerate(schedule.ranks):
            while len(spans[rank]) < len(actions):
                action = actions[len(spans[rank])]
                ready = _ready(action, schedule, ended, travel)
                if ready is None:
                    waiting = True
                    break
                start = max(ready, spans[rank][-1].stop if spans[rank] else 0.0)
                span = Span(action, start, start + durations[action.kind])
                spans[rank].append(span)
                ended[action] = span.stop
                progress = True
        if waiting and not progress:
            raise UsageError(_deadlock(schedule, [len(done) for done in spans], ended))
    return Timeline(tuple(map(tuple, spans)))


def _ready(
    action: Action, schedule: Schedule, ended: Mapping[Action, float], travel: float
) -> float | None:
    """Return when an action may begin; None if one of its inputs has not been computed yet."""
    ready = 0.0
    for need in needs(action, schedule.stages):
        if need not in ended:
            return None
        # With one rank, or for two chunks of one rank, nothing travels.
        away = (need.stage - action.stage) % len(schedule.ranks) != 0
        ready = max(ready, ended[need] + (travel if away else 0.0))
    return ready


def _check_complete(schedule: Schedule) -> None:
    halves = (
        (ActionKind.INPUT, ActionKind.WEIGHT)
        if schedule.splits_backward
        else (ActionKind.BACKWARD,)
    )
    p = len(schedule.ranks)
    for rank, actions in enumerate(schedule.ranks):
        expected = {
            Action(kind, stage, micro_batch)
            for kind in (ActionKind.FORWARD, *halves)
            for stage in range(rank, schedule.stages, p)
            for micro_batch in range(schedule.micro_batches)
        }
        found = set(actions)
        if found != expected or len(actions) != len(found):
            wrong = sorted(map(str, found ^ expected))[:5]
            raise UsageError(
                f"expected each of {len(expected)} actions once on rank {rank} of the schedule "
                f"{schedule.name!r}, found {len(actions)} actions; these differ: {wrong}"
            )


def _deadlock(schedule: Schedule, done: list[int], ended: Mapping[Action, float]) -> str:
    stuck = [
        f"rank {rank} at {actions[count]} waits for "
        + ", ".join(str(n) for n in needs(actions[count], schedule.stages) if n not in ended)
        for rank, (actions, count) in enumerate(zip(schedule.ranks, done, strict=True))
        if count < len(actions)
    ]
    return (
        f"expected a schedule that ends, found ranks that wait for each other: {'; '.join(stuck)}"
    )


@dataclass(frozen=True, slots=True)
class Formula:
    """A promised makespan.

    Attributes:
        text: the formula: p ranks, m micro-batches, v chunks per rank; F and B are the durations
            of forward and backward over all chunks of a rank.
        value: the makespan, in the unit of the durations.
    """

    text: str
    value: float


def promised(schedule: Schedule, durations: Mapping[ActionKind, float]) -> Formula | None:
    """Return the makespan that is promised for a schedule, or None where no formula holds.

    Sources: GPipe and 1F1B: Narayanan et al. 2021 (arXiv 2104.04473), section 2.2.1; interleaved:
    its section 2.2.2, where p divides m; ZB-H1: Qi et al. 2023 (arXiv 2401.10241), section 2.3,
    where its three kinds take equally long and there are at least p micro-batches.
    """
    formula = _FORMULAS.get(schedule.name)
    return None if formula is None else formula(schedule, durations)


def _whole(schedule: Schedule, durations: Mapping[ActionKind, float]) -> Formula:
    p, m = len(schedule.ranks), schedule.micro_batches
    both = durations[ActionKind.FORWARD] + durations[ActionKind.BACKWARD]
    return Formula("(m+p-1)(F+B)", (m + p - 1) * both)


def _interleaved(schedule: Schedule, durations: Mapping[ActionKind, float]) -> Formula | None:
    p, m = len(schedule.ranks), schedule.micro_batches
    if m % p:
        return None
    both = durations[ActionKind.FORWARD] + durations[ActionKind.BACKWARD]
    return Formula("(m+(p-1)/v)(F+B)", (m * schedule.stages // p + p - 1) * both)


def _zero_bubble(schedule: Schedule, durations: Mapping[ActionKind, float]) -> Formula | None:
    p, m = len(schedule.ranks), schedule.micro_batches
    forward = durations[ActionKind.FORWARD]
    equal = forward == durations[ActionKind.INPUT] == durations[ActionKind.WEIGHT]
    return Formula("(3m+p-1)F", (3 * m + p - 1) * forward) if equal and m >= p else None


_FORMULAS: dict[str, Callable[[Schedule, Mapping[ActionKind, float]], Formula | None]] = {
    "gpipe": _whole,
    "1f1b": _whole,
    "interleaved": _interleaved,
    "zb-h1": _zero_bubble,
}
