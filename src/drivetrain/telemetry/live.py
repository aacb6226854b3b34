"""The figures of a run while it goes on: in the bar of its loop, and as means for its trackers."""

from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

from drivetrain.log import Bar
from drivetrain.telemetry.figures import StepFigures, StepSums
from drivetrain.tracking import Trackers

T = TypeVar("T")

RECORDS = 20
"""Rates are means over so many records: over single steps they jump."""

_MEMORY = {"device": "device", "resident": "memory"}
"""Kinds of memory and their words; the first that a record has is shown."""


class LiveFigures:
    """Takes the records of rank 0.

    Args:
        replicas: how many ranks have other samples; their rates are taken to be alike.
        listen: lets a function have each record from now on.
    """

    def __init__(
        self, replicas: int, listen: Callable[[Callable[[StepFigures], None]], None]
    ) -> None:
        listen(self.add)
        self._replicas = replicas
        self._records: deque[StepFigures] = deque(maxlen=RECORDS)
        self._count = 0

    def add(self, figures: StepFigures) -> None:
        """Take the next record."""
        self._records.append(figures)
        self._count += 1

    def bar(
        self, iterable: Iterable[T], total: float | None, desc: str, every: int, disable: bool
    ) -> Bar[T]:
        """Return the iterable with a bar; see ``Accelerator.progress``."""
        figures = str if isinstance(iterable, range) else self.since_now()
        return Bar(iterable, total=total, desc=desc, disable=disable, every=every, figures=figures)

    def since_now(self) -> Callable[[], str]:
        """Return a function that gives the words, "" until the next record has come.

        So the bar of an evaluation does not show the figures of the training before it.
        """
        begun = self._count
        return lambda: self.text() if self._count > begun else ""

    def text(self) -> str:
        """Return ``loss=2.31, 5,120 tokens/s, memory 1.2 GiB``, or the parts that are known."""
        last = self._records[-1]
        parts = [] if last.loss is None else [f"loss={last.loss:.4g}"]
        seconds = sum(record.seconds for record in self._records)
        for unit in ("tokens", "samples"):
            count = sum(getattr(record, unit) for record in self._records)
            if count and seconds:
                parts.append(f"{_rounded(self._replicas * count / seconds)} {unit}/s")
                break
        kind = next((kind for kind in _MEMORY if last.memory.get(kind)), None)
        if kind is not None:
            parts.append(f"{_MEMORY[kind]} {last.memory[kind] / 2**30:.3g} GiB")
        return ", ".join(parts)


def _rounded(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


# --- for trackers ---


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
        self._sums = StepSums(lambda each: each.steps >= STEPS, self._log)

    def take(self, figures: StepFigures) -> None:
        """Log the mean of the steps since the last one, if they are enough."""
        if self._trackers.active:
            self._sums.add(figures)

    def _log(self, figures: StepFigures) -> None:
        self._trackers.log_run(values_of(figures, self._replicas), figures.step)


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
