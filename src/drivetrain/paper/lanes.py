"""Plays a step on paper against prices: when each task runs, and the memory at every moment.

Tasks of a lane run one after the other, and start when all they wait for has ended. Collectives
beside compute slow both down while they run together, as Galvatron measured (arXiv 2211.13878,
section 4: factors of 1.1 to 1.3).
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

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
    needs, followers = _needs(tasks)
    starts, stops = [0.0] * len(tasks), [0.0] * len(tasks)
    ready = [0.0] * len(tasks)
    running: dict[int, dict[str, tuple[float, float]]] = {}
    queue = deque(index for index, count in enumerate(needs) if not count)
    done = 0
    while queue:
        index = queue.popleft()
        task, start = tasks[index], ready[index]
        lanes = running.setdefault(task.stage, {})
        seconds = prices.seconds(task)
        if prices.slowdown and task.lane not in STORE_LANES:
            seconds = _beside(lanes, task.lane, start, seconds, prices.slowdown)
        starts[index], stops[index] = start, start + seconds
        lanes[task.lane] = (start, start + seconds)
        done += 1
        for follower in followers[index]:
            ready[follower] = max(ready[follower], start + seconds)
            needs[follower] -= 1
            if not needs[follower]:
                queue.append(follower)
    if done < len(tasks):
        stuck = next(task.name for task, count in zip(tasks, needs, strict=True) if count)
        raise UsageError(f"expected a step that ends, found that {stuck!r} waits for ever")
    computing = [0.0] * len(step.held)
    for index, task in enumerate(tasks):
        if task.lane == COMPUTE:
            computing[task.stage] += stops[index] - starts[index]
    return PlayedStep(
        [PlayedTask(*each) for each in zip(tasks, starts, stops, strict=True)],
        _peaks(step, starts, stops),
        computing,
    )


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


def _beside(
    lanes: dict[str, tuple[float, float]], lane: str, start: float, seconds: float, slowdown: float
) -> float:
    """Return the duration of a task that runs beside other lanes of its stage."""
    together = 0.0
    for other, (since, until) in lanes.items():
        if other != lane and COMPUTE in (lane, other) and other not in STORE_LANES:
            together += max(0.0, min(until, start + seconds) - max(since, start))
    return seconds + slowdown * together


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
