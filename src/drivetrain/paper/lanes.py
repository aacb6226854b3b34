"""Plays a step on paper against prices: when each task runs, and the memory at every moment.

Tasks of a lane run one after the other, and start when all they wait for has ended. Collectives
beside compute slow both down while they run together, as Galvatron measured (arXiv 2211.13878,
section 4: factors of 1.1 to 1.3).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Protocol, TypeAlias

from drivetrain.errors import UsageError
from drivetrain.paper.step import COMPUTE, PaperStep, PaperTask
from drivetrain.paper.stores import STORE_LANES


class Prices(Protocol):
    """How long work takes on some hardware."""

    @property
    def slowdown(self) -> float:
        """Seconds of compute lost for each second beside a collective."""
        ...

    def seconds(self, task: PaperTask) -> float:
        """Return how long a task runs alone."""
        ...


@dataclass(frozen=True, slots=True)
class PlayedTask:
    """When a task ran, in seconds from the start of the step."""

    task: PaperTask
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class PlayedStep:
    """A step that was played.

    Attributes:
        tasks: in the order of the step.
        peaks: the most bytes in use at a time, by stage.
        computing: seconds that each stage's lane of compute was busy.
    """

    tasks: Sequence[PlayedTask]
    peaks: Sequence[float]
    computing: Sequence[float]

    @property
    def seconds(self) -> float:
        """From the first start to the last end."""
        return max((each.stop for each in self.tasks), default=0.0)

    @property
    def phased(self) -> Sequence[float]:
        """Seconds of each stage's compute that belong to a micro-batch, not to the whole step."""
        totals = [0.0] * len(self.computing)
        for each in self.tasks:
            if each.task.lane == COMPUTE and each.task.phase:
                totals[each.task.stage] += each.stop - each.start
        return totals


def play(step: PaperStep, prices: Prices) -> PlayedStep:
    """Run a step on paper.

    Raises:
        UsageError: tasks wait for each other for ever.
    """
    tasks = step.tasks
    starts, stops = _played(step, prices)
    computing = [0.0] * len(step.held)
    for index, task in enumerate(tasks):
        if task.lane == COMPUTE:
            computing[task.stage] += stops[index] - starts[index]
    return PlayedStep(
        [PlayedTask(*each) for each in zip(tasks, starts, stops, strict=True)],
        _peaks(step, starts, stops),
        computing,
    )


_End: TypeAlias = tuple[float, int]
"""When a task ends, and its index."""


def _played(step: PaperStep, prices: Prices) -> tuple[list[float], list[float]]:
    """Return when each task starts and stops, in the order of time."""
    tasks = step.tasks
    needs, followers = _needs(tasks)
    starts, stops = [0.0] * len(tasks), [0.0] * len(tasks)
    stages = [_Stage(prices.slowdown) for _ in step.held]
    ends: list[tuple[float, int]] = []
    ready = [index for index, count in enumerate(needs) if not count]
    now = 0.0
    while ready or ends:
        for index in ready:
            starts[index] = now
            task = tasks[index]
            for end in stages[task.stage].start(index, task.lane, prices.seconds(task), now):
                heappush(ends, end)
        ready = []
        now, index = heappop(ends)
        task = tasks[index]
        if not stages[task.stage].is_over(index, now):
            continue
        stops[index] = now
        for end in stages[task.stage].stop(index, now):
            heappush(ends, end)
        for follower in followers[index]:
            needs[follower] -= 1
        ready = [each for each in followers[index] if not needs[each]]
    if any(needs):
        stuck = next(task.name for task, count in zip(tasks, needs, strict=True) if count)
        raise UsageError(f"expected a step that ends, found that {stuck!r} waits for ever")
    return starts, stops


def _needs(tasks: Sequence[PaperTask]) -> tuple[list[int], list[list[int]]]:
    """Return how many tasks each one waits for, and who waits for it; lanes run in order."""
    followers: list[list[int]] = [[] for _ in tasks]
    needs = [0] * len(tasks)
    last: dict[tuple[int, str], int] = {}
    for index, task in enumerate(tasks):
        before = set(task.after)
        if (previous := last.get((task.stage, task.lane))) is not None:
            before.add(previous)
        last[task.stage, task.lane] = index
        needs[index] = len(before)
        for each in before:
            followers[each].append(index)
    return needs, followers


@dataclass(slots=True)
class _UnderWay:
    """A task under way.

    Attributes:
        left: seconds that it would still take alone, at the moment ``since``.
        since: when its pace last changed.
        until: when it ends at this pace.
        pace: seconds alone per second.
    """

    left: float
    since: float
    until: float
    pace: float = 1.0


@dataclass(slots=True)
class _Stage:
    """The tasks of a stage that run at a moment: compute and collectives slow each other down."""

    slowdown: float
    computing: dict[int, _UnderWay] = field(default_factory=dict)
    beside: dict[int, _UnderWay] = field(default_factory=dict)
    apart: dict[int, _UnderWay] = field(default_factory=dict)

    def start(self, index: int, lane: str, seconds: float, now: float) -> Iterator[_End]:
        """Start a task; yield when it ends, and the new ends of tasks with another pace."""
        if lane in STORE_LANES or not self.slowdown:
            group = self.apart
        else:
            group = self.computing if lane == COMPUTE else self.beside
        group[index] = _UnderWay(seconds, now, now + seconds)
        yield now + seconds, index
        yield from self._paced(now)

    def is_over(self, index: int, now: float) -> bool:
        """Return whether a task ends now; it does not where its pace has changed meanwhile."""
        return any(index in each and each[index].until == now for each in self._groups)

    def stop(self, index: int, now: float) -> Iterator[_End]:
        """End a task; yield the new ends of tasks with another pace."""
        for group in self._groups:
            group.pop(index, None)
        yield from self._paced(now)

    @property
    def _groups(self) -> tuple[dict[int, _UnderWay], ...]:
        return self.computing, self.beside, self.apart

    def _paced(self, now: float) -> Iterator[_End]:
        for group, others in ((self.computing, self.beside), (self.beside, self.computing)):
            pace = 1 / (1 + self.slowdown * len(others))
            for index, task in group.items():
                if task.pace != pace:
                    task.left = max(0.0, task.left - (now - task.since) * task.pace)
                    task.since, task.pace = now, pace
                    task.until = now + task.left / pace
                    yield task.until, index


def _peaks(step: PaperStep, starts: Sequence[float], stops: Sequence[float]) -> list[float]:
    peaks = []
    for stage, held in enumerate(step.held):
        base = sum(held.values())
        changes: list[tuple[float, float]] = []
        for task, start, stop in zip(step.tasks, starts, stops, strict=True):
            if task.stage == stage and (task.takes or task.frees or task.during):
                changes += [(start, task.takes + task.during), (stop, -task.frees - task.during)]
        peaks.append(base + _highest(changes))
    return peaks


def _highest(changes: Iterable[tuple[float, float]]) -> float:
    level = highest = 0.0
    for _, change in sorted(changes):
        level += change
        highest = max(highest, level)
    return highest
