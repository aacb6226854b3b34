"""Parameters whose values are elsewhere or on their way: a touch brings them, or is refused.

The parameter object is still the object of the user's model, optimizers and lists; only its class
changes while its values are away. A class with ``__torch_function__`` sees every use from Python:
nobody reads memory that is freed or half written, and facts such as the shape cost nothing. When
the values are there the class is ``nn.Parameter`` again and nothing is in the way of a forward.
"""

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_leaves

from drivetrain.errors import UsageError
from drivetrain.parts.torch_calls import Arguments, Function, Keywords, asks_facts, writes_first


class Guard(Protocol):
    """Decides about every use of a guarded parameter."""

    def run(self, function: Function, args: Arguments, kwargs: Keywords) -> Any:
        """Make the parameter's values available, unguard it, and return ``function``'s result."""


class GuardedParameter(nn.Parameter):
    """A parameter that asks its guard before anything reads or writes its values."""

    _guard: Guard

    @classmethod
    @_disable_dynamo  # in a compiled block: the values come, and the graph has a gap
    def __torch_function__(
        cls, func: Function, types: Any, args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        """Answer questions about facts at once; pass everything else to the guard."""
        kwargs = kwargs or {}
        if asks_facts(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        guarded = next(leaf for leaf in tree_leaves((args, kwargs)) if is_guarded(leaf))
        return guarded._guard.run(func, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._guard.run(nn.Parameter.__deepcopy__, (self, memo), {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._guard.run(nn.Parameter.__reduce_ex__, (self, protocol), {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Parameter(values elsewhere, shape {tuple(self.shape)}, {self.dtype})"

    def __format__(self, spec: str) -> str:
        if self.dim():
            return object.__format__(self, spec)  # as repr: one rank may print by itself
        return str(self._guard.run(nn.Parameter.__format__, (self, spec), {}))


class Elsewhere(nn.Parameter):
    """A parameter that other ranks hold: this one has the user's object, and a copy of values.

    Strategies here do not know it (``naming.named_parameters``); copies and pickles are ordinary.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = nn.Parameter(self.data.clone(), self.requires_grad)
        return memo.setdefault(id(self), copied)  # type: ignore[no-any-return]


class StandIn(GuardedParameter, Elsewhere):
    """The same without values: its guard decides about every use."""


def is_guarded(value: object) -> bool:
    """Return whether a parameter's values are away."""
    return issubclass(type(value), GuardedParameter)


def writes(function: Function, args: Arguments, kwargs: Keywords) -> bool:
    """Return whether a use (``copy_``, ``+=``, an initializer) writes into a guarded parameter.

    Functions that write do so into their first argument, and need no look at the values.
    """
    if not writes_first(function):
        return False
    first = [*args, *kwargs.values()][:1]
    return any(is_guarded(leaf) for leaf in tree_leaves(first))


def guard(parameter: Tensor, by: Guard, kind: type[GuardedParameter] = GuardedParameter) -> None:
    """Let a guard decide about every use of a parameter's values."""
    parameter.__class__ = kind
    parameter._guard = by  # type: ignore[attr-defined]


def unguard(parameter: nn.Parameter) -> None:
    """Make a parameter an ordinary one again: its values are there."""
    if issubclass(type(parameter), GuardedParameter):
        parameter.__class__ = nn.Parameter
        del parameter._guard  # type: ignore[attr-defined]  # copies and pickles must not drag it


def check_ordinary(name: str, parameter: nn.Parameter) -> None:
    """Refuse parameters that have a class of their own, whose behavior a guard would hide.

    Raises:
        UsageError: names the parameter and its class.
    """
    if type(parameter) is not nn.Parameter or parameter.layout is not torch.strided:
        raise UsageError(
            f"expected ordinary dense parameters, found {name!r} of class "
            f"{type(parameter).__name__} and layout {parameter.layout}; keep it out of the model "
            "that is prepared, or use a strategy that replicates parameters"
        )
