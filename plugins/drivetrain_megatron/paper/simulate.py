"""Runs a schedule on paper: proves its end, and tells its time, idle time and memory.

The simulation knows nothing of the generators: it reads the lists of actions and the data that
flows between stages. Receives wait; sends do not.
"""

from collections.abc import Mapping

from drivetrain.errors import UsageError
from drivetrain_megatron.pipeline.actions import Action, ActionKind, Schedule, needs
from drivetrain_megatron.pipeline.timeline import Span, Timeline

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
    """Run a schedule on paper.

    Args:
        schedule: what every rank does.
        durations: how long an action of each kind takes, on every stage.
        travel: how long a message between two ranks is under way.

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
