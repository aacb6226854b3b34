"""Words cut over ranks: embeddings, logits, and their loss (Shoeybi et al. 2019, section 3).

An embedding gives a rank's words (arXiv 1909.08053), a head makes logits of a rank's words, which
stay divided until the loss has been made of them.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from drivetrain.collectives import Communicator
from drivetrain.errors import ConfigError, UsageError
from drivetrain.model.guard import Arguments, Function, Keywords, asks_facts, name_of, writes_first
from drivetrain_megatron.tensor.behavior import Behavior, attach, original_class
from drivetrain_megatron.tensor.operators import (
    Edges,
    conjugate,
    gather,
    gathered,
    is_outline,
    once_differentiable,
    outlined,
)
from drivetrain_megatron.tensor.partition import Partition, check_words

# --- embeddings ---

# A rank looks its own words up and gives zeros for the words of others, so that the sum over ranks
# has every word once. The cut may be uneven, and a rank may have no word.


@dataclass(frozen=True)
class VocabularyEmbedding(Behavior):
    """An embedding with this rank's words, one range of the rows of the weight."""

    edges: Edges
    words: Partition

    def forward(self, module: Any, words: Tensor) -> Tensor:
        """Return the features of words (...) as (..., features), or a shard of their sequence."""
        if is_outline(words, module.weight):
            return self.edges.leave(nn.functional.embedding(words, module.weight))
        check_words(words, self.words.size, "words")
        return self.edges.leave(self._own(module, words))

    def _own(self, module: Any, words: Tensor) -> Tensor:
        """Return the features of this rank's words, zeros for others."""
        weight: Tensor = module.weight
        rank = self.edges.ranks.rank
        if weight.shape[0] == 0:
            # A sum over no rows: zeros that still need a gradient, as on the other ranks.
            return weight.sum(0).expand(*words.shape, -1)
        local, elsewhere = self.words.here(words, rank)
        start, stop = self.words.bounds[rank]
        padding = module.padding_idx
        is_here = padding is not None and start <= padding < stop
        found = nn.functional.embedding(local, weight, padding - start if is_here else None)
        return found.masked_fill(elsewhere.unsqueeze(-1), 0)


def attach_vocabulary(module: nn.Module, edges: Edges, words: Partition) -> None:
    """Let an embedding with this rank's rows compute as such.

    Raises:
        ConfigError: the module is no embedding, or has an option that needs the whole weight.
    """
    if reason := reason_against(module):
        raise ConfigError(f"{reason}; leave it out of the plan, or make it without")
    attach(module, VocabularyEmbedding(edges, words))


def reason_against(module: nn.Module) -> str:
    """Return why a module cannot compute with a part of its rows; empty if it can."""
    kind = type(module)
    if (
        not isinstance(module, nn.Embedding)
        or original_class(module).forward is not nn.Embedding.forward
    ):
        return (
            f"expected an embedding that computes as nn.Embedding does, found {module!r} "
            f"({kind.__module__}.{kind.__qualname__})"
        )
    found = {
        "max_norm": module.max_norm is not None,  # changes rows in forward, by their whole norm
        "scale_grad_by_freq": module.scale_grad_by_freq,  # counts the words of others as word 0
        "sparse": module.sparse,  # a sparse gradient cannot be summed by our collectives
    }
    if options := [name for name, is_set in found.items() if is_set]:
        return (
            f"expected an embedding without {', '.join(options)}, which a rank cannot do with its "
            f"part of the weight, found {module!r}"
        )
    return ""


# --- cross entropy of logits cut over the vocabulary ---

# With x the logits, m their maximum and y the target (arXiv 1909.08053)::
#
#     loss = log(sum exp(x - m)) + m - x[y]        d loss / d x = softmax(x) - onehot(y)
#
# so three small all-reduces do, one number per token each: the maximum, the sum of exponentials,
# and the logit of the target. Label smoothing needs the sum of logits too. Backward sends nothing.


LossReduction: TypeAlias = Literal["none", "sum", "mean"]


class Terms(NamedTuple):
    """The options of a cross entropy.

    Attributes:
        ranks: the axis.
        partition: of the classes, one range per rank; its dim does not matter.
        weight: of each class, shape (classes,), the same on all ranks; None: ones.
        ignore_index: targets that do not count.
        reduction: of the losses of single targets.
        label_smoothing: how much of a target is spread evenly over all classes, from 0 to 1.
    """

    ranks: Communicator
    partition: Partition
    weight: Tensor | None = None
    ignore_index: int = -100
    reduction: LossReduction = "mean"
    label_smoothing: float = 0.0


def cross_entropy(logits: Tensor, target: Tensor, terms: Terms) -> Tensor:
    """Return the value of ``torch.nn.functional.cross_entropy`` for whole logits, on every rank.

    Logits are those of this rank's classes, (N, classes) or (classes,); they are not changed.
    Targets are a class each, (N,) or (). Statistics are kept in fp32 for logits of less precision.

    Raises:
        UsageError: a target is no class.
    """
    ignored = target == terms.ignore_index
    check_words(target.masked_fill(ignored, 0), terms.partition.size, "targets")
    device = logits.device.type
    dtype = torch.float32 if torch.is_autocast_enabled(device) else logits.dtype
    flat = logits.reshape(target.numel(), logits.shape[-1])
    losses, weights = _Losses.apply(flat, target.reshape(-1), terms)  # type: ignore[no-untyped-call]
    if terms.reduction == "none":
        return losses.view(target.shape).to(dtype)  # type: ignore[no-any-return]
    total = losses.sum()
    # All targets ignored: 0 / 0, as in torch.
    return (total / weights.sum() if terms.reduction == "mean" else total).to(dtype)  # type: ignore[no-any-return]


class _Losses(torch.autograd.Function):
    """The loss and the weight of each target; shapes: x (n, local), target, losses (n,)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, target: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
        counts = target != terms.ignore_index
        class_weight = terms.weight if terms.weight is None else terms.weight.to(_exact(x))
        words = target.masked_fill(~counts, 0)
        weights = counts.to(_exact(x)) if class_weight is None else class_weight[words] * counts
        ctx.mark_non_differentiable(weights)
        statistics = _Statistics.of(x, words, class_weight, terms)
        smooth = terms.label_smoothing
        losses = (1 - smooth) * weights * (statistics.log_sum - statistics.logit)
        if smooth:
            spread = statistics.total * statistics.log_sum - statistics.weighted
            losses += smooth / terms.partition.size * spread
        ctx.save_for_backward(x, words, counts, weights, class_weight, statistics.log_sum)
        ctx.terms, ctx.total = terms, statistics.total
        return losses.masked_fill_(~counts, 0), weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        x, words, counts, weights, class_weight, log_sum = ctx.saved_tensors
        terms: Terms = ctx.terms
        rank, partition = terms.ranks.rank, terms.partition
        each = terms.label_smoothing / partition.size
        hit = (1 - terms.label_smoothing) * weights * grad
        out = (x.to(log_sum.dtype) - log_sum.unsqueeze(-1)).exp_()
        out *= (hit + each * ctx.total * grad).unsqueeze(-1)
        if terms.label_smoothing:
            mine = 1 if class_weight is None else _own_weights(class_weight, terms)
            out -= each * grad.unsqueeze(-1) * mine
        if x.shape[-1]:
            local, elsewhere = partition.here(words, rank)
            out.scatter_add_(-1, local.unsqueeze(-1), -hit.masked_fill(elsewhere, 0).unsqueeze(-1))
        # What is ignored has no gradient, also where its factor is the nan of an empty mean.
        return out.masked_fill_(~counts.unsqueeze(-1), 0).to(x.dtype), None, None


class _Statistics(NamedTuple):
    """Numbers of whole rows of logits, shape (n,).

    Attributes:
        log_sum: the logarithm of the sum of exponentials.
        logit: that of the target.
        weighted: the sum of logits times class weights; zeros without label smoothing.
        total: the sum of class weights.
    """

    log_sum: Tensor
    logit: Tensor
    weighted: Tensor
    total: Tensor | float

    @classmethod
    def of(
        cls, x: Tensor, words: Tensor, class_weight: Tensor | None, terms: Terms
    ) -> "_Statistics":
        """Return the statistics of this rank's classes of the logits, shape (n, local)."""
        ranks, exact = terms.ranks, x.to(_exact(x))
        highest = exact.amax(-1) if x.shape[-1] else exact.new_full(words.shape, -torch.inf)
        maximum = ranks.all_reduce(highest, reduction="max")
        logit = _own_logits(exact, words, terms)
        pending = [ranks.all_reduce(logit)]
        weighted = torch.zeros_like(logit)
        total = 1.0 * terms.partition.size if class_weight is None else class_weight.sum()
        if terms.label_smoothing:
            mine = exact if class_weight is None else exact * _own_weights(class_weight, terms)
            weighted = mine.sum(-1)
            pending.append(ranks.all_reduce(weighted))
        maximum.wait()
        sums = (exact - highest.unsqueeze(-1)).exp_().sum(-1)
        ranks.all_reduce(sums).wait()
        for handle in pending:
            handle.wait()
        return cls(sums.log_() + highest, logit, weighted, total)


def _own_weights(class_weight: Tensor, terms: Terms) -> Tensor:
    """Return this rank's part of the weights of all classes."""
    start, stop = terms.partition.bounds[terms.ranks.rank]
    return class_weight[start:stop]


def _own_logits(exact: Tensor, words: Tensor, terms: Terms) -> Tensor:
    """Return the logit of each target that is this rank's, zero for others, shape (n,)."""
    if exact.shape[-1] == 0:
        return exact.new_zeros(words.shape)
    local, elsewhere = terms.partition.here(words, terms.ranks.rank)
    return exact.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0)


def _exact(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


# --- a call of torch, as ``__torch_function__`` sees it, and the tensors it writes into ---


class TorchCall(NamedTuple):
    """A call of torch's, as ``__torch_function__`` gets it."""

    func: Function
    args: Arguments
    kwargs: Keywords

    @property
    def name(self) -> str:
        """The name of the function or method; for access to an attribute, the attribute's."""
        return name_of(self.func)

    @property
    def written(self) -> Any:
        """The argument that the call writes into: tensors in any nesting, or None."""
        # With gradients, what a function in place returns is all that its callers go on with.
        asks = self.kwargs.get("inplace") is True and not self.is_recorded
        if writes_first(self.func) or self.replaces or asks:
            return next(iter((*self.args, *self.kwargs.values())), None)
        return self.kwargs.get("out")

    @property
    def replaces(self) -> bool:
        """Whether it changes more than values (storage, graph), or fills a buffer by sending."""
        # Collectives of torch.distributed fill their first argument.
        is_collective = str(getattr(self.func, "__module__", "")).startswith("torch.distributed")
        return is_collective or self.name in _REPLACING or self.name.endswith(" =")

    @property
    def is_recorded(self) -> bool:
        """Whether autograd would have to know of the writing."""
        return torch.is_grad_enabled() and any(
            isinstance(each, Tensor) and each.requires_grad
            for each in tree_leaves((tuple(self.args), dict(self.kwargs)))
        )

    @property
    def rest(self) -> Sequence[Any]:
        """The positional arguments behind the first."""
        return self.args[1:]

    @property
    def has_only_numbers(self) -> bool:
        """Whether the arguments behind the first are numbers."""
        return all(isinstance(each, int | float) for each in self.rest) and not self.kwargs


# fmt: off
_REPLACING = frozenset({"set_", "detach_", "share_memory_", "rename_"})
_BY_ELEMENT = frozenset({
    "add_", "sub_", "mul_", "multiply_", "div_", "divide_", "true_divide_", "__iadd__", "__isub__",
    "__imul__", "__itruediv__", "fill_", "zero_", "neg_", "tanh_",
})


# --- the logits of a head that is cut: the global shape, this rank's words ---

# Functions that models call on logits before the loss keep them so: casts, views, slices and
# transposes that leave the last dim alone, scaling by a number, concatenation along other dims.
# ``F.cross_entropy`` of such logits is computed from the shares. All other functions gather the
# words first and go on with a plain tensor; every rank must then call them, as any collective.
# Functions that write without gradients, as samplers do, write into the shares: views see it.
# Gradients are such tensors too, so that all of autograd (hooks, ``torch.autograd.grad``, functions
# of others) works on them.


class VocabularyCut(NamedTuple):
    """How the last dim is cut over which ranks."""

    ranks: Communicator
    partition: Partition

    def share(self, whole: Tensor) -> Tensor:
        """Return this rank's words of a whole tensor."""
        return self.partition.take(whole, self.ranks.rank)


class ShardedLogits(Tensor):
    """Logits (..., words) of which this rank holds its words; make one with ``of``."""

    _local: Tensor
    _cut: VocabularyCut

    @staticmethod
    def __new__(cls: type["ShardedLogits"], local: Tensor, cut: VocabularyCut) -> "ShardedLogits":
        """Wrap this rank's words, outside of autograd."""
        self = torch.Tensor._make_wrapper_subclass(
            cls, (*local.shape[:-1], cut.partition.size), dtype=local.dtype, device=local.device
        )
        self._local = local.detach()
        self._cut = cut
        return self

    @classmethod
    def of(cls, local: Tensor, ranks: Communicator, partition: Partition) -> Tensor:
        """Return logits of which this rank has the words ``local``, (..., local words).

        On one rank these are the logits.
        """
        if ranks.size == 1:
            return local
        if is_outline(local):
            return outlined(local, -1, partition.size)
        return _Wrap.apply(local, VocabularyCut(ranks, partition))  # type: ignore[no-any-return,no-untyped-call]

    def local(self) -> Tensor:
        """Return this rank's words, shape (..., local words)."""
        return _Unwrap.apply(self)  # type: ignore[no-any-return,no-untyped-call]

    def gathered(self) -> Tensor:
        """Return a plain tensor with all words, the same on every rank. Collective."""
        return gather(self.local(), self._cut.ranks, self._cut.partition)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Describe it without sending anything: one rank may print alone."""
        ranges = self._cut.partition.ranges[self._cut.ranks.rank]
        grad = f", grad_fn={self.grad_fn!r}" if self.requires_grad else ""
        return (
            f"ShardedLogits(shape={tuple(self.shape)}, dtype={self.dtype}, this rank holds words "
            f"{list(ranges)}, gathered() has all{grad})"
        )

    def __format__(self, format_spec: str) -> str:
        return repr(self)

    @classmethod
    def __torch_function__(
        cls,
        func: Function,
        types: Sequence[type],
        args: Arguments = (),
        kwargs: Keywords | None = None
    ) -> Any:
        """Answer from facts, write, stay cut, compute the loss, or gather and go on."""
        kwargs = kwargs or {}
        call = TorchCall(func, args, kwargs)
        name = call.name
        if asks_facts(func) or func in _AUTOGRAD:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        written = _logits_in(call.written)
        if written:
            return _write(call, written)
        if name in _KEPT and args and isinstance(args[0], ShardedLogits):
            kept = _KEPT[name](call, args[0])
            if kept is not None:
                return kept
        if name in _JOINING and args and isinstance(args[0], list | tuple):
            joined = _joined(call, args[0])
            if joined is not None:
                return joined
        args, kwargs = tree_map(_gathered, (tuple(args), dict(kwargs)))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Arguments = (),
        kwargs: Keywords | None = None
    ) -> Any:
        """Run the operations of autograd itself: pass gradients on and add them up."""
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.alias.default, aten.clone.default):
            return ShardedLogits(func(args[0]._local), args[0]._cut)
        if func is aten.add.Tensor:
            cut = next(each._cut for each in args if isinstance(each, ShardedLogits))
            first, second = (
                each._local if isinstance(each, ShardedLogits) else cut.share(each) for each in args
            )
            return ShardedLogits(func(first, second, **(kwargs or {})), cut)
        name = func._schema.name
        if name.endswith("_") and _logits_in(args[0]):
            raise _unwritable(name)
        args, kwargs = tree_map(_plain, (tuple(args), dict(kwargs or {})))
        return func(*args, **kwargs)


class _Wrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, cut: VocabularyCut) -> Tensor:
        ctx.cut = cut
        return ShardedLogits(local, cut)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # A plain gradient is that of all words, the same on every rank.
        return grad._local if isinstance(grad, ShardedLogits) else ctx.cut.share(grad), None


class _Unwrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: ShardedLogits) -> Tensor:
        ctx.cut = logits._cut
        return logits._local.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return ShardedLogits(grad, ctx.cut)


def _gathered(value: Any) -> Any:
    return value.gathered() if isinstance(value, ShardedLogits) else value


def _plain(value: Any) -> Any:
    """Return the whole tensor below autograd."""
    if not isinstance(value, ShardedLogits):
        return value
    return gathered(value._local, value._cut.ranks, value._cut.partition)


def _logits_in(value: Any) -> list["ShardedLogits"]:
    return [each for each in tree_leaves(value) if isinstance(each, ShardedLogits)]


def _write(call: TorchCall, written: Sequence[ShardedLogits]) -> Any:
    """Write into logits as a call does: to all words, of which this rank keeps its own.

    The shares are changed in place, so whatever views them, or is viewed by them, has the values.

    Raises:
        UsageError: autograd would have to know of it, or more than values would change.
    """
    if call.is_recorded or call.replaces:
        raise _unwritable(call.name)
    if call.name in _BY_ELEMENT and call.has_only_numbers:  # each becomes a function of itself
        call.func(written[0]._local, *call.rest)
        return written[0]
    wholes = {id(each): _plain(each) for each in written}
    args, kwargs = tree_map(
        lambda each: wholes[id(each)] if id(each) in wholes else _plain(each),
        (tuple(call.args), dict(call.kwargs)),
    )
    out = call.func(*args, **kwargs)
    for logits in written:
        whole = wholes[id(logits)]
        if (whole.shape, whole.stride()) != (logits.shape, logits.stride()):
            raise _unwritable(call.name)
        logits._local.copy_(logits._cut.share(whole))
    logits_of = {id(wholes[id(logits)]): logits for logits in written}
    return tree_map(lambda each: logits_of.get(id(each), each), out)


def _unwritable(name: str) -> UsageError:
    return UsageError(
        "expected logits that are not written to while gradients are recorded, nor reshaped in "
        f"place, found {name} on logits whose words are cut over ranks; make a new tensor "
        "(logits = logits / 2), write under torch.no_grad(), or write to logits.gathered()"
    )


KeptDivided = Callable[[TorchCall, ShardedLogits], Tensor | None]
"""Computes a call with logits as the first argument from shares, or returns None."""


def _on_shares(call: TorchCall, logits: ShardedLogits) -> Tensor:
    """Apply a function of single elements."""
    return ShardedLogits.of(call.func(logits.local(), *call.rest, **call.kwargs), *logits._cut)


def _new(call: TorchCall, logits: ShardedLogits) -> Tensor:
    """Make a plain tensor of the same dtype and device."""
    made: Tensor = call.func(logits._local, *call.rest, **call.kwargs)
    return made


def _cast(call: TorchCall, logits: ShardedLogits) -> Tensor:
    """Convert dtype or device; a tensor to take them from may be cut itself."""
    args = [each._local if isinstance(each, ShardedLogits) else each for each in call.args]
    return _on_shares(call._replace(args=args), logits)


def _scaled(call: TorchCall, logits: ShardedLogits) -> Tensor | None:
    return _on_shares(call, logits) if call.has_only_numbers else None


def _viewed(call: TorchCall, logits: ShardedLogits) -> Tensor | None:
    """Regroup leading dims; the last dim is as long before and after, so nothing crosses it."""
    if any(isinstance(each, torch.dtype) for each in (*call.rest, *call.kwargs.values())):
        return None
    meta = [torch.empty(each.shape, device="meta") if isinstance(each, Tensor) else each
            for each in call.args]  # fmt: skip
    shape = call.func(*meta, **call.kwargs).shape
    if shape == logits.shape:
        # A node of its own: get_gradient_edge takes the one before that of a view.
        return conjugate(logits, lambda x: ShardedLogits(logits._local, logits._cut), lambda x: x)
    if not shape or shape[-1] != logits.shape[-1]:
        return None
    local = logits.local()
    return ShardedLogits.of(local.reshape(*shape[:-1], local.shape[-1]), *logits._cut)


def _permuted(call: TorchCall, logits: ShardedLogits) -> Tensor | None:
    """Permute leading dims."""
    # Dims by number as lengths, of a tensor without storage: (1, 2, 3) becomes (2, 1, 3), say.
    names = torch.empty([dim + 1 for dim in range(logits.dim())], device="meta")
    if call.func(names, *call.rest, **call.kwargs).shape[-1] != logits.dim():
        return None
    return _on_shares(call, logits)


def _indexed(call: TorchCall, logits: ShardedLogits) -> Tensor | None:
    """Index leading dims."""
    (given,) = call.rest
    index = given if isinstance(given, tuple) else (given,)
    if any(each is None or isinstance(each, bool | list) for each in index):
        return None
    # How many dims each element of the index is about.
    dims = [
        0 if x is Ellipsis else x.dim() if isinstance(x, Tensor) and x.dtype is torch.bool else 1
        for x in index
    ]
    after = next((i + 1 for i, each in enumerate(index) if each is Ellipsis), 0)
    reaches_last = sum(dims) == logits.dim() if after == 0 else sum(dims[after:]) > 0
    if reaches_last and not (isinstance(index[-1], slice) and index[-1] == slice(None)):
        return None
    return _on_shares(call, logits)


def _joined(call: TorchCall, parts: Sequence[Any]) -> Tensor | None:
    """Concatenate logits that are cut alike along a leading dim."""
    dims = [*call.rest, *call.kwargs.values()]
    first = parts[0]
    alike = all(
        isinstance(part, ShardedLogits) and part.dim() == first.dim() and part._cut == first._cut
        for part in parts
    )
    if not alike or len(dims) > 1 or not call.kwargs.keys() <= {"dim"}:
        return None
    if dims and dims[0] in (-1, first.dim() - 1):
        return None
    return ShardedLogits.of(call.func([part.local() for part in parts], *dims), *first._cut)


def _lost(call: TorchCall, logits: ShardedLogits) -> Tensor | None:
    """Compute the cross entropy from shares, when the classes are the last dim."""
    given = inspect.signature(torch.nn.functional.cross_entropy).bind(*call.args, **call.kwargs)
    given.apply_defaults()
    options = given.arguments
    is_legacy = options["size_average"] is not None or options["reduce"] is not None
    target, cut = options["target"], logits._cut
    is_class = isinstance(target, Tensor) and not target.is_floating_point()
    if is_legacy or not is_class or logits.dim() > 2:
        return None
    if target.shape != logits.shape[:-1] or options["reduction"] not in get_args(LossReduction):
        return None  # torch says what is wrong
    names = ("weight", "ignore_index", "reduction", "label_smoothing")
    terms = Terms(*cut, **{name: options[name] for name in names})
    return cross_entropy(logits.local(), target, terms)


# fmt: off
_AUTOGRAD = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)

_KEPT: dict[str, KeptDivided] = {
    **dict.fromkeys((
        "float", "double", "half", "bfloat16", "contiguous", "detach", "clone", "data", "neg",
        "__neg__", "tanh", "cpu", "cuda",
    ), _on_shares),
    **dict.fromkeys(("to", "type_as"), _cast),
    **dict.fromkeys(("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"), _new),
    **dict.fromkeys((
        "mul", "multiply", "div", "divide", "true_divide", "__mul__", "__rmul__", "__truediv__",
    ), _scaled),
    **dict.fromkeys((
        "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as",
    ), _viewed),
    **dict.fromkeys((
        "transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis",
    ), _permuted),
    "__getitem__": _indexed,
    "cross_entropy": _lost,
}
_JOINING = frozenset({"cat", "concat", "concatenate"})
