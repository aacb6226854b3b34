"""Lets a model compute in the run's precision: autocast around forward, fp32 for what comes out."""

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any

from torch import nn

from drivetrain.nested import convert_to_fp32

_ORIGINAL = "_forward_before_prepare"


def compute_in(model: nn.Module, context: Callable[[], AbstractContextManager[object]]) -> None:
    """Run the model's forward inside a context; floating point outputs become fp32.

    A deep copy of the model computes in the same context, with its own parameters; a pickled one
    computes as its class says.

    Args:
        model: changed in place; ``restore_forward`` undoes it.
        context: makes the context of one forward.
    """
    if _ORIGINAL in model.__dict__:
        if getattr(model.__dict__["forward"], "__func__", None) is not type(model).forward:
            return
        restore_forward(model)  # came out of a pickle, which does not hold functions
    before = model.__dict__.get("forward")

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = module.__dict__[_ORIGINAL]
        with context():
            if own is None:
                outputs = type(module).forward(module, *args, **kwargs)
            else:
                outputs = own(*args, **kwargs)
        return convert_to_fp32(outputs)

    functools.update_wrapper(forward, model.forward)
    forward.__signature__ = _with_module(model.forward)  # type: ignore[attr-defined]  # see inspect
    # In __dict__ directly: a compiled module hands attributes set on it to the module inside. A
    # method, since deepcopy binds methods, unlike functions, to the copy.
    model.__dict__[_ORIGINAL] = before
    model.__dict__["forward"] = MethodType(forward, model)


def restore_forward(model: nn.Module) -> None:
    """Give a model back the forward it had before ``compute_in``."""
    if _ORIGINAL not in model.__dict__:
        return
    original = model.__dict__.pop(_ORIGINAL)
    if original is None:
        del model.__dict__["forward"]
    else:
        model.__dict__["forward"] = original


class ForwardNote:
    """A forward pre-hook that tells the facade which model runs; a copy of the model tells nothing.

    Args:
        tell: called with the module before each of its forwards.
    """

    def __init__(self, tell: Callable[[nn.Module], None] | None) -> None:
        self._tell = tell

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        """Tell, unless this is a copy's."""
        if self._tell is not None:
            self._tell(module)

    def __reduce__(self) -> tuple[type["ForwardNote"], tuple[None]]:
        return ForwardNote, (None,)


def _with_module(method: Callable[..., Any]) -> inspect.Signature:
    """Return a bound method's signature with the module before its arguments."""
    module = inspect.Parameter("module", inspect.Parameter.POSITIONAL_ONLY)
    signature = inspect.signature(method)
    arguments = list(signature.parameters.values())
    return signature.replace(parameters=[module, *arguments])
