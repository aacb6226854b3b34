"""Stands before every block of a model and asks, while a pass runs, what a call of it does."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, Protocol

from torch import nn

from drivetrain.parts.blocks import NamedModule


class Conductor(Protocol):
    """Decides what the call of a block does during one pass."""

    def call(
        self,
        index: int,
        compute: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Return what the block returns; ``compute`` is the block's own forward."""


class Gates:
    """Takes the place of the blocks' ``forward``, in their own ``__dict__``.

    Outside of a pass, as when activations are computed again in backward, a block is what it was.

    Args:
        blocks: (name, module), changed in place; ``close`` undoes it.
    """

    def __init__(self, blocks: Sequence[NamedModule]) -> None:
        self._conductor: Conductor | None = None
        self._originals: list[tuple[nn.Module, Any]] = []
        for index, (_, block) in enumerate(blocks):
            self._originals.append((block, block.__dict__.get("forward")))
            self._stand_before(index, block)

    @contextmanager
    def conducted(self, conductor: Conductor) -> Iterator[None]:
        """Run a pass in which a conductor decides; the one of an outer pass waits."""
        outer, self._conductor = self._conductor, conductor
        try:
            yield
        finally:
            self._conductor = outer

    def close(self) -> None:
        """Give the blocks their forward back."""
        for block, original in self._originals:
            block.__dict__.pop("forward", None)
            if original is not None:
                block.__dict__["forward"] = original
        self._originals.clear()

    def _stand_before(self, index: int, block: nn.Module) -> None:
        compute = block.forward

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._conductor is None:
                return compute(*args, **kwargs)
            return self._conductor.call(index, compute, args, kwargs)

        functools.update_wrapper(forward, compute)
        block.__dict__["forward"] = MethodType(forward, block)
