"""One entrance and one sum for column-cut layers with one input (Shoeybi et al. 2019, section 3).

Layers such as q, k and v read one activation, whose gradient is summed over ranks once, when the
last of them has given its part. Nothing would be left to compute meanwhile if each layer computed
the gradient of its weight together with that of its input. So these are two nodes of the graph, and
the nodes of weights are made before the node of the sum: of the nodes that are ready, autograd runs
the youngest::

    forward:   x -> wait -> (weight nodes of q, k, v) -> start -> products of q, k, v
    backward:  inputs' gradients of v, k, q -> start the sum -> weights' gradients -> wait for it

The order decides which computation hides the sum, never a result.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from drivetrain_megatron.tensor.behavior import behavior_of
from drivetrain_megatron.tensor.once import once_differentiable
from drivetrain_megatron.tensor.operators import (
    Edges,
    PendingSum,
    gathered,
    is_outline,
    start_scattered_sum,
    start_sum,
)
from drivetrain_megatron.tensor.partition import Partition
from drivetrain_megatron.tensor.products import Product, as_computed, dtype_computed
from drivetrain_megatron.tensor.weight_grad import deferral_of, rows_of

_KEY = "_drivetrain_later"


class DeferredProduct(NamedTuple):
    """A layer's product whose weight gradient is computed later, by the node behind the token.

    The token has the product's shape, and no memory.
    """

    token: Tensor
    product: Product


class _Sum:
    """The sum of an input's gradient, between its two nodes: start and wait."""

    def __init__(self, edges: Edges, sequence: Partition | None) -> None:
        self.edges = edges
        self.sequence = sequence
        self.pending: PendingSum | None = None


def enter_group(x: Tensor, edges: Edges, layers: Sequence[nn.Module]) -> Tensor:
    """Return the common input of layers cut by columns, as ``Edges.enter`` does, but overlapped.

    The layers are ``ColumnLinear`` with local parameters; their own edges must be ``prepared``. A
    layer that is given anything else than the returned tensor, or that does not run, is not
    disturbed.
    """
    trained = [layer for layer in layers if layer.weight.requires_grad]
    has_gradients = x.requires_grad and torch.is_grad_enabled() and trained
    if edges.ranks.size == 1 or not has_gradients or is_outline(x):
        return edges.enter(x)
    shared = _Sum(edges, edges.sequence)
    x = _Wait.apply(x, shared)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        whole = x if shared.sequence is None else gathered(x, edges.ranks, shared.sequence)
    later = {id(layer): _later(layer, whole, edges) for layer in trained}
    entered: Tensor = _Start.apply(x, whole, shared)  # type: ignore[no-untyped-call]
    setattr(entered, _KEY, later)
    return entered


def grouped_product(x: Tensor, layer: Any) -> Tensor | None:
    """Return a layer's product with the result of ``enter_group``; None if it is anything else."""
    later: DeferredProduct | None = getattr(x, _KEY, {}).get(id(layer))
    if later is None or not torch.is_grad_enabled():
        return None
    x, weight, bias = as_computed(x, layer.weight.detach(), layer.bias)
    return _InputNow.apply(x, later.token, weight, bias, later.product)  # type: ignore[no-any-return,no-untyped-call]


def _later(layer: nn.Module, whole: Tensor, edges: Edges) -> DeferredProduct:
    behavior: Any = behavior_of(layer)
    product = Product(
        edges.ranks, behavior.transposed, deferral=deferral_of(behavior.keeper, layer)
    )
    # Not the weight's own extent: it may be elsewhere until the layer runs.
    outputs = behavior.outputs.local_size(edges.ranks.rank)
    token: Tensor = _WeightLater.apply(layer.weight, whole, outputs, product)  # type: ignore[no-untyped-call]
    return DeferredProduct(token, product)


class _Wait(torch.autograd.Function):
    """Nothing in forward; waits for the sum in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shared: _Sum) -> Tensor:
        ctx.shared = shared
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, placeholder: Tensor) -> tuple[Tensor, None]:
        pending, ctx.shared.pending = ctx.shared.pending, None
        return placeholder if pending is None else pending.result(), None


class _Start(torch.autograd.Function):
    """Returns the whole input in forward; starts the sum of its gradient in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, whole: Tensor, shared: _Sum) -> Tensor:
        ctx.shared, ctx.shape = shared, x.shape
        return whole.view_as(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        shared: _Sum = ctx.shared
        ranks = shared.edges.ranks
        if shared.sequence is None:
            own = grad.clone(memory_format=torch.contiguous_format)
            shared.pending = start_sum(own, ranks)
        else:
            shared.pending = start_scattered_sum(grad, ranks, shared.sequence)
        # Takes no memory; only its arrival matters.
        return grad.new_zeros(()).expand(ctx.shape), None, None


class _WeightLater(torch.autograd.Function):
    """A token of the product's shape, whose gradient becomes that of the weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor, outputs: int, product: Product) -> Tensor:
        ctx.product = product
        ctx.save_for_backward(x)
        zero = x.new_zeros((), dtype=dtype_computed(x))
        return zero.expand(*x.shape[:-1], outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        (x,) = ctx.saved_tensors
        grad_weight, _ = ctx.product.weight_grads(grad, x.to(grad.dtype))
        return grad_weight, None, None, None


class _InputNow(torch.autograd.Function):
    """The product; its gradient becomes those of input and bias, and goes on to the token."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, token: Tensor, weight: Tensor, bias: Tensor | None, product: Product
    ) -> Tensor:
        ctx.product = product
        ctx.save_for_backward(weight)
        return product.of(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, Tensor | None, None]:
        (weight,) = ctx.saved_tensors
        grad_bias = rows_of(grad).sum(0) if ctx.needs_input_grad[3] else None
        return ctx.product.input_grad(grad, weight), grad, None, grad_bias, None
