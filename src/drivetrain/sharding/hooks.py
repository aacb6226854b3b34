"""Module hooks that copies and pickles of the model do not inherit: these are ordinary models."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch._compile import _disable_dynamo


def is_compiled(model: nn.Module) -> bool:
    """Return whether a model is the result of ``torch.compile``."""
    return isinstance(getattr(model, "_orig_mod", None), nn.Module)


class UnitHook:
    """A forward hook or pre-hook of any signature; a copy does nothing.

    Args:
        action: what to call with the hook's arguments; None for nothing.
    """

    def __init__(self, action: Callable[..., None] | None) -> None:
        self._action = action

    @_disable_dynamo  # in a block that compiles its own hooks too: a gap in the graph
    def __call__(self, *arguments: Any) -> None:
        """Act."""
        if self._action is not None:
            self._action(*arguments)

    def __reduce__(self) -> tuple[type["UnitHook"], tuple[None]]:
        return UnitHook, (None,)


class ZeroGrad:
    """Stands in for a model's ``zero_grad``: clears the fragments' gradients too.

    It lies in the module's ``__dict__``; copies and pickles of the model clear their own gradients.

    Args:
        module: the model.
        clear: clears what the strategy keeps; None for nothing.
    """

    def __init__(self, module: nn.Module, clear: Callable[[bool], None] | None) -> None:
        self._module = module
        self._clear = clear

    def __call__(self, set_to_none: bool = True) -> None:
        """Clear all gradients of the model."""
        type(self._module).zero_grad(self._module, set_to_none)
        if self._clear is not None:
            self._clear(set_to_none)

    def __reduce__(self) -> tuple[type["ZeroGrad"], tuple[nn.Module, None]]:
        return ZeroGrad, (self._module, None)
