"""The shapes that blocks return for given inputs, known before anything is computed or received."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves

from drivetrain.model.look import tensors_in
from drivetrain.model.untouched import without_values
from drivetrain.model.valueless import ValuelessTensor
from drivetrain.parts.blocks import BlockHooks
from drivetrain.parts.guard import Arguments, Function, Keywords, targets
from drivetrain_megatron.recording.around_blocks import AroundBlocks
from drivetrain_megatron.recording.block_facts import BlockFacts, BlockRuns, shapes_key
from drivetrain_megatron.recording.crossing import (
    CallPlace,
    Crossing,
    Origin,
    Step,
    crossings,
    writes_in_place,
)
from drivetrain_megatron.recording.hooked import HookedCall, tell_hooks
from drivetrain_megatron.recording.phases import Recording
from drivetrain_megatron.recording.proxy import StageProxy
from drivetrain_megatron.recording.structure import TensorMeta, changed

Metas: TypeAlias = tuple[tuple[TensorMeta, ...], ...]


class CallShapes(NamedTuple):
    """The facts of tensors in one forward, for each block in the order of calls.

    Attributes:
        outputs: of the tensors that the block returns.
        crossings: the tensors for a stage that begins after the block.
        hooked: the calls inside of the block whose results hooks collect for the code after it.
    """

    outputs: Metas
    crossings: tuple[Crossing, ...]
    hooked: tuple[tuple[HookedCall, ...], ...]

    def made(self, block: int) -> Mapping[int, TensorMeta]:
        """Return the facts of the tensors that a block leaves, by their places.

        First those that it returns, then those that hooks collect for the code after it.
        """
        inside = {
            leaf: meta
            for call in self.hooked[block]
            for leaf, meta in zip(call.leaves, call.metas, strict=True)
        }
        return {**dict(enumerate(self.outputs[block])), **inside}

    def left(self, block: int) -> tuple[list[Origin], list[TensorMeta]]:
        """Return the tensors that the rest of a forward may need of a block, and their facts.

        First those that cross the bound after it, then what it returned and code around blocks put
        into the model's output alone.
        """
        crossing = self.crossings[block]
        origins, metas = list(crossing.origins), list(crossing.metas)
        for leaf, meta in enumerate(self.outputs[block]):
            origin = Origin(CallPlace(block + 1), leaf)
            if origin not in crossing.origins:
                origins.append(origin)
                metas.append(meta)
        return origins, metas


_KEPT = 512
"""Combinations of input shapes that are remembered."""

_TRUSTED = 2
"""Combinations after which blocks that kept their input's shape are taken to always do."""


class Shapes:
    """Answers with the facts of all tensors that blocks make, for given inputs of the model.

    A new combination of shapes costs a forward on proxies. Once every block has returned its
    input's shape for two combinations, that forward leaves the blocks out. The model may be whole
    or split; its blocks have the gates, in the order of the recording.
    """

    def __init__(
        self, recording: Recording, model: nn.Module, gates: BlockHooks, device: torch.device
    ) -> None:
        self._recording, self._model, self._gates = recording, model, gates
        self._device = device
        self._forward = model.forward
        self._known: dict[Any, CallShapes] = {}
        self._alike: dict[Any, int] = {}
        self._runs = BlockRuns(gates.blocks)

    def of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallShapes:
        """Return the facts of the tensors of each block.

        Raises:
            UsageError: a block returns another structure than when it was recorded.
        """
        mode = self._mode()
        key = (mode, shapes_key(args, kwargs))
        if key not in self._known:
            if len(self._known) >= _KEPT:
                self._known.pop(next(iter(self._known)))
            self._known[key] = self._run(mode, args, kwargs)
        return self._known[key]

    def _mode(self) -> Any:
        """Return the state on which dtypes depend besides the inputs."""
        casts = tuple(
            torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
            for kind in sorted({"cpu", self._device.type})
        )
        return casts, self._model.training

    def _run(self, mode: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallShapes:
        trusted = self._alike.get(mode, 0) >= _TRUSTED
        shaper = _Shaper(self._recording, trusted, self._device, self._runs)
        try:
            crossed = self._around_blocks(shaper, args, kwargs)
        except _HooksSeen:
            again = _Shaper(self._recording, trusted, self._device, self._runs, shaper.facts)
            crossed = self._around_blocks(again, args, kwargs)
        if not trusted:
            alike = all(facts.alike for facts in shaper.facts)
            self._alike[mode] = self._alike.get(mode, 0) + 1 if alike else -(1 << 30)
        outputs = tuple(facts.metas for facts in shaper.facts)
        return CallShapes(outputs, crossed, _collected(shaper.facts, crossed))

    def _around_blocks(
        self, shaper: "_Shaper", args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Crossing, ...]:
        """Run the code around blocks without values; return the tensors that cross the bounds."""
        with (
            without_values(self._model, StageProxy),
            _copies_hidden(self._model, self._device),
            self._gates.conducted(shaper),
            torch.enable_grad(),
            shaper.seen.code,
        ):
            output = self._forward(*args, **kwargs)
        blocks = self._recording.blocks
        if len(shaper.facts) < len(blocks):
            raise changed(blocks[len(shaper.facts)].name, "no call of it", "one call")
        return shaper.seen.crossings(output)


class _HooksSeen(BaseException):
    """All blocks have run, and hooks have collected their tensors, some of them several times.

    It is nothing for the model's own code to catch. In another forward no block runs, and each hook
    is called once with proxies.
    """


def _collected(
    facts: Sequence[BlockFacts], crossed: Sequence[Crossing]
) -> tuple[tuple[HookedCall, ...], ...]:
    """Return the calls of the modules whose results cross a bound, for each block."""
    origins = {origin for crossing in crossed for origin in crossing.origins}
    names = [
        {
            call.name
            for call in block.hooked
            if any(Origin(CallPlace(number), leaf) in origins for leaf in call.leaves)
        }
        for number, block in enumerate(facts, start=1)
    ]
    return tuple(
        tuple(call for call in block.hooked if call.name in chosen)
        for block, chosen in zip(facts, names, strict=True)
    )


class _SeenSteps:
    """The steps of one forward without values, and its tensors by their numbers.

    Attributes:
        code: the mode in which functions around blocks are seen.
    """

    def __init__(self) -> None:
        self.code = AroundBlocks(self)
        self._steps: list[Step] = []
        self._numbers: dict[int, int] = {}
        self._tensors: list[ValuelessTensor] = []  # kept, so that identities stay theirs

    def crossings(self, output: Any) -> tuple[Crossing, ...]:
        """Return the tensors that cross the bound after each block of a forward with an output."""
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        return crossings(self._steps, self._meta_of, {*map(self._number, tensors)})

    def called(self, place: CallPlace, func: Function, args: Arguments, kwargs: Keywords) -> Any:
        """Call a function outside of blocks, and note its tensors."""
        result = func(*args, **kwargs)
        made = list(tensors_in(result))
        outputs = [self._number(tensor) for tensor in made]
        inputs = [self._number(tensor) for tensor in tensors_in((args, kwargs))]
        changed = {*map(self._number, tensors_in(list(targets(place.function, args, kwargs))))}
        if writes_in_place(func, args, kwargs):
            changed |= {*outputs} & {*inputs}
        written = [number for number in changed if number is not None]
        if written or any(number is not None for number in outputs):
            bases = [
                (number, base)
                for number, tensor in zip(outputs, made, strict=True)
                if isinstance(tensor, ValuelessTensor) and tensor.shown is not None
                for base in inputs[tensor.shown.place : tensor.shown.place + 1]
                if number is not None and base is not None and number not in inputs
            ]
            self._steps.append(Step(place, inputs, outputs, written, bases))
        return result

    def block(
        self, phase: int, given: Sequence[Any], made: Sequence[Tensor], hooked: Sequence[Tensor]
    ) -> None:
        """Note the call of a block: the leaves of its arguments, the tensors it made."""
        inputs = [self._number(leaf) for leaf in given if isinstance(leaf, Tensor)]
        outputs, collected = [[self._number(x) for x in tensors] for tensors in (made, hooked)]
        self._steps.append(Step(CallPlace(phase), inputs, outputs, hooked=collected))
        self.code.begin_phase(phase)

    def _number(self, tensor: Tensor) -> int | None:
        """Return the number of a tensor; None if it has values, as on every stage."""
        if not isinstance(tensor, ValuelessTensor):
            return None
        number = self._numbers.setdefault(id(tensor), len(self._tensors))
        if number == len(self._tensors):
            self._tensors.append(tensor)
        return number

    def _meta_of(self, number: int) -> TensorMeta:
        tensor = self._tensors[number]
        facts = tensor.facts
        return TensorMeta(tuple(facts.shape), facts.dtype, tensor.requires_grad)


class _Shaper:
    """Runs blocks on proxies, or only hands their inputs on.

    With the facts of an earlier forward no block runs, and hooks inside of blocks get proxies.

    Attributes:
        facts: of the blocks that were called.
        seen: the steps of the forward.
    """

    def __init__(
        self,
        recording: Recording,
        trusted: bool,
        device: torch.device,
        runs: BlockRuns,
        known: Sequence[BlockFacts] | None = None,
    ) -> None:
        self._recording, self._trusted, self._device = recording, trusted, device
        self._runs, self._known = runs, known
        self.seen = _SeenSteps()
        self.facts: list[BlockFacts] = []

    def call(self, index: int, compute: Function, args: Arguments, kwargs: Keywords) -> Any:
        """Note the output of a block."""
        number = len(self.facts)
        block = self._recording.called(number, index)
        leaves, _ = tree_flatten((tuple(args), dict(kwargs)))
        with self.seen.code.inside_block():
            facts = (
                self._runs.facts(block, index, compute, args, kwargs, trusted=self._trusted)
                if self._known is None
                else self._known[number]
            )
            self.facts.append(facts)
            made = self._proxies(facts.metas)
            hooked = self._proxies([meta for call in facts.hooked for meta in call.metas])
            result = block.output.build(block.name, made, leaves)
            if self._known is not None:
                tell_hooks(self._runs.blocks[index], facts.hooked, hooked, self._device)
        if self._known is None and self._is_last and any(each.hooked for each in self.facts):
            raise _HooksSeen
        self.seen.block(len(self.facts), leaves, made, hooked)
        return result

    @property
    def _is_last(self) -> bool:
        return len(self.facts) == len(self._recording.blocks)

    def _proxies(self, metas: Sequence[TensorMeta]) -> list[StageProxy]:
        return [StageProxy.like(m.shape, m.dtype, self._device, m.requires_grad) for m in metas]


@contextmanager
def _copies_hidden(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Let proxies stand for the copies of parameters that another stage owns.

    No module registers a copy, and its values would count as values that every stage has.
    """
    copies = [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, nn.Parameter)
    ]
    try:
        for module, name, value in copies:
            vars(module)[name] = StageProxy.of(value, device)
        yield
    finally:
        for module, name, value in copies:
            vars(module)[name] = value
