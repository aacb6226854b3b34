"""Runs a schedule on paper: proves that it ends, and tells its time, idle time and memory.

The simulation knows nothing of the generators: it reads the lists of actions and the data that
flows between stages. Receives wait; sends do not.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from drivetrain.errors import UsageError
from drivetrain_megatron.pipeline.actions import Action, Kind, Schedule, needs

UNIT_DURATIONS: Mapping[Kind, float] = {
    Kind.FORWARD: 1.0,
    Kind.BACKWARD: 2.0,
    Kind.INPUT: 1.0,
    Kind.WEIGHT: 1.0,
}
"""Backward multiplies matrices twice as often as forward, once for each of its halves."""


@dataclass(frozen=True, slots=True)
class Span:
    """When an action ran.

    Attributes:
        action: the action.
        start: seconds, or units of time, since the step began.
        stop: when it ended.
    """

    action: Action
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """When every rank did what: worked out by ``simulate``, or measured.

    Attributes:
        ranks: the spans of each rank, in order. A measured one may lack actions.
    """

    ranks: tuple[tuple[Span, ...], ...]

    @property
    def start(self) -> float:
        """When the first action of all ranks begins; 0 without any."""
        return min((span.start for rank in self.ranks for span in rank), default=0.0)

    @property
    def makespan(self) -> float:
        """Time from the first begin to the last end over all ranks; 0 without any action."""
        stop = max((span.stop for rank in self.ranks for span in rank), default=0.0)
        return stop - self.start

    @property
    def idle(self) -> float:
        """The share of all ranks' time in which they wait, from 0 to 1."""
        return self._idle(self.ranks)

    def idle_of(self, rank: int) -> float:
        """Return the share of the makespan in which a rank waits, from 0 to 1."""
        return self._idle(self.ranks[rank : rank + 1])

    def kept(self, rank: int) -> int:
        """Return how many micro-batches of its stages a rank keeps at most."""
        kept = most = 0
        for span in self.ranks[rank]:
            kept += span.action.kind is Kind.FORWARD
            most = max(most, kept)
            kept -= span.action.kind.frees
        return most

    def _idle(self, ranks: tuple[tuple[Span, ...], ...]) -> float:
        time = self.makespan * len(ranks)
        busy = sum(span.stop - span.start for rank in ranks for span in rank)
        return 1.0 - busy / time if time else 0.0


def simulate(
    schedule: Schedule, durations: Mapping[Kind, float] = UNIT_DURATIONS, *, travel: float = 0.0
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
    """Return when an action may begin; None if what it needs has not been computed yet."""
    ready = 0.0
    for need in needs(action, schedule.stages):
        if need not in ended:
            return None
        # With one rank, or for two chunks of one rank, nothing travels.
        away = (need.stage - action.stage) % len(schedule.ranks) != 0
        ready = max(ready, ended[need] + (travel if away else 0.0))
    return ready


def _check_complete(schedule: Schedule) -> None:
    halves = (Kind.INPUT, Kind.WEIGHT) if schedule.splits_backward else (Kind.BACKWARD,)
    p = len(schedule.ranks)
    for rank, actions in enumerate(schedule.ranks):
        expected = {
            Action(kind, stage, micro_batch)
            for kind in (Kind.FORWARD, *halves)
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
