"""Backward in two halves: linear layers compute their weights' gradients when they are asked to.

The stage before waits for the gradient of a stage's input, and nobody waits for the gradients of
its weights (Qi et al. 2023, arXiv 2401.10241, section 2.1). So a linear layer's backward computes
the former and keeps what the latter needs. Other layers compute both at once: their weights take
little of the time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from drivetrain_megatron.tensor.behavior import Behavior, attach, behavior_of, detach
from drivetrain_megatron.tensor.layers import is_transposed
from drivetrain_megatron.tensor.linear import as_computed


@dataclass(frozen=True, slots=True)
class _Call:
    gradients: "WeightGradients"
    parameters: tuple[nn.Parameter, nn.Parameter | None]
    transposed: bool


@dataclass(frozen=True, slots=True)
class Product:
    """What the gradients of one product's weight and bias are computed from.

    Attributes:
        x: the input, shape (..., in).
        gradient: of the output, shape (..., out).
        for_weight: whether the weight wants a gradient.
        for_bias: whether the bias does.
        call: whose.
    """

    x: Tensor
    gradient: Tensor
    for_weight: bool
    for_bias: bool
    call: _Call

    def compute(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of weight and bias; None for what wants none."""
        gradient = self.gradient.reshape(-1, self.gradient.shape[-1])
        x = self.x.reshape(-1, self.x.shape[-1])
        weight = None
        if self.for_weight:
            weight = x.t() @ gradient if self.call.transposed else gradient.t() @ x
        return weight, gradient.sum(0) if self.for_bias else None


class WeightGradients:
    """The products whose weights' gradients have not been computed, by micro-batch."""

    def __init__(self) -> None:
        self._kept: dict[int, list[Product]] = {}
        self._collecting: list[Product] | None = None

    @contextmanager
    def collecting(self, micro_batch: int) -> Iterator[None]:
        """Context in which backward keeps products instead of computing weights' gradients."""
        self._collecting = self._kept[micro_batch] = []
        try:
            yield
        finally:
            self._collecting = None

    def keep(self, product: Product) -> bool:
        """Keep a product; False where its gradients are wanted at once."""
        if self._collecting is None:
            return False
        self._collecting.append(product)
        return True

    def compute(self, micro_batch: int) -> tuple[list[nn.Parameter], list[Tensor]]:
        """Return the parameters of a micro-batch's products, each once, and their gradients."""
        found: dict[nn.Parameter, Tensor] = {}
        for product in self._kept.pop(micro_batch, []):
            for parameter, gradient in zip(product.call.parameters, product.compute(), strict=True):
                if parameter is not None and gradient is not None:
                    mine, before = gradient.to(parameter.dtype), found.get(parameter)
                    found[parameter] = mine if before is None else before + mine
        return list(found), list(found.values())

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()

    def attach_to(self, model: nn.Module) -> list[nn.Module]:
        """Let the ordinary linear layers of a model keep products; return them."""
        chosen = [
            module
            for module in model.modules()
            if behavior_of(module) is None
            and isinstance(module._parameters.get("weight"), nn.Parameter)
            and (type(module).forward is nn.Linear.forward or is_transposed(module))
        ]
        for module in chosen:
            attach(module, DeferredLinear(self, is_transposed(module)))
        return chosen

    @staticmethod
    def detach_from(modules: list[nn.Module]) -> None:
        """Give linear layers their own forward back."""
        for module in modules:
            detach(module)


class DeferredLinear(Behavior):
    """A linear layer whose backward may keep its product.

    Args:
        gradients: where it is kept.
        transposed: whether the weight is (in, out).
    """

    def __init__(self, gradients: WeightGradients, transposed: bool) -> None:
        self._gradients = gradients
        self._transposed = transposed

    def forward(self, module: Any, x: Tensor) -> Tensor:
        """Return the product plus the bias."""
        x, weight, bias = as_computed(x, module.weight, module.bias)
        parameters = (module.weight, module.bias)
        call = _Call(self._gradients, parameters, self._transposed)
        out: Tensor = _Deferred.apply(x, weight, bias, call)  # type: ignore[no-untyped-call]
        return out


class _Deferred(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: _Call) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(x, weight)
        return nn.functional.linear(x, weight.t() if call.transposed else weight, bias)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        call: _Call = ctx.call
        wanted = ctx.needs_input_grad
        given = None
        if wanted[0]:
            given = gradient @ (weight.t() if call.transposed else weight)
        product = Product(x, gradient, wanted[1], wanted[2], call)
        if call.gradients.keep(product):
            return given, None, None, None
        return given, *product.compute(), None
