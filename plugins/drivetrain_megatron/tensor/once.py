"""Gradients that cannot be differentiated again say so, and name the way out."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from drivetrain.errors import UsageError


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Let the backward of an autograd function be computed without a graph.

    Its gradients refuse to be differentiated.
    """

    @functools.wraps(backward)
    def alone(ctx: Any, *grads: Any) -> Any:
        with torch.no_grad():
            found = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return found
        if isinstance(found, tuple):
            return tuple(_refusing(each) for each in found)
        return _refusing(found)

    return alone


def _refusing(gradient: Any) -> Any:
    if not isinstance(gradient, Tensor) or not gradient.is_floating_point():
        return gradient
    return _Refusal.apply(gradient.detach().requires_grad_())  # type: ignore[no-untyped-call]


class _Refusal(torch.autograd.Function):
    """Nothing in forward; an error in backward."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise UsageError(
            "expected gradients of layers that ranks share to be differentiated once, found a "
            "backward through them (create_graph, a gradient penalty): leave the layers around out "
            "of a plan of your own, or take another strategy, such as fsdp or zero3"
        )
