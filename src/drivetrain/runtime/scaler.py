"""The dynamic loss scale of fp16, agreed by all ranks.

The loss is multiplied by a scale so that small gradients survive fp16. Before a step the gradients
are divided by the scale they were made with; when any of them is infinite or NaN on any rank, the
step is skipped on all, and the scale shrinks. (Micikevicius et al., "Mixed Precision Training",
2018, section 3.2.)
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class LossScaler:
    """A scale that grows after many good steps and shrinks after a bad one.

    Args:
        enabled: False makes the scale one and checks nothing.
        init_scale: first scale.
        growth_factor: factor after ``growth_interval`` good steps in a row.
        backoff_factor: factor after a bad step.
        growth_interval: good steps in a row between growths.
    """

    def __init__(
        self,
        *,
        enabled: bool,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        self._enabled = enabled
        self._scale = init_scale if enabled else 1.0
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._good_steps = 0
        self._overflow: bool | None = None

    def is_enabled(self) -> bool:
        """Whether losses are scaled."""
        return self._enabled

    def get_scale(self) -> float:
        """Return the factor of the next loss."""
        return self._scale

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale."""
        return loss * self._scale if self._enabled else loss

    def unscale(self, pieces: Sequence[Tensor], scale: float, *, ranks: int) -> bool:
        """Divide gradients in place by the scale they were made with.

        Collective when ranks > 1.

        Returns:
            Whether any gradient on any rank is infinite or NaN.
        """
        device = pieces[0].device if pieces else torch.device("cpu")
        found = torch.zeros((), device=device)
        inverse = torch.full((), 1.0 / scale, device=device)
        for dtype in {piece.dtype for piece in pieces}:
            same = [piece for piece in pieces if piece.dtype is dtype]
            torch._amp_foreach_non_finite_check_and_unscale_(same, found, inverse)
        if ranks > 1:
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return bool(found.item())

    def record(self, *, overflow: bool) -> None:
        """Remember how an optimizer step went, until ``update``."""
        self._overflow = overflow or bool(self._overflow)

    def update(self) -> None:
        """Change the scale by what was recorded since the last update."""
        if self._overflow is None or not self._enabled:
            return
        if self._overflow:
            self._scale *= self._backoff_factor
            self._good_steps = 0
        else:
            self._good_steps += 1
            if self._good_steps == self._growth_interval:
                self._scale *= self._growth_factor
                self._good_steps = 0
        self._overflow = None

    def state_dict(self) -> dict[str, Any]:
        """Return scale and count of good steps."""
        return {"scale": self._scale, "good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved scale."""
        if self._enabled:
            self._scale = float(state["scale"])
            self._good_steps = int(state["good_steps"])
