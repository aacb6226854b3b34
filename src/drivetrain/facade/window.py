"""Makes the gradient of an accumulation window the mean that one large batch would have given.

Every micro-batch's loss is divided by the configured number of micro-batches. A window that ends
early is put right once, when its last gradients are synchronised. With weights (tokens, say) the
losses are multiplied by them, and the sum over micro-batches *and* ranks divides at the end.
"""

import torch
from torch import Tensor

from drivetrain import communication
from drivetrain.errors import UsageError
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
        """Return the loss as it enters backward.

        Args:
            loss: 0-d.
            weight: what this micro-batch counts for, or None for all alike.

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

    def finish(self, axis: Axis, device: torch.device) -> float | None:
        """Return the factor that makes the synchronised gradients right, None when they are.

        Collective over the axis when the losses are weighted.
        """
        if self._finished:
            return None
        if self._weights:
            self._finished = True
            total = torch.tensor(sum(self._weights), dtype=torch.float64, device=device)
            whole = float(communication.reduce(total, "sum", group=axis))
            return axis.size / whole if whole else 0.0
        length = self._state.window_length
        if not self._counted or length >= self._state.num_steps:
            return None
        self._finished = True
        return self._state.num_steps / length
