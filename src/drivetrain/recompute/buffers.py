"""Buffers that a forward changes, such as BatchNorm's statistics, are not changed a second time."""

from contextlib import AbstractContextManager
from types import TracebackType

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


class Unchanged:
    """Remembers whose buffers a forward changed, and undoes what recomputation does to them.

    Buffers that stay as they are are neither copied nor written to: they may be large, as masks, or
    wait in a graph that checks whether they were written to.

    Args:
        block: the recomputed module.
    """

    def __init__(self, block: nn.Module) -> None:
        self.noting: AbstractContextManager[None] = _Noting(self)
        self.undoing: AbstractContextManager[None] = _Undoing(self)
        self.block = block
        self.changed: list[nn.Module] = []


class _Noting(AbstractContextManager[None]):
    """Surrounds the forward."""

    def __init__(self, owner: Unchanged) -> None:
        self._owner = owner
        self._versions: list[tuple[nn.Module, list[int]]] = []

    def __enter__(self) -> None:
        self._versions = [
            (module, _versions(module)) for module in self._owner.block.modules() if module._buffers
        ]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # The norms' kernels write their statistics without counting it as a write.
        self._owner.changed = [
            module
            for module, versions in self._versions
            if isinstance(module, _NormBase) or _versions(module) != versions
        ]


class _Undoing(AbstractContextManager[None]):
    """Surrounds the recomputation."""

    def __init__(self, owner: Unchanged) -> None:
        self._owner = owner
        self._before: list[tuple[Tensor, Tensor]] = []

    def __enter__(self) -> None:
        self._before = [
            (buffer, buffer.detach().clone())
            for module in self._owner.changed
            for buffer in module.buffers(recurse=False)
        ]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with torch.no_grad():
            for buffer, values in self._before:
                buffer.copy_(values)
        self._before = []


def _versions(module: nn.Module) -> list[int]:
    return [buffer._version for buffer in module.buffers(recurse=False)]
