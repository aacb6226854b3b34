"""Linear layers cut by columns or by rows (Shoeybi et al. 2019, arXiv 1909.08053, section 3).

They are ``nn.Linear``, and Hugging Face's ``Conv1D``. A layer cut by columns computes its rank's
output features from a whole input; a layer cut by rows computes from its rank's input features a
part of each output feature, and the parts are summed. One after the other they need one all-reduce
in forward and one in backward. ``in_features`` and ``out_features`` stay those of the whole layer.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.errors import ConfigError
from drivetrain_megatron.tensor.behavior import (
    Behavior,
    attach,
    behavior_of,
    detach,
    exchange,
    original_class,
)
from drivetrain_megatron.tensor.logits import ShardedLogits
from drivetrain_megatron.tensor.operators import Edges
from drivetrain_megatron.tensor.partition import Partition
from drivetrain_megatron.tensor.products import Product, as_computed, column_product, row_product
from drivetrain_megatron.tensor.shared_input import grouped_product
from drivetrain_megatron.tensor.weight_grad import WeightGradients, deferral_of, linear


def is_linear(module: nn.Module) -> bool:
    """Whether a module multiplies its input's last dim by a matrix of its own, plus perhaps a bias.

    A weight that is computed whenever it is read (a parametrization) cannot be cut.
    """
    own = module._parameters.get("weight") is not None
    return own and (isinstance(module, nn.Linear) or is_transposed(module))


def is_transposed(module: nn.Module) -> bool:
    """Whether a linear layer keeps its weight as (inputs, outputs), as ``Conv1D`` of GPT-2 does."""
    weight, bias = (module._parameters.get(name) for name in ("weight", "bias"))
    return (
        type(module).__name__ == "Conv1D"
        and isinstance(weight, nn.Parameter)
        and isinstance(bias, nn.Parameter)
        and weight.dim() == 2
        and bias.shape == weight.shape[1:]
        and not isinstance(module, nn.modules.conv._ConvNd)
    )


def computes_as_linear(module: nn.Linear) -> bool:
    """Whether a layer gives the numbers of ``nn.Linear``, by trial if it has a forward of its own.

    The trial has a small weight; the code may use weight and bias, and nothing random.
    """
    forward: Any = original_class(module).forward
    if forward is nn.Linear.forward:
        return True
    if module._modules or module._buffers or set(module._parameters) - {"weight", "bias"}:
        return False
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((2, 5), (3, 5), (3,))
    )
    used = [x, weight] if module.bias is None else [x, weight, bias]
    expected = nn.functional.linear(*used)
    try:
        return all(
            _equal(expected, forward(_small(module, used[1:], training=training), x), used)
            for training in (True, False)
        )
    except Exception:  # whatever the user's code raises
        return False


def _small(module: nn.Linear, tensors: Sequence[Tensor], *, training: bool) -> nn.Module:
    """Return a layer of the same class with other tensors as weight and bias."""
    small: nn.Module = object.__new__(original_class(module))
    small.__dict__.update(module.__dict__)
    weight, *bias = tensors
    parameters = {"weight": weight, "bias": bias[0] if bias else None}
    small.__dict__.update(_parameters=parameters, training=training, in_features=5, out_features=3)
    return small


def _equal(expected: Tensor, found: Any, used: Sequence[Tensor]) -> bool:
    """Whether outputs and gradients are equal."""
    seed = torch.arange(expected.numel(), dtype=torch.float64).view(expected.shape)
    pairs = zip(
        (expected, *torch.autograd.grad(expected, used, seed, retain_graph=True)),
        (found, *torch.autograd.grad(found, used, seed)),
        strict=True,
    )
    return all(torch.allclose(one, other, rtol=1e-12) for one, other in pairs)


def features_of(module: nn.Module) -> tuple[int, int]:
    """Return how many features go into a linear layer and come out of it."""
    weight: Any = module.weight
    outputs, inputs = weight.shape
    return (int(outputs), int(inputs)) if is_transposed(module) else (int(inputs), int(outputs))


@dataclass(frozen=True)
class ColumnLinear(Behavior):
    """A linear layer with this rank's output features, of weight and bias.

    Attributes:
        edges: the way in.
        outputs: how the output features are cut, in dim -1 of the output.
        transposed: whether the weight is (in, out), as in ``Conv1D``.
        logits: whether the output is a tensor of global shape, see ``logits``.
        keeper: may take gradients of weight and bias later.
    """

    edges: Edges
    outputs: Partition
    transposed: bool = False
    logits: bool = False
    keeper: WeightGradients | None = None

    def forward(self, module: Any, x: Tensor) -> Tensor:
        """Return the local output features, shape (..., features)."""
        out = self._product(module, x)
        return ShardedLogits.of(out, self.edges.ranks, self.outputs) if self.logits else out

    def _product(self, module: Any, x: Tensor) -> Tensor:
        if (out := grouped_product(x, module)) is not None:
            return out
        x, weight, bias = as_computed(x, module.weight, module.bias)
        deferral = deferral_of(self.keeper, module)
        if self.edges.prepared or self.edges.ranks.size == 1:
            return linear(x, weight, bias, transposed=self.transposed, deferral=deferral)
        product = Product(self.edges.ranks, self.transposed, self.edges.sequence, deferral)
        return column_product(x, weight, bias, product)


@dataclass(frozen=True)
class RowLinear(Behavior):
    """A linear layer with this rank's input features of the weight, and the whole bias.

    Attributes:
        edges: the way out.
        inputs: how the input features are cut, in dim -1 of the input.
        transposed: whether the weight is (in, out), as in ``Conv1D``.
        keeper: may take the gradient of the weight later.
    """

    edges: Edges
    inputs: Partition
    transposed: bool = False
    keeper: WeightGradients | None = None

    def forward(self, module: Any, x: Tensor) -> Tensor:
        """Return the whole output, or this rank's shard of its sequence, shape (..., out)."""
        x, weight, bias = as_computed(x, module.weight, module.bias)
        deferral = deferral_of(self.keeper, module)
        product = Product(self.edges.ranks, self.transposed, self.edges.sequence, deferral)
        out = row_product(x, weight, product)
        # Once, after the sum: each rank would add it otherwise.
        return out if bias is None else out + bias


@dataclass(frozen=True)
class DeferredLinear(Behavior):
    """A linear layer whose backward may leave its product to a keeper."""

    keeper: WeightGradients
    transposed: bool

    def forward(self, module: Any, x: Tensor) -> Tensor:
        """Return the product plus the bias."""
        x, weight, bias = as_computed(x, module.weight, module.bias)
        deferral = deferral_of(self.keeper, module)
        return linear(x, weight, bias, transposed=self.transposed, deferral=deferral)


def attach_column(
    module: nn.Module,
    edges: Edges,
    outputs: Partition,
    *,
    logits: bool = False,
) -> None:
    """Let a linear layer with this rank's output features compute as such.

    Raises:
        ConfigError: the module is no linear layer, or one with a forward of its own.
    """
    transposed = _is_transposed(module)
    attach(module, ColumnLinear(edges, outputs, transposed, logits))


def attach_row(module: nn.Module, edges: Edges, inputs: Partition) -> None:
    """Let a linear layer with this rank's input features compute as such.

    Raises:
        ConfigError: the module is no linear layer, or one with a forward of its own.
    """
    attach(module, RowLinear(edges, inputs, _is_transposed(module)))


def defer_weights(model: nn.Module, keeper: WeightGradients) -> list[nn.Module]:
    """Let the linear layers of a model, whole or divided, keep products; return them."""
    return [
        module
        for module in model.modules()
        if isinstance(module._parameters.get("weight"), nn.Parameter)
        and is_linear(module)
        and _defers(module, keeper)
    ]


def defer_no_more(modules: Iterable[nn.Module]) -> None:
    """Let linear layers compute both halves at once again."""
    for module in modules:
        behavior = behavior_of(module)
        if isinstance(behavior, ColumnLinear | RowLinear):
            exchange(module, replace(behavior, keeper=None))
        else:
            detach(module)


def _defers(module: nn.Module, keeper: WeightGradients) -> bool:
    """Let a linear layer keep products; False if it computes in a way of its own."""
    behavior = behavior_of(module)
    if isinstance(behavior, ColumnLinear | RowLinear):
        exchange(module, replace(behavior, keeper=keeper))
        return True
    own = behavior is None and (type(module).forward is nn.Linear.forward or is_transposed(module))
    if own:
        attach(module, DeferredLinear(keeper, is_transposed(module)))
    return own


def _is_transposed(module: nn.Module) -> bool:
    if is_transposed(module):
        return True
    if not isinstance(module, nn.Linear):
        raise ConfigError(
            f"expected a linear layer (nn.Linear, or Conv1D of transformers), found {module!r}; "
            "leave it out of the plan"
        )
    if not computes_as_linear(module):
        raise ConfigError(
            f"expected a linear layer that computes as nn.Linear does, found "
            f"{type(module).__module__}.{type(module).__qualname__} with a forward of its own; "
            "leave it out of the plan"
        )
    return False
