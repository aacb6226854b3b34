"""A step on paper: tasks with their lanes, their order, and the memory they take and free; played.

A strategy draws the graph once. The bytes held and sent follow from it, and, with a description of
the hardware, the time, the peak of memory and the picture.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from drivetrain.errors import ConfigError, UsageError
from drivetrain.paper.run import BytesPerElement
from drivetrain.paper.work import Collective, HostPass, Operation, PaperUnit, TierCopy

COMPUTE = "compute"
"""The lane of kernels; every axis has a lane of its own, named like the axis."""

LENT, ARRIVALS = "lent", "receive buffers"
"""Kinds of held bytes that all units use in turn: buffers of gradients and of messages."""


@dataclass(slots=True)
class PaperTask:
    """A piece of a rank's work, or a collective beside it.

    Attributes:
        name: for pictures.
        operations: run one after the other; a collective among the operations of the lane
            ``compute`` makes the rank wait.
        lane: ``compute``, or the axis over which a collective runs beside compute. The tasks of a
            lane run in the order of the step.
        after: indices of tasks of the step that must have ended.
        stage: which of the ranks that a step describes runs it: its pipeline stage.
        takes: bytes of memory from the start of the task on.
        frees: bytes given back when it ends.
        during: bytes that exist only while it runs.
        repeat: how often the operations run.
        phase: ``forward``, ``backward``, or nothing for work of the whole step.
        micro_batch: which one the phase is about.
    """

    name: str
    operations: tuple[Operation, ...] = ()
    lane: str = COMPUTE
    after: tuple[int, ...] = ()
    stage: int = 0
    takes: float = 0.0
    frees: float = 0.0
    during: float = 0.0
    repeat: int = 1
    phase: str = ""
    micro_batch: int = 0


@dataclass(slots=True)
class PaperStep:
    """One optimizer step of the ranks of one data-parallel replica.

    Attributes:
        tasks: in an order in which every task comes after those it waits for, or at least so in
            each lane.
        held: bytes between steps by stage and kind.
        axes: the number of ranks of each axis.
        stored: bytes between steps in host memory and on a disk, by stage.
    """

    tasks: list[PaperTask]
    held: Sequence[Mapping[str, float]]
    axes: Mapping[str, int] = field(default_factory=dict)
    stored: Sequence[Mapping[str, float]] = ()

    def sent(self) -> Sequence[Mapping[tuple[str, str], float]]:
        """Return the bytes that a rank of each stage sends, by axis or link, and operation."""
        stages: list[Counter[tuple[str, str]]] = [Counter() for _ in self.held]
        for task in self.tasks:
            for operation in task.operations:
                if isinstance(operation, Collective):
                    ranks = self.axes.get(operation.axis, 1)
                    key = (operation.axis, operation.operation)
                    stages[task.stage][key] += operation.sent(ranks) * task.repeat  # type: ignore[assignment]
                elif isinstance(operation, TierCopy):
                    key = (operation.link, task.lane)
                    stages[task.stage][key] += operation.nbytes * task.repeat  # type: ignore[assignment]
        return stages


# --- offloaded state: transfers over the bus and to the disk, and updates on the host ---

# Gradients go to the host when a step is taken; the processor updates unit by unit, and the next
# forward waits for each of its units (Ren et al. 2021, arXiv 2101.06840, section 4.2; Rajbhandari
# et al. 2021, arXiv 2104.07857, section 5). A step on paper begins with the updates of the step
# before.


TO_HOST, HOST, DISK, FROM_HOST = "to the host", "host", "disk", "from the host"
"""Lanes beside those of compute and of axes; the bus carries both directions at once."""

STORE_LANES = frozenset((TO_HOST, HOST, DISK, FROM_HOST))

STATE = 12
"""Bytes of masters and moments; gradients that wait beside a master are no state of a store."""

Tier: TypeAlias = Literal["", "cpu", "nvme"]
"""Where state lies: on the device, in host memory, on a disk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """State in stores between its uses.

    Attributes:
        optimizer: where the optimizer's state lies.
        parameters: where this rank's share of divided parameters lies.
        share: of the parameters whose optimizer state is stored.
        delayed: whether forward does not wait for updates, and uses values of one step before.
    """

    optimizer: Tier = ""
    parameters: Tier = ""
    share: float = 1.0
    delayed: bool = False

    @property
    def part(self) -> float:
        """Share of the optimizer's state that is not on the device."""
        return self.share if self.optimizer else 0.0

    def update(
        self, unit: PaperUnit, elements: float, each: BytesPerElement, first: int
    ) -> list[PaperTask]:
        """Return the update of this rank's share of a unit; the last task brings new values.

        Args:
            unit: for names.
            elements: of this rank's share whose state is stored.
            each: bytes of an element.
            first: the index in the step of the first task.
        """
        state = elements * min(STATE, each.optimizer)
        moved = elements * (each.gradient + each.parameter)
        chain: list[tuple[str, str, Operation]] = [
            ("gradients of", TO_HOST, TierCopy("bus", elements * each.gradient)),
            ("read", DISK, TierCopy("disk", state)),
            ("update", HOST, HostPass(2 * state + moved)),
            ("write", DISK, TierCopy("disk", state)),
            ("values of", FROM_HOST, TierCopy("bus", elements * each.parameter)),
        ]
        if self.optimizer != "nvme":
            chain = [link for link in chain if link[1] != DISK]
        return list(_tasks(chain, unit.name, first))

    def fetch(self, unit: PaperUnit, nbytes: float, first: int) -> list[PaperTask]:
        """Return the tasks that bring this rank's share of a unit's parameters to the device."""
        chain: list[tuple[str, str, Operation]] = [("fetch", FROM_HOST, TierCopy("bus", nbytes))]
        if self.parameters == "nvme":
            chain.insert(0, ("read", DISK, TierCopy("disk", nbytes)))
        return list(_tasks(chain, unit.name, first)) if self.parameters else []

    def held(self, optimizer: float, gradients: float, parameters: float) -> Mapping[str, float]:
        """Return the bytes that a rank keeps in host memory and on the disk.

        Args:
            optimizer: bytes of this rank's share of the optimizer's state.
            gradients: of its gradients.
            parameters: of its parameters.
        """
        found = {"cpu": self.part * gradients, "nvme": 0.0, "": 0.0}
        found[self.optimizer] += self.part * optimizer
        found[self.parameters] += parameters
        return {"host": found["cpu"], "disk": found["nvme"]}


def _tasks(chain: list[tuple[str, str, Operation]], name: str, first: int) -> Iterator[PaperTask]:
    for index, (verb, lane, operation) in enumerate(chain):
        after = (first + index - 1,) if index else ()
        yield PaperTask(f"{verb} {name}", (operation,), lane, after)


# --- played against prices: when each task runs, and the memory at every moment ---

# Tasks of a lane run one after the other, and start when all they wait for has ended. Collectives
# beside compute slow both down while they run together, as Galvatron measured (arXiv 2211.13878,
# section 4: factors of 1.1 to 1.3).


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


# --- as a Chrome trace: one process per stage, one row per lane ---


MICROSECONDS = 1e6


def trace_events(played: PlayedStep) -> list[dict[str, Any]]:
    """Return the events of a trace, which ``chrome://tracing`` and Perfetto read."""
    rows = sorted({(each.task.stage, each.task.lane) for each in played.tasks})
    numbers = {row: index for index, row in enumerate(rows)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": stage, "tid": number, "args": {"name": lane}}
        for (stage, lane), number in numbers.items()
    ]
    events += [
        {"ph": "M", "name": "process_name", "pid": stage, "args": {"name": f"stage {stage}"}}
        for stage in sorted({stage for stage, _ in rows})
    ]
    return events + [
        {
            "ph": "X",
            "name": each.task.name,
            "pid": each.task.stage,
            "tid": numbers[each.task.stage, each.task.lane],
            "ts": each.start * MICROSECONDS,
            "dur": (each.stop - each.start) * MICROSECONDS,
        }
        for each in played.tasks
        if each.stop > each.start
    ]


def write_trace(played: PlayedStep, path: Path) -> None:
    """Write a trace.

    Raises:
        ConfigError: the file cannot be written.
    """
    text = json.dumps({"traceEvents": trace_events(played), "displayTimeUnit": "ms"})
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write {str(path)!r}: {error.strerror or error}; choose another file"
        ) from error
