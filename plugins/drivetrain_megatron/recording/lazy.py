"""Values that come later: an expression over tensors that another stage will send.

After backward the loss of the last stage reaches every rank. What the script made of the loss
before that, such as ``loss.detach() / 4``, is kept as an expression and computed when asked for.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from drivetrain.errors import UsageError

_DEPTH = 100
"""Operations in a row that an expression keeps; a running sum that is never read stops there."""


_LOOK = 4
"""Operations in a row after which it is worth a look whether the values have come by now."""


class LazyValue:
    """A value that is known now, or follows from others, or is still to come.

    Args:
        function: makes the value from the arguments; None when another stage sends it.
        args: arguments, in which ``LazyValue`` objects stand for tensors.
        kwargs: the same by name.
    """

    def __init__(
        self,
        function: Callable[..., Any] | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._value: Tensor | None = None
        self._depth: int
        self._function = function
        self._args, self._kwargs = tuple(args), dict(kwargs or {})
        parents = [
            leaf for leaf in _leaves((self._args, self._kwargs)) if isinstance(leaf, LazyValue)
        ]
        for parent in parents:
            if parent._depth > _LOOK:
                parent.value()
        self._depth = 1 + max((parent._depth for parent in parents), default=0)
        if self._depth > _DEPTH:
            self._function, self._args, self._kwargs, self._depth = None, (), {}, 1

    def settle(self, value: Tensor) -> None:
        """Give the value; what it was to be computed from is let go."""
        self._value = value
        self._function, self._args, self._kwargs, self._depth = None, (), {}, 1

    def value(self) -> Any:
        """Return the value, or None while something that it follows from is still to come."""
        if self._value is None and self._function is not None:
            args, kwargs = _valued(self._args), _valued(self._kwargs)
            if not any(leaf is _MISSING for leaf in _leaves((args, kwargs))):
                with torch.no_grad():
                    self.settle(self._function(*args, **kwargs))
        return self._value


class _Missing:
    """Stands for a value that is still to come."""


_MISSING = _Missing()


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in _leaves(item)]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _leaves(item)]
    return [value]


def _valued(value: Any) -> Any:
    if isinstance(value, LazyValue):
        found = value.value()
        # A copy, since an operation in place must not change what others follow from.
        return _MISSING if found is None else _copied(found)
    if isinstance(value, list | tuple):
        return type(value)(_valued(item) for item in value)
    if isinstance(value, dict):
        return {key: _valued(item) for key, item in value.items()}
    return value


def _copied(found: Any) -> Any:
    return found.clone() if isinstance(found, Tensor) else found


def slope(of: LazyValue, by: LazyValue) -> Tensor:
    """Return the derivative of a value to come by another one that it follows from.

    Args:
        of: the value.
        by: 0-d, still to come; where it stands does not matter if the expression is linear.

    Raises:
        UsageError: it follows from something else, too, or is not linear.
    """
    slopes = []
    for point in (1.0, 2.0):
        at = torch.full((), point, dtype=torch.float64, requires_grad=True)
        with torch.enable_grad():
            value = _at(of, by, at)
            if value is None or not value.requires_grad:
                raise _no_slope("one that does not follow from it")
            slopes.append(torch.autograd.grad(value, at)[0])
    if not torch.equal(slopes[0], slopes[1]):
        raise _no_slope("an expression that is not linear")
    return slopes[0]


def _at(of: LazyValue, by: LazyValue, point: Tensor) -> Any:
    """Return a value with another one assumed; None if it does not follow from known ones."""
    if of is by:
        return point
    if of._function is None:
        return of._value
    missing = False

    def valued(value: Any) -> Any:
        nonlocal missing
        if isinstance(value, LazyValue):
            found = _at(value, by, point)
            missing = missing or found is None
            return found
        if isinstance(value, list | tuple):
            return type(value)(valued(item) for item in value)
        if isinstance(value, dict):
            return {key: valued(item) for key, item in value.items()}
        return value

    args, kwargs = valued(of._args), valued(of._kwargs)
    return None if missing else of._function(*args, **kwargs)


def _no_slope(found: str) -> UsageError:
    return UsageError(
        f"expected the model's loss times numbers, found {found}: under pipeline parallelism "
        "backward begins while forward still runs; make the loss in a function and hand it over "
        "(accelerator.pipeline_step), or return it from the model"
    )
