"""One pass of a stage through the model's own forward: some blocks compute, others give proxies."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from drivetrain.errors import UsageError
from drivetrain.model.look import named_leaves
from drivetrain.parts.blocks import BlockHooks
from drivetrain_megatron.pipeline.cut import StageCut
from drivetrain_megatron.pipeline.other_stages import ProxyPlace
from drivetrain_megatron.recording.phases import Recording
from drivetrain_megatron.recording.proxy import StageProxy
from drivetrain_megatron.recording.shapes import Metas, Shapes
from drivetrain_megatron.recording.structure import PLAIN, changed


@dataclass(frozen=True, slots=True)
class ModelParts:
    """The parts of a model that the stages of a rank share."""

    model: nn.Module
    blocks: tuple[nn.Module, ...]
    forward: Callable[..., Any]
    recording: Recording
    cut: StageCut
    gates: BlockHooks
    shapes: Shapes
    device: torch.device

    @property
    def inside(self) -> set[int]:
        """Identities of the modules inside of blocks."""
        return {id(module) for block in self.blocks for module in block.modules()}


@dataclass(frozen=True, slots=True)
class PassOptions:
    """The blocks that compute in a pass, and the use of their results.

    Attributes:
        own: the blocks of the stage.
        given: tensors that blocks return instead of computing, by index of the block.
        computes: whether own blocks compute; other blocks, and own ones that do not, give proxies.
        stops: whether proxies follow the last own block, whose tensors are for the next stage.
        kept: indices of own blocks whose tensors are handed out.
    """

    own: range
    given: Mapping[int, Sequence[Tensor]]
    computes: bool = True
    stops: bool = True
    kept: Collection[int] = ()


class StagePass:
    """Decides which blocks compute in one forward of a stage.

    The metas are those of each block's tensors. Parameters that the own blocks share with earlier
    stages are out of sight until the pass reaches these blocks.

    Attributes:
        before: contexts that end where the phases of the own blocks begin.
        sent: the tensors for the next stage.
        made: the tensors of own blocks that are handed out, by index of the block.
    """

    def __init__(
        self,
        parts: ModelParts,
        options: PassOptions,
        metas: Metas,
        inputs: Sequence[Any],
        unseen: Sequence[ProxyPlace] = (),
    ) -> None:
        self._parts, self._options, self._metas = parts, options, metas
        self._unseen = {id(place.proxy): place for place in unseen}
        self._grad = torch.is_grad_enabled()
        self._objects = {id(leaf) for leaf in inputs if not isinstance(leaf, (Tensor, *PLAIN))}
        self._next = 0
        self.before = ExitStack()
        self.sent: tuple[Tensor, ...] = ()
        self.made: dict[int, tuple[Tensor, ...]] = {}

    @property
    def is_after_blocks(self) -> bool:
        """Whether all blocks were called."""
        return self._next == len(self._metas)

    def call(
        self,
        index: int,
        compute: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Compute an own block; return given tensors, or proxies, for another."""
        block = self._parts.recording.blocks[index]
        if index != self._next:
            expected = self._name(self._next)
            raise changed(expected, f"a call of {block.name!r} in its place", "one call in order")
        self._next += 1
        options = self._options
        if not options.computes or index not in options.own:
            if options.own and index == options.own.start - 1:
                self.before.close()
            tensors = options.given.get(index)
            leaves = tree_flatten((tuple(args), dict(kwargs)))[0]
            found = self._proxies(index) if tensors is None else tensors
            return block.output.build(block.name, found, leaves)
        if self._unseen:
            args, kwargs = tree_map(self._in_sight, (tuple(args), dict(kwargs)))
        self._check_arguments(block.name, args, kwargs)
        result = compute(*args, **kwargs)
        is_last = options.stops and index == options.own.stop - 1
        if is_last or index in options.kept:
            tensors = self._checked(index, block.output.carried(block.name, result))
            self.made[index] = tensors
        if not is_last:
            return result
        self.sent = self.made[index]
        leaves = tree_flatten((tuple(args), dict(kwargs)))[0]
        return block.output.build(block.name, self._proxies(index), leaves)

    def finish(self) -> None:
        """Check that all blocks were called.

        Raises:
            UsageError: some were not.
        """
        if not self.is_after_blocks:
            raise changed(self._name(self._next), "no call of it", "one call")

    def _in_sight(self, leaf: Any) -> Any:
        """Return the parameter itself for its proxy, which code before the own blocks has met."""
        place = self._unseen.get(id(leaf))
        return leaf if place is None else getattr(place.module, place.name)

    def _name(self, index: int) -> str:
        blocks = self._parts.recording.blocks
        return blocks[index].name if index < len(blocks) else "after the last"

    def _proxies(self, index: int) -> list[StageProxy]:
        found = [
            StageProxy.like(shape, dtype, self._parts.device, requires_grad and self._grad)
            for shape, dtype, requires_grad in self._metas[index]
        ]
        for proxy in found:
            proxy.blocks = frozenset({index})
        return found

    def _checked(self, index: int, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the tensors to send, after a check that the next stage expects them."""
        name = self._name(index)
        if self._grad and not torch.is_grad_enabled():
            raise UsageError(
                f"expected the output of block {name!r} with its history, found it computed "
                "without gradients inside of a reentrant checkpoint: use checkpoint(..., "
                "use_reentrant=False), or the configuration's recompute"
            )
        found = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        expected = [meta[:2] for meta in self._metas[index]]
        if found != expected:
            raise changed(name, f"a result of {found}", f"{expected} for these inputs")
        return tensors

    def _check_arguments(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        for argument, leaf in named_leaves(args, kwargs):
            if isinstance(leaf, StageProxy):
                raise UsageError(
                    f"expected argument {argument!r} of block {name!r} to come from the block "
                    "before it or from the inputs, found a tensor of another pipeline stage (a "
                    "skip connection): let every block return it with its output, or choose "
                    "stages that keep both ends together"
                )
            if id(leaf) in self._objects:
                raise UsageError(
                    f"expected blocks that get tensors, found the caller's {type(leaf).__name__} "
                    f"as argument {argument!r} of block {name!r}: blocks of other stages cannot "
                    "fill it. Call the model without it (use_cache=False for a cache)"
                )
