"""The clock of a step: every moment belongs to one section, or to waiting for other ranks."""

import time
from collections.abc import Callable

from drivetrain.runtime.board import board


class StepClock:
    """Sums up the seconds of each section since the last cut.

    Args:
        waited: returns the seconds that this process has waited for collectives so far; they do
            not count for the section in which they passed.

    Attributes:
        section: the name of the section at hand; "" before the first one.
    """

    def __init__(self, waited: Callable[[], float]) -> None:
        self._waited = waited
        self._sections: dict[str, float] = {}
        self.section = ""
        self._cut_at = self._entered_at = time.perf_counter()
        self._waited_at = waited()

    def enter(self, section: str) -> None:
        """Leave the section at hand, and enter another one; time before the first is nobody's."""
        now, waited = time.perf_counter(), self._waited()
        if self.section:
            # Threads besides the program's own may wait, too: never less than nothing is left.
            passed = max(0.0, now - self._entered_at - (waited - self._waited_at))
            self._sections[self.section] = self._sections.get(self.section, 0.0) + passed
        else:
            self._cut_at = now
        if section != self.section:
            board.enter(section)
        self.section, self._entered_at, self._waited_at = section, now, waited

    def cut(self) -> tuple[float, dict[str, float]]:
        """Return the seconds since the last cut, in all and by section; the next step begins."""
        self.enter(self.section or "other")
        seconds, self._cut_at = self._entered_at - self._cut_at, self._entered_at
        sections, self._sections = self._sections, {}
        return seconds, sections
