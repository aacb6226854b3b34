"""A tensor whose values exist on another pipeline stage.

A parameter that lives on another stage is a proxy, and whatever it touches is a proxy: a tensor
without values (``drivetrain.model``) that says so. What a script makes of a loss of another stage,
such as ``loss.detach() / 4``, is known as an expression, and has its value when the loss has.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from drivetrain.errors import UsageError
from drivetrain.model.look import tensors_in
from drivetrain.model.results import Facts, ValuesNeededError
from drivetrain.model.valueless import ValuelessTensor
from drivetrain_megatron.recording.lazy import LazyValue, slope

_SMALL = 64
"""Elements that a real tensor may have to be copied into an expression of values to come."""

OTHER = "a real tensor that wants a gradient"
"""Stands among the origins of a proxy for what came from outside of any call."""


class StageProxy(ValuelessTensor):
    """Facts of a tensor without its values; a 0-d one may get its value later.

    Attributes:
        origins: where its gradient would go: calls of the model, and ``OTHER``.
    """

    origins: frozenset[object]
    _later: LazyValue | None

    def __new__(cls, facts: Facts, requires_grad: bool = False, work: int = 0) -> "StageProxy":
        """Make one without a known expression."""
        self = super().__new__(cls, facts, requires_grad, work)
        self.origins = frozenset()
        self._later = None if facts.shape else LazyValue()
        return self

    def value(self) -> Tensor | None:
        """Return its value, or None as long as it is not known here."""
        value: Tensor | None = None if self._later is None else self._later.value()
        return value

    def derived_from(self, tensors: Sequence[Tensor]) -> None:
        """Note where the gradient of what is made of tensors would go."""
        if torch.is_grad_enabled() and (self.requires_grad or any(t is self for t in tensors)):
            self.origins |= _origins(tensors)

    @classmethod
    def remember(
        cls, result: Any, function: Callable[..., Any], args: Sequence[Any], kwargs: Any
    ) -> None:
        """Keep how results follow from values to come."""
        for tensor in tensors_in((args, kwargs)):
            if isinstance(tensor, StageProxy):
                if tensor._later is None:
                    return
            elif tensor.numel() > _SMALL:
                return
        later = LazyValue(function, _stand_in(tuple(args)), _stand_in(dict(kwargs)))
        if isinstance(result, StageProxy):
            result._later = later
        elif isinstance(result, list | tuple):
            for i, item in enumerate(result):
                if isinstance(item, StageProxy):
                    item._later = LazyValue(operator.getitem, (later, i))

    @classmethod
    def values_needed(cls, use: str) -> ValuesNeededError:
        """Return the error for a use of values that another pipeline stage has."""
        return ValuesNeededError(
            f"expected values for {use}, found a tensor whose values exist on another pipeline "
            "stage: its shape and dtype are known here, its numbers are not. Return the loss from "
            "the model, or call .item() after accelerator.backward(loss), in an accumulation "
            "window after the last one; for choices that depend on values, compute them inside of "
            "the model's blocks",
            use,
        )

    @classmethod
    def write_refused(cls, name: str, target: Tensor) -> UsageError:
        """Return the error for values that are not here and go into a real tensor."""
        return UsageError(
            f"expected values for {name}() to write, found a tensor whose values exist on another "
            f"pipeline stage, and a real tensor of shape {tuple(target.shape)} as the target: make "
            "a new tensor instead (torch.where, torch.cat, a + b), or do this inside of one of the "
            "model's blocks"
        )

    @classmethod
    def reshape_refused(cls, name: str) -> UsageError:
        """Return the error for an operation that changes the shape of its argument."""
        return UsageError(
            f"expected a tensor that keeps its shape, found {name}() on a tensor whose values "
            "exist on another pipeline stage: use the form that returns a new tensor"
        )

    @classmethod
    def backward_refused(cls) -> UsageError:
        """Return the error for a backward of one stage alone."""
        return UsageError(
            "expected accelerator.backward(loss), found a backward of its own on a loss whose "
            "values exist on another pipeline stage: the pipeline runs backward on all stages "
            "together"
        )

    @classmethod
    def assignment_refused(cls) -> UsageError:
        """Return the error for other data given to a proxy."""
        return UsageError(
            "expected to read .data, found an assignment to the .data of a tensor whose values "
            "exist on another pipeline stage: change it before accelerator.prepare()"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        value = self.value()
        if value is not None:
            return f"StageProxy({value}, from another pipeline stage)"
        shape, _, dtype, device = self.facts
        return f"StageProxy(values on another pipeline stage, {shape}, {dtype}, device='{device}')"

    def __format__(self, spec: str) -> str:
        value = self.value()
        if value is not None:
            return format(value.item() if not value.dim() else value, spec)
        if not spec:
            return repr(self)
        raise self.values_needed(f"format(tensor, {spec!r})")


def proxy_of(tensor: Tensor, device: torch.device | None = None) -> StageProxy:
    """Return a proxy with the facts of a tensor, which is let go.

    Args:
        tensor: a strided tensor, on any device.
        device: what the proxy says of its device; None for the tensor's.
    """
    return StageProxy.of(tensor, device)


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
    return StageProxy.like(shape, dtype, device, requires_grad)


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
    return proxy.value()


def _origins(tensors: Sequence[Tensor]) -> frozenset[object]:
    """Return where the gradient of what is made of tensors would go."""
    other = frozenset[object]({OTHER})
    wanting = [t for t in tensors if t.requires_grad]
    return frozenset().union(*(t.origins if isinstance(t, StageProxy) else other for t in wanting))


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
