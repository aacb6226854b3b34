"""Cross entropy of a linear layer whose logits never exist whole, alone and in language models.

The rows of a batch (its tokens) are taken in pieces: the logits of one piece are made, turned into
its loss and in place into their own gradient, which is multiplied into the gradients of the inputs
and of the matrix, and given back. So both gradients are known when the loss is, and a batch of
8,192 tokens over 152,000 words holds the logits of a few hundred rows instead of 5 GB. Ranks may
divide the classes: they sum up three numbers of each row, and once the gradient of the inputs.

Papers: Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training", 2024, section 3.2
(fused linear cross entropy); Chowdhery et al., "PaLM", 2022, section 5 (the z-loss); Shoeybi et
al., "Megatron-LM", 2019, section 3 (divided classes).
"""

import functools
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from drivetrain.collectives import Communicator
from drivetrain.errors import UsageError
from drivetrain.memory import is_out_of_memory
from drivetrain.model.guard import Arguments, Function, Keywords
from drivetrain.model.modules import unwrap_forward, wrap_forward

LEAST_ROWS = 512
"""Rows of a piece, at least: each piece reads and writes the sum of the matrix's gradients."""

LEAST_PIECES = 8
"""Pieces of a batch, at least, where it has the rows: the peak of the logits is 1/8 or less."""


@dataclass(frozen=True, slots=True)
class Classes:
    """Which classes a matrix has rows of: all, or a range where ranks divide them.

    Attributes:
        first: the first of them.
        total: the classes of all ranks.
        ranks: those that divide them; None for one rank with all.
    """

    first: int
    total: int
    ranks: Communicator | None = None

    def rows(self, size: int) -> int:
        """Return the rows of a piece: the ranks' number divides them, so pieces send no more."""
        ranks = 1 if self.ranks is None else self.ranks.size
        return max(size // ranks, 1) * ranks

    def own(self, of_classes: Tensor, count: int) -> Tensor:
        """Return the numbers of this rank's classes, of numbers of all."""
        return of_classes[self.first : self.first + count]

    def here(self, labels: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the places of classes among this rank's ``count``, and which are elsewhere."""
        if self.ranks is None:
            return labels, torch.zeros_like(labels, dtype=torch.bool)
        places = labels - self.first
        elsewhere = (places < 0) | (places >= count)
        return places.masked_fill(elsewhere, 0), elsewhere

    def sum(self, own: Tensor) -> Tensor:
        """Return the sum over ranks, in place."""
        if self.ranks is not None:
            self.ranks.all_reduce(own).wait()
        return own

    def log_sum(self, own: Tensor) -> Tensor:
        """Return the logarithm of the sum of exponentials, of this rank's own."""
        if self.ranks is None:
            return own
        largest = own.clone()
        self.ranks.all_reduce(largest, reduction="max").wait()
        return self.sum((own - largest).exp_()).log_().add_(largest)


def linear_cross_entropy(  # noqa: PLR0913 - the arguments of torch's cross_entropy
    hidden: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    rows: int | None = None,
    classes: Classes | None = None,
) -> Tensor:
    """Return ``cross_entropy(linear(hidden, linear_weight, linear_bias), target)`` in pieces.

    Products are computed in the inputs' dtype, or in autocast's; the softmax, the sums over rows
    and the gradients' sums over pieces in fp32, or in fp64 for inputs in fp64.

    Args:
        hidden: (..., features), the inputs of the last layer.
        linear_weight: (classes, features).
        target: (...) int64, the class of each row.
        linear_bias: (classes,).
        weight: (classes,), the weight of each class in the loss.
        ignore_index: rows with this target count nothing.
        label_smoothing: share of each target that is spread evenly over all classes, 0 to 1.
        z_loss: factor of the mean square of the logarithm of the softmax's denominator.
        reduction: ``mean`` over the rows that count, by their weights, or ``sum``.
        rows: rows of a piece; by default so many that their logits are about as large as
            ``hidden``, at least 512, and at most an eighth of the batch.
        classes: those of ``linear_weight`` and ``linear_bias``, where ranks divide them; all other
            arguments are the same on these ranks. None: all.

    Returns:
        The loss, 0-d, fp32 or fp64. It can be differentiated once.

    Raises:
        UsageError: the shapes do not fit together, or another reduction.
    """
    given = hidden, linear_weight, target
    if has_torch_function(given):  # whoever looks on, or has no values, sees one function
        made: Tensor = handle_torch_function(
            linear_cross_entropy,
            given,
            *given,
            linear_bias=linear_bias,
            weight=weight,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            reduction=reduction,
            rows=rows,
            classes=classes,
        )
        return made
    flat, labels = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
    _check(hidden, linear_weight, target, reduction, rows)
    if torch.is_autocast_enabled(hidden.device.type) and hidden.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(hidden.device.type)
        flat, linear_weight = flat.to(dtype), linear_weight.to(dtype)
        linear_bias = None if linear_bias is None else linear_bias.to(dtype)
    count, features = linear_weight.shape
    classes = classes or Classes(0, count)
    like_input = -(-len(flat) * features // count)
    size = rows or min(max(LEAST_ROWS, like_input), -(-len(flat) // LEAST_PIECES))
    size = classes.rows(size)
    rule = _Rule(classes, weight, ignore_index, label_smoothing, z_loss, reduction == "mean")
    wanted = torch.is_grad_enabled()
    with torch.autocast(hidden.device.type, enabled=False):
        result: Tensor = _InPieces.apply(  # type: ignore[no-untyped-call]
            flat, linear_weight, linear_bias, labels, rule, size, wanted
        )
    return result


def _without_values(
    hidden: Tensor, linear_weight: Tensor, target: Tensor, **options: Any
) -> Tensor:
    """Return a tensor like the loss, by as much work as its logits take."""
    exact = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    return F.linear(hidden, linear_weight).sum(dtype=exact)


linear_cross_entropy.without_values = _without_values  # type: ignore[attr-defined]


def _check(
    hidden: Tensor, linear_weight: Tensor, target: Tensor, reduction: str, rows: int | None
) -> None:
    fits = linear_weight.dim() == 2 and linear_weight.shape[1] == hidden.shape[-1]
    if not fits or target.shape != hidden.shape[:-1]:
        raise UsageError(
            "expected hidden of (..., features), a linear_weight of (classes, features) and a "
            f"target of (...), found {tuple(hidden.shape)}, {tuple(linear_weight.shape)} and "
            f"{tuple(target.shape)}"
        )
    if rows is not None and rows < 1:
        raise UsageError(f"expected pieces of 1 row or more, found rows={rows}")
    if reduction not in ("mean", "sum"):
        raise UsageError(
            f"expected reduction mean or sum, found {reduction!r}; the loss of each row needs "
            "cross_entropy(linear(hidden, linear_weight), target, reduction='none')"
        )


class _InPieces(torch.autograd.Function):
    """The loss, with the gradients of both sides computed in forward."""

    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 - what the loss depends on
        ctx: Any,
        flat: Tensor,
        matrix: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        rule: "_Rule",
        size: int,
        wanted: bool,
    ) -> Tensor:
        """Return the loss; ``wanted`` tells whether gradients may be asked for."""
        exact = torch.float64 if flat.dtype == torch.float64 else torch.float32
        of_input, of_matrix, of_bias = (wanted and each for each in ctx.needs_input_grad[:3])
        to_input = torch.empty_like(flat) if of_input else None
        to_matrix = torch.zeros_like(matrix, dtype=exact) if of_matrix else None
        to_bias = torch.zeros_like(matrix[:, 0], dtype=exact) if of_bias else None
        weights = rule.of_rows(labels, exact)
        share = 1 / weights.sum() if rule.mean else torch.ones_like(weights.sum())
        loss = torch.zeros((), dtype=exact, device=flat.device)
        for first in range(0, len(flat), size):
            piece = slice(first, first + size)
            rows = flat[piece].masked_fill(rule.ignores(labels[piece]), 0)
            logits = F.linear(rows, matrix, bias).to(exact)
            part, gradient = rule.loss(logits, labels[piece], weights[piece])
            loss += part * share
            del logits
            to_rows = gradient.to(flat.dtype)
            if to_input is not None:
                torch.mm(to_rows, matrix, out=to_input[piece])
            if to_matrix is not None and exact == flat.dtype:
                to_matrix.addmm_(to_rows.t(), rows)
            elif to_matrix is not None:
                to_matrix += to_rows.t() @ rows
            if to_bias is not None:
                to_bias += gradient.sum(0)
        # As torch has it: the mean of no rows is NaN, and its gradients are zeros.
        ctx.save_for_backward(share.nan_to_num(posinf=0.0), to_input, to_matrix, to_bias)
        ctx.dtype, ctx.classes = flat.dtype, rule.classes
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients that forward has computed, times that of the loss.

        A row's share is in here, too: in fp16 the gradients of a mean over many rows would be zeros
        before the loss scale, which is in the factor, has made them larger.
        """
        share, *sums = ctx.saved_tensors
        grads = [None if each is None else (each * (factor * share)).to(ctx.dtype) for each in sums]
        if grads[0] is not None:
            ctx.classes.sum(grads[0])
        return *grads, None, None, None, None


@dataclass(frozen=True, slots=True)
class _Rule:
    """What counts in the loss: the arguments of ``linear_cross_entropy``, by its names."""

    classes: Classes
    weight: Tensor | None
    ignore_index: int
    smoothing: float
    z_loss: float
    mean: bool

    def ignores(self, labels: Tensor) -> Tensor:
        """Return which rows count nothing: (rows, 1)."""
        return (labels == self.ignore_index).unsqueeze(1)

    def of_rows(self, labels: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weight of each row's own class, 0 where it is ignored: (rows,)."""
        ignored = labels == self.ignore_index
        if self.weight is None and self.classes.ranks is None:
            return (~ignored).to(dtype)
        ones = torch.ones(self.classes.total, dtype=dtype, device=labels.device)
        weight = ones if self.weight is None else self.weight.to(dtype)
        # Refuses labels that are no class, which no rank would find among its own.
        return weight.gather(0, labels.masked_fill(ignored, 0)).masked_fill_(ignored, 0)

    def loss(self, logits: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses of some rows, and the gradient of their logits.

        With p the softmax, Z its denominator, w the weight of the row's class y, W that of all
        classes together, C their number and s the smoothing, the loss of a row is::

            (1 - s) w (log Z - logit_y) + s/C (W log Z - sum of w_c logit_c) + z log^2 Z

        and its gradient ``a p - (1 - s) w [c = y] - s/C w_c``, with ``a = (1 - s) w + s W/C +
        2 z log Z``. The largest logit's p is 1/C at least, so log Z follows from it. The softmax is
        that of this rank's classes first, to which the Z of all is a factor.

        Args:
            logits: (rows, classes), of this rank's classes.
            labels: (rows,).
            weights: (rows,), of each row's own class; 0 where it is ignored.
        """
        ignored, classes = self.ignores(labels), self.classes
        own = labels.unsqueeze(1).masked_fill(ignored, 0)
        hit, counts = weights.unsqueeze(1) * (1 - self.smoothing), (~ignored).to(logits.dtype)
        spread = total = torch.zeros_like(counts)
        if self.smoothing:
            each = logits.new_ones(classes.total) if self.weight is None else self.weight
            each = each.to(logits.dtype) * (self.smoothing / classes.total)
            of_classes, total = classes.own(each, logits.shape[1]), each.sum()
            spread = classes.sum(logits @ of_classes.unsqueeze(1))
        largest, place = logits.max(1, keepdim=True)
        own, elsewhere = classes.here(own, logits.shape[1])
        target = classes.sum(logits.gather(1, own).masked_fill(elsewhere, 0))
        gradient = logits.softmax(1)
        here = largest - gradient.gather(1, place).log()
        log = classes.log_sum(here)
        losses = hit * (log - target) + (total * log - spread)
        if self.z_loss:
            losses += self.z_loss * log.square()
        gradient.mul_((hit + total + 2 * self.z_loss * log) * counts * (here - log).exp())
        gradient.scatter_add_(1, own, -hit.masked_fill(elsewhere, 0))
        if self.smoothing:
            gradient.addcmul_(of_classes, counts, value=-1)
        return losses.mul_(counts).sum(), gradient


# --- in the causal language models of transformers ---

_ORIGINAL = "_forward_before_chunked_loss"
_CAUSAL = "ForCausalLMLoss"

DIVIDED = "_drivetrain_loss_in_pieces"
"""The method of a head that a strategy has changed: ``linear_cross_entropy`` without its matrix."""


def compute_in_pieces(model: nn.Module) -> None:
    """Let causal language models of transformers compute their training loss without logits.

    In training calls with labels the head returns the loss in place of logits, computed where it is
    called: a strategy that divides parameters has the head's there, and only there. The model hands
    it to its loss function, which proves that nothing lies between: a model that scales or caps its
    logits is refused. Such calls return None for ``logits``; others compute as before.

    Args:
        model: of transformers, or around such a model; changed in place.
            ``restore_loss`` undoes it.

    Raises:
        UsageError: it holds no such model, or one whose head or loss is of another kind.
    """
    module, head = language_model_in(model)
    calls: list[_Call | None] = []
    wrap_forward(module, _ORIGINAL, _Around(calls))
    wrap_forward(head, _ORIGINAL, _InHead(calls))


def language_model_in(model: nn.Module) -> tuple[nn.Module, nn.Linear]:
    """Return the model of transformers whose loss can be computed in pieces, and its head.

    Raises:
        UsageError: it holds no such model, or one whose head or loss is of another kind.
    """
    heads = ((module, _head(module)) for module in model.modules())
    for module, head in heads:
        if head is not None:
            return module, _checked(module, head)
    raise UsageError(
        f"loss: chunked: expected a causal language model of transformers, found "
        f"{type(model).__name__}; call drivetrain.losses.linear_cross_entropy in the script, "
        "or leave loss: whole"
    )


def restore_loss(model: nn.Module) -> None:
    """Let the models inside compute their loss from logits again."""
    for module in model.modules():
        unwrap_forward(module, _ORIGINAL)


def _head(module: nn.Module) -> nn.Module | None:
    """Return the layer that makes the logits of a model of transformers, if the module is one."""
    method: Any = getattr(type(module), "get_output_embeddings", None)
    head: nn.Module | None = method and method(module)
    return head


def _checked(model: nn.Module, head: nn.Module) -> nn.Linear:
    loss = getattr(model, "loss_function", None)
    if type(head) is not nn.Linear:
        raise UsageError(
            f"loss: chunked: expected the head of {type(model).__name__} to be a Linear, found "
            f"{type(head).__name__}; leave loss: whole"
        )
    if getattr(loss, "__name__", None) != _CAUSAL:
        raise UsageError(
            f"loss: chunked: expected {type(model).__name__} to compute {_CAUSAL}, found "
            f"{getattr(loss, '__name__', loss)}; leave loss: whole"
        )
    return head


def head_loss(head: nn.Module, hidden: Tensor, target: Tensor, **options: Any) -> Tensor:
    """Return ``linear_cross_entropy`` with the matrix and bias of a linear layer."""
    matrix: Any = head.weight
    bias: Any = head.bias
    return linear_cross_entropy(hidden, matrix, target, linear_bias=bias, **options)


class _Call:
    """One training call of a model with labels.

    Attributes:
        arguments: of the call, by name; what the signature does not name included.
        loss: what the head has computed.
        is_used: whether the model's loss function has been given it.
    """

    def __init__(self, model: nn.Module, arguments: Keywords) -> None:
        self.model = type(model).__name__
        self.arguments = arguments
        self.loss: Tensor | None = None
        self.is_used = False

    def compute(self, head: nn.Module, hidden: Tensor) -> Tensor:
        """Return the loss of the head's inputs."""
        labels, shifted = self.arguments["labels"], self.arguments.get("shift_labels")
        ignored = self.arguments.get("ignore_index", -100)
        if hidden.shape[:-1] != labels.shape or self.loss is not None:
            raise self.refusal(f"a head that is called with {tuple(hidden.shape)}")
        if shifted is None:
            shifted = F.pad(labels, (0, 1), value=ignored)[..., 1:]
        items = self.arguments.get("num_items_in_batch")
        own: Any = getattr(head, DIVIDED, functools.partial(head_loss, head))
        loss: Tensor = own(
            hidden,
            shifted.to(hidden.device).reshape(hidden.shape[:-1]),
            ignore_index=ignored,
            reduction="mean" if items is None else "sum",
        )
        if items is not None:
            loss = loss / (items.to(loss.device) if isinstance(items, Tensor) else items)
        self.loss = loss
        return loss

    def function(self, logits: Any, labels: Any, vocab_size: int = 0, **options: Any) -> Tensor:
        """Return the loss in place of the model's loss function, if it is given the same values."""
        passed = {"labels": labels, **options}
        same = all(
            passed.get(name) is self.arguments.get(name)
            for name in ("labels", "shift_labels", "num_items_in_batch")
        )
        if self.loss is None or logits is not self.loss or not same:
            raise self.refusal("a loss of other values than those of its head and call")
        self.is_used = True
        return self.loss.clone()  # the model may add to it in place

    def without_logits(self, outputs: Any) -> Any:
        """Return the outputs with None for the logits that were not made."""
        if not self.is_used:
            raise self.refusal("one that calls no loss_function")
        if isinstance(outputs, tuple):
            return tuple(None if each is self.loss else each for each in outputs)
        kept = {name: None if each is self.loss else each for name, each in outputs.items()}
        return type(outputs)(**kept)

    def refusal(self, found: str) -> UsageError:
        """Return the error about a model whose loss cannot be computed in pieces."""
        return UsageError(
            f"loss: chunked: expected {self.model} to hand what its head returns, row by row, to "
            f"its loss_function as it is, found {found}; leave loss: whole"
        )


@dataclass(frozen=True, slots=True)
class _Around:
    """Stands around a model's forward: notes the labels, and gives the loss in place of logits."""

    calls: list[_Call | None]

    def __call__(
        self, module: nn.Module, compute: Function, args: Arguments, kwargs: Keywords
    ) -> Any:
        """Return the model's outputs."""
        given = inspect.signature(type(module).forward).bind_partial(module, *args, **kwargs)
        named = dict(given.arguments)
        for parameter in given.signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                named |= named.pop(parameter.name, {})
        if named.get("labels") is None or not (module.training and torch.is_grad_enabled()):
            self.calls.append(None)  # perhaps inside of a call with a loss
            try:
                return compute(*args, **kwargs)
            finally:
                self.calls.pop()
        call = _Call(module, named)
        own = module.__dict__.get("_loss_function")
        module.__dict__["_loss_function"] = call.function
        self.calls.append(call)
        try:
            outputs = compute(*args, **kwargs)
        except (IndexError, RuntimeError) as error:
            if call.loss is None or call.is_used or is_out_of_memory(error):
                raise
            raise call.refusal("one that computes with the logits itself") from error
        finally:
            self.calls.pop()
            del module.__dict__["_loss_function"]
            if own is not None:
                module.__dict__["_loss_function"] = own
        return call.without_logits(outputs)


@dataclass(frozen=True, slots=True)
class _InHead:
    """Stands around the head's forward: computes the loss of the call that is under way."""

    calls: list[_Call | None]

    def __call__(
        self, module: nn.Module, compute: Function, args: Arguments, kwargs: Keywords
    ) -> Any:
        """Return the loss in a training call with labels, and logits otherwise."""
        call = self.calls[-1] if self.calls else None
        return compute(*args, **kwargs) if call is None else call.compute(module, *args)
