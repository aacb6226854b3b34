"""A stage's backward in two halves (Qi et al. 2023, arXiv 2401.10241, section 2.1).

The stage before waits for the gradient of a stage's input, and nobody waits for the gradients of
its weights: linear layers compute these when they are asked to. So a linear layer's backward
computes the former and keeps what the latter needs, also where the layer is divided over ranks.
Other layers compute both at once: their weights take little of the time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, autograd, nn

from drivetrain_megatron.tensor.behavior import Behavior, attach, behavior_of, detach, exchange
from drivetrain_megatron.tensor.linear import ColumnLinear, RowLinear, is_transposed
from drivetrain_megatron.tensor.products import as_computed
from drivetrain_megatron.tensor.weight_grad import Keeper, WeightHalf, deferral_of, linear


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

        Gradients are computed one layer at a time, so that one is in memory besides those of
        parameters, and that a data-parallel strategy reduces one while the next is computed.
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

    def attach_to(self, model: nn.Module) -> list[nn.Module]:
        """Let the linear layers of a model, whole or divided, keep products; return them."""
        return [
            module
            for module in model.modules()
            if isinstance(module._parameters.get("weight"), nn.Parameter)
            and (is_transposed(module) or isinstance(module, nn.Linear))
            and self._attach(module)
        ]

    @staticmethod
    def detach_from(modules: list[nn.Module]) -> None:
        """Let linear layers compute both halves at once again."""
        for module in modules:
            behavior = behavior_of(module)
            if isinstance(behavior, ColumnLinear | RowLinear):
                exchange(module, replace(behavior, keeper=None))
            else:
                detach(module)

    def _attach(self, module: nn.Module) -> bool:
        """Let a linear layer keep products; False if it computes in a way of its own."""
        behavior = behavior_of(module)
        if isinstance(behavior, ColumnLinear | RowLinear):
            exchange(module, replace(behavior, keeper=self))
            return True
        own = behavior is None and (
            type(module).forward is nn.Linear.forward or is_transposed(module)
        )
        if own:
            attach(module, DeferredLinear(self, is_transposed(module)))
        return own


class DeferredLinear(Behavior):
    """A linear layer whose backward may keep its product.

    Args:
        keeper: where it is kept.
        transposed: whether the weight is (in, out).
    """

    def __init__(self, keeper: Keeper, transposed: bool) -> None:
        self._keeper = keeper
        self._transposed = transposed

    def forward(self, module: Any, x: Tensor) -> Tensor:
        """Return the product plus the bias."""
        x, weight, bias = as_computed(x, module.weight, module.bias)
        deferral = deferral_of(self._keeper, module)
        return linear(x, weight, bias, transposed=self._transposed, deferral=deferral)


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
