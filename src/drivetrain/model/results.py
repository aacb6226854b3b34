"""Results of functions of torch, and their work: found from shapes alone, and remembered.

A function runs once per combination of arguments on torch's own fake tensors, which have the
shape, strides, dtype and device of the real ones and no values. That takes some hundred
microseconds, sometimes milliseconds. So the result is kept, and asked again it costs a look-up.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import flop_registry

from drivetrain.errors import UsageError
from drivetrain.parts.guard import Arguments, Function

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


class TypedNumber(NamedTuple):
    """A number with its type, since 1, 1.0 and True are equal as keys."""

    kind: type
    value: Any


class FrozenItems(NamedTuple):
    """A list, tuple or similar of frozen values."""

    kind: type
    values: tuple[Any, ...]


class FrozenEntries(NamedTuple):
    """A dictionary of frozen values."""

    values: tuple[tuple[Any, Any], ...]


class FrozenSlice(NamedTuple):
    """A slice."""

    values: tuple[Any, Any, Any]


class CallResult(NamedTuple):
    """The result of a call.

    Attributes:
        value: the frozen result, in which tensors are ``GivenTensor`` or ``MadeTensor``.
        work: floating point operations of the matrix products, convolutions and attentions in it.
    """

    value: Any
    work: int


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
        return TypedNumber(kind, value)
    if isinstance(value, list | tuple):
        return FrozenItems(kind, tuple(freeze(item, tensor) for item in value))
    if kind is dict:
        return FrozenEntries(tuple((key, freeze(item, tensor)) for key, item in value.items()))
    if kind is slice:
        ends = (value.start, value.stop, value.step)
        return FrozenSlice(tuple(freeze(end, tensor) for end in ends))
    return value


def thaw(value: Any, tensor: Callable[[Any], Any]) -> Any:
    """Undo ``freeze``; ``tensor`` makes the tensors."""
    kind = type(value)
    if kind is GivenTensor or kind is MadeTensor:
        return tensor(value)
    if kind is TypedNumber:
        return value.value
    if kind is FrozenItems:
        return _rebuilt(value.kind, [thaw(item, tensor) for item in value.values])
    if kind is FrozenEntries:
        return {key: thaw(item, tensor) for key, item in value.values}
    if kind is FrozenSlice:
        return slice(*(thaw(item, tensor) for item in value.values))
    return value


def _rebuilt(kind: type, values: list[Any]) -> Any:
    if kind is list:
        return values
    if hasattr(kind, "_fields"):  # a named tuple
        return kind(*values)
    return kind(values)


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
    return CallResult(freeze(result, _Naming(fakes)), tally.work)


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

    Matrix products, convolutions and attentions count, as in ``torch.utils.flop_counter``.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Arguments = (), kwargs: Any = None
    ) -> Any:
        """Run an operation and count it."""
        if func.namespace == "c10d" and any(isinstance(arg, FakeTensor) for arg in _flat(args)):
            raise ValuesNeededError(f"{func} sends values", str(func))
        named = kwargs or {}
        result = func(*args, **named)
        packet = func.overloadpacket
        count = flop_registry.get(packet)
        if packet in _ATTENTIONS:
            self.work += _attention_work(*args[:3])
        elif count is not None:
            self.work += int(count(*args, **named, out_val=result))
        return result


# torch's own counter leaves out the CPU's, and up to torch 2.11 refuses heads that share keys.
_ATTENTIONS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._scaled_dot_product_flash_attention,
    torch.ops.aten._scaled_dot_product_efficient_attention,
    torch.ops.aten._scaled_dot_product_cudnn_attention,
}


def _attention_work(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Return the work of an attention over (batch, heads, length, features).

    Heads of the query may share heads of the keys and values.
    """
    batch, heads, queries, features = query.shape
    scores = batch * heads * queries * key.shape[2]
    return 2 * scores * (features + value.shape[3])


def needs_values(op: Any) -> bool:
    """Whether an operation reads values, sends them, or has a shape that depends on them.

    Indexing has one only when a mask is among the indices, which fake tensors refuse themselves.
    """
    dynamic = torch.Tag.dynamic_output_shape in op.tags and op is not torch.ops.aten.index.Tensor
    dependent = torch.Tag.data_dependent_output in op.tags
    return dynamic or dependent or op.namespace == "c10d"


def _flat(values: Sequence[Any]) -> list[Any]:
    return [x for value in values for x in (value if isinstance(value, list | tuple) else [value])]
