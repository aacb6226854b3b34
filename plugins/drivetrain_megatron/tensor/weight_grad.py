"""The two halves of a linear layer's backward (Qi et al. 2023, arXiv 2401.10241, section 2.1).

The gradient of the input comes now, since the layer before waits for it; the gradient of the weight
may come later, since nobody waits for it. A linear layer with a keeper (``WeightGradients``) hands
the tensors for the second half over, also where the layer is divided over ranks. Other layers
compute both halves at once: their weights take little of the time.

Shapes: x (..., in), weight (out, in) or transposed (in, out), product (..., out).
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, autograd, nn
from torch.autograd.function import once_differentiable


class WeightHalf(NamedTuple):
    """The half of a layer's backward that nobody waits for: the gradients of weight and bias.

    The factors are the product's input x and its gradient. A transposed weight is (in, out).
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


class WeightGradients:
    """The halves of backward that have not been computed, by micro-batch."""

    def __init__(self) -> None:
        self._kept: dict[int, list[tuple[nn.Module, WeightHalf]]] = {}
        self._collecting: list[tuple[nn.Module, WeightHalf]] | None = None

    @contextmanager
    def collecting(self, micro_batch: int) -> Iterator[None]:
        """Context in which backward keeps products instead of computing weights' gradients."""
        self._collecting = self._kept[micro_batch] = []
        try:
            yield
        finally:
            self._collecting = None

    def keep(self, module: nn.Module, half: WeightHalf) -> bool:
        """Keep the factors of a layer's gradients for later; False: compute them at once."""
        if self._collecting is None:
            return False
        self._collecting.append((module, half))
        return True

    def roots(self, micro_batch: int) -> list[Tensor]:
        """Return a 0-d tensor for each product of a micro-batch, whose backward computes the rest.

        Gradients are computed one layer at a time: memory holds a single gradient besides those of
        parameters, and a data-parallel strategy reduces each while the next is computed.
        """
        found: list[Tensor] = []
        for module, half in self._kept.pop(micro_batch, []):
            weight, bias = module.weight, module.bias
            wanted = (weight if half.for_weight else None, bias if half.for_bias else None)
            if any(isinstance(parameter, nn.Parameter) for parameter in wanted):
                found.append(_Half.apply(half, *wanted))  # type: ignore[no-untyped-call]
        return found

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()


Deferral = Callable[[WeightHalf], bool]
"""``WeightGradients.keep`` of one layer."""


def deferral_of(keeper: WeightGradients | None, module: nn.Module) -> Deferral | None:
    """Return how a layer leaves its half to a keeper."""
    return None if keeper is None else functools.partial(keeper.keep, module)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool, deferral: Deferral | None
) -> Tensor:
    """Return x times the weight, plus the bias, on this rank alone.

    The weight is (out, in), or (in, out) if transposed; the bias (out,). A deferral may take the
    half of backward that nobody waits for.
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


class _Half(autograd.Function):
    """Makes nothing of a layer's parameters; its backward is the half that was left for later."""

    @staticmethod
    def forward(ctx: Any, half: WeightHalf, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        ctx.half = half
        return half.grad.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, Tensor | None, Tensor | None]:
        half, ctx.half = ctx.half, None
        return None, *half.compute()


def rows_of(tensor: Tensor) -> Tensor:
    """Return a view or copy of shape (all leading dims together, last); either may be 0."""
    return tensor.reshape(tensor.shape[:-1].numel(), tensor.shape[-1])
