"""Stands before the blocks of a model: during a pass, a conductor decides about their calls."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import nn

from drivetrain.parts.blocks import NamedModule
from drivetrain.parts.wrapping import unwrap_forward, wrap_forward

_ORIGINAL = "_forward_before_hooks"


class BlockConductor(Protocol):
    """Decides about the calls of blocks during one pass."""

    def call(
        self,
        index: int,
        compute: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Return the block's result; ``compute`` is the block's own forward."""


class BlockHooks:
    """Takes the place of the blocks' ``forward``, in their own ``__dict__``.

    Outside of a pass, as when activations are computed again in backward, a block is what it was.

    Args:
        blocks: (name, module), changed in place; ``close`` undoes it.
    """

    def __init__(self, blocks: Sequence[NamedModule]) -> None:
        self._conductor: BlockConductor | None = None
        self._blocks = [block for _, block in blocks]
        for index, block in enumerate(self._blocks):
            self._stand_before(index, block)

    @contextmanager
    def conducted(self, conductor: BlockConductor) -> Iterator[None]:
        """Context of a pass in which a conductor decides; the one of an outer pass waits."""
        outer, self._conductor = self._conductor, conductor
        try:
            yield
        finally:
            self._conductor = outer

    def close(self) -> None:
        """Give the blocks their forward back."""
        for block in self._blocks:
            unwrap_forward(block, _ORIGINAL)
        self._blocks.clear()

    def _stand_before(self, index: int, block: nn.Module) -> None:
        def around(
            module: nn.Module,
            compute: Callable[..., Any],
            args: Sequence[Any],
            kwargs: Mapping[str, Any],
        ) -> Any:
            if self._conductor is None or module is not block:  # a copy computes as it is
                return compute(*args, **kwargs)
            return self._conductor.call(index, compute, args, kwargs)

        wrap_forward(block, _ORIGINAL, around)
