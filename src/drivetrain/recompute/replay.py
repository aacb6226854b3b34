"""One call of a block whose intermediate values are dropped and computed again in backward."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from drivetrain.recompute.inputs import KeptInputs


class Contexts(NamedTuple):
    """The contexts around a block's forward, and those around its recomputation."""

    first: Sequence[AbstractContextManager[Any]]
    again: Sequence[AbstractContextManager[Any]]


class Together:
    """Several contexts as a single reusable context: retained graphs recompute twice."""

    def __init__(self, contexts: Sequence[AbstractContextManager[Any]]) -> None:
        self._contexts = contexts
        self._stack = ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for context in self._contexts:
                stack.enter_context(context)
            self._stack = stack.pop_all()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)


def replay(
    compute: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    inputs: KeptInputs,
    contexts: Callable[[], Contexts] | None = None,
) -> Any:
    """Return the outputs of ``compute``; only its inputs stay in memory until backward.

    Recomputation sees the random numbers, the autocast state and the inputs of the first time.
    Tensors count as inputs in any nesting of tuples, lists and dicts; what stands in other objects
    is simply held.

    Args:
        compute: the block's forward.
        args: its positional arguments.
        kwargs: its keyword arguments.
        inputs: where input tensors wait.
        contexts: makes the contexts of this call.
    """
    leaves, structure = tree_flatten((args, dict(kwargs)))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tensors = [leaves[i] for i in places]
    for i in places:
        leaves[i] = None  # held by autograd alone, as its hooks say

    def run(*values: Tensor) -> Any:
        filled = list(leaves)
        for i, value in zip(places, values, strict=True):
            filled[i] = value
        again_args, again_kwargs = tree_unflatten(filled, structure)
        return compute(*again_args, **again_kwargs)

    options: dict[str, Any] = {}
    if contexts is not None:
        options["context_fn"] = lambda: tuple(Together(each) for each in contexts())
    with inputs.hooks():
        return checkpoint(run, *tensors, use_reentrant=False, **options)


class Unchanged:
    """Remembers which buffers a forward changed, and undoes their change by a recomputation.

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
