"""Linear layers cut by columns or by rows (Shoeybi et al. 2019, arXiv 1909.08053, section 3).

They are ``nn.Linear``, and Hugging Face's ``Conv1D``. A layer cut by columns computes its rank's
output features from a whole input; a layer cut by rows computes from its rank's input features a
part of each output feature, and the parts are summed. One after the other they need one all-reduce
in forward and one in backward. ``in_features`` and ``out_features`` stay those of the whole layer.
Backward may be computed in two halves (Qi et al. 2023, arXiv 2401.10241, section 2.1).

Shapes: x (..., in), weight (out, in) or transposed (in, out), product (..., out).
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, autograd, nn

from drivetrain.collectives import Communicator, Finished
from drivetrain.errors import ConfigError, UsageError
from drivetrain.losses import Classes, head_loss
from drivetrain_megatron.tensor.behavior import (
    Behavior,
    attach,
    behavior_of,
    detach,
    exchange,
    original_class,
)
from drivetrain_megatron.tensor.operators import (
    Edges,
    PendingSum,
    Uncopied,
    copy,
    gather,
    gathered,
    is_outline,
    once_differentiable,
    one_node,
    reduce,
    reduce_scatter,
    scatter,
    start_sum,
    unviewed,
)
from drivetrain_megatron.tensor.partition import Partition
from drivetrain_megatron.tensor.vocabulary import ShardedLogits

# --- the two halves of backward ---

# The gradient of the input comes now, since the layer before waits for it; the gradient of the
# weight may come later, since nobody waits for it. A linear layer with a keeper
# (``WeightGradients``) hands the tensors for the second half over, also where the layer is divided
# over ranks. Other layers compute both halves at once: their weights take little of the time.


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
    product = Product(transposed=transposed, deferral=deferral)
    return _ColumnProduct.apply(x, weight, bias, product)  # type: ignore[no-any-return,no-untyped-call]


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


# --- matrix products with collectives inside ---

# A layer cut by columns sums the gradient of its input over ranks while it computes the gradient of
# its weight (arXiv 1909.08053; the overlap is Narayanan et al. 2021, arXiv 2104.04473). A layer cut
# by rows sums its product in place, nobody else holds it yet.


class Product(NamedTuple):
    """How a product is computed, and over which ranks.

    Attributes:
        ranks: the axis; None for a product of this rank alone.
        sequence: None: the activation outside is whole on every rank; else its cut.
        transposed: whether the weight is (in, out), as in ``Conv1D``, and not (out, in).
        deferral: may take the half of backward that nobody waits for.
    """

    ranks: Communicator | None = None
    sequence: Partition | None = None
    transposed: bool = False
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

    def entered(self, x: Tensor) -> Tensor:
        """Return a whole activation."""
        if self.ranks is None or self.sequence is None:
            return x
        return gathered(x, self.ranks, self.sequence)

    def start_sum(self, tensor: Tensor, *, own: bool = True) -> PendingSum:
        """Start to sum ranks' parts of an activation, as it is outside."""
        if self.ranks is None:
            return PendingSum(Finished(), lambda: tensor)
        return start_sum(tensor, self.ranks, self.sequence, own=own)


@one_node
def column_product(
    x: Tensor,
    ranks: Communicator,
    sequence: Partition | None,
    weight: Tensor,
    bias: Tensor | None,
    *how: Any,
) -> Tensor:
    """Return this rank's columns of a product, of a whole input, or of a shard of the sequence.

    Shards are gathered, and kept whole for backward. ``how`` are the other fields of ``Product``.
    """
    product = Product(ranks, sequence, *how)
    if is_outline(x, weight):
        if sequence is not None:
            x = gather(x, ranks, sequence, partial=True)
        return product.of(x, weight, bias)
    return _ColumnProduct.apply(x, weight, bias, product)  # type: ignore[no-any-return,no-untyped-call]


@one_node
def row_product(
    x: Tensor, ranks: Communicator, sequence: Partition | None, weight: Tensor, *how: Any
) -> Tensor:
    """Return the whole product of this rank's features, or this rank's shard of its sequence."""
    product = Product(ranks, sequence, *how)
    if is_outline(x, weight):
        out = product.of(x, weight, None)
        return out if sequence is None else reduce_scatter(out, ranks, sequence)
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
        x = product.entered(x)
        ctx.product = product
        ctx.save_for_backward(x, weight)
        return product.of(x, weight, bias)

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        product: Product = ctx.product
        if not torch.is_grad_enabled() or product.ranks is None or product.sequence is not None:
            return _ColumnProduct.once(ctx, grad)  # type: ignore[no-any-return]
        x, weight = ctx.saved_tensors
        needs_x, *needs, _ = ctx.needs_input_grad
        # gradients that can be differentiated again
        grad_x = reduce(product.input_grad(grad, weight), product.ranks) if needs_x else None
        half = WeightHalf(copy(x, product.ranks), grad, product.transposed, *needs)
        return grad_x, *half.compute(), None

    @staticmethod
    @once_differentiable
    def once(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        product: Product = ctx.product
        needs_x, *needs, _ = ctx.needs_input_grad
        pending = product.start_sum(product.input_grad(grad, weight)) if needs_x else None
        # While the input's gradient is on its way:
        grads = WeightHalf(x, grad, product.transposed, *needs).settled(product.deferral)
        return None if pending is None else pending.result(), *grads, None


class _RowProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, product: Product) -> Tensor:
        ctx.product = product
        ctx.save_for_backward(x, weight)
        own = product.of(x, weight, None)
        if torch._C._len_torch_dispatch_stack():
            own = own.clone()  # selective recompute keeps the product, and gives it back
        return product.start_sum(own).result()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        product: Product = ctx.product
        if not torch.is_grad_enabled() or product.ranks is None or product.sequence is not None:
            return _RowProduct.once(ctx, grad)  # type: ignore[no-any-return]
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        entered = copy(grad, product.ranks)
        grad_x = product.input_grad(entered, weight) if needs_x else None
        # gradients that can be differentiated again
        grad_weight, _ = WeightHalf(x, entered, product.transposed, needs_weight).compute()
        return grad_x, grad_weight, None

    @staticmethod
    @once_differentiable
    def once(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        product: Product = ctx.product
        grad = product.entered(grad)
        needs_x, needs_weight, _ = ctx.needs_input_grad
        grad_x = product.input_grad(grad, weight) if needs_x else None
        half = WeightHalf(x, grad, product.transposed, needs_weight)
        grad_weight, _ = half.settled(product.deferral)
        return grad_x, grad_weight, None


# --- one entrance and one sum for column-cut layers with one input ---

# Layers such as q, k and v read one activation, whose gradient is summed over ranks once, when the
# last of them has given its part. Nothing would be left to compute meanwhile if each layer computed
# the gradient of its weight together with that of its input. So the entrance computes the gradients
# of all weights, and a token of each layer's product brings it the product's gradient::
#
#     forward:   x -> entrance -> whole input and tokens -> products of q, k, v
#     backward:  inputs' gradients of v, k, q -> start the sum -> weights' gradients -> wait for it
#
# That hides the sum, and never changes a result.


_KEY = "_drivetrain_later"


def enter_group(x: Tensor, edges: Edges, layers: Sequence[nn.Module]) -> Tensor:
    """Return the common input of layers cut by columns, as ``Edges.enter`` does, but overlapped.

    The layers are ``ColumnLinear`` with local parameters; their own edges must be ``prepared``. A
    layer that is given anything else than the returned tensor, or that does not run, is not
    disturbed.
    """
    trained = [layer for layer in layers if layer.weight.requires_grad]
    if torch.compiler.is_compiling():  # a graph has an order of its own
        return edges.enter(x)
    has_gradients = x.requires_grad and torch.is_grad_enabled() and trained
    if edges.ranks.size == 1 or not has_gradients or is_outline(x):
        return edges.enter(x)
    behaviors: list[Any] = [behavior_of(layer) for layer in trained]
    products = [
        Product(transposed=each.transposed, deferral=deferral_of(each.keeper, layer))
        for each, layer in zip(behaviors, trained, strict=True)
    ]
    # Not the weights' own extents: they may be elsewhere until the layers run.
    outputs = [each.outputs.local_sizes[edges.ranks.rank] for each in behaviors]
    shared, weights = Product(edges.ranks, edges.sequence), [layer.weight for layer in trained]
    entered, *tokens = _Group.apply(x, shared, products, outputs, *weights)  # type: ignore[no-untyped-call]
    each = zip(trained, tokens, products, strict=True)
    setattr(entered, _KEY, {id(layer): later for layer, *later in each})
    return entered  # type: ignore[no-any-return]


def grouped_product(x: Tensor, layer: Any) -> Tensor | None:
    """Return a layer's product with the result of ``enter_group``; None if it is anything else."""
    if torch.compiler.is_compiling():
        return None
    later: list[Any] | None = getattr(x, _KEY, {}).get(id(layer))
    if later is None or not torch.is_grad_enabled():
        return None
    token, product = later
    x, weight, bias = as_computed(x, layer.weight.detach(), layer.bias)
    return _InputNow.apply(x, token, weight, bias, product)  # type: ignore[no-any-return,no-untyped-call]


class _Group(torch.autograd.Function):
    """The whole input of layers, and a token of each product, which takes no memory.

    A token's gradient becomes that of the layer's weight.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        shared: Product,
        products: Sequence[Product],
        outputs: Sequence[int],
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        whole = shared.entered(x)
        ctx.shared, ctx.products = shared, products
        ctx.save_for_backward(whole)
        ctx.set_materialize_grads(False)
        zero = whole.new_zeros((), dtype=dtype_computed(whole))
        tokens = (zero.expand(*whole.shape[:-1], extent) for extent in outputs)
        return whole.view_as(whole), *tokens

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *grads: Tensor | None) -> tuple[Any, ...]:
        pending = ctx.shared.start_sum(grad, own=False)
        (whole,) = ctx.saved_tensors
        found = [
            None
            if each is None
            else WeightHalf(whole.to(each.dtype), each, product.transposed).settled(
                product.deferral
            )[0]
            for each, product in zip(grads, ctx.products, strict=True)
        ]
        return pending.result(), None, None, None, *found


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


# --- the layers ---


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


def computes_as_linear(module: nn.Module) -> bool:
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


def _small(module: nn.Module, tensors: Sequence[Tensor], *, training: bool) -> nn.Module:
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

    @property
    def is_traced(self) -> bool:
        """Whether ``torch.compile`` may trace the forward."""
        return self.keeper is None and not self.logits

    def forward(self, module: Any, x: Tensor) -> Tensor:
        """Return the local output features, shape (..., features)."""
        ranks, deferral = self.edges.ranks, deferral_of(self.keeper, module)
        out = grouped_product(x, module)
        if out is None:
            x, weight, bias = as_computed(x, module.weight, module.bias)
            if self.edges.prepared or ranks.size == 1:
                out = linear(x, weight, bias, transposed=self.transposed, deferral=deferral)
            else:
                how = self.transposed, deferral
                out = column_product(x, ranks, self.edges.sequence, weight, bias, *how)
        return ShardedLogits.of(out, ranks, self.outputs) if self.logits else out

    def loss(self, module: Any, hidden: Tensor, target: Tensor, **options: Any) -> Tensor:
        """Compute the loss of the logits of all ranks, whose inputs are whole on each.

        Raises:
            UsageError: a rank has no words.
        """
        words, ranks = self.outputs, self.edges.ranks
        if not self.logits or min(words.local_sizes) == 0:
            raise UsageError(
                "loss: chunked: expected a head of which each rank has words, found ranks with "
                f"{words.local_sizes} of its features; take a smaller tp, or leave loss: whole"
            )
        start, _ = words.bounds[ranks.rank]
        classes = Classes(start, words.size, ranks)
        return head_loss(module, hidden, target, classes=classes, **options)


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

    @property
    def is_traced(self) -> bool:
        """Whether ``torch.compile`` may trace the forward."""
        return self.keeper is None

    def loss(self, module: Any, hidden: Tensor, target: Tensor, **options: Any) -> Tensor:
        """Refuse to be a head.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "loss: chunked: expected a head that ranks divide by words, found one divided by "
            "features; leave it out of the plan, or leave loss: whole"
        )

    def forward(self, module: Any, x: Tensor) -> Tensor:
        """Return the whole output, or this rank's shard of its sequence, shape (..., out)."""
        x, weight, bias = as_computed(x, module.weight, module.bias)
        deferral = deferral_of(self.keeper, module)
        ranks, sequence = self.edges.ranks, self.edges.sequence
        out = row_product(x, ranks, sequence, weight, self.transposed, deferral)
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
    module: nn.Module, edges: Edges, outputs: Partition, *, logits: bool = False
) -> None:
    """Let a linear layer with this rank's output features compute as such.

    Raises:
        ConfigError: the layer has a forward of its own.
    """
    attach(module, ColumnLinear(edges, outputs, _is_transposed(module), logits))


def attach_row(module: nn.Module, edges: Edges, inputs: Partition) -> None:
    """Let a linear layer with this rank's input features compute as such.

    Raises:
        ConfigError: the layer has a forward of its own.
    """
    attach(module, RowLinear(edges, inputs, _is_transposed(module)))


def defer_weights(model: nn.Module, keeper: WeightGradients) -> list[nn.Module]:
    """Let the linear layers of a model, whole or divided, keep products; return them."""
    found = []
    for module in model.modules():
        behavior = behavior_of(module)
        if not (isinstance(module._parameters.get("weight"), nn.Parameter) and is_linear(module)):
            continue
        if isinstance(behavior, ColumnLinear | RowLinear):
            exchange(module, replace(behavior, keeper=keeper))
            found.append(module)
        elif behavior is None and (
            type(module).forward is nn.Linear.forward or is_transposed(module)
        ):  # others compute in a way of their own
            attach(module, DeferredLinear(keeper, is_transposed(module)))
            found.append(module)
    return found


def defer_no_more(modules: Iterable[nn.Module]) -> None:
    """Let linear layers compute both halves at once again."""
    for module in modules:
        behavior = behavior_of(module)
        if isinstance(behavior, ColumnLinear | RowLinear):
            exchange(module, replace(behavior, keeper=None))
        else:
            detach(module)


def _is_transposed(module: nn.Module) -> bool:
    if is_transposed(module):
        return True
    if not computes_as_linear(module):
        raise ConfigError(
            f"expected a linear layer that computes as nn.Linear does, found "
            f"{type(module).__module__}.{type(module).__qualname__} with a forward of its own; "
            "leave it out of the plan"
        )
    return False


# --- linear layers that are divided by themselves: whole activations come in and go out ---

# Cut by columns, a layer gathers its output features; cut by rows, it takes its rank's features of
# the input. No other layer has to fit (Shoeybi et al. 2019, arXiv 1909.08053, section 3, divides
# pairs, between which nothing is sent; here each layer sends twice).


@dataclass(frozen=True, slots=True)
class FeatureGate(Uncopied):
    """Hooks between the whole features of an activation and this rank's.

    Attributes:
        edges: the ranks.
        features: how the last dim is cut.
    """

    edges: Edges
    features: Partition

    def scattered(self, module: nn.Module, args: Any) -> Any:
        """Be a forward pre-hook: the layer sees this rank's input features."""
        x, *rest = args
        return (scatter(x, self.edges.ranks, self.features), *rest)

    def gathered(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """Be a forward hook: the code after the layer sees all output features."""
        return gather(output, self.edges.ranks, self.features)


def attach_alone(module: nn.Module, edges: Edges, features: Partition, *, by_rows: bool) -> None:
    """Let a linear layer with this rank's share of the weight compute as the whole layer.

    Raises:
        ConfigError: the layer has a forward of its own.
    """
    gate = FeatureGate(edges, replace(features, dim=-1))
    if by_rows:
        attach_row(module, edges, gate.features)
        module.register_forward_pre_hook(gate.scattered)
    else:
        attach_column(module, edges, gate.features)
        module.register_forward_hook(gate.gathered, prepend=True)  # users' hooks see the whole
