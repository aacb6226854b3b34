"""The seconds of a backward, measured in training, for a choice of methods for slow links.

``links.far: auto`` chooses at ``prepare()``, before any backward; without ``links.backward_s`` the
choice counts on nothing to hide behind. So the first steps tell the figure for the next start.
"""

from collections.abc import Callable

from drivetrain.strategy import Run
from drivetrain.telemetry.figures import StepFigures
from drivetrain.telemetry.link import COUNTED, WARM_UP

BACKWARD = "backward"
"""The section of a step that counts; see ``drivetrain.telemetry.figures.SECTIONS``."""


class BackwardTime:
    """Says once how long a backward takes on this rank, without its waiting for other ranks.

    Args:
        run: the run of the strategy.
        say: shows a line.
    """

    def __init__(self, run: Run, say: Callable[[str], None]) -> None:
        self._run, self._say = run, say
        self._steps = 0
        self._seconds = 0.0

    @classmethod
    def wanted(cls, run: Run) -> bool:
        """Whether a choice is open that such a figure changes, and records can tell the figure.

        Records have the times of the host: an accelerator may still compute when it goes on.
        """
        auto = run.links.auto
        undeclared = auto is not None and not auto.backward_s
        return undeclared and run.world.spans_hosts and run.world.device.type == "cpu"

    def take(self, figures: StepFigures) -> None:
        """Take the record of a step."""
        self._steps += figures.steps
        if not WARM_UP < self._steps <= WARM_UP + COUNTED:
            return
        self._seconds += figures.sections.get(BACKWARD, 0.0)
        if self._steps == WARM_UP + COUNTED:
            self._tell()

    def _tell(self) -> None:
        mean_s = self._seconds / (COUNTED * self._run.accumulation)
        self._say(
            f"between hosts, auto: a backward takes {mean_s:.3g} s on rank 0 without waiting, the "
            f"mean of {COUNTED} steps; the methods were chosen as if no traffic could hide behind "
            f"it: links.backward_s={mean_s:.3g} lets the next start count on that"
        )
