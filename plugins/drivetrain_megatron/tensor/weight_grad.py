"""The two halves of a linear layer's backward (Qi et al. 2023, arXiv 2401.10241, section 2.1).

The gradient of the input comes now, since the layer before waits for it; the gradient of the weight
may come later, since nobody waits for it. A layer with a keeper hands the tensors for the second
half over, if the keeper accepts them.

Shapes: x (..., in), weight (out, in) or transposed (in, out), product (..., out).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor, autograd, nn
from torch.autograd.function import once_differentiable


class WeightHalf(NamedTuple):
    """The half of a layer's backward that nobody waits for: the gradients of weight and bias.

    Attributes:
        x: the factors of the product.
        grad: the gradient of the product.
        transposed: whether the weight is (in, out).
        for_weight: whether the weight wants a gradient.
        for_bias: whether the bias does.
    """

    x: Tensor
    grad: Tensor
    transposed: bool
    for_weight: bool = True
    for_bias: bool = False

    def compute(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of weight and bias; None for an unwanted gradient."""
        rows, grads = rows_of(self.x), rows_of(self.grad)
        weight = None
        if self.for_weight:
            weight = rows.t().mm(grads) if self.transposed else grads.t().mm(rows)
        return weight, grads.sum(0) if self.for_bias else None

    def settled(self, deferral: "Deferral | None") -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients; None for an unwanted or later gradient."""
        if not (self.for_weight or self.for_bias) or (deferral is not None and deferral(self)):
            return None, None
        return self.compute()


class Keeper(Protocol):
    """Who may want gradients of weights at another time than in backward."""

    def keep(self, module: nn.Module, half: WeightHalf) -> bool:
        """Keep the factors of a weight's gradient for later; False: compute it at once."""


Deferral = Callable[[WeightHalf], bool]
"""A ``Keeper``'s method for one layer."""


def deferral_of(keeper: Keeper | None, module: nn.Module) -> Deferral | None:
    """Return how a layer leaves its half to a keeper."""
    return None if keeper is None else functools.partial(keeper.keep, module)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool, deferral: Deferral | None
) -> Tensor:
    """Return x times the weight, plus the bias, on this rank alone.

    Args:
        x: the input.
        weight: (out, in), or (in, out) if transposed.
        bias: shape (out,).
        transposed: which of the two.
        deferral: takes the half of backward that nobody waits for, if it wants to.
    """
    if deferral is None:
        return nn.functional.linear(x, weight.t() if transposed else weight, bias)
    return _Linear.apply(x, weight, bias, transposed, deferral)  # type: ignore[no-any-return,no-untyped-call]


class _Linear(autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, later: Deferral
    ) -> Tensor:
        ctx.transposed, ctx.later = transposed, later
        ctx.save_for_backward(x, weight)
        return nn.functional.linear(x, weight.t() if transposed else weight, bias)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad_x = grad @ (weight.t() if ctx.transposed else weight) if needs_x else None
        half = WeightHalf(x, grad, ctx.transposed, needs_weight, needs_bias)
        return grad_x, *half.settled(ctx.later), None, None


def rows_of(tensor: Tensor) -> Tensor:
    """Return a view or copy of shape (all leading dims together, last); either may be 0."""
    return tensor.reshape(tensor.shape[:-1].numel(), tensor.shape[-1])
