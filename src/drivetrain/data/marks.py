"""Where a loader was before an accumulation window: a resumed run begins the window again."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from drivetrain.runtime import rng
from drivetrain.runtime.gradient_state import GradientState


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a loader and all generators were before the first batch of an accumulation window.

    Attributes:
        window: its number.
        state, random: of the loader, as of ``state_dict``, and of the generators.
        at: time of the mark, on a clock of this process.
    """

    window: int
    state: dict[str, Any]
    random: rng.Snapshot = field(default_factory=rng.Snapshot)
    at: float = field(default_factory=time.perf_counter)


class Marks:
    """The mark of one loader, for the last window that it was read for."""

    def __init__(self) -> None:
        self._mark: Mark | None = None

    def of(self, window: int) -> Mark | None:
        """Return where the loader was before a window; None if it has read nothing for it."""
        return self._mark if self._mark is not None and self._mark.window == window else None

    def read(self, state: Callable[[], dict[str, Any]], observer: GradientState | None) -> None:
        """Mark the place before the first batch of a window that may be interrupted."""
        if observer is not None and observer.num_steps > 1:
            window = observer.coming_window
            self._mark = self.of(window) or Mark(window, state())

    def end(self, observer: GradientState) -> None:
        """Forget a mark that was made between two windows, as for an evaluation."""
        if self._mark is not None and self._mark.window > observer.windows:
            self._mark = None
