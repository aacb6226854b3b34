"""Bounds of a step from below, without playing: the busy time of each unit's lanes.

A search sketches thousands of layouts with them. No lane can be quicker than all of its work.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from drivetrain.paper.run import PaperRun
from drivetrain.paper.step import ARRIVALS, COMPUTE, LENT, PaperStep, Prices
from drivetrain.paper.work import PaperUnit

Draw = Callable[[Sequence[PaperUnit], PaperRun], PaperStep]


@dataclass(frozen=True, slots=True)
class PaperBound:
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
        self, units: Sequence[PaperUnit], key: Any, draw: Draw, run: PaperRun
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

    def _computed(self, unit: PaperUnit, draw: Draw, run: PaperRun) -> UnitCost:
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

    def _busy(self, step: PaperStep) -> Mapping[str, float]:
        busy: Counter[str] = Counter()
        for task in step.tasks:
            busy[task.lane] += self.prices.seconds(task)  # type: ignore[assignment]
        return busy


def stage_bound(
    costs: Sequence[tuple[UnitCost, int]], micro_batches: int, in_flight: float
) -> PaperBound:
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
    return PaperBound(max(lanes.values()), held + max(at_turn, later))
