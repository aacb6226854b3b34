"""Where training stands between two optimizer steps: the accumulation window and its loader.

What counts is the batch at hand: that of the pass over a loader which delivered last. Passes that
stay open, as an evaluation's ``iter(loader)``, do not hide it.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from drivetrain.errors import UsageError
from drivetrain.nested import recursively_apply


class ActivePass(Protocol):
    """One pass over a loader, with the batch that it delivered last.

    Attributes:
        loader: the prepared loader.
        end_of_dataloader: whether the batch at hand is the last of the epoch.
        remainder: samples of the last global batch that are no repetitions; -1 when none repeats.
        evaluates: whether a model has run without gradients on its batches.
        trains: whether a backward has followed on one of them.
        rows: of the batch; None where no batch repeats samples.
        first: of its first batch.
        total: of all its batches so far.
    """

    loader: Any
    end_of_dataloader: bool
    remainder: int
    evaluates: bool
    trains: bool
    rows: Any
    first: Any
    total: Any

    def use(self, *, trains: bool) -> None:
        """Note that all ranks together have used the batch, to train or otherwise."""


class BatchPiece(NamedTuple):
    """A piece of a batch: the rows from ``start`` to ``stop``, of so many."""

    start: int
    stop: int
    of: int

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return self.stop - self.start


@dataclass(eq=False, repr=False)
class GradientState:
    """The accumulation window of one Accelerator.

    A window is the run of micro-batches that make up one optimizer step. It ends after
    ``num_steps`` micro-batches or with the loader, whichever comes first.

    Attributes:
        num_steps: micro-batches per window.
        sync_with_dataloader: end the window with the loader.
        sync_each_batch: synchronise gradients on every micro-batch of the window.
        sync_gradients: whether the micro-batch at hand ends the window.
        divides_by_length: divide the gradients of a window by its real length, also where the
            loader ends it early; False divides by ``num_steps``.
        uneven: whether ranks may take different numbers of steps now.
        micro_batch: the one at hand in its window, from 1; at the window's end, its length.
        windows: how many windows ``accumulate()`` has begun.
        backwards: how many backwards the window at hand has had.
        stepped: whether an optimizer has stepped, or left out a step, at its end.
        at_hand: the pass that delivered the batch at hand; it may have been left since.
        finished: the pass that came to its end after the last batch was delivered.
        piece: the piece of a batch that is at hand; None for whole batches.
        left_early: whether the script left a batch before its last piece.
        is_inside: whether the script is inside of a micro-batch's context.
    """

    num_steps: int
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False
    divides_by_length: bool = True
    uneven: bool = False
    sync_gradients: bool = True
    micro_batch: int = 0
    windows: int = 0
    backwards: int = 0
    stepped: bool = False
    piece: BatchPiece | None = None
    left_early: bool = False
    at_hand: ActivePass | None = None
    finished: ActivePass | None = None
    is_inside: bool = False
    _ends_window: bool = True
    _clear_later: list[Callable[[], None]] = field(default_factory=list)
    _open: list[ActivePass] = field(default_factory=list)
    """The one that delivered last is the last."""
    _fresh: list[ActivePass] = field(default_factory=list)
    """Delivered since the micro-batch before this one."""
    _used: bool = False
    _trained: ActivePass | None = None
    _known: dict[int, tuple[weakref.ref[Tensor], Any]] = field(default_factory=dict)

    def deliver(self, one: ActivePass, batch: Any) -> None:
        """Note that a pass delivers a batch."""
        if self._used:
            self._fresh.clear()
            self._used = False
        for passes in (self._open, self._fresh):
            if not passes or passes[-1] is not one:
                passes[:] = [*(each for each in passes if each is not one), one]
        self.at_hand, self.finished = one, None
        if one.rows is not None:
            recursively_apply(self._know, batch, one.rows)

    def _know(self, tensor: Tensor, rows: Any) -> None:
        key = id(tensor)
        self._known[key] = (weakref.ref(tensor, partial(self._known.pop, key)), rows)

    def rows_of(self, tensor: Tensor) -> Any:
        """Return the rows of the batch that a tensor was delivered in, None for other tensors."""
        known, rows = self._known.get(id(tensor), (None, None))
        return rows if known is not None and known() is tensor else None

    def holds(self, rows: Any) -> bool:
        """Whether the script holds tensors of the batch with these rows."""
        return any(each is rows for _, each in self._known.values())

    def end(self, one: ActivePass, *, finished: bool) -> None:
        """Note that a pass came to its end, or was left."""
        self._open = [each for each in self._open if each is not one]
        if finished or self._open:  # else its last batch stays at hand
            self._fresh = [each for each in self._fresh if each is not one]
            if self.at_hand is one:
                self.at_hand = self.active_pass
        if finished:
            self.finished = one

    def use(self, *, trains: bool) -> None:
        """Note that all ranks together have used what is at hand, to train or otherwise."""
        self._used = True
        for one in self._fresh:
            one.use(trains=trains)

    def evaluate(self) -> None:
        """Note that a model runs without gradients: among several passes, on the last batch."""
        if len(self._open) > 1:
            self._open[-1].evaluates = True

    @property
    def active_pass(self) -> ActivePass | None:
        """The pass under way that delivered last."""
        return self._open[-1] if self._open else None

    @property
    def active_dataloader(self) -> Any:
        """The loader of that pass."""
        return None if self.active_pass is None else self.active_pass.loader

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being read."""
        return bool(self._open)

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the batch at hand is the last of its loader's epoch.

        Where several loaders have delivered for one micro-batch, as under ``zip``, the first one to
        end decides; those that only evaluate do not count beside others.
        """
        return any(each.end_of_dataloader for each in self._counted())

    @property
    def trained_pass(self) -> ActivePass | None:
        """The pass that the training loop makes, the first one under ``zip``."""
        passes = self._counted()
        if self._trained not in passes:
            self._trained = next(iter(passes), None)
        return self._trained

    def _counted(self) -> list[ActivePass]:
        passes = [each for each in self._fresh if each in self._open] or self._open[-1:]
        return [each for each in passes if not each.evaluates] or passes

    @property
    def remainder(self) -> int:
        """Real samples of the last global batch when it repeats others, else -1."""
        return -1 if self.active_pass is None else self.active_pass.remainder

    @property
    def coming_window(self) -> int:
        """Number of the window that a batch which is read now is for."""
        return self.windows + (self.sync_gradients and not self.is_inside)

    @property
    def is_unfinished(self) -> bool:
        """Whether the window at hand has micro-batches whose gradients wait for a step."""
        if not self.sync_gradients:
            return True
        return self.is_inside and self.num_steps > 1 and self.backwards > 0 and not self.stepped

    @contextmanager
    def next_micro_batch(
        self, *, first: bool = True, last: bool = True, piece: BatchPiece | None = None
    ) -> Iterator[None]:
        """Context of the next micro-batch, or of a piece; decides whether it ends the window.

        Args:
            first: whether it is whole, or the first piece; not where ``accumulate()`` is around.
            last: whether it is whole, or the last piece.
            piece: its rows.

        Raises:
            UsageError: the batch before was left early.
        """
        self.check_whole()
        if first:
            if self.sync_gradients:
                self.micro_batch, self.backwards, self.stepped = 0, 0, False
                self.windows += 1
                later, self._clear_later = self._clear_later, []
                for clear in later:
                    clear()
            self.micro_batch += 1
            ends_loader = self.sync_with_dataloader and self.end_of_dataloader
            self._ends_window = ends_loader or self.micro_batch >= self.num_steps
        self._used = True
        self.sync_gradients = last and self._ends_window
        around, self.is_inside = (self.is_inside, self.piece), True
        self.piece = piece
        try:
            yield
        finally:
            self.is_inside, self.piece = around

    def check_whole(self) -> None:
        """Refuse to go on after a batch that was left before its last piece.

        Raises:
            UsageError: on each rank that left it: no rank has sent the gradients of its pieces.
        """
        if self.left_early:
            raise UsageError(
                "expected the loop over micro_batches() to reach the last piece, with which "
                "gradients are sent, found that it was left before; let it run to its end, with a "
                "loss times 0 for pieces that shall not count, or go on by load_state()"
            )

    def clear(self, clear: Callable[[], None], *, used: bool) -> None:
        """Clear gradients for a script, but never those of a window that no step has used.

        In the micro-batch that ends a window a script may clear before its step, or in place of it:
        then they go when the next window begins.

        Args:
            clear: clears them.
            used: whether a step has used them.
        """
        whole = self.micro_batch == 1 and (self.piece is None or self.piece.start == 0)
        alone = self.sync_gradients and (not self.is_inside or whole)
        if alone or (self.is_inside and (used or not self.backwards)):
            clear()
        elif self.sync_gradients:
            self._clear_later.append(clear)

    def forget(self) -> None:
        """Let a new window begin, and let go of passes that are over: the gradients are gone."""
        self.sync_gradients, self.left_early = True, False
        self._clear_later = []
        self.at_hand, self.finished, self._fresh = self.active_pass, None, []
        self._trained = None
