"""A tensor whose values exist on another pipeline stage.

A parameter that lives on another stage is a proxy, and whatever it touches is a proxy. A proxy has
the real shape, strides, dtype and device, takes no memory, and any operation with one among its
arguments gives proxies and computes nothing. Operations on real tensors alone are not touched.

A function that proxies cannot run, since it communicates or calls a kernel of its own, may have an
attribute ``without_values``: a function of the same arguments that gives tensors of the same shapes
and dtypes. It is used when the function hands proxies over (``torch.overrides``).
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from drivetrain.errors import UsageError
from drivetrain_megatron.recording.lazy import LazyValue, slope
from drivetrain_megatron.recording.refusals import refuse_assignment, refuse_backward, refuse_write
from drivetrain_megatron.recording.shapes_of_ops import (
    Facts,
    Fresh,
    Function,
    Slot,
    facts_of,
    freeze,
    needs_values,
    outcome,
    thaw,
    values_needed,
)
from drivetrain_megatron.recording.uses import CONSTANTS, QUESTIONS, READERS, targets

Handler: TypeAlias = Callable[[Function, Sequence[Any], Mapping[str, Any]], Any]

_SMALL = 64
"""Elements that a real tensor may have to be copied into an expression of values to come."""


OTHER = "a real tensor that wants a gradient"
"""Stands among the origins of a proxy for what came from outside of any call."""


class StageProxy(Tensor):
    """Facts of a tensor without its values; made by ``proxy_of`` and by operations on proxies.

    Attributes:
        facts: shape, strides, dtype, device.
        work: floating point operations of the matrix products that would have made it.
        phases: where in the model its values come from; only a recording begins and reads it.
        origins: where its gradient would go: calls of the model, and ``OTHER``.
    """

    facts: Facts
    work: int
    phases: frozenset[int]
    origins: frozenset[object]
    _later: LazyValue | None

    def __new__(cls, facts: Facts, requires_grad: bool = False, work: int = 0) -> "StageProxy":
        """Make one without a known expression; a 0-d one may get its value later."""
        self: StageProxy = Tensor._make_wrapper_subclass(
            cls,
            facts.shape,
            strides=facts.stride,
            dtype=facts.dtype,
            device=facts.device,
            requires_grad=requires_grad,
        )
        self.facts, self.work, self.phases = facts, work, frozenset()
        self.origins = frozenset()
        self._later = None if facts.shape else LazyValue()
        return self

    def __init__(self, facts: Facts, requires_grad: bool = False, work: int = 0) -> None:
        """Everything is done in ``__new__``."""

    @classmethod
    def __torch_function__(
        cls,
        func: Function,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Give what a function of torch would give."""
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(func, args, kwargs or {})
        if getattr(func, "__name__", "") == "__get__":
            return _on_facts(func, args, kwargs or {})
        return _apply(getattr(func, "without_values", func), args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Give what an operation called from C++ would give."""
        if needs_values(func):
            return _on_values(func, args, kwargs or {})
        return _apply(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        value = value_of(self)
        if value is not None:
            return f"StageProxy({value}, from another pipeline stage)"
        shape, _, dtype, device = self.facts
        return f"StageProxy(values on another pipeline stage, {shape}, {dtype}, device='{device}')"

    def __format__(self, spec: str) -> str:
        value = value_of(self)
        if value is not None:
            return format(value.item() if not value.dim() else value, spec)
        if not spec:
            return repr(self)
        raise values_needed(f"format(tensor, {spec!r})")

    def __deepcopy__(self, memo: dict[int, Any]) -> "StageProxy":
        copied = StageProxy(self.facts, self.requires_grad)
        memo[id(self)] = copied
        return copied


def proxy_of(tensor: Tensor, device: torch.device | None = None) -> StageProxy:
    """Return a proxy with the facts of a tensor, which is let go.

    Args:
        tensor: a strided tensor, on any device.
        device: what the proxy says of its device; None for the tensor's.
    """
    facts = facts_of(tensor)
    return StageProxy(facts._replace(device=device or facts.device), tensor.requires_grad)


def proxy_like(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, requires_grad: bool = False
) -> StageProxy:
    """Return a contiguous proxy.

    Args:
        shape: its shape.
        dtype: its dtype.
        device: the device that the values would be on.
        requires_grad: whether a loss made from it can be differentiated.
    """
    meta = torch.empty(tuple(shape), dtype=dtype, device="meta")
    return StageProxy(facts_of(meta)._replace(device=device), requires_grad)


def slope_of(proxy: StageProxy, by: StageProxy) -> Tensor:
    """Return the derivative of a 0-d proxy by one that it follows from linearly, fp64.

    Raises:
        UsageError: it is no multiple of the other.
    """
    if proxy._later is None or by._later is None:
        raise UsageError(
            f"expected a 0-d loss, found a tensor of shape {proxy.facts.shape} whose values exist "
            "on another pipeline stage; take its mean() or sum() in the model"
        )
    return slope(proxy._later, by._later)


def resolve(proxy: StageProxy, value: Tensor) -> None:
    """Give a proxy its value; what was derived from it by pure operations has its value then, too.

    Args:
        proxy: a proxy.
        value: of the proxy's shape; kept detached, in the proxy's dtype.

    Raises:
        UsageError: the shapes differ.
    """
    if tuple(value.shape) != proxy.facts.shape:
        raise UsageError(
            f"expected a value of shape {proxy.facts.shape} for a proxy, found one of "
            f"{tuple(value.shape)}: give the value of this very tensor"
        )
    later = proxy._later = proxy._later or LazyValue()
    later.settle(value.detach().to(proxy.facts.dtype).clone())


def value_of(proxy: StageProxy) -> Tensor | None:
    """Return the value of a proxy, or None as long as it is not known here."""
    value: Tensor | None = None if proxy._later is None else proxy._later.value()
    return value


def _apply(func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the proxies that a call gives, or values when all of its proxies have them."""
    tensors: list[Tensor] = []

    def slot(tensor: Tensor) -> Slot:
        tensors.append(tensor)
        known = type(tensor) is StageProxy
        return Slot(len(tensors) - 1, tensor.facts if known else facts_of(tensor))  # type: ignore[attr-defined]

    frozen, named = freeze(tuple(args), slot), freeze(dict(kwargs), slot)
    proxies = [tensor for tensor in tensors if type(tensor) is StageProxy]
    later = all(proxy._later is not None for proxy in proxies)
    if later and all(value_of(proxy) is not None for proxy in reversed(proxies)):
        return _on_values(func, args, kwargs)
    written = targets(getattr(func, "__name__", ""), args, kwargs)
    refuse_write(func, [t for t in written if isinstance(t, Tensor) and type(t) is not StageProxy])
    device = next((proxy.facts.device for proxy in proxies if proxy.dim()), proxies[0].facts.device)
    cast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
    found = _outcome(func, frozen, named, (cast, torch.get_default_dtype()))
    grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    work, phases = found.work, frozenset[int]().union(*(proxy.phases for proxy in proxies))
    origins = _origins(tensors) if grad else frozenset[object]()

    def tensor_of(frozen: Slot | Fresh) -> Tensor:
        nonlocal work
        if isinstance(frozen, Slot):
            return _unchanged(func, tensors[frozen.place], frozen, phases, origins)
        dtype = frozen.facts.dtype
        differentiable = grad and (dtype.is_floating_point or dtype.is_complex)
        made, work = StageProxy(frozen.facts, differentiable, work), 0
        made.phases, made.origins = phases, origins if differentiable else frozenset()
        return made

    result = thaw(found.value, tensor_of)
    if later and tensors:
        _remember(result, func, args, kwargs, tensors)
    return result


def _outcome(func: Function, args: Any, kwargs: Any, surroundings: Any) -> Any:
    try:
        return outcome(func, args, kwargs, surroundings)
    except TypeError as error:
        if "unhashable" not in str(error):
            raise
    return outcome.__wrapped__(func, args, kwargs, surroundings)


def _origins(tensors: Sequence[Tensor]) -> frozenset[object]:
    """Return where the gradient of what is made of tensors would go."""
    other = frozenset[object]({OTHER})
    wanting = [t for t in tensors if t.requires_grad]
    return frozenset().union(*(t.origins if isinstance(t, StageProxy) else other for t in wanting))


def _unchanged(
    func: Function,
    tensor: Tensor,
    place: Slot,
    phases: frozenset[int],
    origins: frozenset[object],
) -> Tensor:
    """Return an argument that a call returned; its shape must still be the one it was made with."""
    known = tensor.facts if isinstance(tensor, StageProxy) else facts_of(tensor)
    if (known.shape, known.dtype) != (place.facts.shape, place.facts.dtype):
        name = getattr(func, "__name__", str(func))
        raise UsageError(
            f"expected a tensor that keeps its shape, found {name}() on a tensor whose values "
            "exist on another pipeline stage: use the form that returns a new tensor"
        )
    written = targets(getattr(func, "__name__", ""), (tensor,), {})[0] is not None
    if written and isinstance(tensor, StageProxy):
        tensor.phases |= phases
        tensor.origins |= origins
    return tensor


def _remember(
    result: Any,
    func: Function,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    tensors: Sequence[Tensor],
) -> None:
    """Keep how results follow from values to come."""
    if any(not isinstance(t, StageProxy) and t.numel() > _SMALL for t in tensors):
        return

    later = LazyValue(func, _stand_in(tuple(args)), _stand_in(dict(kwargs)))
    if isinstance(result, StageProxy):
        result._later = later
    elif isinstance(result, list | tuple):
        for i, item in enumerate(result):
            if isinstance(item, StageProxy):
                item._later = LazyValue(operator.getitem, (later, i))


def _stand_in(value: Any) -> Any:
    """Return arguments with values to come in place of proxies and copies of real tensors."""
    if isinstance(value, StageProxy):
        return value._later
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, list | tuple):
        return type(value)(_stand_in(item) for item in value)
    if isinstance(value, dict):
        return {key: _stand_in(item) for key, item in value.items()}
    return value


def _on_facts(func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _on_values(func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function that reads values, if they have come."""

    def valued(value: Any) -> Any:
        if isinstance(value, StageProxy):
            found = value_of(value)
            if found is None:
                name = getattr(func, "__name__", None) or str(func)
                raise values_needed(f"{name.strip('_')}()")
            return found
        if isinstance(value, list | tuple):
            return type(value)(valued(item) for item in value)
        return value

    return func(*valued(tuple(args)), **{key: valued(item) for key, item in kwargs.items()})


def _derived(function: Function) -> Handler:
    """Return a handler that calls another function."""
    return lambda func, args, kwargs: _apply(function, args, kwargs)


def _detached(func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    with torch.no_grad():
        return _apply(Tensor.detach, args, kwargs)


def _index(func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Index; a real mask is turned into positions, whose number is known here."""
    target, index, *rest = args
    parts = index if isinstance(index, tuple) else (index,)
    plain: list[Any] = []
    for part in parts:
        mask = isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8)
        if mask and not isinstance(part, StageProxy):
            plain.extend(part.nonzero(as_tuple=True))
        else:
            plain.append(part)
    return _apply(func, (target, tuple(plain), *rest), kwargs)


def _constant(func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Make a real tensor, since its values do not depend on the proxy's, only its shape."""
    like, *rest = args
    if not isinstance(like, StageProxy):
        return _apply(func, args, kwargs)
    given = {"device": like.facts.device, "dtype": like.facts.dtype}
    given |= {key: value for key, value in kwargs.items() if value is not None}
    stand_in = torch.empty(1, dtype=like.facts.dtype, device=like.facts.device)
    if getattr(func, "__name__", "").endswith("_like"):
        stand_in = stand_in.expand(like.facts.shape)
        given.setdefault("memory_format", torch.contiguous_format)
    return func(stand_in, *rest, **given)


def _iterate(func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return iter(_apply(Tensor.unbind, args, {}))


def _handlers() -> dict[Any, Handler]:
    """Return what is done with functions that are no operations on values."""
    handlers: dict[Any, Handler] = {
        Tensor.__getitem__: _index,
        Tensor.__setitem__: _index,
        Tensor.__iter__: _iterate,
        Tensor.detach: _detached,
        torch.detach: _detached,
        Tensor.data.__get__: _detached,  # type: ignore[attr-defined]
        Tensor.data.__set__: refuse_assignment,  # type: ignore[attr-defined]
        Tensor.requires_grad.__set__: _on_facts,  # type: ignore[attr-defined]
        Tensor.grad.__set__: _on_facts,  # type: ignore[union-attr]
        Tensor.T.__get__: _derived(Tensor.t),  # type: ignore[attr-defined]
        Tensor.mT.__get__: _derived(_transposed),  # type: ignore[attr-defined]
        Tensor.real.__get__: _derived(torch.real),  # type: ignore[attr-defined]
        Tensor.imag.__get__: _derived(torch.imag),  # type: ignore[attr-defined]
        Tensor.backward: refuse_backward,
        torch.autograd.backward: refuse_backward,
        torch.autograd.grad: refuse_backward,
    }
    handlers |= dict.fromkeys(CONSTANTS, _constant)
    handlers |= dict.fromkeys(READERS, _on_values)
    handlers |= dict.fromkeys(QUESTIONS, _on_facts)
    return handlers


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.transpose(-2, -1)


_HANDLERS: Mapping[Any, Handler] = MappingProxyType(_handlers())
