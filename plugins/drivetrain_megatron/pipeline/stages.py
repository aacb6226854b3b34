"""Turns a module into the pipeline stages of one rank, in place, and runs them.

Every stage runs the user's own top-level forward. Blocks of other stages give proxies. Tensors that
a stage receives take the place of the proxies where they were made, in a block or in the code
around blocks. The tensors that cross the stage's end are sent, and proxies go on. Masks and other
values without parameters are computed on every stage from the inputs.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from drivetrain.errors import UsageError
from drivetrain.model.untouched import keep_padding
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
from drivetrain_megatron.pipeline.stage_pass import ModelParts, PassOptions, StagePass
from drivetrain_megatron.recording.phases import Recording, TensorMeta, block_order
from drivetrain_megatron.recording.proxy import StageProxy
from drivetrain_megatron.recording.shapes import Metas, Shapes

Watch: TypeAlias = Callable[[StagePass], AbstractContextManager[object]]
"""Makes a context around a pass."""


@dataclass(frozen=True, slots=True)
class StageOutput:
    """The results of one stage for one micro-batch.

    Attributes:
        sent: tensors for the next stage, with their history; empty on the last stage.
        output: of the model's forward: real on the last stage, proxies before it.
        made: the tensors that cross the bounds that were asked for, by index of the block before.
    """

    sent: tuple[Tensor, ...]
    output: Any
    made: Mapping[int, tuple[Tensor, ...]]


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
        parts: ModelParts,
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

    @property
    def last_blocks(self) -> range:
        """The blocks whose tensors the last stage has: its own, and the one before."""
        blocks = self._parts.cut.blocks(self._parts.cut.stages - 1)
        return range(blocks.start - 1, blocks.stop)

    def receives(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[TensorMeta, ...]:
        """Return the facts of the tensors that ``run`` needs for these inputs, in order."""
        if self.is_first:
            return ()
        return self.metas(args, kwargs)[self.blocks.start - 1]

    def sends(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[TensorMeta, ...]:
        """Return the facts of the tensors for the next stage, for these inputs, in order."""
        return () if self.is_last else self.metas(args, kwargs)[self.blocks.stop - 1]

    def ends(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[TensorMeta, ...]:
        """Return the facts of the last block's output for these inputs, in order."""
        return self._parts.shapes.of(args, kwargs).outputs[-1]

    def metas(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Metas:
        """Return the facts of the tensors that cross the bound after each block, in order."""
        crossings = self._parts.shapes.of(args, kwargs).crossings
        return tuple(crossing.metas for crossing in crossings)

    def left(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Metas:
        """Return the facts of the tensors that the rest of a forward may need of each block.

        The first of them cross the bound after it.
        """
        shapes = self._parts.shapes.of(args, kwargs)
        return tuple(tuple(shapes.left(block)[1]) for block in range(len(shapes.outputs)))

    def given(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Metas:
        """Return the facts of the tensors that this stage has of each block.

        Of blocks of other stages it has at most those that cross the bound after them.
        """
        crossing, left = self.metas(args, kwargs), self.left(args, kwargs)
        return tuple(left[b] if b in self.blocks else crossing[b] for b in range(len(left)))

    def run(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        received: Sequence[Tensor] = (),
        kept: Collection[int] | None = None,
    ) -> StageOutput:
        """Run the model's forward with the blocks of this stage alone.

        Inputs are the same on every stage; ``receives`` describes the received tensors.

        Args:
            args: positional inputs of the model.
            kwargs: inputs by name.
            received: the tensors that cross the bound before this stage.
            kept: blocks with bounds after them whose tensors are handed out. Then on the last
                stage, too, the forward goes on with proxies after the last block, as ``finish``
                computes the rest.

        Raises:
            UsageError: the blocks are called in another way than when the model was recorded, or
                one of this stage needs a tensor of another stage.
        """
        self._check(received, self.metas(args, kwargs))
        stops = kept is not None or not self.is_last
        given = {} if self.is_first else {self.blocks.start - 1: received}
        options = PassOptions(self.blocks, given, stops=stops, kept=kept or ())
        return self._pass(options, args, kwargs)

    def finish(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        given: Mapping[int, Sequence[Tensor]],
        watch: Watch | None = None,
    ) -> Any:
        """Run the model's forward around blocks with given tensors; return its output.

        No block computes: it returns proxies, but for tensors that are given. These cross the bound
        after a block. A context, made for the pass, may watch it.
        """
        options = PassOptions(self.blocks, given, computes=False)
        return self._pass(options, args, kwargs, watch).output

    def run_ambient(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the model's forward without any block, for the parts that every stage computes."""
        return self._pass(PassOptions(range(0), {}), args, kwargs).output

    def outer_places(self) -> Mapping[str, Sequence[ProxyPlace]]:
        """Return where this stage's parameters outside of blocks stand, by their first names."""
        return self._outer

    def _pass(
        self,
        options: PassOptions,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        watch: Watch | None = None,
    ) -> StageOutput:
        parts = self._parts
        leaves = tree_flatten((args, kwargs))[0]
        unseen = self._not_before(options.own)
        conductor = StagePass(parts, options, parts.shapes.of(args, kwargs), leaves, unseen)
        with ExitStack() as stack, conductor.before:
            stack.enter_context(hidden(self._places))
            conductor.before.enter_context(hidden(unseen))
            stack.enter_context(parts.gates.conducted(conductor))
            if watch is not None:
                stack.enter_context(watch(conductor))
            stack.enter_context(conductor.watching())
            output = parts.forward(*args, **kwargs)
        conductor.finish()
        if self.is_last:
            return StageOutput((), output, conductor.made)
        output = _as_on_last(output, conductor.collected)
        return StageOutput(conductor.sent, output, conductor.made)

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
        model: the module that was cut.
        inside: identities of the modules inside of blocks.
        stages: in the order of their indices.
        ties: the parameters that several stages use, of all stages.
    """

    def __init__(self, parts: ModelParts, stages: tuple[Stage, ...], tied: tuple[Tie, ...]) -> None:
        self._parts = parts
        self.model, self.inside = parts.model, parts.inside
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
    here = {block.name for index, block in enumerate(recording.blocks) if index in phases}
    keep_padding(model)
    take_away(foreign_places(model, recording, phases, device))
    for name, block in blocks:
        if name not in here:
            take_hooks(block)
    gates = BlockHooks(blocks)
    shapes = Shapes(recording, model, gates, device)
    modules = tuple(block for _, block in blocks)
    parts = ModelParts(model, modules, model.forward, recording, cut, gates, shapes, device)
    tied = ties(recording, cut)
    stages = []
    for index in sorted(owned):
        mine = tuple(tie for tie in tied if index in (tie.owner, *tie.copies))
        others = _of_other_stages(parts, index, len(owned))
        stages.append(Stage(parts, index, mine, others, _outer_of(parts, index)))
    return Split(parts, tuple(stages), tied)


def _as_on_last(output: Any, collected: Sequence[Tensor]) -> Any:
    """Return an early stage's output with proxies for the tensors that hooks have collected.

    Whatever they collect for the output goes on to the last stage, where a loss is made of it.
    """
    collected_ids = {id(tensor) for tensor in collected}
    return tree_map_only(
        Tensor, lambda x: StageProxy.of(x) if id(x) in collected_ids else x, output
    )


def _of_other_stages(parts: ModelParts, stage: int, stages: int) -> list[ProxyPlace]:
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


def _outer_of(parts: ModelParts, stage: int) -> dict[str, list[ProxyPlace]]:
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
    first = next(iter(model.parameters()), None)
    return torch.device("cpu") if first is None else first.device
