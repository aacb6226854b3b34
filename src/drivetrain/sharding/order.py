"""In which order units were needed the last time: what comes next can be gathered ahead.

Forward, backward and evaluation are remembered each by itself. If the order changes, the wrong unit
was gathered ahead, and nothing else happens.
"""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from drivetrain.sharding.layout import ROOT
from drivetrain.sharding.unit import Unit


class Need(NamedTuple):
    """A unit was needed.

    Attributes:
        phase: in which of the phases.
        unit: the unit.
        time: for the how manieth time: behind a tied head comes something else than behind the
            embedding.
    """

    phase: str
    unit: Unit
    time: int


class UsualOrder:
    """The order of one model's units."""

    def __init__(self) -> None:
        self._next: dict[Need, Need] = {}
        self._latest: dict[str, Need] = {}
        self._times: Counter[tuple[str, Unit]] = Counter()
        self._forward: dict[Unit, None] = {}  # in the order of the last need
        self._left: Counter[Unit] = Counter()
        self._usual: Counter[Unit] = Counter()
        self._spared: frozenset[Unit] = frozenset()

    def begin(self) -> None:
        """Begin a forward of the model."""
        self.interrupt()
        self._forward.clear()
        self._left.clear()

    def interrupt(self) -> None:
        """Forget which unit was needed last: the next one does not follow it."""
        self._latest.clear()
        self._times.clear()

    def needed(self, phase: str, unit: Unit) -> None:
        """Note that a unit is needed now, in ``forward``, ``backward`` or ``evaluation``."""
        self._times[phase, unit] += 1
        need, before = self._need(phase, unit), self._latest.get(phase)
        if before is not None:
            self._next[before] = need
        self._latest[phase] = need
        if phase == "forward" and unit.layout.key != ROOT:
            self._forward.pop(unit, None)
            self._forward[unit] = None

    def after(self, phase: str, unit: Unit, count: int) -> Iterator[Unit]:
        """Yield the units that followed one the last time, so many at most."""
        need = self._next.get(self._need(phase, unit))
        for _ in range(count):
            if need is None:
                return
            yield need.unit
            need = self._next.get(need)

    def _need(self, phase: str, unit: Unit) -> "Need":
        return Need(phase, unit, self._times[phase, unit])

    def left_for_good(self, unit: Unit) -> bool:
        """Note that a module that needed a unit ends; return whether backward begins with it."""
        self._left[unit] += 1
        # A tied layer that comes later needs it once more, and may be far away.
        return unit in self._spared and self._left[unit] >= self._usual[unit]

    def end(self, *, spared: int) -> None:
        """End a forward of the model: with so many units at its end backward begins."""
        if self._forward:
            self._spared = frozenset(list(self._forward)[-spared:])
            self._usual = self._left.copy()
