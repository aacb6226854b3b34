"""Where training stands between two optimizer steps: the accumulation window and its loader."""

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

    def next_micro_batch(self) -> None:
        """Enter the next micro-batch and decide whether it ends the window."""
        if self.sync_gradients:
            self.micro_batch = 0
        self.micro_batch += 1
        ends_loader = self.sync_with_dataloader and self.end_of_dataloader
        self.sync_gradients = ends_loader or self.micro_batch >= self.num_steps
