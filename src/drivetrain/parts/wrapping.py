"""Another forward for a module, and hooks and methods that copies of a module do not inherit."""

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from drivetrain.nested import convert_to_fp32
from drivetrain.parts.guard import Arguments, Function, Keywords

_ORIGINAL = "_forward_before_prepare"


class AroundForward(Protocol):
    """Computes a module's outputs in place of its forward."""

    def __call__(
        self, module: nn.Module, compute: Function, args: Arguments, kwargs: Keywords
    ) -> Any:
        """Return the outputs of a call of the module; ``compute`` is the forward it had before."""


def wrap_forward(module: nn.Module, key: str, around: AroundForward) -> None:
    """Put another forward around a module's own; hooks of the module stay outside of it.

    A deep copy is wrapped too and computes with its own parameters; a pickled module computes as
    its class says.

    Args:
        module: changed in place; ``unwrap_forward`` undoes it. If it is wrapped under this key
            already, the older wrapping is taken off first.
        key: of the module's ``__dict__``, a key for each purpose; holds the forward from before.
        around: called instead of the forward, with the module itself or a copy of it.
    """
    unwrap_forward(module, key)
    before = module.__dict__.get("forward")

    def forward(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        own = module.__dict__[key]
        compute = MethodType(type(module).forward, module) if own is None else own
        return around(module, compute, args, kwargs)

    functools.update_wrapper(forward, module.forward)
    forward.__name__ = "forward"  # pickle looks a method up on the class under this name
    forward.__signature__ = _with_module(module.forward)  # type: ignore[attr-defined]
    # In __dict__ directly: a compiled module hands attributes set on it to the module inside. A
    # method, since deepcopy binds methods, unlike functions, to the copy.
    module.__dict__[key] = before
    module.__dict__["forward"] = MethodType(forward, module)


def unwrap_forward(module: nn.Module, key: str) -> None:
    """Give a module back the forward it had before it was wrapped under a key, if it was."""
    if key not in module.__dict__:
        return
    before = module.__dict__.pop(key)
    if before is None:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = before


def is_wrapped(module: nn.Module, key: str) -> bool:
    """Return whether a module is wrapped under a key; a pickle has lost the function around."""
    own = getattr(module.__dict__.get("forward"), "__func__", None)
    return key in module.__dict__ and own is not type(module).forward


def _with_module(method: Callable[..., Any]) -> inspect.Signature:
    """Return a bound method's signature with the module before its arguments.

    It is called ``self`` there: a forward may have an argument of any other name.
    """
    module = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    signature = inspect.signature(method)
    return signature.replace(parameters=[module, *signature.parameters.values()])


def compute_in(model: nn.Module, context: Callable[[], AbstractContextManager[object]]) -> None:
    """Run the model's forward inside a context; floating point outputs become fp32.

    A deep copy of the model computes in the same context, with its own parameters; a pickled model
    computes as its class says. ``restore_forward`` undoes the change.
    """
    if is_wrapped(model, _ORIGINAL):
        return

    def in_context(module: nn.Module, compute: Function, args: Arguments, kwargs: Keywords) -> Any:
        with context():
            outputs = compute(*args, **kwargs)
        return convert_to_fp32(outputs)

    wrap_forward(model, _ORIGINAL, in_context)


def restore_forward(model: nn.Module) -> None:
    """Give a model back the forward it had before ``compute_in``."""
    unwrap_forward(model, _ORIGINAL)


class UninheritedHook:
    """A hook on a module, of any signature, that copies and pickles of the module do not inherit.

    Copies for moving averages and pickles are ordinary models: they must neither communicate nor
    hold on to the strategy.

    Args:
        action: called with the hook's arguments; None for nothing, as in a copy.
    """

    def __init__(self, action: Callable[..., Any] | None) -> None:
        self._action = action

    def __call__(self, *arguments: Any) -> Any:
        """Act, and return what the action returns: a hook may replace inputs or results."""
        return None if self._action is None else self._action(*arguments)

    def __reduce__(self) -> tuple[type["UninheritedHook"], tuple[None]]:
        return UninheritedHook, (None,)


class UninheritedContext:
    """The context method of one module; copies and pickles of the module have one without effect.

    Args:
        enter: makes the context.
    """

    def __init__(self, enter: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._enter = enter

    def __call__(self) -> AbstractContextManager[None]:
        """Return a new context."""
        return self._enter()

    def __reduce__(self) -> tuple[type["UninheritedContext"], tuple[()]]:
        return UninheritedContext, ()


class UninheritedMethod:
    """A method of one object in the place of its class's; copies and pickles have their class's.

    Args:
        owner: a module or an optimizer.
        name: of the method.
        action: called with the method's arguments; None for the class's method, as in a copy.
    """

    def __init__(
        self, owner: nn.Module | Optimizer, name: str, action: Callable[..., Any] | None = None
    ) -> None:
        self._owner, self._name = owner, name
        self._action = action
        self._before: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method."""
        action = self._action or MethodType(getattr(type(self._owner), self._name), self._owner)
        return action(*args, **kwargs)

    def put(self) -> None:
        """Let the owner have it, until ``take_off``."""
        self._before = self._owner.__dict__.get(self._name)
        self._owner.__dict__[self._name] = self

    def take_off(self) -> None:
        """Let the owner have the method from before, unless it has had another one since."""
        if self._owner.__dict__.get(self._name) is not self:
            return
        del self._owner.__dict__[self._name]
        if self._before is not None:
            self._owner.__dict__[self._name] = self._before

    def __reduce__(self) -> tuple[type["UninheritedMethod"], tuple[nn.Module | Optimizer, str]]:
        return UninheritedMethod, (self._owner, self._name)


# --- the forward hooks that a script, or its model, has put on a module ---


def hooks_of_script(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """Return a module's forward hooks by their numbers, without those of strategies and of looks.

    The latter act on tensors, or note them, wherever the module is called.
    """
    return {
        number: hook
        for number, hook in module._forward_hooks.items()
        if not str(getattr(hook, "__module__", "")).startswith("drivetrain")
    }


def is_compiled_call(module: nn.Module) -> bool:
    """Return whether ``module.compile()`` compiled the calls of a module, hooks and forward."""
    return module.__dict__.get("_compiled_call_impl") is not None
