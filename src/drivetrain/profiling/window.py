"""The profiled steps of a run, as ``--profile STEPS`` names them."""

import re
from dataclasses import dataclass

from drivetrain.errors import ConfigError

WARM_UP = 2
"""Steps left out before the profile where only a number is given: they allocate and tune."""

_FORM = re.compile(r"(\d+)|(\d*):(\d+)")


@dataclass(frozen=True, slots=True)
class StepWindow:
    """The profile begins after ``skipped`` optimizer steps and ends after step ``last``."""

    skipped: int
    last: int

    @classmethod
    def parse(cls, text: int | str) -> "StepWindow":
        """Read ``5``, which profiles five steps after two that warm up, or ``10:15``.

        ``10:15`` skips ten steps and profiles the next five, as a slice of Python does.

        Raises:
            ConfigError: another text, or no step.
        """
        found = _FORM.fullmatch(str(text).strip())
        if found is not None:
            count, first, last = found.groups()
            window = (
                cls(WARM_UP, WARM_UP + int(count))
                if count is not None
                else cls(int(first or 0), int(last))
            )
            if window.last > window.skipped:
                return window
        raise ConfigError(
            f"profile.steps: expected a number of steps, such as 5, or the begin and end of some, "
            f"such as 10:15, found {text!r}; 5 profiles five steps after two that warm up, 10:15 "
            "skips ten steps and profiles the next five"
        )

    @property
    def count(self) -> int:
        """How many steps are profiled."""
        return self.last - self.skipped

    def __str__(self) -> str:
        first = self.skipped + 1
        return f"steps {first} to {self.last}" if self.count > 1 else f"step {first}"
