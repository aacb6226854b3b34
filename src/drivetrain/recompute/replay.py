"""One call of a block whose intermediate values are dropped and computed again in backward."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from drivetrain.recompute.inputs import Inputs


class Contexts(NamedTuple):
    """What surrounds a block's forward, and what surrounds its recomputation."""

    first: Sequence[AbstractContextManager[Any]]
    again: Sequence[AbstractContextManager[Any]]


class Together:
    """Several contexts as one that can be entered again: retained graphs recompute twice."""

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
    inputs: Inputs,
    contexts: Callable[[], Contexts] | None = None,
) -> Any:
    """Return what ``compute`` returns; only its inputs stay in memory until backward.

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
