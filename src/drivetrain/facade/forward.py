"""Lets a model compute in the run's precision: autocast around forward, fp32 for what comes out."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from drivetrain.nested import convert_to_fp32

_ORIGINAL = "_forward_before_prepare"


def compute_in(model: nn.Module, context: Callable[[], AbstractContextManager[object]]) -> None:
    """Run the model's forward inside a context; floating point outputs become fp32.

    Args:
        model: changed in place; ``restore_forward`` undoes it.
        context: makes the context of one forward.
    """
    if _ORIGINAL in model.__dict__:
        return
    original = model.forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with context():
            outputs = original(*args, **kwargs)
        return convert_to_fp32(outputs)

    # In __dict__ directly: a compiled module hands attributes set on it to the module inside.
    model.__dict__[_ORIGINAL] = model.__dict__.get("forward")
    model.__dict__["forward"] = forward


def restore_forward(model: nn.Module) -> None:
    """Give a model back the forward it had before ``compute_in``."""
    if _ORIGINAL not in model.__dict__:
        return
    original = model.__dict__.pop(_ORIGINAL)
    if original is None:
        del model.__dict__["forward"]
    else:
        model.__dict__["forward"] = original
