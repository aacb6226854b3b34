"""The least time and memory of a layout, and the simulated step of data parallelism.

Draws the step of data parallelism: the divided state decides about the messages.

Volumes follow Rajbhandari et al. 2020 (arXiv 1910.02054), section 7.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Any, Generic, NamedTuple, TypeVar

from drivetrain.collectives.neighbors import arrivals_bytes
from drivetrain.collectives.ring import PIECE_BYTES
from drivetrain.errors import ConfigError
from drivetrain.simulator.step import (
    ARRIVALS,
    COMPUTE,
    FP8,
    LENT,
    STORE_LANES,
    Collective,
    MemoryPass,
    Operation,
    Prices,
    SimulatedRun,
    SimulatedStep,
    SimulatedTask,
    SimulatedUnit,
    Stored,
)

# --- the least time and memory of a layout, from the costs of its units ---

Draw = Callable[[Sequence[SimulatedUnit], SimulatedRun], SimulatedStep]


@dataclass(frozen=True, slots=True)
class StepBound:
    """The least time and memory of a layout.

    Attributes:
        seconds: of a step.
        nbytes: of memory, on the rank that needs most.
    """

    seconds: float
    nbytes: float


@dataclass(frozen=True, slots=True)
class UnitCost:
    """The cost of a unit for its rank.

    Attributes:
        each: seconds by lane, for every micro-batch.
        once: seconds by lane, for every step.
        held: bytes between steps.
        kept: bytes of activations of a micro-batch.
        during: the most bytes of a moment.
    """

    each: Mapping[str, float]
    once: Mapping[str, float]
    held: float
    kept: float
    during: float

    @property
    def compute(self) -> float:
        """Seconds of compute of a micro-batch."""
        return self.each.get(COMPUTE, 0.0)


@dataclass
class UnitCosts:
    """The costs of units, each computed once."""

    prices: Prices
    _known: dict[Any, UnitCost] = field(default_factory=dict, repr=False)

    def of(
        self, units: Sequence[SimulatedUnit], key: Any, draw: Draw, run: SimulatedRun
    ) -> list[tuple[UnitCost, int]]:
        """Return the costs of the distinct units, and how often each one occurs.

        Args:
            units: equal ones are the same object.
            key: equal wherever ``draw`` draws the same.
            draw: draws the step of units.
            run: its number of micro-batches does not count.
        """
        found = []
        for unit, count in Counter(units).items():
            place = (unit, key, run.axes.get("dp", 1), run.precision, run.far)
            if place not in self._known:
                self._known[place] = self._computed(unit, draw, run)
            found.append((self._known[place], count))
        return found

    def _computed(self, unit: SimulatedUnit, draw: Draw, run: SimulatedRun) -> UnitCost:
        one, two = (draw([unit], replace(run, micro_batches=count)) for count in (1, 2))
        first, second = self._busy(one), self._busy(two)
        each = {lane: second[lane] - first.get(lane, 0.0) for lane in second}
        once = {lane: first[lane] - each[lane] for lane in first}
        takes = max((task.takes for task in one.tasks if task.phase == "forward"), default=0.0)
        during = max(task.during for task in one.tasks)
        # Units share some buffers, and gradients may be missing until backward: not every moment
        # of a step has them, so a bound leaves them out.
        held = sum(count for kind, count in one.held[0].items() if kind not in (LENT, ARRIVALS))
        missing = sum(min(0.0, task.takes) for task in one.tasks)
        return UnitCost(each, once, held + missing, takes, during)

    def _busy(self, step: SimulatedStep) -> Mapping[str, float]:
        busy: Counter[str] = Counter()
        for task in step.tasks:
            busy[task.lane] += self.prices.seconds(task)  # type: ignore[assignment]
        return busy


def stage_bound(
    costs: Sequence[tuple[UnitCost, int]], micro_batches: int, in_flight: float
) -> StepBound:
    """Return the bound of a rank with units in sequence.

    Args:
        costs: of distinct units, with the number of each.
        micro_batches: of a step.
        in_flight: micro-batches whose activations are kept at a time.
    """
    lanes: Counter[str] = Counter()
    for cost, count in costs:
        for lane, seconds in cost.each.items():
            lanes[lane] += count * micro_batches * seconds  # type: ignore[assignment]
        for lane, seconds in cost.once.items():
            lanes[lane] += count * seconds  # type: ignore[assignment]
    held = sum(count * cost.held for cost, count in costs)
    kept = sum(count * cost.kept for cost, count in costs)
    # Backward begins with the last unit, when everything is kept.
    first, _ = costs[-1]
    at_turn = in_flight * kept + first.during
    later = (in_flight - 1) * kept + max(cost.during for cost, _ in costs)
    return StepBound(max(lanes.values()), held + max(at_turn, later))


# --- how often units are gathered in a forward and its backward ---

KeyT = TypeVar("KeyT", bound=Hashable)


class UnitUse(NamedTuple, Generic[KeyT]):
    """A module that needs a unit in forward.

    Attributes:
        key: the unit's.
        read_back: whether its backward reads values again.
    """

    key: KeyT
    read_back: bool


def times_again(uses: Sequence[UnitUse[KeyT]], spared: int | None) -> Counter[KeyT]:
    """Return how often each unit is gathered after its first time in a forward with its backward.

    Args:
        uses: of units, in the order of forward.
        spared: how many units are not freed because forward ends and backward begins with them;
            None: all, which are freed behind a use in backward alone.
    """
    live = set(list(dict.fromkeys(use.key for use in reversed(uses)))[:spared])
    gathers = Counter(use.key for use in (uses if spared is not None else ()))
    gathers.subtract(set(gathers))
    for use in reversed(uses):
        if not use.read_back:
            continue
        if use.key in live:
            live.discard(use.key)  # freed when its backward is over
        else:
            gathers[use.key] += 1
    return gathers


# --- draws the step of data parallelism ---

AXIS = "dp"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """How the ranks of the data-parallel axis share the state of a model.

    Attributes:
        optimizer: whether optimizer state is divided.
        gradients: whether gradients are divided: they are then reduced after every micro-batch.
        parameters: whether parameters are divided, and gathered unit by unit.
        keeps: whether gathered parameters stay whole from forward to backward.
        ahead: units that are gathered while another one computes.
        whole_below: elements below which a parameter stays whole, though parameters are divided.
        group: how many neighbors divide the state; 0 for all ranks of the axis.
        secondary: whether the ranks of each of several hosts keep all parameters together, and
            gather among themselves.
        fused: whether one kernel makes the optimizer's update in one pass.
        lent: buffers that whole gradients pass through on their way to their owners; 0: gradients
            stay where they come.
        bucket: most bytes of the parameters whose gradients are sent together; 0: those of a unit.
        stored: what lies in stores between its uses.
    """

    optimizer: bool = False
    gradients: bool = False
    parameters: bool = False
    keeps: bool = False
    ahead: int = 1
    whole_below: int = 0
    group: int = 0
    secondary: bool = False
    fused: bool = False
    lent: int = 0
    bucket: int = 0
    stored: Stored = Stored()


def data_parallel_step(
    units: Sequence[SimulatedUnit], run: SimulatedRun, sharing: Sharing | None = None
) -> SimulatedStep:
    """Return the step of one rank that trains units on its share of the batch.

    Args:
        units: in the order of forward.
        run: see there.
        sharing: what is divided; nothing by default.

    Raises:
        ConfigError: groups do not divide the ranks.
    """
    sharing = sharing or Sharing()
    ranks = run.axes.get(AXIS, 1)
    if sharing.group and ranks % sharing.group:
        raise ConfigError(
            f"expected groups that divide the {ranks} ranks of {AXIS!r}, found groups of "
            f"{sharing.group} ranks that share one copy; change shard_group, or the ranks"
        )
    return _StepBuilder(units, run, sharing).step()


@lru_cache(maxsize=4096)
def _backward(unit: SimulatedUnit, each: int) -> tuple[Operation, ...]:
    """Return the operations of backward, and the copy of gradients into a buffer of messages."""
    if not (unit.elements and each):
        return unit.computed_backward
    return (*unit.computed_backward, MemoryPass(2.0 * unit.elements * each, 0))


def _runs(
    units: Sequence[SimulatedUnit], *, alone: bool
) -> Iterator[tuple[int, int, SimulatedUnit]]:
    """Yield (index, count, unit): equal neighbors together, unless each is on its own."""
    for _, equal in groupby(enumerate(units), key=lambda each: each[0] if alone else id(each[1])):
        (index, unit), *others = equal
        yield index, 1 + len(others), unit


def _all_gather(
    unit: SimulatedUnit,
    line: str,
    nbytes: float,
    after: Sequence[int],
    phase: str = "",
    index: int = 0,
) -> SimulatedTask:
    """Return the task of a gather of a unit's values, in a micro-batch or before all of them."""
    message, name = Collective(line, "all_gather", nbytes), f"gather {unit.name}"
    return SimulatedTask(name, (message,), line, tuple(after), phase=phase, micro_batch=index)


@dataclass
class _StepBuilder:
    units: Sequence[SimulatedUnit]
    run: SimulatedRun
    sharing: Sharing
    tasks: list[SimulatedTask] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ranks = self.run.axes.get(AXIS, 1)
        self.group = self.sharing.group or self.ranks
        self.near = AXIS if self.group == self.ranks else f"{AXIS}.near"
        self.together = self.run.together(AXIS)
        self.far = self.run.far if self.together < self.ranks else None
        self.secondary = self.sharing.secondary and self.together < self.ranks
        self.gathers = self.sharing.parameters and self.group > 1
        # Whether a gradient's memory is taken when backward reaches it: no buffer waits for it.
        self.come_late = self.ranks == 1 and not self.sharing.optimizer
        self.elements = sum(unit.elements for unit in self.units)
        self.parts = self.group if self.sharing.optimizer else 1  # that state is divided into

    def step(self) -> SimulatedStep:
        m = self.run.micro_batches
        arriving = self._arriving()
        if self.come_late:
            gone = -self.elements * self.run.bytes.gradient
            self._add(SimulatedTask("no gradients yet", takes=float(gone)))
        for index in range(m):
            self._forward(index, arriving if index == 0 else {})
            self._backward(index)
        self._update()
        inside = (self.far or self.secondary) and self.group == self.ranks
        near = self.together if inside else self.group
        axes = {**self.run.axes, f"{AXIS}.near": near, f"{AXIS}.far": self.ranks // near}
        held, stored = self._tiers()
        return SimulatedStep(self.tasks, [held], axes, [stored])

    # --- the phases of a step ---

    def _arriving(self) -> dict[int, int]:
        """Update stored state and gather updated parameters; forward waits for each unit."""
        divides = self.sharing.optimizer and self.group > 1
        stored = self.sharing.stored
        found: dict[int, int] = {}
        for index, unit in enumerate(self.units):
            if not unit.elements:
                continue
            before: list[int] = []
            if stored.part:
                elements = unit.elements * stored.part / self.parts
                tasks = stored.update(unit, elements, self.run.bytes, len(self.tasks))
                ended = [self._add(task) for task in tasks]
                before = [] if stored.delayed else ended[-1:]
            if divides and (elements := self._whole_of(unit)):
                nbytes = elements * self.run.bytes.parameter
                before = [self._add(_all_gather(unit, self.near, nbytes, before))]
            if self.secondary and (elements := unit.elements - self._whole_of(unit)):
                part = elements * self.run.bytes.parameter / self.together
                before = [self._add(_all_gather(unit, f"{AXIS}.far", part, before))]
            if before:
                found[index] = before[0]
        return found

    def _forward(self, index: int, arriving: dict[int, int]) -> None:
        if weights := sum(len(self._in_bytes(unit)) for unit in self.units):
            # Each weight is scaled by its largest magnitude on all ranks.
            message = Collective(self.near, "all_reduce", 4.0 * weights)
            task = SimulatedTask("largest magnitudes", (message,), self.near, phase="forward")
            task.micro_batch = index
            self._add(task)
        for at, count, unit in _runs(self.units, alone=bool(arriving) or self.gathers):
            after = [arriving[at]] if at in arriving else []
            if self.gathers:
                after = self._bring(unit, "forward", index, after)
            task = SimulatedTask(unit.name, unit.forward, after=tuple(after), phase="forward")
            task.micro_batch, task.repeat = index, count
            task.takes, task.during = count * unit.kept, self._whole(at, 1)
            self._add(task)

    def _backward(self, index: int) -> None:
        last = index == self.run.micro_batches - 1
        reduces = self.ranks > 1 and (self.sharing.gradients or last)
        bucket = 0
        for at, count, unit in reversed(list(_runs(self.units, alone=reduces or self.gathers))):
            after = self._bring(unit, "backward", index) if self._gathered_again[at] else []
            nbytes = self.run.bytes.gradient if reduces else 0
            task = SimulatedTask(unit.name, _backward(unit, nbytes), after=tuple(after))
            task.phase, task.micro_batch, task.repeat = "backward", index, count
            task.frees = count * unit.kept
            task.during = unit.transient + self._passing(unit, index) + self._whole(at, -1)
            if self.come_late and index == 0:
                task.takes = float(count * unit.elements * self.run.bytes.gradient)
            computed = self._add(task)
            bucket += unit.elements if reduces else 0
            if bucket and (at == 0 or bucket * self.run.bytes.parameter >= self.sharing.bucket):
                self._reduce(unit.name, bucket, computed, index, last=last)
                bucket = 0

    def _reduce(self, name: str, elements: int, computed: int, index: int, *, last: bool) -> None:
        after = computed
        for lane, operations in self._sums(elements * self.run.bytes.gradient, last=last):
            task = SimulatedTask(f"reduce {name}", operations, lane, (after,))
            task.phase, task.micro_batch = "backward", index
            after = self._add(task)

    def _sums(self, nbytes: float, *, last: bool) -> Iterator[tuple[str, tuple[Operation, ...]]]:
        """Yield the lane and the operations of each message of a sum of gradients."""
        operation = "reduce_scatter" if self.sharing.optimizer else "all_reduce"
        whole, replicas = self.group == self.ranks, self.group < self.ranks and last
        if self.far and whole:
            hosts = self.ranks // self.together
            divided = self.sharing.optimizer
            yield from self.far.messages(AXIS, nbytes, self.together, hosts, divided=divided)
            return
        if self.group > 1:
            yield self.near, (Collective(self.near, operation, nbytes),)
        part, copies = nbytes / self.group, self.ranks // self.group
        if replicas and self.far:
            yield from self.far.messages(AXIS, part, 1, copies, divided=False)
        elif replicas:
            yield f"{AXIS}.far", (Collective(f"{AXIS}.far", "all_reduce", part),)

    def _update(self) -> None:
        beside = {COMPUTE, *STORE_LANES}
        reduced = [index for index, task in enumerate(self.tasks) if task.lane not in beside]
        parts = self.parts
        elements = self.elements / parts * (1 - self.sharing.stored.part)
        kind = "fused update" if self.sharing.fused else "update"
        tensors = -(-sum(len(unit.sizes) for unit in self.units) // parts)
        update = MemoryPass(elements * self.run.bytes.update, 0, kind=kind, starts=tensors)
        # The norm of the gradients is a sum over all of them.
        task = SimulatedTask("update", (update,), after=tuple(reduced[-len(self.units) :]))
        # Results in between of an optimizer that is not fused, in fp32: torch's AdamW makes the
        # root of the second moment of all parameters at once, on a processor that and a quotient
        # of one parameter after the other.
        longest = max((unit.longest for unit in self.units), default=0)
        if longest and not self.sharing.fused:
            task.during = 4.0 * (2 * longest if self.run.on_host else self.elements / parts)
        self._add(task)

    # --- pieces ---

    @cached_property
    def _gathered_again(self) -> Counter[int]:
        """The units that are freed behind forward, and that backward reads.

        The last units of forward stay, since backward begins with them. What lies outside of the
        blocks stays from its first use to the end of backward.
        """
        if not self.gathers or self.sharing.keeps:
            return Counter()
        freed = [
            UnitUse(index, unit.read_in_backward)
            for index, unit in enumerate(self.units)
            if unit.repeated and unit.elements > self._whole_of(unit)
        ]
        return times_again(freed, 1 + self.sharing.ahead)

    def _whole_of(self, unit: SimulatedUnit) -> int:
        """Return the elements of a unit that every rank has whole between steps."""
        if not self.sharing.parameters:
            return unit.elements
        return sum(size for size in unit.sizes if size < self.sharing.whole_below)

    def _in_bytes(self, unit: SimulatedUnit) -> Sequence[int]:
        """Return the elements of each weight that is gathered in 8 bits."""
        others = any(size > 1 for axis, size in self.run.axes.items() if axis.split(".")[0] != AXIS)
        kept = self.secondary or self.sharing.stored.part or self.sharing.stored.parameters
        if not self.gathers or others or kept or self.run.precision != FP8:
            return ()
        return [each for each in unit.narrow if each >= self.sharing.whole_below]

    def _bring(
        self, unit: SimulatedUnit, phase: str, index: int, values: Sequence[int] = ()
    ) -> list[int]:
        """Gather a unit beside the unit before it, not earlier: its memory is limited."""
        elements = unit.elements - self._whole_of(unit)
        if not elements:
            return list(values)
        before = [*self.computed[-2:-1], *values]
        each = self.run.bytes.parameter
        nbytes = elements * each - min(elements, sum(self._in_bytes(unit))) * (each - 1)
        for task in self.sharing.stored.fetch(unit, nbytes / self.group, len(self.tasks)):
            task.after = (*task.after, *before)
            task.phase, task.micro_batch = phase, index
            before = [self._add(task)]
        line = f"{AXIS}.near" if self.secondary else self.near
        return [self._add(_all_gather(unit, line, nbytes, before, phase, index))]

    def _whole(self, at: int, direction: int) -> float:
        """Return the bytes of whole units: the computing unit, and units on their way."""
        if not self.gathers:
            return 0.0
        last = at + direction * self.sharing.ahead
        first, last = max(0, min(at, last)), max(at, last)
        units = self.units[first : last + 1]
        elements = sum(unit.elements for unit in units) + self.units[at].borrowed
        on_their_way = sum(sum(self._in_bytes(unit)) for unit in units)
        return float(elements * self.run.bytes.parameter + on_their_way)

    def _passing(self, unit: SimulatedUnit, index: int) -> float:
        """Return the bytes of gradients that are on their way while a unit runs backward.

        Where a parameter's gradient has its place already, autograd makes another tensor, which is
        added there; at that time one gradient of an activation is left.
        """
        if self.come_late and index == 0:
            return unit.passing
        return max(unit.passing, unit.passing / 2 + unit.longest * self.run.bytes.gradient)

    def _tiers(self) -> tuple[dict[str, float], Mapping[str, float]]:
        """Return the bytes on the device by kind, and those in stores."""
        each, elements, sharing, group = self.run.bytes, self.elements, self.sharing, self.group
        whole = sum(map(self._whole_of, self.units))
        kept = (elements - whole) / self.together if self.secondary else 0
        held: dict[str, float] = {
            "parameters": (whole + (elements - whole) / group + kept) * each.parameter,
            "gradients": elements * each.gradient / (group if sharing.gradients else 1),
            "optimizer": elements * each.optimizer / self.parts,
        }
        stored, gradients = sharing.stored, elements * each.gradient / self.parts
        there = stored.held(held["optimizer"], gradients, held["parameters"])
        held["optimizer"] *= 1 - stored.part
        if sharing.gradients:
            held["gradients"] *= 1 - stored.part
        if stored.parameters:
            held["parameters"] = 0.0
        if self.ranks > 1:
            held |= self._buffers()
        if self.far:
            near = self.together if group == self.ranks else group
            held["errors of links"] = 4.0 * elements * self.far.held / near
        return held, there

    def _buffers(self) -> dict[str, float]:
        """Return the bytes of buffers that units use in turn, by kind."""
        sharing, each = self.sharing, self.run.bytes.gradient
        blocks = [unit.elements for unit in self.units if unit.repeated]
        longest = max(blocks or [unit.elements for unit in self.units], default=0) * each
        total = self.elements * each
        if sharing.bucket:
            longest = min(sharing.bucket * each // self.run.bytes.parameter, total)
        pieces = -(-total // longest) if longest else 0
        found: dict[str, float] = {LENT: min(sharing.lent, pieces) * longest}
        if self.run.on_host:
            chunk = (longest if sharing.lent else total) // self.ranks
            found[ARRIVALS] = arrivals_bytes(min(PIECE_BYTES, chunk))
        return {kind: nbytes for kind, nbytes in found.items() if nbytes}

    def _add(self, task: SimulatedTask) -> int:
        self.tasks.append(task)
        if task.lane == COMPUTE:
            self.computed.append(len(self.tasks) - 1)
        return len(self.tasks) - 1
