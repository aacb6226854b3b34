"""One pass of a stage through the model's own forward: some blocks compute, others give proxies."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only

from drivetrain.errors import UsageError
from drivetrain.model.look import named_leaves, tensors_in
from drivetrain.parts.blocks import BlockHooks
from drivetrain.parts.guard import Arguments, Function, Keywords
from drivetrain_megatron.pipeline.cut import StageCut
from drivetrain_megatron.pipeline.other_stages import ProxyPlace
from drivetrain_megatron.recording.phases import (
    PLAIN,
    CallPlace,
    Origin,
    Recording,
    TensorMeta,
    changed,
)
from drivetrain_megatron.recording.proxy import StageProxy
from drivetrain_megatron.recording.shapes import (
    AroundBlocks,
    CallShapes,
    Shapes,
    run_with_hooks,
    tell_hooks,
)


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

    Blocks are calls of modules, by index.

    Attributes:
        own: the blocks of the stage.
        given: tensors from elsewhere that cross the bound after a block, by the block.
        computes: whether own blocks compute; other blocks, and own ones that do not, give proxies.
        stops: whether the tensors that cross the bound after the last own block are for the next
            stage, and proxies take their place.
        kept: own blocks with bounds after them whose tensors are handed out.
    """

    own: range
    given: Mapping[int, Sequence[Tensor]]
    computes: bool = True
    stops: bool = True
    kept: Collection[int] = ()


class StagePass:
    """Decides which blocks compute in one forward of a stage.

    Code around blocks runs on every stage. Where it makes a tensor that another stage has sent, the
    sent one takes its place; so its values are right, whatever went into it here. Parameters that
    the own blocks share with earlier stages are out of sight until the pass reaches these blocks.

    Attributes:
        before: contexts that end where the phases of the own blocks begin.
        sent: the tensors for the next stage.
        made: the tensors that cross the bound after own blocks, by index of the block, for those
            that are handed out.
        collected: the tensors of own blocks that hooks have collected.
    """

    def __init__(
        self,
        parts: ModelParts,
        options: PassOptions,
        shapes: CallShapes,
        inputs: Sequence[Any],
        unseen: Sequence[ProxyPlace] = (),
    ) -> None:
        self._parts, self._options, self._shapes = parts, options, shapes
        self._unseen = {id(place.proxy): place for place in unseen}
        self._grad = torch.is_grad_enabled()
        self._objects = {id(leaf) for leaf in inputs if not isinstance(leaf, (Tensor, *PLAIN))}
        self._next = 0
        self._code = AroundBlocks(self.called)
        self._given: dict[Origin, Tensor] = {}
        self._unchanged: set[CallPlace] = set()
        for block, tensors in sorted(options.given.items()):
            crossing = shapes.crossings[block]
            # Of a block of the stage before, there are the tensors that cross alone.
            for origin, tensor in zip(shapes.left(block)[0], tensors, strict=False):
                # Neither a leaf nor a view of one may be written into.
                copied = tensor.requires_grad and origin in crossing.rewritten
                self._given[origin] = tensor.clone() if copied else tensor
            self._unchanged |= crossing.changes
        self._missing = {*self._given}
        self._handed = self._bounds_handed_out()
        self._last = options.own.stop - 1 if options.computes and options.stops else -1
        # Two bounds are followed in any case: there the last stage and the rest of the model begin.
        self._marked = {parts.cut.blocks(parts.cut.stages - 1).start - 1, len(shapes.outputs) - 1}
        followed = {*self._handed, *self._marked} - {-1}
        self._followed = {origin for block in followed for origin in shapes.left(block)[0]}
        self._found: dict[Origin, Tensor] = {}
        self._made_at: dict[Origin, int] = {}  # how often it had been written into then
        self._end = shapes.crossings[self._last] if self._last >= 0 else None
        self._versions: list[int] = []  # of the tensors for the next stage, at the cut
        self.before = ExitStack()
        self.sent: tuple[Tensor, ...] = ()
        self.made: dict[int, tuple[Tensor, ...]] = {}
        self.collected: list[Tensor] = []

    def _bounds_handed_out(self) -> list[int]:
        """Return the own blocks whose crossing tensors are asked for."""
        options = self._options
        if not options.computes:
            return []
        last = [options.own.stop - 1] if options.stops and options.own else []
        return sorted({*last, *(index for index in options.kept if index in options.own)})

    @property
    def is_after_blocks(self) -> bool:
        """Whether all blocks were called."""
        return self._next == len(self._parts.recording.blocks)

    def watching(self) -> AbstractContextManager[object]:
        """Return the context of the pass: code around blocks is seen, where tensors of it cross."""
        places = {*self._unchanged, *(origin.place for origin in (*self._given, *self._followed))}
        places |= set() if self._end is None else {self._end.position}
        return self._code if any(place.function for place in places) else nullcontext()

    def called(self, place: CallPlace, func: Function, args: Arguments, kwargs: Keywords) -> Any:
        """Call a function of the code around blocks, or take the tensors of another stage."""
        if place in self._unchanged:  # the stage before has done it
            return None if place.function == "__setitem__" else next(tensors_in((args, kwargs)))
        result = func(*args, **kwargs)
        made = list(tensors_in(result))
        taken = [self._taken(Origin(place, leaf), tensor) for leaf, tensor in enumerate(made)]
        if self._end is not None:
            if place == self._end.position:
                self._versions = self._current_versions()
            taken = [self._handed_on(Origin(place, leaf), x) for leaf, x in enumerate(taken)]
        if all(new is old for new, old in zip(taken, made, strict=True)):
            return result
        replaced = {id(old): new for old, new in zip(made, taken, strict=True)}
        return tree_map_only(Tensor, lambda tensor: replaced[id(tensor)], result)

    def _handed_on(self, origin: Origin, tensor: Tensor) -> Tensor:
        """Return a tensor, or a proxy if it is made for the next stage."""
        if self._end is None or origin not in self._end.handed:
            return tensor
        facts = TensorMeta(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        return self._proxy(facts, self._last)

    def _current_versions(self) -> list[int]:
        """Return how often each tensor for the next stage has been written into."""
        if self._end is None or not self._grad:
            return []
        found = [self._found[origin] for origin in self._end.origins if origin in self._found]
        return [tensor._version for tensor in found]

    def call(
        self,
        index: int,
        compute: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Compute an own block; return given tensors, or proxies, for another."""
        number = self._next
        block = self._parts.recording.called(number, index)
        self._next += 1
        options = self._options
        is_own = options.computes and number in options.own
        if is_own and self._unseen:
            args, kwargs = tree_map(self._in_sight, (tuple(args), dict(kwargs)))
        leaves = tree_flatten((tuple(args), dict(kwargs)))[0]
        module, hooked = self._parts.blocks[index], self._shapes.hooked[number]
        if is_own:
            _check_arguments(block.name, args, kwargs, self._objects)
            run = partial(compute, *args, **kwargs)
            with self._code.inside_block():
                result, collected = run_with_hooks(block.name, module, hooked, run)
            tensors = [*block.output.carried(block.name, result), *collected]
            self.collected += collected
        else:
            if options.own and number == options.own.start - 1:
                self.before.close()
            tensors = self._proxies(number)
        self._code.begin_phase(self._next)
        ends = self._end is not None and self._end.position == CallPlace(self._next)
        if number in self._handed:
            self._check_history(block.name)
        place = CallPlace(self._next)
        pairs = zip(self._shapes.made(number), tensors, strict=True)
        taken = [self._taken(Origin(place, leaf), tensor) for leaf, tensor in pairs]
        if not is_own:
            with self._code.inside_block():
                tell_hooks(module, hooked, taken[len(block.like) :], self._parts.device)
        if number in self._marked:
            self._mark(number)
        if ends:
            self._versions = self._current_versions()
            taken = self._proxies(number)
        elif is_own:
            return result
        return block.output.build(block.name, taken, leaves)

    def finish(self) -> None:
        """Collect the tensors that are handed out.

        Raises:
            UsageError: blocks were not called, or other tensors were made than expected.
        """
        if not self.is_after_blocks:
            name = self._parts.recording.blocks[self._next].name
            raise changed(name, "no call of it", "one call")
        for origin in self._missing:
            what = f"no call of {origin.place.function} after it that makes the tensor sent"
            raise changed(self._name(origin.place.phase - 1), what, "one call")
        self.made = {index: self._collected(index) for index in self._handed}
        if self._versions != self._current_versions():
            raise UsageError(
                f"expected tensors that cross the bound after block {self._name(self._last)!r} to "
                "stay as they are there, found that code of the model writes into one later: let "
                "it make a new tensor (x = x + y for x += y)"
            )
        sent = 0 if self._end is None else len(self._end.origins)  # then what the model returns
        self.sent = self.made.get(self._last, ())[:sent]

    def _in_sight(self, leaf: Any) -> Any:
        """Return the parameter itself for its proxy, which code before the own blocks has met."""
        place = self._unseen.get(id(leaf))
        return leaf if place is None else getattr(place.module, place.name)

    def _taken(self, origin: Origin, tensor: Tensor) -> Tensor:
        """Return the tensor that the rest of the pass gets in place of one made here."""
        sent = self._given.get(origin)
        if sent is not None:
            if (sent.shape, sent.dtype) != (tensor.shape, tensor.dtype):
                expected = f"one of {tuple(sent.shape)}, {sent.dtype}"
                what = f"a tensor of {tuple(tensor.shape)}, {tensor.dtype} in its place"
                raise changed(self._name(origin.place.phase), what, expected)
            tensor = sent
            self._missing.discard(origin)
        if origin in self._followed:
            self._found[origin] = tensor
            self._made_at[origin] = 0 if tensor.is_inference() else tensor._version
        return tensor

    def _mark(self, block: int) -> None:
        """Let the proxies of crossing tensors know the block before their bound."""
        for origin in self._shapes.left(block)[0]:
            tensor = self._found.get(origin)
            if isinstance(tensor, StageProxy):
                tensor.blocks = frozenset({block})

    def _name(self, number: int) -> str:
        blocks = self._parts.recording.blocks
        return blocks[number].name if number < len(blocks) else "after the last"

    def _proxies(self, index: int) -> list[Tensor]:
        return [self._proxy(meta, index) for meta in self._shapes.made(index).values()]

    def _proxy(self, meta: TensorMeta, block: int) -> StageProxy:
        wanting = meta.requires_grad and self._grad
        proxy = StageProxy.like(meta.shape, meta.dtype, self._parts.device, wanting)
        proxy.blocks = frozenset({block})
        return proxy

    def _check_history(self, name: str) -> None:
        if self._grad and not torch.is_grad_enabled():
            raise UsageError(
                f"expected the output of block {name!r} with its history, found it computed "
                "without gradients inside of a reentrant checkpoint: use checkpoint(..., "
                "use_reentrant=False), or the configuration's recompute"
            )

    def _collected(self, index: int) -> tuple[Tensor, ...]:
        """Return the tensors that a block leaves, after a check that others expect them."""
        origins, metas = self._shapes.left(index)
        crossing = len(self._shapes.crossings[index].origins)
        if index not in self._options.kept:
            origins, metas = origins[:crossing], metas[:crossing]
        name = self._name(index)
        tensors = [self._found[origin] for origin in origins if origin in self._found]
        found = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        expected = [meta[:2] for meta in metas]
        if found != expected:
            raise changed(name, f"a result of {found}", f"{expected} for these inputs")
        for origin in origins[crossing:]:
            self._check_unwritten(name, origin)
        for tensor, meta in zip(tensors, metas, strict=True):
            lost = tensor.requires_grad and not meta.requires_grad
            if isinstance(tensor, StageProxy) or (self._grad and lost):
                what = "without values" if isinstance(tensor, StageProxy) else "with a gradient"
                raise changed(name, f"a tensor {what} that goes to the next stage", "the other")
        return tuple(tensors)

    def _check_unwritten(self, name: str, origin: Origin) -> None:
        """Check a tensor that no later block reads: the rest of the model would write once more."""
        tensor = self._found[origin]
        if not tensor.is_inference() and tensor._version != self._made_at[origin]:
            raise UsageError(
                f"expected the output of block {name!r}, which the model returns, to stay as it "
                "is, found that code after the block writes into it: let it make a new tensor "
                "(x = x + y for x += y)"
            )


def _check_arguments(
    name: str, args: Arguments, kwargs: Keywords, objects: Collection[int]
) -> None:
    """Check that a block gets values of this stage, and none of the caller's objects (by id)."""
    for argument, leaf in named_leaves(args, kwargs):
        if isinstance(leaf, StageProxy):
            raise UsageError(
                f"expected argument {argument!r} of block {name!r} to follow from blocks "
                "before it or from the inputs by functions of torch, found a tensor of another "
                "pipeline stage that reached it in another way (inside of a custom object, "
                "or from an autograd function): let the block before return it, or choose "
                "stages that keep both ends together"
            )
        if id(leaf) in objects:
            raise UsageError(
                f"expected blocks that get tensors, found the caller's {type(leaf).__name__} "
                f"as argument {argument!r} of block {name!r}: blocks of other stages cannot "
                "fill it. Call the model without it (use_cache=False for a cache)"
            )
