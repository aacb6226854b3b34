"""The shapes that blocks return for given inputs, known before anything is computed or received."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only

from drivetrain.model.look import tensors_in
from drivetrain.model.random_values import SEED, filled, random_like
from drivetrain.model.substitution import without_values
from drivetrain.model.valueless import ValuelessTensor
from drivetrain.parts.blocks import BlockHooks
from drivetrain.parts.torch_calls import Arguments, Function, Keywords, targets
from drivetrain.runtime import rng
from drivetrain_megatron.recording.around_blocks import AroundBlocks
from drivetrain_megatron.recording.crossing import (
    CallPlace,
    Crossing,
    Origin,
    Step,
    crossings,
    writes_in_place,
)
from drivetrain_megatron.recording.phases import Block, Recording
from drivetrain_megatron.recording.proxy import StageProxy
from drivetrain_megatron.recording.structure import TensorMeta, changed

Metas: TypeAlias = tuple[tuple[TensorMeta, ...], ...]
ShapeAndDtype: TypeAlias = tuple[tuple[int, ...], torch.dtype]


class CallShapes(NamedTuple):
    """The facts of tensors in one forward, for each block in the order of calls.

    Attributes:
        outputs: of the tensors that the block returns.
        crossings: the tensors for a stage that begins after the block.
    """

    outputs: Metas
    crossings: tuple[Crossing, ...]

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
        self._valued = _Valued(gates.blocks)

    def of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallShapes:
        """Return the facts of the tensors of each block.

        Raises:
            UsageError: a block returns another structure than when it was recorded.
        """
        mode = self._mode()
        key = (mode, _key(args, kwargs))
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
        seen = _SeenSteps()
        shaper = _Shaper(self._recording, trusted, self._device, self._valued, seen)
        with (
            without_values(self._model, StageProxy),
            _copies_hidden(self._model, self._device),
            self._gates.conducted(shaper),
            torch.enable_grad(),
            seen.code,
        ):
            self._forward(*args, **kwargs)
        blocks = self._recording.blocks
        if len(shaper.metas) < len(blocks):
            raise changed(blocks[len(shaper.metas)].name, "no call of it", "one call")
        if not trusted:
            self._alike[mode] = self._alike.get(mode, 0) + 1 if shaper.alike else -(1 << 30)
        return CallShapes(tuple(shaper.metas), seen.crossings())


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

    def crossings(self) -> tuple[Crossing, ...]:
        """Return the tensors that cross the bound after each block."""
        return crossings(self._steps, self._meta_of)

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

    def block(self, phase: int, given: Sequence[Any], made: Sequence[Tensor]) -> None:
        """Note the call of a block: the leaves of its arguments, the tensors it made."""
        inputs = [self._number(leaf) for leaf in given if isinstance(leaf, Tensor)]
        self._steps.append(Step(CallPlace(phase), inputs, [self._number(x) for x in made]))
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


class _Valued:
    """Runs blocks that cannot run on proxies, with random values.

    Blocks of one class are taken to return the same shapes for arguments of the same shapes.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._blocks = blocks
        self._known: dict[Any, Any] = {}

    def result(
        self,
        index: int,
        compute: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Return the result of a block, computed without values if the block can do so."""
        again = tree_map(_copied, (tuple(args), dict(kwargs)))  # a failed run may fill a cache
        try:
            return compute(*args, **kwargs)
        except Exception:  # it may depend on values
            block = self._blocks[index]
            key = type(block), _key(args, kwargs)
            if key not in self._known:
                self._known[key] = self._computed(block, compute, *again)
            return self._known[key]

    def _computed(
        self,
        block: nn.Module,
        compute: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Return the result of a block with random values, as proxies."""
        values, named = tree_map_only(
            StageProxy, lambda leaf: random_like(leaf.facts), (args, kwargs)
        )
        with rng.fork(SEED), filled(block), torch.no_grad():
            block.eval()  # nothing is dropped
            result = compute(*values, **named)
        return tree_map_only(Tensor, StageProxy.of, result)


class _Shaper:
    """Runs blocks on proxies, or only hands their inputs on."""

    def __init__(
        self,
        recording: Recording,
        trusted: bool,
        device: torch.device,
        valued: _Valued,
        seen: _SeenSteps,
    ) -> None:
        self._recording, self._trusted, self._device = recording, trusted, device
        self._valued, self._seen = valued, seen
        self.alike = True
        self.metas: list[tuple[TensorMeta, ...]] = []

    def call(
        self,
        index: int,
        compute: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Note the output of a block."""
        block = self._recording.called(len(self.metas), index)
        with self._seen.code.inside_block():
            metas, leaves = self._output(
                block, lambda: self._valued.result(index, compute, args, kwargs), args, kwargs
            )
            self.metas.append(metas)
            made = [StageProxy.like(m.shape, m.dtype, self._device, m.requires_grad) for m in metas]
            result = block.output.build(block.name, made, leaves)
        self._seen.block(len(self.metas), leaves, made)
        return result

    def _output(
        self, block: Block, compute: Callable[[], Any], args: Arguments, kwargs: Keywords
    ) -> tuple[tuple[TensorMeta, ...], list[Any]]:
        """Return the facts of the tensors that a block returns, and the leaves of its arguments."""
        leaves, _ = tree_flatten((tuple(args), dict(kwargs)))
        as_recorded = len(leaves) == block.output.arguments  # else places are of other arguments
        places = block.like if as_recorded else [None] * len(block.like)
        likes = [leaves[place] if place is not None else None for place in places]
        kept = [(tuple(like.shape), like.dtype) for like in likes if like is not None]
        if self._trusted and as_recorded:
            found = kept
        else:
            found = self._computed(block, kept, compute)
            self.alike &= not as_recorded or all(
                isinstance(like, Tensor) and (tuple(like.shape), like.dtype) == facts
                for like, facts in zip(likes, found, strict=True)
            )
        metas = (
            TensorMeta(*facts, recorded.requires_grad)
            for facts, recorded in zip(found, block.output.metas, strict=True)
        )
        return tuple(metas), leaves

    def _computed(
        self, block: Block, kept: Sequence[ShapeAndDtype], compute: Callable[[], Any]
    ) -> list[ShapeAndDtype]:
        """Return the facts of the tensors that a block returns."""
        try:
            result = compute()
        except Exception:  # not even with values: shapes are as in the recording
            if len(kept) < len(block.output.metas):
                raise
            return list(kept)
        carried = block.output.carried(block.name, result)
        return [(tuple(tensor.shape), tensor.dtype) for tensor in carried]


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


def _copied(leaf: Any) -> Any:
    """Return a copy of an argument, unless it is a tensor or cannot be copied."""
    if isinstance(leaf, Tensor):
        return leaf
    try:
        return copy.deepcopy(leaf)
    except Exception:  # a lock, say; whoever calls the block again will meet it
        return leaf


def _key(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    leaves, tree = tree_flatten((tuple(args), dict(kwargs)))
    return str(tree), tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf)
        for leaf in leaves
    )
