"""Tensors without values, and the results of torch's functions on them, which are remembered.

Any operation with one among its arguments gives tensors without values and computes nothing.
Operations on real tensors alone are not touched.

Functions that communicate or call a kernel of their own cannot run without values. Such a function
may have an attribute ``without_values``: another function of the same arguments that returns
tensors of the same shapes and dtypes, and is used instead when the function hands its tensors over
(``torch.overrides``).

Results of functions of torch, and their work: found from shapes alone, and remembered.

A function runs once per combination of arguments on torch's own fake tensors, which have the
shape, strides, dtype and device of the real ones and no values. That takes some hundred
microseconds, sometimes milliseconds. So the result is kept, and asked again it costs a look-up.
"""

import logging
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from math import prod
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

from drivetrain.errors import UsageError
from drivetrain.model.guard import (
    CONSTANTS,
    QUESTIONS,
    READERS,
    Arguments,
    Function,
    Keywords,
    targets,
)

# --- results of functions of torch, and their work ---

_FAKE_LOG = logging.getLogger("torch._subclasses.fake_tensor")

_UNKNOWN = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)


class Facts(NamedTuple):
    """Shape, strides, dtype and device of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        """Bytes of the distinct elements: a dim that is expanded counts once."""
        elements = 1
        for extent, stride in zip(self.shape, self.stride, strict=True):
            elements *= extent if stride or not extent else 1
        return elements * self.dtype.itemsize


class GivenTensor(NamedTuple):
    """Stands for a tensor among the arguments of a call.

    Attributes:
        place: its place among their tensors.
        facts: of it.
    """

    place: int
    facts: Facts


class MadeTensor(NamedTuple):
    """Stands for a tensor that a call made.

    Attributes:
        facts: of it.
        base: the place of the argument whose memory it shows; None for memory of its own.
        offset: by how many elements it begins later than the argument.
    """

    facts: Facts
    base: int | None = None
    offset: int = 0


class Frozen(NamedTuple):
    """Frozen values of a list, tuple, dict or slice; or a number, since 1, 1.0 and True are equal.

    Attributes:
        kind: the class.
        values: what is inside, pairs of a dict; the number.
    """

    kind: type
    values: Any


class CallResult(NamedTuple):
    """The result of a call.

    Attributes:
        value: the frozen result, in which tensors are ``GivenTensor`` or ``MadeTensor``.
        work: floating point operations of the matrix products, convolutions and attentions in it.
        draws: whether random numbers were drawn, but for those inside of attentions.
    """

    value: Any
    work: int
    draws: bool


class ValuesNeededError(UsageError):
    """A call, or the shape of its result, depends on values that are not there.

    Args:
        message: for the user.
        use: name of the call.
    """

    def __init__(self, message: str, use: str = "") -> None:
        super().__init__(message)
        self.use = use


def facts_of(tensor: Tensor) -> Facts:
    """Return the facts of a strided tensor."""
    return Facts(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


def freeze(value: Any, tensor: Callable[[Tensor], Any]) -> Any:
    """Return a hashable copy of arguments or results; ``tensor`` replaces the tensors."""
    if isinstance(value, Tensor):
        return tensor(value)
    kind = type(value)
    if kind is float or kind is bool:
        return Frozen(kind, value)
    if isinstance(value, list | tuple):
        return Frozen(kind, tuple(freeze(item, tensor) for item in value))
    if kind is dict:
        return Frozen(kind, tuple((key, freeze(item, tensor)) for key, item in value.items()))
    if kind is slice:
        ends = (value.start, value.stop, value.step)
        return Frozen(kind, tuple(freeze(end, tensor) for end in ends))
    return value


def thaw(value: Any, tensor: Callable[[Any], Any]) -> Any:
    """Undo ``freeze``; ``tensor`` makes the tensors."""
    if isinstance(value, GivenTensor | MadeTensor):
        return tensor(value)
    if not isinstance(value, Frozen):
        return value
    kind, values = value
    if kind in {float, bool}:
        return values
    if kind is dict:
        return {key: thaw(item, tensor) for key, item in values}
    items = [thaw(item, tensor) for item in values]
    return kind(*items) if kind is slice or hasattr(kind, "_fields") else kind(items)


def result_of(function: Function, args: Any, kwargs: Any, surroundings: Any) -> CallResult:
    """Return the result of a call with frozen arguments.

    ``surroundings`` is whatever else the result depends on and that holds now, such as autocast.

    Raises:
        ValuesNeededError: the result needs values.
    """
    try:
        return _remembered(function, args, kwargs, surroundings)
    except TypeError as error:
        if "unhashable" not in str(error):
            raise
    return computed(function, args, kwargs, surroundings)


def computed(function: Function, args: Any, kwargs: Any, surroundings: Any) -> CallResult:
    """Return the same, and remember nothing."""
    # As a last resort, torch would run a kernel that has no fake one on memory full of zeros.
    mode: Any = FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=True)
    mode.cache_enabled = False  # what is found here is remembered here
    fakes: dict[int, Tensor] = {}

    def meta(given: GivenTensor) -> Tensor:
        shape, stride, dtype, _ = given.facts
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")

    def fake(given: GivenTensor) -> Tensor:
        if given.place not in fakes:
            fakes[given.place] = FakeTensor(mode, meta(given), given.facts.device)
        return fakes[given.place]

    given, named = thaw(args, fake), thaw(kwargs, fake)
    # Whoever watches the real operations must not see these.
    with _disable_current_modes(), torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        try:
            with mode, WorkTally() as tally, _unlogged():
                result = function(*given, **named)
        except _UNKNOWN as error:
            raise ValuesNeededError(f"{error.func} needs values", str(error.func)) from error
        except ValueError:
            # A view that is not possible: kernels refuse it with another error than fake tensors.
            function(*thaw(args, meta), **thaw(kwargs, meta))
            raise
    return CallResult(freeze(result, _Naming(fakes)), tally.work, tally.draws)


@contextmanager
def _unlogged() -> Iterator[None]:
    """Keep errors off the log: a block whose code needs values gets some."""
    disabled, _FAKE_LOG.disabled = _FAKE_LOG.disabled, True
    try:
        yield
    finally:
        _FAKE_LOG.disabled = disabled


_remembered = lru_cache(maxsize=1 << 14)(computed)


class _Naming:
    """Tells apart fake results that are arguments, views of arguments, or new tensors."""

    def __init__(self, fakes: Mapping[int, Tensor]) -> None:
        self._places = {id(fake): place for place, fake in fakes.items()}
        self._bases = {
            _memory(fake): (place, fake) for place, fake in reversed(list(fakes.items()))
        }

    def __call__(self, tensor: Tensor) -> GivenTensor | MadeTensor:
        facts = facts_of(tensor)
        if id(tensor) in self._places:
            return GivenTensor(self._places[id(tensor)], facts)
        place, base = self._bases.get(_memory(tensor), (None, tensor))
        return MadeTensor(facts, place, int(tensor.storage_offset() - base.storage_offset()))


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class WorkTally(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context that sums floating point operations, with 2 for a product and its addition.

    Matrix products, convolutions, recurrent layers and attentions count, as in
    ``torch.utils.flop_counter``.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work, self.draws = 0, False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Arguments = (), kwargs: Any = None
    ) -> Any:
        """Run an operation and count it."""
        if func.namespace == "c10d" and any(isinstance(arg, FakeTensor) for arg in _flat(args)):
            raise ValuesNeededError(f"{func} sends values", str(func))
        named = kwargs or {}
        result = func(*args, **named)
        count = WORK.get(func.overloadpacket)
        if count is not None:
            self.work += int(count(*args, **named, out_val=result))
        elif not isinstance(result, int):  # nor one that chooses a kernel for attention
            self.draws |= torch.Tag.nondeterministic_seeded in func.tags
        return result


def _attention_work(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
    """Return the work of an attention over (batch, heads, length, features).

    Heads of the query may share heads of the keys and values.
    """
    batch, heads, queries, features = query.shape
    scores = batch * heads * queries * key.shape[2]
    return 2 * scores * (features + value.shape[3])


def _recurrent_work(x: Tensor, weights: Sequence[Tensor]) -> int:
    """Return the work of a layer's steps: the product of each with each of its weights."""
    return 2 * prod(x.shape[:-1]) * sum(each.numel() for each in weights if each.dim() > 1)


_aten = torch.ops.aten
WORK: Mapping[Any, Callable[..., int]] = ChainMap(
    {
        _aten._scaled_dot_product_flash_attention_for_cpu: _attention_work,
        _aten._scaled_dot_product_flash_attention: _attention_work,
        _aten._scaled_dot_product_efficient_attention: _attention_work,
        _aten._scaled_dot_product_cudnn_attention: _attention_work,
        _aten.mkldnn_rnn_layer: lambda x, *args, **_: _recurrent_work(x, args[:2]),
        _aten._cudnn_rnn: lambda x, weights, *_, **__: _recurrent_work(x, weights),
        _aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
            _aten._scaled_dot_product_flash_attention_backward
        ],
    },
    flop_registry,
)
"""Formulas by operation. torch's own leave out the CPU's attention and recurrent layers, and up to
torch 2.11 refuse heads that share keys."""


def needs_values(op: Any) -> bool:
    """Whether an operation reads values, sends them, or has a shape that depends on them.

    Indexing has one only when a mask is among the indices, which fake tensors refuse themselves.
    """
    dynamic = torch.Tag.dynamic_output_shape in op.tags and op is not torch.ops.aten.index.Tensor
    dependent = torch.Tag.data_dependent_output in op.tags
    return dynamic or dependent or op.namespace == "c10d"


def _flat(values: Sequence[Any]) -> list[Any]:
    return [x for value in values for x in (value if isinstance(value, list | tuple) else [value])]


# --- a tensor without values ---

_Kind: TypeAlias = type["ValuelessTensor"]
_Handler: TypeAlias = Callable[[_Kind, Function, Arguments, Keywords], Any]


class WriteRefusedError(UsageError):
    """Values that are not there were to go into a real tensor.

    Args:
        message: for the user.
        target: the real tensor.
    """

    def __init__(self, message: str, target: Tensor) -> None:
        super().__init__(message)
        self.target = target


class Shown(NamedTuple):
    """Which memory a view shows.

    Attributes:
        place: of the tensor with the memory, among the arguments of the view.
        offset: by how many elements the view begins later.
    """

    place: int
    offset: int


class Refusals(NamedTuple):
    """The messages of one kind of tensors about what cannot be done without values.

    Attributes:
        values: a use of values, ``{use}``.
        write: a function ``{name}`` that writes them into a real tensor of shape ``{shape}``.
        reshape: a function ``{name}`` that changes the shape of its argument.
        backward: a backward.
        assignment: an assignment to ``data``.
    """

    values: str
    write: str
    reshape: str
    backward: str
    assignment: str


class ValuelessTensor(Tensor):
    """Facts of a tensor without its values; made by ``of``, ``like`` and operations on others.

    Subclasses may know where values come from, and say in ``refusals`` where they are.

    Attributes:
        facts: shape, strides, dtype, device.
        work: floating point operations of its matrix products, which nobody computed.
        shown: the memory of a view; None for memory of its own.
    """

    facts: Facts
    work: int
    shown: Shown | None
    refusals: ClassVar[Refusals] = Refusals(
        "expected a forward that depends on shapes alone, found {use}, which needs values: the "
        "model is looked at without any; choose by shapes, in the data, or inside of a repeated "
        "block",
        "expected values for {name}() to write, found a tensor without values, and a real tensor "
        "of shape {shape} as the target: make a new tensor instead",
        "expected a tensor that keeps its shape, found {name}() on a tensor without values: use "
        "the form that returns a new tensor",
        "expected a forward alone, found a backward of a tensor without values",
        "expected to read .data, found an assignment to it, without values",
    )

    def __new__(cls, facts: Facts, requires_grad: bool = False, work: int = 0) -> Self:
        """Make a tensor of which only the facts are known."""
        self: Self = Tensor._make_wrapper_subclass(
            cls,
            facts.shape,
            strides=facts.stride,
            dtype=facts.dtype,
            device=facts.device,
            requires_grad=requires_grad,
        )
        self.facts, self.work, self.shown = facts, work, None
        return self

    def __init__(self, facts: Facts, requires_grad: bool = False, work: int = 0) -> None:
        """Everything is done in ``__new__``."""

    @classmethod
    def of(cls, tensor: Tensor, device: torch.device | None = None) -> Self:
        """Return one with the facts of a strided tensor, perhaps on another device."""
        facts = facts_of(tensor)
        return cls(facts._replace(device=device or facts.device), tensor.requires_grad)

    @classmethod
    def like(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        requires_grad: bool = False,
    ) -> Self:
        """Return a contiguous one of this shape, for values on this device."""
        meta = torch.empty(tuple(shape), dtype=dtype, device="meta")
        return cls(facts_of(meta)._replace(device=device), requires_grad)

    def value(self) -> Tensor | None:
        """Return the value, if it has become known; None as long as it is not."""
        return None

    def derived_from(self, tensors: Sequence[Tensor]) -> None:
        """Note the arguments of the operation that made or changed this tensor."""

    @classmethod
    def remember(cls, result: Any, function: Function, args: Arguments, kwargs: Keywords) -> None:
        """Note how results follow from values that may become known."""

    @classmethod
    def drawn(cls, result: Any, function: Function, args: Arguments, kwargs: Keywords) -> None:
        """Note that a function would have drawn random numbers."""

    @classmethod
    def values_needed(cls, use: str) -> ValuesNeededError:
        """Return the error for a use of values."""
        return ValuesNeededError(cls.refusals.values.format(use=use), use)

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        """Return the result of a function of torch."""
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(cls, func, args, kwargs or {})
        if getattr(func, "__name__", "") == "__get__":
            return _on_facts(cls, func, args, kwargs or {})
        return cls._apply(getattr(func, "without_values", func), args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        """Return the result of an operation called from C++."""
        if needs_values(func):
            return _on_values(cls, func, args, kwargs or {})
        return cls._apply(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        shape, _, dtype, device = self.facts
        return f"{type(self).__name__}({shape}, {dtype}, device='{device}')"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = type(self)(self.facts, self.requires_grad)
        memo[id(self)] = copied
        return copied

    @classmethod
    def _apply(cls, func: Function, args: Arguments, kwargs: Keywords) -> Any:
        """Return the tensors that a call gives, or values when all of its arguments have them."""
        tensors: list[Tensor] = []

        def given(tensor: Tensor) -> GivenTensor:
            tensors.append(tensor)
            facts = tensor.facts if isinstance(tensor, ValuelessTensor) else facts_of(tensor)
            return GivenTensor(len(tensors) - 1, facts)

        frozen, named = freeze(tuple(args), given), freeze(dict(kwargs), given)
        empty = [tensor for tensor in tensors if isinstance(tensor, ValuelessTensor)]
        if all(tensor.value() is not None for tensor in reversed(empty)):
            return _on_values(cls, func, args, kwargs)
        name = getattr(func, "__name__", "")
        written = cls._written(name, args, kwargs)
        device = next((each.facts.device for each in empty if each.dim()), empty[0].facts.device)
        cast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
        try:
            found = result_of(func, frozen, named, (cast, torch.get_default_dtype()))
        except ValuesNeededError as error:
            raise cls.values_needed(error.use) from error
        grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        work = found.work

        def tensor_of(frozen: GivenTensor | MadeTensor) -> Tensor:
            nonlocal work
            if isinstance(frozen, GivenTensor):
                return cls._unchanged(name or str(func), tensors[frozen.place], frozen.facts)
            dtype = frozen.facts.dtype
            differentiable = grad and (dtype.is_floating_point or dtype.is_complex)
            made, work = cls(frozen.facts, differentiable, work), 0
            if frozen.base is not None:
                made.shown = Shown(frozen.base, frozen.offset)
            made.derived_from(tensors)
            return made

        result = thaw(found.value, tensor_of)
        for target in written:
            target.derived_from(tensors)
        (cls.drawn if found.draws else cls.remember)(result, func, args, kwargs)
        return result

    @classmethod
    def _written(cls, name: str, args: Arguments, kwargs: Keywords) -> list["ValuelessTensor"]:
        """Return the targets of a function that writes; they have no values either."""
        written = [target for target in targets(name, args, kwargs) if isinstance(target, Tensor)]
        for target in written:
            if not isinstance(target, ValuelessTensor):
                text = cls.refusals.write.format(name=name, shape=tuple(target.shape))
                raise WriteRefusedError(text, target)
        return [target for target in written if isinstance(target, ValuelessTensor)]

    @classmethod
    def _unchanged(cls, name: str, tensor: Tensor, facts: Facts) -> Tensor:
        """Return an argument that a call returned; its shape must not have changed."""
        known = tensor.facts if isinstance(tensor, ValuelessTensor) else facts_of(tensor)
        if (known.shape, known.dtype) != (facts.shape, facts.dtype):
            raise UsageError(cls.refusals.reshape.format(name=name))
        return tensor


def _on_facts(cls: _Kind, func: Function, args: Arguments, kwargs: Keywords) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _on_values(cls: _Kind, func: Function, args: Arguments, kwargs: Keywords) -> Any:
    """Call a function that reads values, if they have become known."""

    def valued(leaf: Any) -> Any:
        found = leaf.value() if isinstance(leaf, ValuelessTensor) else leaf
        if found is None and leaf is not None:
            name = getattr(func, "__name__", None) or str(func)
            raise cls.values_needed(f"{name.strip('_')}()")
        return found

    given, named = tree_map(valued, (tuple(args), dict(kwargs)))
    return func(*given, **named)


def _instead(function: Function) -> _Handler:
    """Return a handler that calls another function."""
    return lambda cls, func, args, kwargs: cls._apply(function, args, kwargs)


def _detached(cls: _Kind, func: Function, args: Arguments, kwargs: Keywords) -> Any:
    with torch.no_grad():
        return cls._apply(Tensor.detach, args, kwargs)


def _index(cls: _Kind, func: Function, args: Arguments, kwargs: Keywords) -> Any:
    """Index; a real mask is turned into positions, whose number is known here."""
    target, index, *rest = args
    parts = index if isinstance(index, tuple) else (index,)
    plain: list[Any] = []
    for part in parts:
        mask = isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8)
        if mask and not isinstance(part, ValuelessTensor):
            plain.extend(part.nonzero(as_tuple=True))
        else:
            plain.append(part)
    return cls._apply(func, (target, tuple(plain), *rest), kwargs)


def _constant(cls: _Kind, func: Function, args: Arguments, kwargs: Keywords) -> Any:
    """Make a real tensor, since its values do not depend on its argument's, only its shape."""
    like, *rest = args
    if not isinstance(like, ValuelessTensor):
        return cls._apply(func, args, kwargs)
    given = {"device": like.facts.device, "dtype": like.facts.dtype}
    given |= {key: value for key, value in kwargs.items() if value is not None}
    pattern = torch.empty(1, dtype=like.facts.dtype, device=like.facts.device)
    if getattr(func, "__name__", "").endswith("_like"):
        pattern = pattern.expand(like.facts.shape)
        given.setdefault("memory_format", torch.contiguous_format)
    return func(pattern, *rest, **given)


def _iterate(cls: _Kind, func: Function, args: Arguments, kwargs: Keywords) -> Any:
    return iter(cls._apply(Tensor.unbind, args, {}))


def _no_backward(cls: _Kind, func: Function, args: Arguments, kwargs: Keywords) -> Any:
    raise UsageError(cls.refusals.backward)


def _no_assignment(cls: _Kind, func: Function, args: Arguments, kwargs: Keywords) -> Any:
    raise UsageError(cls.refusals.assignment)


def _handlers() -> dict[Any, _Handler]:
    """Return the handlers of functions that are no operations on values."""
    handlers: dict[Any, _Handler] = {
        Tensor.__getitem__: _index,
        Tensor.__setitem__: _index,
        Tensor.__iter__: _iterate,
        Tensor.detach: _detached,
        torch.detach: _detached,
        Tensor.data.__get__: _detached,  # type: ignore[attr-defined]
        Tensor.data.__set__: _no_assignment,  # type: ignore[attr-defined]
        Tensor.requires_grad.__set__: _on_facts,  # type: ignore[attr-defined]
        Tensor.grad.__set__: _on_facts,  # type: ignore[union-attr]
        Tensor.T.__get__: _instead(Tensor.t),  # type: ignore[attr-defined]
        Tensor.mT.__get__: _instead(lambda tensor: tensor.transpose(-2, -1)),  # type: ignore[attr-defined]
        Tensor.real.__get__: _instead(torch.real),  # type: ignore[attr-defined]
        Tensor.imag.__get__: _instead(torch.imag),  # type: ignore[attr-defined]
        Tensor.backward: _no_backward,
        torch.autograd.backward: _no_backward,
        torch.autograd.grad: _no_backward,
    }
    handlers |= dict.fromkeys(CONSTANTS, _constant)
    handlers |= dict.fromkeys(READERS, _on_values)
    handlers |= dict.fromkeys(QUESTIONS, _on_facts)
    return handlers


_HANDLERS: Mapping[Any, _Handler] = MappingProxyType(_handlers())


# --- random values, for one block whose forward cannot run without any ---


SEED = 20210111
"""Of the values, and of whatever the block draws; any would do, the same on all ranks."""

_PERIOD = 65537
"""Random numbers that are drawn; a longer tensor repeats them, which takes no time. A prime: rows
of a matrix must differ."""


def random_like(facts: Facts, requires_grad: bool = False) -> Tensor:
    """Return a contiguous tensor of random numbers; zeros where they are no floating point."""
    made = torch.zeros(facts.shape, dtype=facts.dtype, device=facts.device)
    if facts.dtype.is_floating_point and made.numel():
        generator = torch.Generator().manual_seed(SEED)
        drawn = torch.randn(min(_PERIOD, made.numel()), generator=generator)
        spread = facts.shape[-1] ** -0.5 if len(facts.shape) > 1 else 1.0
        drawn = (drawn * spread).to(facts.device, facts.dtype)
        made.copy_(drawn.repeat(-(-made.numel() // _PERIOD))[: made.numel()].view(facts.shape))
    return made.requires_grad_(requires_grad)


@contextmanager
def filled(block: nn.Module) -> Iterator[list[tuple[ValuelessTensor, Tensor]]]:
    """Context in which a block's parameters and buffers have values; yields pairs (old, new).

    Also those that stand in a module's ``__dict__``, as tensors of other pipeline stages do.
    """
    pairs: dict[int, tuple[ValuelessTensor, Tensor]] = {}
    places: list[tuple[dict[str, Any], str, ValuelessTensor]] = []
    for module in block.modules():
        contents: tuple[dict[str, Any], ...] = (
            module._parameters,
            module._buffers,
            vars(module),
        )
        for owner, name, tensor in [(o, n, t) for o in contents for n, t in o.items()]:
            if isinstance(tensor, ValuelessTensor):
                if id(tensor) not in pairs:
                    value = random_like(tensor.facts, tensor.requires_grad)
                    pairs[id(tensor)] = tensor, value
                places.append((owner, name, tensor))
                owner[name] = pairs[id(tensor)][1]
    try:
        yield list(pairs.values())
    finally:
        for owner, name, tensor in places:
            owner[name] = tensor
