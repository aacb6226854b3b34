"""Hands the figures of a run to its trackers: means over some steps, without a line of a script."""

from drivetrain.telemetry.figures import StepFigures, merged
from drivetrain.tracking.trackers import Trackers

STEPS = 10
"""Trackers get a mean over so many optimizer steps: services limit the rate of values."""

PREFIX = "run/"


class RunFigures:
    """Collects the records of the main process's rank, and logs their means.

    Args:
        trackers: those of the run; nothing is collected before they are started.
        replicas: ranks with a batch of their own, for rates of the whole run.
    """

    def __init__(self, trackers: Trackers, replicas: int) -> None:
        self._trackers = trackers
        self._replicas = replicas
        self._begun: StepFigures | None = None

    def take(self, figures: StepFigures) -> None:
        """Log the mean of the steps since the last one, if they are enough."""
        if not self._trackers.active:
            return
        self._begun = figures if self._begun is None else merged(self._begun, figures)
        if self._begun.steps >= STEPS:
            self._trackers.log_run(values_of(self._begun, self._replicas), self._begun.step)
            self._begun = None


def values_of(figures: StepFigures, replicas: int) -> dict[str, float]:
    """Return the figures by the names that trackers know them by.

    Args:
        figures: of one rank; times and bytes become those of one step.
        replicas: ranks with a batch of their own; rates are theirs together.
    """
    steps = figures.steps
    values: dict[str, float | None] = {
        "step": float(figures.step),
        "loss": figures.loss,
        "learning_rate": figures.lr,
        "gradient_norm": figures.grad_norm,
        "loss_scale": figures.loss_scale,
        "step_seconds": figures.seconds / steps,
        "samples_per_second": figures.samples_per_second * replicas or None,
        "tokens_per_second": figures.tokens_per_second * replicas or None,
        "memory_bytes": figures.memory.get("resident"),
        "device_memory_bytes": figures.memory.get("device"),
        "sent_bytes": sum(figures.sent.values()) / steps,
        "skipped_steps": float(figures.skipped),
    }
    values |= {f"time/{name}": seconds / steps for name, seconds in figures.sections.items()}
    values |= {f"waiting/{axis}": seconds / steps for axis, seconds in figures.waiting.items()}
    values |= {name: value for name, value in figures.own.items() if name not in values}
    return {PREFIX + name: value for name, value in values.items() if value is not None}
