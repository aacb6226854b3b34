"""How far a loader is: its epoch, its place there, and where it was before a window of batches."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from drivetrain.data.steps import Start
from drivetrain.runtime import rng
from drivetrain.runtime.gradient_state import ActiveLoader, GradientState


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


@dataclass(slots=True)
class Progress:
    """The position of a loader; shared with the loaders that skip batches on its behalf.

    Attributes:
        seed: the run's seed.
        epoch: the epoch that is being read, or that is read next.
        start: where in that epoch to start or go on; None for its beginning.
        ends: whether the batch at hand is this rank's last.
        remainder: see PreparedLoader.
        running: the iteration that is under way; None between epochs.
        mark: where it was before the first batch of the last window that it was read for.
    """

    seed: int
    epoch: int = 0
    start: Start | None = None
    ends: bool = False
    remainder: int = -1
    running: "Iteration | None" = None
    mark: Mark | None = None

    def mark_of(self, window: int) -> Mark | None:
        """Return where the loader was before a window; None if it has read nothing for it."""
        return self.mark if self.mark is not None and self.mark.window == window else None

    def read(self, state: Callable[[], dict[str, Any]], observer: GradientState | None) -> None:
        """Mark the place before the first batch of a window that may be interrupted."""
        if observer is not None and observer.num_steps > 1:
            window = observer.coming_window
            self.mark = self.mark_of(window) or Mark(window, state())

    def end(self, loader: ActiveLoader, observer: GradientState | None) -> None:
        """End an epoch; forget a mark that was made between two windows, as for an evaluation."""
        if observer is not None:
            observer.end(loader)
            if self.mark is not None and self.mark.window > observer.windows:
                self.mark = None


@dataclass(frozen=True, eq=False, slots=True)
class Iteration:
    """One pass over a loader, from the first batch that is asked for to its end or ``break``."""

    loader: ActiveLoader
    epoch: int
