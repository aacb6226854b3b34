"""The tensor that a head cut over the vocabulary returns: the global shape, this rank's words.

Functions that models call on logits before the loss keep them so: casts, views, slices and
transposes that leave the last dim alone, scaling by a number, concatenation along other dims.
``F.cross_entropy`` of such logits is computed from the shares. All other functions gather the words
first and go on with a plain tensor; every rank must then call them, as any collective. Functions
that write without gradients, as samplers do, write into the shares: views see it. Gradients are
such tensors too, so that all of autograd (hooks, ``torch.autograd.grad``, functions of others)
works on them.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from drivetrain.collectives import Communicator
from drivetrain.errors import UsageError
from drivetrain_megatron.tensor.cross_entropy import Terms, cross_entropy
from drivetrain_megatron.tensor.once import once_differentiable
from drivetrain_megatron.tensor.operators import gather, gathered, is_outline, outlined
from drivetrain_megatron.tensor.partition import Partition
from drivetrain_megatron.tensor.writing import TorchCall


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
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer from facts, write, stay cut, compute the loss, or gather and go on."""
        kwargs = kwargs or {}
        call = TorchCall(func, args, kwargs)
        name = call.name
        if name in _FACTS:
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
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
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


class _Same(torch.autograd.Function):
    """One node of autograd's graph, after which nothing is different.

    Who looks for the node of a leaf, such as ``torch.autograd.graph.get_gradient_edge``, views it
    and takes the node before the view's.
    """

    @staticmethod
    def forward(ctx: Any, logits: ShardedLogits) -> Tensor:
        return ShardedLogits(logits._local, logits._cut)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


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
    if call.is_by_element:
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
        return _Same.apply(logits)  # type: ignore[no-any-return,no-untyped-call]
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
    dims = [_dims_of(each) for each in index]
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


def _dims_of(index: Any) -> int:
    """Return how many dims one element of an index is about."""
    if index is Ellipsis:
        return 0
    return index.dim() if isinstance(index, Tensor) and index.dtype is torch.bool else 1


def _lost(call: TorchCall, logits: ShardedLogits) -> Tensor | None:
    """Compute the cross entropy from shares, when the classes are the last dim."""
    given = inspect.signature(torch.nn.functional.cross_entropy).bind(*call.args, **call.kwargs)
    given.apply_defaults()
    options = given.arguments
    is_legacy = options["size_average"] is not None or options["reduce"] is not None
    target, cut = options["target"], logits._cut
    is_class = isinstance(target, Tensor) and not target.is_floating_point()
    if is_legacy or not is_class or logits.dim() > 2 or not cut.partition.is_simple:
        return None
    names = ("weight", "ignore_index", "reduction", "label_smoothing")
    terms = Terms(*cut, **{name: options[name] for name in names})
    return cross_entropy(logits.local(), target, terms)


# fmt: off
_FACTS = frozenset({
    "shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "grad_fn", "grad", "ndim",
    "names", "_version", "output_nr", "is_cpu", "is_cuda", "is_meta", "is_mps", "is_xpu",
    "is_sparse", "is_nested", "is_quantized", "size", "dim", "ndimension", "numel", "nelement",
    "element_size", "itemsize", "nbytes", "is_floating_point", "is_complex", "is_inference",
    "is_contiguous", "stride", "__len__", "__hash__", "register_hook", "retain_grad",
    "retains_grad", "requires_grad_", "requires_grad =", "grad =", "backward", "_backward_hooks",
    "register_post_accumulate_grad_hook", "_post_accumulate_grad_hooks", "untyped_storage",
    "storage_offset", "get_device", "is_signed", "is_mkldnn",
})

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
