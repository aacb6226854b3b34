"""Matrix products with collectives inside, of divided layers (Shoeybi et al. 2019, section 3).

A layer cut by columns sums the gradient of its input over ranks while it computes the gradient of
its weight (arXiv 1909.08053; the overlap is Narayanan et al. 2021, arXiv 2104.04473). A layer cut
by rows sums its product in place, nobody else holds it yet.

Shapes: x (..., in), weight (out, in) or transposed (in, out), product (..., out).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from drivetrain.collectives import Communicator
from drivetrain_megatron.tensor.once import once_differentiable
from drivetrain_megatron.tensor.operators import (
    PendingSum,
    copy,
    gather,
    gathered,
    is_outline,
    reduce,
    reduce_scatter,
    start_scattered_sum,
    start_sum,
    unviewed,
)
from drivetrain_megatron.tensor.partition import Partition
from drivetrain_megatron.tensor.weight_grad import Deferral, WeightHalf, rows_of


class Product(NamedTuple):
    """How a product is computed, and over which ranks.

    Attributes:
        ranks: the axis.
        transposed: whether the weight is (in, out), as in ``Conv1D``, and not (out, in).
        sequence: None: the activation outside is whole on every rank; else its cut.
        deferral: may take the half of backward that nobody waits for.
    """

    ranks: Communicator
    transposed: bool = False
    sequence: Partition | None = None
    deferral: Deferral | None = None

    def of(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x times the weight, plus the bias."""
        matrix = weight if self.transposed else weight.t()
        rows = rows_of(x)
        product = torch.mm(rows, matrix) if bias is None else torch.addmm(bias, rows, matrix)
        return unviewed(product.view(*x.shape[:-1], matrix.shape[1]))

    def input_grad(self, grad: Tensor, weight: Tensor) -> Tensor:
        """Return this rank's summand of the gradient of x."""
        matrix = weight if self.transposed else weight.t()
        return torch.mm(rows_of(grad), matrix.t()).view(*grad.shape[:-1], matrix.shape[0])

    def weight_grad(self, grad: Tensor, x: Tensor) -> Tensor:
        """Return the gradient of the weight, now and within autograd."""
        product = torch.mm(rows_of(grad).t(), rows_of(x))
        return product.t() if self.transposed else product

    def weight_grads(
        self, grad: Tensor, x: Tensor, *, for_weight: bool = True, for_bias: bool = False
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of weight and bias; None for an unwanted or later gradient."""
        half = WeightHalf(x, grad, self.transposed, for_weight, for_bias)
        return half.settled(self.deferral)


def column_product(x: Tensor, weight: Tensor, bias: Tensor | None, product: Product) -> Tensor:
    """Return this rank's columns of a product, of a whole input, or of a shard of the sequence.

    Shards are gathered, and kept whole for backward.
    """
    if is_outline(x, weight):
        if product.sequence is not None:
            x = gather(x, product.ranks, product.sequence, partial=True)
        return product.of(x, weight, bias)
    return _ColumnProduct.apply(x, weight, bias, product)  # type: ignore[no-any-return,no-untyped-call]


def row_product(x: Tensor, weight: Tensor, product: Product) -> Tensor:
    """Return the whole product of this rank's features, or this rank's shard of its sequence."""
    if is_outline(x, weight):
        out = product.of(x, weight, None)
        if product.sequence is None:
            return out
        return reduce_scatter(out, product.ranks, product.sequence)
    return _RowProduct.apply(x, weight, product)  # type: ignore[no-any-return,no-untyped-call]


def as_computed(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Any]:
    """Return input, weight and bias in the dtype in which autocast would multiply them."""
    cast = [None if each is None else each.to(dtype_computed(each)) for each in (x, weight, bias)]
    return cast[0], cast[1], cast[2]  # type: ignore[return-value]


def dtype_computed(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which autocast would multiply a tensor; its own without autocast."""
    device = tensor.device.type
    is_cast = tensor.is_floating_point() and tensor.dtype is not torch.float64
    if is_cast and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return tensor.dtype


class _ColumnProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, product: Product
    ) -> Tensor:
        if product.sequence is not None:
            x = gathered(x, product.ranks, product.sequence)
        ctx.product = product
        ctx.save_for_backward(x, weight)
        return product.of(x, weight, bias)

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        product: Product = ctx.product
        if torch.is_grad_enabled() and product.sequence is None:
            return *_column_grads(ctx, grad), None
        return _ColumnProduct.once(ctx, grad)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def once(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        product: Product = ctx.product
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        pending: PendingSum | None = None
        if needs_x:
            own = product.input_grad(grad, weight)
            if product.sequence is None:
                pending = start_sum(own, product.ranks)
            else:
                pending = start_scattered_sum(own, product.ranks, product.sequence, own=True)
            del own
        # While the input's gradient is on its way:
        grad_weight, grad_bias = product.weight_grads(
            grad, x, for_weight=needs_weight, for_bias=needs_bias
        )
        grad_x = None if pending is None else pending.result()
        return grad_x, grad_weight, grad_bias, None


class _RowProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, product: Product) -> Tensor:
        ctx.product = product
        ctx.save_for_backward(x, weight)
        own = product.of(x, weight, None)
        if product.sequence is None:
            return start_sum(own, product.ranks).result()
        return start_scattered_sum(own, product.ranks, product.sequence, own=True).result()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        product: Product = ctx.product
        if torch.is_grad_enabled() and product.sequence is None:
            return *_row_grads(ctx, grad), None
        return _RowProduct.once(ctx, grad)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def once(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        product: Product = ctx.product
        if product.sequence is not None:
            grad = gathered(grad, product.ranks, product.sequence)
        needs_x, needs_weight, _ = ctx.needs_input_grad
        grad_x = product.input_grad(grad, weight) if needs_x else None
        grad_weight, _ = product.weight_grads(grad, x, for_weight=needs_weight)
        return grad_x, grad_weight, None


def _column_grads(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of input, weight and bias, which can be differentiated again."""
    x, weight = ctx.saved_tensors
    product: Product = ctx.product
    needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
    return (
        reduce(product.input_grad(grad, weight), product.ranks) if needs_x else None,
        product.weight_grad(grad, copy(x, product.ranks)) if needs_weight else None,
        rows_of(grad).sum(0) if needs_bias else None,
    )


def _row_grads(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of input and weight, which can be differentiated again."""
    x, weight = ctx.saved_tensors
    product: Product = ctx.product
    needs_x, needs_weight, _ = ctx.needs_input_grad
    entered = copy(grad, product.ranks)
    return (
        product.input_grad(entered, weight) if needs_x else None,
        product.weight_grad(entered, x) if needs_weight else None,
    )
