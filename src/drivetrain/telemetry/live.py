"""The newest figures of a run in a few words, for the bar of its loop."""

from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

from drivetrain.log import Bar
from drivetrain.telemetry.figures import StepFigures

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
