"""Where training stands between two optimizer steps: the accumulation window and its loader."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol


class ActiveLoader(Protocol):
    """Facts about the active loader, for the accumulation window."""

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the batch at hand is the last of the epoch."""

    @property
    def remainder(self) -> int:
        """Samples of the last global batch that are no repetitions; -1 when none repeats."""


class GradientState:
    """The accumulation window of one Accelerator.

    A window is the run of micro-batches that make up one optimizer step. It ends after
    ``num_steps`` micro-batches or with the loader, whichever comes first.

    Args:
        num_steps: micro-batches per window.
        sync_with_dataloader: end the window with the loader.
        sync_each_batch: synchronise gradients on every micro-batch of the window.

    Attributes:
        divides_by_length: divide the gradients of a window by its real length, also where the
            loader ends it early; False divides by ``num_steps``.
        uneven: whether ranks may take different numbers of steps now.
        windows: how many windows ``accumulate()`` has begun.
        backwards: how many backwards the window at hand has had.
        stepped: whether an optimizer has stepped, or left out a step, at its end.
    """

    def __init__(
        self, num_steps: int, *, sync_with_dataloader: bool = True, sync_each_batch: bool = False
    ) -> None:
        self.num_steps = num_steps
        self.sync_with_dataloader = sync_with_dataloader
        self.sync_each_batch = sync_each_batch
        self.divides_by_length = True
        self.uneven = False
        self.sync_gradients = True
        self.micro_batch = 0
        self.windows = 0
        self.backwards = 0
        self.stepped = False
        self._inside = False
        self._clear_later: list[Callable[[], None]] = []
        self._loaders: list[ActiveLoader] = []

    def begin(self, loader: ActiveLoader) -> None:
        """Note the start of a loader's epoch; until its end, the loader is the active loader."""
        self._loaders.append(loader)

    def end(self, loader: ActiveLoader) -> None:
        """Note that a loader's epoch ended or was left."""
        self._loaders = [active for active in self._loaders if active is not loader]

    @property
    def active_dataloader(self) -> ActiveLoader | None:
        """The innermost loader that is being read."""
        return self._loaders[-1] if self._loaders else None

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being read."""
        return bool(self._loaders)

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the batch at hand is the last of its loader's epoch."""
        return self.active_dataloader is not None and self.active_dataloader.end_of_dataloader

    @property
    def remainder(self) -> int:
        """Real samples of the last global batch when it repeats others, else -1."""
        return self.active_dataloader.remainder if self.active_dataloader is not None else -1

    @property
    def window_length(self) -> int:
        """Micro-batches of the window so far; at its end, its real length."""
        return self.micro_batch

    @property
    def coming_window(self) -> int:
        """Number of the window that a batch which is read now is for."""
        return self.windows + (self.sync_gradients and not self._inside)

    @property
    def is_unfinished(self) -> bool:
        """Whether the window at hand has micro-batches whose gradients wait for a step."""
        if not self.sync_gradients:
            return True
        return self._inside and self.num_steps > 1 and self.backwards > 0 and not self.stepped

    @contextmanager
    def next_micro_batch(self) -> Iterator[None]:
        """Context of the next micro-batch; decides whether it ends the window."""
        if self.sync_gradients:
            self._begin_window()
        self.micro_batch += 1
        ends_loader = self.sync_with_dataloader and self.end_of_dataloader
        self.sync_gradients = ends_loader or self.micro_batch >= self.num_steps
        around, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = around

    def _begin_window(self) -> None:
        self.micro_batch, self.backwards, self.stepped = 0, 0, False
        self.windows += 1
        later, self._clear_later = self._clear_later, []
        for clear in later:
            clear()

    def clear(self, clear: Callable[[], None], *, used: bool) -> None:
        """Clear gradients for a script, but never those of a window that no step has used.

        In the micro-batch that ends a window a script may clear before its step, or in place of it:
        then they go when the next window begins.

        Args:
            clear: clears them.
            used: whether a step has used them.
        """
        alone = self.sync_gradients and (not self._inside or self.micro_batch == 1)
        if alone or (self._inside and (used or not self.backwards)):
            clear()
        elif self.sync_gradients:
            self._clear_later.append(clear)

    def forget(self) -> None:
        """Let a new window begin: the gradients at hand are gone."""
        self.sync_gradients = True
        self._clear_later = []
