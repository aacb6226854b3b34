"""What an operation would give, worked out from shapes alone and remembered.

A function runs once per combination of arguments on *shadows*: tensors with the shape, strides,
dtype and device of the arguments and no values. They pass through autocast as the real ones would
and are computed by the kernels of the meta device. Those kernels take up to milliseconds, so the
result is kept: asked again, it costs a look-up.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from drivetrain.errors import UsageError

Function: TypeAlias = Callable[..., Any]


class Facts(NamedTuple):
    """What is known of a tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Slot(NamedTuple):
    """The place of a tensor among the arguments of a call."""

    place: int
    facts: Facts


class Fresh(NamedTuple):
    """A tensor that a call made."""

    facts: Facts


class Number(NamedTuple):
    """A number with its type, since 1, 1.0 and True are equal as keys."""

    kind: type
    value: Any


class Items(NamedTuple):
    """A list, tuple or similar of frozen values."""

    kind: type
    values: tuple[Any, ...]


class Entries(NamedTuple):
    """A dictionary of frozen values."""

    values: tuple[tuple[Any, Any], ...]


class Part(NamedTuple):
    """A slice."""

    values: tuple[Any, Any, Any]


class Outcome(NamedTuple):
    """What a call gives.

    Attributes:
        value: the frozen result; a ``Slot`` is an argument itself, a ``Fresh`` a new tensor.
        work: floating point operations of the matrix products in it.
    """

    value: Any
    work: int


class ValuesNeededError(UsageError):
    """The result, or its shape, depends on values that are not there."""


def facts_of(tensor: Tensor) -> Facts:
    """Return the facts of a strided tensor."""
    return Facts(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


def freeze(value: Any, slot: Callable[[Tensor], Any]) -> Any:
    """Return a hashable copy of arguments or results; tensors become what ``slot`` returns."""
    if isinstance(value, Tensor):
        return slot(value)
    kind = type(value)
    if kind is float or kind is bool:
        return Number(kind, value)
    if isinstance(value, list | tuple):
        return Items(kind, tuple(freeze(item, slot) for item in value))
    if kind is dict:
        return Entries(tuple((key, freeze(item, slot)) for key, item in value.items()))
    if kind is slice:
        return Part((freeze(value.start, slot), freeze(value.stop, slot), freeze(value.step, slot)))
    return value


def thaw(value: Any, tensor: Callable[[Slot | Fresh], Any]) -> Any:
    """Undo ``freeze``; ``tensor`` makes the tensors."""
    kind = type(value)
    if kind is Slot or kind is Fresh:
        return tensor(value)
    if kind is Number:
        return value.value
    if kind is Items:
        return _rebuild(value.kind, [thaw(item, tensor) for item in value.values])
    if kind is Entries:
        return {key: thaw(item, tensor) for key, item in value.values}
    if kind is Part:
        return slice(*(thaw(item, tensor) for item in value.values))
    return value


def _rebuild(kind: type, values: list[Any]) -> Any:
    if kind is list:
        return values
    if hasattr(kind, "_fields"):  # a named tuple
        return kind(*values)
    return kind(values)


@lru_cache(maxsize=1 << 14)
def outcome(function: Function, args: Any, kwargs: Any, surroundings: Any) -> Outcome:
    """Return what a call with frozen arguments gives.

    Args:
        function: a function of torch.
        args: frozen positional arguments.
        kwargs: frozen arguments by name.
        surroundings: whatever else the result depends on and that holds now, such as autocast.

    Raises:
        ValuesNeededError: the result needs values.
    """
    shadows: dict[int, Shadow] = {}
    tally = Tally()

    def shade(slot: Slot | Fresh) -> "Shadow":
        if isinstance(slot, Fresh):
            return Shadow(slot.facts, tally)
        return shadows.setdefault(slot.place, Shadow(slot.facts, tally))

    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        result = function(*thaw(args, shade), **thaw(kwargs, shade))
    places = {id(shadow): index for index, shadow in shadows.items()}

    def note(tensor: Tensor) -> Slot | Fresh:
        facts = facts_of(tensor)
        return Slot(places[id(tensor)], facts) if id(tensor) in places else Fresh(facts)

    return Outcome(freeze(result, note), tally.work)


class Tally:
    """Sums the floating point operations of one call."""

    def __init__(self) -> None:
        self.work = 0

    def add(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Count one operation on meta tensors."""
        packet = op.overloadpacket
        count = flop_registry.get(packet)
        if count is not None:
            self.work += int(count(*args, **kwargs, out_val=result))
        elif packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
            query, key, value = (tensor.shape for tensor in args[:3])
            self.work += int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


class Shadow(Tensor):
    """A tensor with the facts of another and no values; operations on it run on the meta device."""

    _meta: Tensor
    _tally: Tally

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, facts: Facts, tally: Tally, meta: Tensor | None = None) -> "Shadow":
        """Make one; ``meta`` is made when there is none."""
        shape, stride, dtype, device = facts
        self: Shadow = Tensor._make_wrapper_subclass(
            cls, shape, strides=stride, dtype=dtype, device=device, requires_grad=False
        )
        if meta is None:
            meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        self._meta, self._tally = meta, tally
        return self

    def __init__(self, facts: Facts, tally: Tally, meta: Tensor | None = None) -> None:
        """Everything is done in ``__new__``."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Shadow({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation on the meta device."""
        if needs_values(func):
            raise values_needed(str(func))
        lowered = _Lowered()
        metas, named = lowered.lower(list(args)), lowered.lower(dict(kwargs or {}))
        if named.get("device") is not None:
            lowered.device, named["device"] = torch.device(named["device"]), torch.device("meta")
        try:
            result = func(*metas, **named)
        except NotImplementedError as error:
            raise values_needed(str(func)) from error
        lowered.tally.add(func, metas, named, result)
        return lowered.lift(result)


class _Lowered:
    """The shadows of one operation: from them to meta tensors and back."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.tally = Tally()
        self._shadows: dict[int, Shadow] = {}
        self._ranked = -1

    def lower(self, value: Any) -> Any:
        """Return arguments with meta tensors in place of all tensors."""
        if isinstance(value, Shadow):
            self._shadows[id(value._meta)] = value
            self.tally = value._tally
            if min(value.dim(), 1) > self._ranked:  # a 0-d tensor may be on another device
                self._ranked, self.device = min(value.dim(), 1), value.device
            return value._meta
        if isinstance(value, Tensor):
            return value.detach().to("meta")
        if isinstance(value, list | tuple):
            return type(value)(self.lower(item) for item in value)
        if isinstance(value, dict):
            return {key: self.lower(item) for key, item in value.items()}
        return value

    def lift(self, value: Any) -> Any:
        """Return results with shadows in place of meta tensors; an argument stays itself."""
        if isinstance(value, Tensor):
            known = self._shadows.get(id(value))
            if known is not None:
                return known
            facts = facts_of(value)._replace(device=self.device)
            return Shadow(facts, self.tally, value)
        if isinstance(value, list | tuple):
            return type(value)(self.lift(item) for item in value)
        return value


def needs_values(op: Any) -> bool:
    """Whether an operation reads values, or has a shape that depends on them.

    Indexing has one only when a mask is among the indices, which the meta device refuses itself.
    """
    dynamic = torch.Tag.dynamic_output_shape in op.tags and op is not torch.ops.aten.index.Tensor
    dependent = torch.Tag.data_dependent_output in op.tags
    return dynamic or dependent or op.namespace == "c10d"


def values_needed(what: str) -> ValuesNeededError:
    """Return the error for a use of values that another pipeline stage has."""
    return ValuesNeededError(
        f"expected values for {what}, found a tensor whose values exist on another pipeline "
        "stage: its shape and dtype are known here, its numbers are not. Return the loss from the "
        "model, or call .item() after accelerator.backward(loss), in an accumulation window after "
        "the last one; for choices that depend on values, compute them inside of the model's blocks"
    )
