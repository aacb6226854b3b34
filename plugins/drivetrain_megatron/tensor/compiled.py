"""Sets ``torch.compile`` aside in a model that ranks share.

Inside of its forward they exchange activations, through threads that a compiler cannot see into.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from drivetrain.log import get_logger
from drivetrain.parts.naming import uncompiled

logger = get_logger(__name__)


_COMPILED_CALL = "_compiled_call_impl"


class Uncompiled:
    """Lets compiled modules run as they are written, until ``undo``."""

    def __init__(self) -> None:
        self._before: list[tuple[dict[str, Any], str, Callable[..., Any]]] = []

    def set(
        self,
        model: nn.Module,
        modules: Iterable[nn.Module] | None = None,
        reason: str = "because ranks share its layers",
    ) -> None:
        """Begin; a model of which nothing is compiled stays as it is.

        Args:
            model: the user's.
            modules: of it that shall run as written; None for all.
            reason: what the user is told.
        """
        for module in model.modules() if modules is None else modules:
            inner = uncompiled(module)
            if inner is not module:  # the wrapper that torch.compile(module) returned
                self._put(module, "forward", inner)
            if module.__dict__.get(_COMPILED_CALL) is not None:  # module.compile()
                self._put(module, _COMPILED_CALL, None)
        if self._before:
            logger.announce(
                f"torch.compile: {type(uncompiled(model)).__name__} runs uncompiled, {reason}"
            )

    def undo(self) -> None:
        """End; modules are compiled again."""
        for members, name, value in self._before:
            members[name] = value
        self._before = []

    def _put(self, module: nn.Module, name: str, value: Callable[..., Any] | None) -> None:
        members = module.__dict__
        self._before.append((members, name, members[name]))
        members[name] = value
