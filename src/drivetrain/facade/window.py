"""One accumulation window: its gradient is a mean of its micro-batches, and of nothing before them.

A window's length, and its sum of weights, are known when it ends. A factor then puts its gradients
right; gradients that earlier windows left, for this window to add to, keep their values.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain import communication
from drivetrain.data.loader import Mark
from drivetrain.errors import UsageError
from drivetrain.facade.prepared import PreparedModel, PreparedObjects
from drivetrain.runtime import rng
from drivetrain.runtime.gradient_state import GradientState
from drivetrain.runtime.mesh import Axis


class WindowMean:
    """The normalisation of one accumulation window.

    Args:
        state: the window it belongs to.
        counted: whether the micro-batches are counted by ``accumulate()``; a loop that counts them
            itself always has full windows.
    """

    def __init__(self, state: GradientState, *, counted: bool) -> None:
        self._state = state
        self._counted = counted
        self._weights: list[float] = []
        self._unweighted = False
        self._finished = False

    def divide(self, loss: Tensor, weight: float | Tensor | None) -> Tensor:
        """Return the loss as it enters backward: weighted, or a share of the window's mean.

        Raises:
            UsageError: weighted and unweighted losses in one window, or a weighted loss after the
                window was finished.
        """
        if weight is None:
            self._unweighted = True
        else:
            self._weights.append(float(weight))
        if self._weights and self._unweighted:
            raise UsageError(
                "expected a weight for every loss of an accumulation window or for none, found "
                "both; pass weight= to each backward() of the window"
            )
        if weight is None:
            length = self._state.window_length if self._finished else self._state.num_steps
            return loss / length if length > 1 else loss
        if self._finished or (self._state.num_steps > 1 and not self._counted):
            raise UsageError(
                "expected one weighted backward() per micro-batch inside accumulate(), found one "
                "after the window's gradients were already divided by the sum of weights; add the "
                "losses before backward(), and use 'with accelerator.accumulate(model):'"
            )
        return loss * weight

    @property
    def counts_nothing(self) -> bool:
        """Whether the last loss has the weight 0: it may be no number."""
        return bool(self._weights) and not self._weights[-1]

    @property
    def may_scale(self) -> bool:
        """Whether ``finish`` may return a factor."""
        state = self._state
        may_end_early = self._counted and state.num_steps > 1 and state.sync_with_dataloader
        return bool(self._weights) or (may_end_early and state.divides_by_length)

    def finish(self, axis: Axis, device: torch.device) -> float | None:
        """Return the factor that makes the synchronised gradients right, None when they are.

        Collective over the axis when the losses are weighted.
        """
        if self._finished:
            return None
        if self._weights:
            self._finished = True
            # In fp64: sums of token counts stay exact.
            total = torch.tensor(sum(self._weights), dtype=torch.float64, device=device)
            whole = float(communication.reduce(total, "sum", group=axis))
            # The strategy has averaged over the axis: its size turns the mean into a sum again.
            return axis.size / whole if whole else 0.0
        length = self._state.window_length
        is_full = length >= self._state.num_steps
        if is_full or not (self._counted and self._state.divides_by_length):
            return None
        self._finished = True
        return self._state.num_steps / length


class WindowStart:
    """The state that a window began with; a run that goes on from inside it begins it again.

    Args:
        prepared: the models and loaders.
        window: number of the window; 0 for the state of now.
    """

    def __init__(self, prepared: PreparedObjects, window: int) -> None:
        self._prepared = prepared
        self._window = window
        first = min(self._marks(), key=lambda mark: mark.at, default=None)
        self._random = rng.Snapshot() if first is None else first.random
        self.progress = [dict(entry.strategy.progress()) for entry in prepared.models]

    def loaders(self) -> list[dict[str, Any]]:
        """Return the states of loaders before the window's first batches."""
        marks = [(loader, loader.mark_of(self._window)) for loader in self._prepared.loaders]
        return [mark.state if mark else loader.state_dict() for loader, mark in marks]

    def random(self) -> dict[str, Tensor]:
        """Return the state of all generators before the window's first batch was read."""
        return self._random.packed()

    def _marks(self) -> Iterator[Mark]:
        marks = (loader.mark_of(self._window) for loader in self._prepared.loaders)
        return (mark for mark in marks if mark is not None)


class EarlierGradients:
    """Copies of the gradients that were there before a window; a loop that clears them has none.

    Args:
        prepared: the models.
    """

    def __init__(self, prepared: PreparedObjects) -> None:
        self._prepared = prepared
        self._kept: list[KeptGradient] | None = None

    def keep(self) -> None:
        """Copy the gradients before the window's first backward; before others, drop cleared ones.

        A script may clear gradients between the micro-batches of a window.
        """
        if self._kept is None:
            self._kept = [
                KeptGradient(entry, parameter)
                for entry in self._prepared.models
                if _is_any(entry.strategy.gradients())
                for _, parameter in entry.module.named_parameters()
            ]
        self._kept = [kept for kept in self._kept if _is_any(kept.pieces())]

    def scale_fresh(self, factor: float) -> None:
        """Multiply the window's gradients; gradients from before the window stay as they were."""
        for entry in self._prepared.models:
            entry.strategy.scale_gradients(factor)
        self._restore(factor)

    def _restore(self, factor: float) -> None:
        """Give earlier gradients the values they had before all gradients were multiplied."""
        for kept in self._kept or ():
            kept.restore(factor)


class KeptGradient:
    """A copy of one parameter's gradient, as far as this rank's optimizers read it.

    Args:
        entry: the model.
        parameter: one of its parameters.
    """

    def __init__(self, entry: PreparedModel, parameter: nn.Parameter) -> None:
        self._entry = entry
        self._parameter = parameter
        self._scale = entry.scale
        self._copies = [piece.clone() for piece in self.pieces()]

    def pieces(self) -> list[Tensor]:
        """Return the gradient as it is now; empty where there is none."""
        return list(self._entry.strategy.gradients([self._parameter]))

    def restore(self, factor: float) -> None:
        """Undo a factor for the part of the gradient that the copy is of."""
        # The copy carries the loss scale of its time.
        scale = self._entry.scale / self._scale if self._entry.scale and self._scale else 1.0
        for piece, copy in zip(self.pieces(), self._copies, strict=True):
            piece.add_(copy, alpha=(1.0 - factor) * scale)


def _is_any(pieces: Iterable[Tensor]) -> bool:
    """Whether a gradient is there, and is not zero."""
    return any(bool(piece.any()) for piece in pieces)
