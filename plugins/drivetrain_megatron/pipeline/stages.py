"""Turns a module into the pipeline stages of one rank, in place, and runs them.

Every stage runs the user's own top-level forward. Blocks of other stages give proxies; the block
just before a stage's first gives the received tensors; the output of the stage's last block is
sent, and proxies go on. Masks and other values without parameters are computed on every stage from
the inputs.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from drivetrain.errors import UsageError
from drivetrain.model.look import named_leaves
from drivetrain.model.substitution import keep_padding
from drivetrain.parts.blocks import BlockHooks
from drivetrain_megatron.pipeline.cut import StageCut
from drivetrain_megatron.pipeline.other_stages import (
    ProxyPlace,
    Tie,
    foreign_places,
    hidden,
    is_local,
    place_of,
    take_away,
    take_hooks,
    ties,
)
from drivetrain_megatron.recording.phases import Recording, block_order
from drivetrain_megatron.recording.proxy import StageProxy
from drivetrain_megatron.recording.shapes import Metas, Shapes
from drivetrain_megatron.recording.structure import PLAIN, TensorMeta, changed


@dataclass(frozen=True, slots=True)
class StageOutput:
    """The results of one stage for one micro-batch.

    Attributes:
        sent: tensors for the next stage, with their history; empty on the last stage.
        output: of the model's forward: real on the last stage, proxies before it.
    """

    sent: tuple[Tensor, ...]
    output: Any


@dataclass(frozen=True, slots=True)
class _Parts:
    """The parts that the stages of a rank share."""

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


class Stage:
    """One stage of the pipeline; made by ``split``.

    Args:
        parts: shared by the stages of this rank.
        index: of the stage among all stages.
        tied: the parameters that this stage shares with others.
        places: parameters of other stages of this rank, which this stage must not see.
        outer: its own parameters outside of blocks.
    """

    def __init__(
        self,
        parts: _Parts,
        index: int,
        tied: tuple[Tie, ...],
        places: Sequence[ProxyPlace],
        outer: Mapping[str, Sequence[ProxyPlace]],
    ) -> None:
        self._parts = parts
        self._places = places
        self._outer = outer
        self.index = index
        self.blocks = parts.cut.blocks(index)
        self.is_first = index == 0
        self.is_last = index == parts.cut.stages - 1
        self.ties = tied

    @property
    def copies(self) -> tuple[str, ...]:
        """Names of the parameters here that an earlier stage owns."""
        return tuple(tie.name for tie in self.ties if tie.owner != self.index)

    def receives(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[TensorMeta, ...]:
        """Return the facts of the tensors that ``run`` needs for these inputs, in order."""
        if self.is_first:
            return ()
        return self._parts.shapes.of(args, kwargs)[self.blocks.start - 1]

    def sends(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[TensorMeta, ...]:
        """Return the facts of the tensors for the next stage, for these inputs, in order."""
        return () if self.is_last else self._parts.shapes.of(args, kwargs)[self.blocks.stop - 1]

    def ends(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[TensorMeta, ...]:
        """Return the facts of the last block's output for these inputs, in order."""
        return self._parts.shapes.of(args, kwargs)[-1]

    def run(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], received: Sequence[Tensor] = ()
    ) -> StageOutput:
        """Run the model's forward with the blocks of this stage alone.

        Inputs are the same on every stage; ``receives`` describes the received tensors.

        Raises:
            UsageError: the blocks are called in another way than when the model was recorded, or
                one of this stage needs a tensor of another stage.
        """
        metas = self._parts.shapes.of(args, kwargs)
        self._check(received, metas)
        return self._pass(self.blocks, metas, args, kwargs, received)

    def run_ambient(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the model's forward without any block, for the parts that every stage computes."""
        metas = self._parts.shapes.of(args, kwargs)
        return self._pass(range(0), metas, args, kwargs, ()).output

    def _pass(
        self,
        blocks: range,
        metas: Metas,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        received: Sequence[Tensor],
    ) -> StageOutput:
        parts = self._parts
        conductor = _Pass(parts, blocks, metas, received, tree_flatten((args, kwargs))[0])
        with ExitStack() as stack, conductor.before:
            stack.enter_context(hidden(self._places))
            conductor.before.enter_context(hidden(self._not_before(blocks)))
            stack.enter_context(parts.gates.conducted(conductor))
            output = parts.forward(*args, **kwargs)
        conductor.finish()
        return StageOutput(conductor.sent, output)

    def _not_before(self, blocks: range) -> list[ProxyPlace]:
        """Return the parameters that stay out of sight until the pass reaches these blocks.

        A word embedding that is also the head on the last stage would be looked up there for
        nothing, and the result summed over tensor-parallel ranks.
        """
        names = self.copies if blocks else self._outer
        return [place for name in names for place in self._outer.get(name, ())]

    def _check(self, received: Sequence[Tensor], metas: Metas) -> None:
        expected = [] if self.is_first else [m[:2] for m in metas[self.blocks.start - 1]]
        found = [(tuple(tensor.shape), tensor.dtype) for tensor in received]
        if found != expected:
            raise UsageError(
                f"expected stage {self.index} to receive {expected} for these inputs, found "
                f"{found}: all stages must be given the same micro-batch"
            )


class Split:
    """The stages that one rank holds of a model; made by ``split``.

    Attributes:
        stages: in the order of their indices.
        ties: the parameters that several stages use, of all stages.
    """

    def __init__(self, parts: _Parts, stages: tuple[Stage, ...], tied: tuple[Tie, ...]) -> None:
        self._parts = parts
        self.stages = stages
        self.ties = tied

    def close(self) -> None:
        """Take the hooks off the blocks; parameters of other stages stay proxies."""
        self._parts.gates.close()


def split(
    model: nn.Module,
    recording: Recording,
    cut: StageCut,
    owned: Sequence[int],
    device: torch.device | None = None,
) -> Split:
    """Reduce a model, in place, to the stages of one rank.

    Parameters of other stages leave their modules, so that ``parameters()`` and ``state_dict()``
    show the local ones under unchanged names, and their memory is free. A parameter that several
    stages use stays on each.

    Args:
        model: the module that was recorded.
        recording: of it.
        cut: into stages, the same on every rank.
        owned: indices of this rank's stages.
        device: where the model computes; None for that of its parameters.

    Raises:
        UsageError: a stage does not exist.
    """
    wrong = [stage for stage in owned if not 0 <= stage < cut.stages]
    if wrong or not owned:
        raise UsageError(f"expected stages below {cut.stages}, found {list(owned)}")
    device = device or _device(model)
    blocks = block_order(recording, model)
    phases = {phase for stage in owned for phase in cut.phases(stage)}
    keep_padding(model)
    take_away(foreign_places(model, recording, phases, device))
    for index, (_, block) in enumerate(blocks):
        if index not in phases:
            take_hooks(block)
    gates = BlockHooks(blocks)
    shapes = Shapes(recording, model, gates, device)
    modules = tuple(block for _, block in blocks)
    parts = _Parts(model, modules, model.forward, recording, cut, gates, shapes, device)
    tied = ties(recording, cut)
    stages = []
    for index in sorted(owned):
        mine = tuple(tie for tie in tied if index in (tie.owner, *tie.copies))
        others = _of_other_stages(parts, index, len(owned))
        stages.append(Stage(parts, index, mine, others, _outer_of(parts, index)))
    return Split(parts, tuple(stages), tied)


def _of_other_stages(parts: _Parts, stage: int, stages: int) -> list[ProxyPlace]:
    """Return the places outside of blocks that only other stages of this rank use."""
    if stages == 1:
        return []
    places = foreign_places(parts.model, parts.recording, parts.cut.phases(stage), parts.device)
    inside = parts.inside
    return [
        place
        for place in places
        if id(place.module) not in inside and place.name not in place.module.__dict__
    ]


def _outer_of(parts: _Parts, stage: int) -> dict[str, list[ProxyPlace]]:
    """Return where the parameters of a stage stand outside of blocks, by their first names."""
    phases, inside = parts.cut.phases(stage), parts.inside
    found = {
        first: [place_of(parts.model, name, parts.device) for name in use.names]
        for first, use in parts.recording.parameters.items()
        if is_local(use, phases)
    }
    return {
        first: [place for place in places if id(place.module) not in inside]
        for first, places in found.items()
    }


def _device(model: nn.Module) -> torch.device:
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


class _Pass:
    """Decides which blocks compute in one forward of a stage.

    The metas are those of each block's tensors; the block before the first own block returned the
    received tensors.

    Attributes:
        before: contexts that end where the phases of the own blocks begin.
        sent: the tensors for the next stage.
    """

    def __init__(
        self,
        parts: _Parts,
        own: range,
        metas: Metas,
        received: Sequence[Tensor],
        inputs: Sequence[Any],
    ) -> None:
        self._parts, self._own, self._metas, self._received = parts, own, metas, received
        self._grad = torch.is_grad_enabled()
        self._objects = {id(leaf) for leaf in inputs if not isinstance(leaf, (Tensor, *PLAIN))}
        self._next = 0
        self.before = ExitStack()
        self.sent: tuple[Tensor, ...] = ()

    def call(
        self,
        index: int,
        compute: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Compute an own block; return the received tensors, or proxies, for another."""
        block = self._parts.recording.blocks[index]
        if index != self._next:
            expected = self._name(self._next)
            raise changed(expected, f"a call of {block.name!r} in its place", "one call in order")
        self._next += 1
        if index not in self._own:
            leaves = tree_flatten((tuple(args), dict(kwargs)))[0]
            before = bool(self._own) and index == self._own.start - 1
            if before:
                self.before.close()
            tensors = self._received if before else self._proxies(index)
            return block.output.build(block.name, tensors, leaves)
        self._check_arguments(block.name, args, kwargs)
        result = compute(*args, **kwargs)
        if index < self._own.stop - 1 or index == len(self._metas) - 1:
            return result
        self.sent = self._checked(index, block.output.carried(block.name, result))
        leaves = tree_flatten((tuple(args), dict(kwargs)))[0]
        return block.output.build(block.name, self._proxies(index), leaves)

    def finish(self) -> None:
        """Check that all blocks were called.

        Raises:
            UsageError: some were not.
        """
        if self._next < len(self._metas):
            raise changed(self._name(self._next), "no call of it", "one call")

    def _name(self, index: int) -> str:
        blocks = self._parts.recording.blocks
        return blocks[index].name if index < len(blocks) else "after the last"

    def _proxies(self, index: int) -> list[StageProxy]:
        return [
            StageProxy.like(shape, dtype, self._parts.device, requires_grad and self._grad)
            for shape, dtype, requires_grad in self._metas[index]
        ]

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
