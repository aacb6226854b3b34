"""Backward from several tensors with given gradients, as the backward of one 0-d loss."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def seeded(tensors: Sequence[Tensor], gradients: list[Tensor], device: torch.device) -> Tensor:
    """Return a 0-d loss whose backward gives these tensors these gradients.

    A data-parallel strategy runs backward from a loss; a stage has the gradients of its outputs.

    Args:
        tensors: outputs, or parameters; without any, the loss reaches nothing.
        gradients: of the same shapes; emptied in backward, since a gradient that nobody else holds
            becomes a parameter's own instead of being copied.
        device: of the loss.
    """
    if not tensors:
        return torch.zeros((), device=device, requires_grad=True)
    loss: Tensor = _Seeded.apply(gradients, *tensors)  # type: ignore[no-untyped-call]
    return loss


class _Seeded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *tensors: Tensor) -> Tensor:
        ctx.gradients = gradients
        return tensors[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Any, ...]:
        given = tuple(ctx.gradients)
        ctx.gradients.clear()
        return None, *given
