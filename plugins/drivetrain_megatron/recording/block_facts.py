"""The facts of the tensors that one block makes for given inputs, found by a run of the block."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only

from drivetrain.log import get_logger
from drivetrain.model.valueless import SEED, filled, random_like
from drivetrain.parts.guard import Arguments, Function, Keywords
from drivetrain.runtime import rng
from drivetrain_megatron.recording.hooked import (
    HookedCall,
    SeenCall,
    calls_of,
    facts_of_calls,
    hooked_modules,
)
from drivetrain_megatron.recording.phases import Block
from drivetrain_megatron.recording.proxy import StageProxy
from drivetrain_megatron.recording.structure import TensorMeta

logger = get_logger(__name__)

ShapeAndDtype: TypeAlias = tuple[tuple[int, ...], torch.dtype]


class BlockFacts(NamedTuple):
    """The facts of one call of a block.

    Attributes:
        metas: of the tensors that it returns.
        hooked: its calls of modules with hooks.
        alike: whether each tensor that it returns has the shape of the argument that it had the
            shape of in the recording.
    """

    metas: tuple[TensorMeta, ...]
    hooked: Sequence[HookedCall]
    alike: bool


class _BlockResult(NamedTuple):
    """The result of a block, and its calls of modules with hooks."""

    result: Any
    calls: Sequence[SeenCall]


class BlockRuns:
    """Runs blocks on proxies, or with random values where they cannot run on proxies.

    Blocks of one class are taken to return the same shapes for arguments of the same shapes.

    Attributes:
        blocks: by index.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self.blocks = blocks
        self._known: dict[Any, _BlockResult] = {}

    def facts(
        self,
        block: Block,
        index: int,
        compute: Function,
        args: Arguments,
        kwargs: Keywords,
        *,
        trusted: bool,
    ) -> BlockFacts:
        """Return the facts of the tensors that a block makes.

        A trusted block does not run: the shapes of its arguments say those of its result.
        """
        leaves, _ = tree_flatten((tuple(args), dict(kwargs)))
        as_recorded = len(leaves) == block.output.arguments  # else places are of other arguments
        places = block.like if as_recorded else [None] * len(block.like)
        likes = [leaves[place] if place is not None else None for place in places]
        kept = [(tuple(like.shape), like.dtype) for like in likes if like is not None]
        calls: Sequence[SeenCall] = ()
        alike = True
        if trusted and as_recorded and not hooked_modules(self.blocks[index]):
            found = kept
        else:
            found, calls = self._computed(block, index, kept, compute, args, kwargs)
            alike = not as_recorded or all(
                isinstance(like, Tensor) and (tuple(like.shape), like.dtype) == facts
                for like, facts in zip(likes, found, strict=True)
            )
        metas = tuple(
            TensorMeta(*facts, recorded.requires_grad)
            for facts, recorded in zip(found, block.output.metas, strict=True)
        )
        return BlockFacts(metas, facts_of_calls(calls, len(metas)), alike)

    def _computed(
        self,
        block: Block,
        index: int,
        kept: Sequence[ShapeAndDtype],
        compute: Function,
        args: Arguments,
        kwargs: Keywords,
    ) -> tuple[list[ShapeAndDtype], Sequence[SeenCall]]:
        """Return the facts of the tensors that a block returns, and its calls inside."""
        try:
            result, calls = self._result(index, compute, args, kwargs)
        except Exception as error:
            if len(kept) < len(block.output.metas) or hooked_modules(self.blocks[index]):
                raise
            logger.warning_once(
                f"pipeline: the shapes that block {block.name!r} returns are not known for these "
                "inputs, and taken to be those of the arguments that they equalled when the model "
                "was recorded: without values, and with random ones, the block raised "
                f"{type(error).__name__}: {error}"
            )
            return list(kept), ()
        carried = block.output.carried(block.name, result)
        return [(tuple(tensor.shape), tensor.dtype) for tensor in carried], calls

    def _result(
        self, index: int, compute: Function, args: Arguments, kwargs: Keywords
    ) -> _BlockResult:
        """Return the result of a block, computed without values if the block can do so."""
        again = tree_map(_copied, (tuple(args), dict(kwargs)))  # a failed run may fill a cache
        block = self.blocks[index]
        modules = hooked_modules(block)
        try:
            with calls_of(modules) as seen:
                return _BlockResult(compute(*args, **kwargs), seen)
        except Exception as error:  # it may depend on values
            key = type(block), tuple(modules), shapes_key(args, kwargs)
            if key not in self._known:
                # Shapes of such a run are as right as without values: no news for the user.
                logger.debug(f"{type(block).__name__} runs with random values: {error}")
                with calls_of(modules) as seen:
                    result = _run(block, compute, *again)
                self._known[key] = tree_map_only(Tensor, StageProxy.of, _BlockResult(result, seen))
            return self._known[key]


def shapes_key(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return a key that is equal for arguments of the same shapes, dtypes and plain values."""
    leaves, tree = tree_flatten((tuple(args), dict(kwargs)))
    return str(tree), tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf)
        for leaf in leaves
    )


def _run(
    block: nn.Module, compute: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Return the result of a block with random values."""
    values, named = tree_map_only(
        StageProxy,
        lambda leaf: random_like(leaf.facts, leaf.requires_grad).clone(),  # it may be written into
        (args, kwargs),
    )
    with rng.fork(SEED), filled(block), torch.enable_grad():
        block.eval()  # nothing is dropped
        return compute(*values, **named)


def _copied(leaf: Any) -> Any:
    """Return a copy of an argument, unless it is a tensor or cannot be copied."""
    if isinstance(leaf, Tensor):
        return leaf
    try:
        return copy.deepcopy(leaf)
    except Exception:  # a lock, say: only the second call of a block that fails would need a copy
        return leaf
