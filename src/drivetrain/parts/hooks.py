"""The forward hooks that a script, or its model, has put on a module."""

from collections.abc import Callable
from typing import Any

from torch import nn


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
