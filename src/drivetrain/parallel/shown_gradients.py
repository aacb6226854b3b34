"""What stands at ``p.grad`` where each rank holds a piece of the gradient.

It has the parameter's shape, dtype and device, and no memory. What a script does with it means what
it means with a whole gradient::

    p.grad = None; p.grad.zero_()            cleared on this rank; no gradient, no step
    p.grad.mul_(x), clamp_, p.grad * 2       element by element: done with the piece
    p.grad.add_(whole, alpha=a), p.grad[i]=x a rank takes its part of the other operand
    torch.nn.utils.clip_grad_norm_(...)      norms are global: one collective for all gradients
    .sum(), .numpy(), x + p.grad, ...        the whole is brought together: a collective
    p.grad.normal_(), torch.randn_like(...)  refused: ranks draw different numbers
    kept = p.grad; p.grad = None             kept goes on with a copy of the piece

Collectives are for all ranks that share the parameter: they must do the same. Autograd adds to it
as to any gradient; what it adds waits in ``arrived`` for the strategy.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_leaves, tree_map

from drivetrain.errors import DrivetrainError, StorageError, UsageError
from drivetrain.model.guard import Arguments, Function, Keywords, read_only
from drivetrain.parallel.backward import in_backward

_ATEN = torch.ops.aten

_ELEMENTWISE = frozenset(
    {
        _ATEN.zero_, _ATEN.fill_, _ATEN.copy_, _ATEN.clone, _ATEN._to_copy, _ATEN.masked_fill,
        _ATEN.masked_fill_, _ATEN.nan_to_num, _ATEN.nan_to_num_,
    }
)  # fmt: skip
"""Functions that act element by element, beside those that torch marks as such."""

_SAME = frozenset({_ATEN.detach, _ATEN.detach_, _ATEN.alias, _ATEN.lift_fresh})
"""Functions that return what they are given."""

_BLANK = frozenset(
    {
        _ATEN.zeros_like, _ATEN.ones_like, _ATEN.full_like, _ATEN.empty_like, _ATEN.new_zeros,
        _ATEN.new_ones, _ATEN.new_full, _ATEN.new_empty, _ATEN.new_empty_strided,
    }
)  # fmt: skip
"""Functions that ask for facts only, and make an ordinary tensor."""

_NORMS = frozenset({_ATEN.linalg_vector_norm.default, _ATEN.norm.Scalar})
"""Norms; all of a tensor if no dim is named."""

_IN_BACKWARD = frozenset({_ATEN.add_.Tensor, _ATEN.add.Tensor})
"""How autograd adds to a gradient that is there."""

_VALUES = frozenset(
    {Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__deepcopy__, Tensor.__reduce_ex__}
)
"""Methods that read values behind the back of torch's dispatch."""

_MEMORY = frozenset({Tensor.data_ptr, Tensor.storage, Tensor.__dlpack__})
"""Methods that ask for memory."""


class GradientPlace(Protocol):
    """Where the piece of one gradient lies on this rank."""

    name: str

    def look(self) -> None:
        """Notice what the script has done to the parameter's ``grad``."""

    def piece(self) -> Tensor:
        """Return this rank's piece, to be read and changed.

        Raises:
            UsageError: micro-batches wait to be averaged.
        """

    def clear(self) -> None:
        """Write zeros, also where micro-batches wait to be averaged."""

    def changed(self) -> None:
        """Learn that the piece was changed."""

    def cut(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a tensor of the parameter's shape, shaped as its piece."""

    def whole(self, piece: Tensor) -> Tensor:
        """Bring the pieces of all ranks together. Collective."""

    def norm(self, norm_type: float) -> Tensor:
        """Return the norm of the whole gradient, 0-d. Collective, once for all gradients."""


class DividedGradient(Tensor):
    """A gradient of which this rank holds a piece.

    Args:
        like: the parameter.
        place: where the piece lies.
        values: the piece of a tensor that was computed from the gradient; None: the gradient.

    Attributes:
        place: as given.
        arrived: what autograd has added, and the strategy has not taken yet.
    """

    place: GradientPlace
    arrived: Tensor | None
    _computed: Tensor | None
    _gone: DrivetrainError | None

    @staticmethod
    def __new__(  # noqa: D102
        cls: type["DividedGradient"],
        like: Tensor,
        place: GradientPlace,
        values: Tensor | None = None,
    ) -> "DividedGradient":
        with torch._C.DisableTorchFunctionSubclass():  # a parameter may have its guard
            made: DividedGradient = Tensor._make_wrapper_subclass(
                cls,
                like.shape,
                strides=like.stride(),
                dtype=like.dtype if values is None else values.dtype,
                device=like.device,
            )
        made.place, made.arrived, made._computed, made._gone = place, None, values, None
        return made

    def __init__(
        self, like: Tensor, place: GradientPlace, values: Tensor | None = None
    ) -> None: ...

    def piece(self) -> Tensor:
        """Return this rank's piece: the one that is stepped with, or computed values."""
        if self._gone is not None:
            raise self._gone
        return self.place.piece() if self._computed is None else self._computed

    def leave(self) -> None:
        """Go on with a copy of the piece: the parameter is about to have another gradient."""
        try:
            self._computed = self._read().clone()
        except (UsageError, StorageError) as error:  # nobody can read it any more
            self._gone = error

    def whole(self) -> Tensor:
        """Return the whole as an ordinary tensor. Collective."""
        return self.place.whole(self._read()).to(self.device)

    def _read(self) -> Tensor:
        return self.piece().to(self.dtype)  # a piece that is stepped with may be of a master's

    @classmethod
    @_disable_dynamo
    def __torch_function__(
        cls, func: Function, types: Any, args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        """Take what torch would do without its dispatch."""
        if not all(issubclass(kind, cls) for kind in types):
            return NotImplemented  # a guarded parameter brings its values first
        kwargs = kwargs or {}
        own = args[0] if args and isinstance(args[0], cls) else None
        if own is not None and func in _VALUES:
            return func(own.whole(), *args[1:], **kwargs)
        if own is not None and func in _MEMORY:
            raise UsageError(
                f"expected a tensor with memory, found the gradient of {own.place.name!r}, of "
                "which every rank holds a piece; p.grad.clone().sum() and the like work on it"
            )
        if own is not None and func is Tensor.untyped_storage:
            nothing: Any = torch.UntypedStorage
            return nothing(0)  # who adds up memory finds none
        with torch._C.DisableTorchFunctionSubclass():
            if own is not None and func in _SETTERS:
                return _SETTERS[func](*args)
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        """Do with pieces what is asked of whole gradients."""
        kwargs = kwargs or {}
        first = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        if func in _IN_BACKWARD and args[0] is first and first._computed is None and in_backward():
            first.arrived = args[1] if first.arrived is None else first.arrived + args[1]
            return first
        return _answer(first, func, args, kwargs)

    def _set(self, index: Any, value: Any) -> None:
        """Write into elements: every rank into those of its piece."""
        wanted = torch.zeros(self.shape, dtype=torch.bool, device=self.device)
        values = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        wanted[index] = True
        values[index] = value.whole() if isinstance(value, DividedGradient) else value
        piece, place = self.piece(), self.place
        cut = place.cut(values).to(piece.device, piece.dtype)
        piece.copy_(torch.where(place.cut(wanted).to(piece.device), cut, piece))
        self._changed()

    def _changed(self) -> None:
        if self._computed is None:
            self.place.changed()

    def _assign(self, values: Tensor) -> None:
        """Take other values, as ``p.grad.data = values`` says."""
        self.copy_(values)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"DividedGradient(of {self.place.name}, shape {tuple(self.shape)}, {self.dtype}; "
            "every rank holds a piece)"
        )

    def __format__(self, spec: str) -> str:
        return format(self.whole(), spec) if not self.dim() else object.__format__(self, spec)


_SETTERS: Mapping[Function, Callable[..., None]] = {
    Tensor.__setitem__: DividedGradient._set,
    Tensor.data.__set__: DividedGradient._assign,  # type: ignore[attr-defined]
}
"""Ways to write that torch does without its dispatch, or by views."""


def _answer(first: DividedGradient, func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Choose how a function is called: by facts, by pieces, or with whole gradients."""
    packet = func.overloadpacket
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, DividedGradient) and leaf._computed is None:
            leaf.place.look()  # it may have left p.grad
    if torch.Tag.nondeterministic_seeded in func.tags:
        raise UsageError(
            f"expected no random numbers from a gradient, found {packet.__name__} of "
            f"{first.place.name!r}: ranks would draw different ones; draw a tensor of the "
            "parameter's shape from a generator with one seed on all ranks, and add that"
        )
    if packet in _BLANK:
        blank = torch.empty((), dtype=first.dtype, device=first.device).expand(first.shape)
        return func(blank, *args[1:], **kwargs)
    if packet in _SAME:
        return first
    if packet.__name__.startswith("_foreach"):
        return _each(func, args, kwargs)
    if func in _NORMS and (found := _norm(first, *args[1:], **kwargs)) is not None:
        return found
    by_elements = packet in _ELEMENTWISE or torch.Tag.pointwise in func.tags
    if by_elements and "out" not in kwargs and _alike(first, args, kwargs):
        return _by_pieces(first, func, args, kwargs)
    return _by_wholes(func, args, kwargs)


def _alike(first: DividedGradient, args: Arguments, kwargs: Keywords) -> bool:
    """Return whether a function's result has the elements of the gradient."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if not isinstance(args[0], DividedGradient):
        return False  # the script goes on with an ordinary tensor
    places = {id(leaf.place) for leaf in tensors if isinstance(leaf, DividedGradient)}
    shape: torch.Size = torch.broadcast_shapes(*(t.shape for t in tensors))  # type: ignore[no-untyped-call]
    return len(places) == 1 and shape == first.shape


def _by_pieces(first: DividedGradient, func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Call a function that acts element by element with this rank's parts of its operands."""
    written = args[0] if func._schema.is_mutable else None
    if func is _ATEN.zero_.default and first._computed is None:
        first.place.clear()
        return first
    target = first.piece() if written is first else first._read()

    def part(leaf: Any) -> Any:
        if leaf is first:
            return target
        if isinstance(leaf, DividedGradient):
            return leaf._read().to(target.device)
        if not isinstance(leaf, Tensor) or not leaf.dim():
            return leaf
        return first.place.cut(leaf.expand(first.shape)).to(target.device)

    result = func(*tree_map(part, args), **tree_map(part, dict(kwargs)))
    if written is not None:
        first._changed()
        return first
    return DividedGradient(first, first.place, result)


def _by_wholes(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Call a function with whole gradients; what it writes into one goes back into the pieces."""
    first = args[0] if args else None

    def whole(leaf: Any) -> Any:
        return leaf.whole() if isinstance(leaf, DividedGradient) else leaf

    given = tree_map(whole, tuple(args))
    if any(isinstance(leaf, DividedGradient) for leaf in tree_leaves(kwargs.get("out"))):
        raise UsageError(
            "expected an ordinary tensor as out, found a gradient of which every rank holds a "
            "piece; use p.grad.copy_(result)"
        )
    result = func(*given, **tree_map(whole, dict(kwargs)))
    if func._schema.is_mutable and isinstance(first, DividedGradient):
        piece = first.piece()
        piece.copy_(first.place.cut(given[0]))
        first._changed()
        return first
    if any(each.alias_info is not None for each in func._schema.returns):
        name = next(a.place.name for a in tree_leaves(args) if isinstance(a, DividedGradient))
        refused = UsageError(
            f"expected a view of the gradient of {name!r} to be read, found that it is written "
            "into, and every rank holds a piece of the gradient; write p.grad[index] = value, or "
            "assign a whole tensor to p.grad"
        )
        return tree_map(lambda leaf: read_only(leaf.clone(), refused), result)
    return result


def _norm(
    gradient: DividedGradient,
    norm_type: float = 2.0,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor | None:
    """Return the norm of a gradient; None if it is not one that a rank's part helps with."""
    if gradient._computed is not None or dim or keepdim or not norm_type > 0:
        return None
    return gradient.place.norm(float(norm_type)).to(gradient.device, dtype or gradient.dtype)


def _each(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Call a function of lists: of the pieces in the place of gradients."""
    lists: Sequence[Sequence[Any]] = [each for each in args if isinstance(each, list | tuple)]
    leads = lists[0]
    if func.overloadpacket is _ATEN._foreach_norm:
        norm_type = args[1] if len(args) > 1 else kwargs.get("ord", 2.0)
        dtype = kwargs.get("dtype")
        return [torch.linalg.vector_norm(each, norm_type, dtype=dtype) for each in leads]
    named = func.overloadpacket.__name__.removeprefix("_foreach_")
    one: Callable[..., Any] = getattr(_ATEN, named)
    rest = [each if isinstance(each, list | tuple) else [each] * len(leads) for each in args[1:]]
    results = [one(lead, *others, **kwargs) for lead, *others in zip(leads, *rest, strict=True)]
    return None if func._schema.is_mutable else results
