"""Turns a module into the pipeline stages of one rank, in place, and runs them.

Every stage runs the user's own top-level forward. Blocks of other stages give proxies. Tensors that
a stage receives take the place of the proxies where they were made, in a block or in the code
around blocks. The tensors that cross the stage's end are sent, and proxies go on. Masks and other
values without parameters are computed on every stage from the inputs.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only

from drivetrain.errors import UsageError
from drivetrain.model.deferred import become
from drivetrain.model.guard import Arguments, Function, Keywords, guard, is_guarded, unguard
from drivetrain.model.modules import BlockHooks, named_parameters
from drivetrain.model.trace import named_leaves
from drivetrain.model.untouched import keep_padding
from drivetrain.nested import tensors_in
from drivetrain.shards import WeightSource
from drivetrain.strategy import Strategy
from drivetrain_megatron.pipeline.cut import StageCut
from drivetrain_megatron.pipeline.transfer import (
    Direction,
    Link,
    Message,
    MicroBatch,
    absent_like,
    is_absent,
)
from drivetrain_megatron.recording.phases import (
    PLAIN,
    CallPlace,
    Crossing,
    Origin,
    Recording,
    TensorMeta,
    Use,
    changed,
    named_blocks,
)
from drivetrain_megatron.recording.proxy import (
    OtherStage,
    ParameterProxy,
    StageParameter,
    StageProxy,
)
from drivetrain_megatron.recording.shapes import (
    AroundBlocks,
    CallShapes,
    Metas,
    Shapes,
    run_with_hooks,
    tell_hooks,
)
from drivetrain_megatron.shares import inside

# --- parameters of other stages: proxies in their places, copies where several stages use one ---

# The first stage that uses a parameter is the owner, which optimizes and saves the parameter. A
# copy on another rank is no parameter of the strategy inside of the cell. After the last backward
# of a step a copy's gradient goes to the owner, where it enters the owner's last backward; before
# the next forward the owner's new values go to the copies. So nothing is counted twice, and copies
# cannot drift apart.


@dataclass(frozen=True, slots=True)
class Tie:
    """A parameter that several stages use.

    Attributes:
        name: its first name in the model.
        owner: the first stage that uses it, where its gradient is summed and it is optimized.
        copies: the other stages that use it, in order.
    """

    name: str
    owner: int
    copies: tuple[int, ...]


def ties(recording: Recording, cut: StageCut) -> tuple[Tie, ...]:
    """Return the parameters that are used on several stages of a cut."""
    found = []
    for name, use in recording.parameters.items():
        stages = sorted({cut.stage_of(phase) for phase in use.phases})
        if len(stages) > 1:
            found.append(Tie(name, stages[0], tuple(stages[1:])))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class ProxyPlace:
    """The module and name where a proxy stands, or will stand, for a parameter or buffer.

    In trials the place of a proxy is taken by a tensor with other values.
    """

    module: nn.Module
    name: str
    proxy: Tensor


def is_local(use: Use, phases: Collection[int]) -> bool:
    """Whether a parameter or buffer is used in phases; without any use, in the first."""
    return not (use.phases or {0}).isdisjoint(phases)


def foreign_places(
    model: nn.Module, recording: Recording, phases: Collection[int], device: torch.device
) -> list[ProxyPlace]:
    """Return where proxies must stand for some phases to run; nothing is changed.

    A buffer from which something follows without a parameter stays on every stage.
    """
    names = [
        name
        for use in recording.parameters.values()
        if not is_local(use, phases)
        for name in use.names
    ]
    names += [
        name
        for name, use in recording.buffers.items()
        if use.phases and not use.ambient and not is_local(use, phases)
    ]
    return [place_of(model, name, device) for name in names]


def place_of(model: nn.Module, full_name: str, device: torch.device) -> ProxyPlace:
    """Return where a proxy can stand for a parameter or buffer."""
    prefix, _, name = full_name.rpartition(".")
    module = model.get_submodule(prefix)
    value = getattr(module, name)
    kind = ParameterProxy if isinstance(value, nn.Parameter | ParameterProxy) else StageProxy
    return ProxyPlace(module, name, kind.of(value, device))


@contextmanager
def hidden(places: Iterable[ProxyPlace]) -> Iterator[None]:
    """Let proxies stand before parameters and buffers that stay; found first by attribute."""
    chosen = list(places)
    before = [place.module.__dict__.get(place.name) for place in chosen]
    for place in chosen:
        place.module.__dict__[place.name] = place.proxy
    try:
        yield
    finally:
        for place, value in zip(chosen, before, strict=True):
            if value is None:
                place.module.__dict__.pop(place.name, None)
            else:  # a copy of a parameter that another rank owns
                place.module.__dict__[place.name] = value


def take_hooks(block: nn.Module) -> None:
    """Let no hook and no compiled code run when a block of another stage is called."""
    for name, value in block.__dict__.items():
        if isinstance(value, OrderedDict) and name.startswith(("_forward_", "_backward_")):
            block.__dict__[name] = OrderedDict()
    block.__dict__["_compiled_call_impl"] = None


_CHECKPOINTS = "torch.utils.checkpoint"
"""The module of the hooks by which torch's checkpoints save nothing."""

_GLIMPSE = 256
"""Elements of a parameter that are compared to see whether a script has changed it."""


class SharedParameters:
    """The parameters that stages of this rank share with stages of other ranks."""

    def __init__(
        self, model: nn.Module, tied: Iterable[Tie], owned: Sequence[int], ranks: int, link: Link
    ) -> None:
        self._model, self._link = model, link
        self._lent: list[tuple[int, Tie, nn.Parameter, list[int]]] = []
        self._copies: list[tuple[int, Tie, nn.Parameter, int]] = []
        self._hidden: dict[nn.Parameter, OtherStage] = {}
        self._glimpses: dict[int, Tensor] = {}
        mine = set(owned)
        names = dict(model.named_parameters(remove_duplicate=False))
        rank = owned[0] % ranks
        for number, tie in enumerate(tied):
            elsewhere = sorted({stage % ranks: stage for stage in reversed(tie.copies)}.values())
            elsewhere = [stage for stage in elsewhere if stage % ranks != tie.owner % ranks]
            if tie.owner % ranks == rank:
                if elsewhere and tie.owner in mine:
                    self._lent.append((number, tie, names[tie.name], elsewhere))
            elif copy := next((stage for stage in elsewhere if stage % ranks == rank), None):
                self._copies.append((number, tie, _take_out(model, names[tie.name]), copy))

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Context in which copies have their values and gradients; nobody else gets at them."""
        covered = [copy for copy in self._hidden if is_guarded(copy)]
        for copy in covered:
            unguard(copy)
        try:
            yield
        finally:
            for copy in covered:
                guard(copy, self._hidden[copy], StageParameter)

    def hide(self, has_gradient: Callable[[], bool], device: torch.device) -> None:
        """Let copies be seen in ``computing`` alone from now on."""
        for _, tie, copy, _ in self._copies:
            proxy = ParameterProxy.of(copy, device)
            proxy.has_gradient = has_gradient
            self._hidden[copy] = OtherStage(proxy, tie.name, tie.owner)
            guard(copy, self._hidden[copy], StageParameter)

    def materialize(self, source: WeightSource, device: torch.device) -> None:
        """Give copies their values, where the model was built without any."""
        for _, tie, copy, _ in self._copies:
            if copy.is_meta:
                become(copy, source.value(tie.name, copy).to(device), tie.name)

    def leaves(self) -> list[nn.Parameter]:
        """Return what gets gradients here: the parameters of this rank's stages, and copies."""
        copies = (copy for _, _, copy, _ in self._copies)
        mine = (*named_parameters(self._model).values(), *copies)
        return [leaf for leaf in mine if leaf.requires_grad]

    def send_gradients(self) -> None:
        """Send the gradients of copies to their owners, also that a copy has none."""
        for number, tie, copy, stage in self._copies:
            if copy.requires_grad:
                gradient = absent_like(copy) if copy.grad is None else copy.grad
                copy.grad = None
                self._link.send(Message(Direction.TIED, stage, tie.owner, number), [gradient])

    def receive_gradients(self) -> tuple[list[nn.Parameter], list[Tensor]]:
        """Return the parameters that are lent, and the sum of their copies' gradients."""
        parameters, gradients = [], []
        for number, tie, parameter, stages in self._lent:
            if not parameter.requires_grad:
                continue
            meta = [TensorMeta(tuple(parameter.shape), parameter.dtype)]
            arrivals = [
                self._link.receive(Message(Direction.TIED, stage, tie.owner, number), meta)
                for stage in stages
            ]
            arrived = [arrival.wait()[0] for arrival in arrivals]
            made = [gradient for gradient in arrived if not is_absent(gradient)]
            if made:
                for gradient in made[1:]:
                    made[0].add_(gradient)
                parameters.append(parameter)
                gradients.append(made[0])
        return parameters, gradients

    def refresh(self, inner: Strategy[Any]) -> None:
        """Give copies their owners' values, gathered by the data-parallel strategy."""
        with inner.state.gathered([parameter for _, _, parameter, _ in self._lent], modify=False):
            for number, tie, parameter, stages in self._lent:
                self._glimpses[number] = _glimpse(parameter)
                for stage in stages:
                    message = Message(Direction.TIED, tie.owner, stage, number)
                    self._link.send(message, [parameter.detach().clone()])
        for number, tie, copy, stage in self._copies:
            message = Message(Direction.TIED, tie.owner, stage, number)
            arrival = self._link.receive(message, [TensorMeta(tuple(copy.shape), copy.dtype)])
            with torch.no_grad():
                (values,) = arrival.wait()
                if not torch.equal(copy, values):  # a forward may wait that needs it as it was
                    copy.copy_(values)

    def check_unchanged(self) -> None:
        """Check that parameters that are lent have the values that their copies have.

        Raises:
            UsageError: names one that the script has changed.
        """
        for number, tie, parameter, _ in self._lent:
            before = self._glimpses.get(number)
            if before is not None and not torch.equal(_glimpse(parameter), before):
                raise UsageError(
                    f"expected {tie.name!r}, of which other pipeline stages have copies, to be as "
                    "in the forward before, found other values: change it inside of 'with "
                    "accelerator.gathered(model.parameters()):', so that the copies follow"
                )


with_copies = inside(lambda owner, *_: owner.stages.shared.computing())
"""Lets a method of a pipeline, which has ``stages``, compute with copies."""


def _glimpse(parameter: Tensor) -> Tensor:
    """Return some elements of a parameter, from all over it."""
    flat = parameter.detach().flatten()
    return flat[:: max(flat.numel() // _GLIMPSE, 1)].clone()


def _take_out(model: nn.Module, parameter: nn.Parameter) -> nn.Parameter:
    """Put a copy in its memory into ordinary attributes: forward finds it, no list has it."""
    copied = nn.Parameter(parameter.detach(), parameter.requires_grad)
    for module in model.modules():
        names: Mapping[str, nn.Parameter | None] = dict(module._parameters)
        for name, found in names.items():
            if found is parameter:
                del module._parameters[name]
                module.__dict__[name] = copied
    return copied


# --- one pass of a stage through the model's own forward ---


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
        self._region: object = None  # the checkpoint around the block before a bound
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
        self._last = options.own.stop - 1 if options.computes and options.stops else -1
        kept = [index for index in options.kept if index in options.own and options.computes]
        self._handed = sorted({self._last, *kept} - {-1})
        # Two bounds are followed in any case: there the last stage and the rest of the model begin.
        self._marked = {parts.cut.blocks(parts.cut.stages - 1).start - 1, len(shapes.outputs) - 1}
        followed = {*self._handed, *self._marked} - {-1}
        self._followed = {origin for block in followed for origin in shapes.left(block)[0]}
        self._found: dict[Origin, Tensor] = {}
        # How often each had been written into then; those for the next stage, at the cut.
        self._made_at: dict[Origin, int] = {}
        self._end = shapes.crossings[self._last] if self._last >= 0 else None
        self.before = ExitStack()
        self.sent: tuple[Tensor, ...] = ()
        self.made: dict[int, tuple[Tensor, ...]] = {}
        self.collected: list[Tensor] = []

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
                self._note_versions(self._end)
            for leaf, x in enumerate(taken):
                if Origin(place, leaf) in self._end.handed:  # it is made for the next stage
                    facts = TensorMeta(tuple(x.shape), x.dtype, x.requires_grad)
                    taken[leaf] = self._proxy(facts, self._last)
        if all(new is old for new, old in zip(taken, made, strict=True)):
            return result
        replaced = {id(old): new for old, new in zip(made, taken, strict=True)}
        return tree_map_only(Tensor, lambda tensor: replaced[id(tensor)], result)

    def _note_versions(self, end: Crossing) -> None:
        """Note how often each tensor for the next stage has been written into before the cut."""
        for origin in end.origins:
            if self._grad and origin in self._found:
                self._made_at[origin] = self._found[origin]._version

    def call(self, index: int, compute: Function, args: Arguments, kwargs: Keywords) -> Any:
        """Compute an own block; return given tensors, or proxies, for another."""
        number = self._next
        block = self._parts.recording.called(number, index)
        self._next += 1
        self._check_region(number)
        options = self._options
        is_own = options.computes and number in options.own
        if is_own and self._unseen:
            # The parameters themselves, for proxies that code before the own blocks has met.
            args, kwargs = tree_map(
                lambda x: getattr(p.module, p.name) if (p := self._unseen.get(id(x))) else x,
                (tuple(args), dict(kwargs)),
            )
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
        if number in self._handed and self._grad and not torch.is_grad_enabled():
            raise UsageError(
                f"expected the output of block {block.name!r} with its history, found it computed "
                "without gradients inside of a reentrant checkpoint: use checkpoint(..., "
                "use_reentrant=False), or the configuration's recompute"
            )
        if number in self._handed and self._grad and is_own:
            _refuse_backward_hooks(block.name, module)
        place = CallPlace(self._next)
        pairs = zip(self._shapes.made(number), tensors, strict=True)
        taken = [self._taken(Origin(place, leaf), tensor) for leaf, tensor in pairs]
        if not is_own:
            with self._code.inside_block():
                tell_hooks(module, hooked, taken[len(block.like) :], self._parts.device)
        if number in self._marked:
            self._mark(number)
        if self._end is not None and self._end.position == place:
            self._note_versions(self._end)
            taken = self._proxies(number)
        elif is_own:
            return result
        return block.output.build(block.name, taken, leaves)

    def _check_region(self, number: int) -> None:
        """Refuse a checkpoint that goes on over a bound: a part of it computes on another stage."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False) if self._grad else None
        region = hooks[0] if hooks else None
        own, inside = self._options.own, getattr(region, "__module__", "") == _CHECKPOINTS
        if inside and region is self._region and number in (own.start, own.stop):
            name, before = self._name(number), self._name(number - 1)
            raise UsageError(
                "expected what is recomputed to lie on one pipeline stage, found blocks "
                f"{before!r} and {name!r} inside of one checkpoint, with the bound of two stages "
                f"between them: recompute smaller parts (such as recompute.blocks: {name}), or "
                "choose stages, by strategy.pp or strategy.cut, that keep them together"
            )
        self._region = region

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
        sent = 0 if self._end is None else len(self._end.origins)  # then what the model returns
        self.sent = self.made.get(self._last, ())[:sent]

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
        for origin in origins if index == self._last and self._grad else origins[crossing:]:
            self._check_unwritten(name, origin)
        for tensor, meta in zip(tensors, metas, strict=True):
            lost = tensor.requires_grad and not meta.requires_grad
            if isinstance(tensor, StageProxy) or (self._grad and lost):
                what, wanted = "without values", "its values for the next stage"
                if not isinstance(tensor, StageProxy):
                    what, wanted = "that wants a gradient, since a layer was thawed", _FROZEN
                raise changed(name, f"a tensor {what}", wanted)
        return tuple(tensors)

    def _check_unwritten(self, name: str, origin: Origin) -> None:
        """Check a tensor of this stage: the rest of the model would write into it once more."""
        tensor = self._found[origin]
        if not tensor.is_inference() and tensor._version != self._made_at[origin]:
            raise UsageError(
                f"expected tensors that cross the bound after block {name!r}, or that the model "
                "returns, to stay as they are there, found that code of the model writes into one "
                "later: let it make a new tensor (x = x + y for x += y)"
            )


_FROZEN = (
    "all that comes before the next stage frozen (layers that a script thaws later may be frozen "
    "after prepare(), not before it)"
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


def _refuse_backward_hooks(name: str, block: nn.Module) -> None:
    """Refuse hooks for the gradient of an output that leaves the rank before torch hooks it."""
    if count := len(block._backward_hooks) + len(block._backward_pre_hooks):
        raise UsageError(
            f"expected no full backward hooks on block {name!r}, whose output goes to another "
            f"stage, found {count}, which would not run: register them on the modules inside of "
            "the block, or on blocks that end no stage (the log names the stages' blocks), or use "
            "no pipeline (pp: 1)"
        )


# --- the stages ---


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


@dataclass(eq=False, repr=False)
class Stage:
    """One stage of the pipeline; made by ``split``.

    Args:
        parts: shared by the stages of this rank.
        index: of the stage among all stages.
        copies: names of the parameters here that an earlier stage owns.
        places: parameters of other stages of this rank, which this stage must not see.
        outer: where its own parameters outside of blocks stand, by their first names.
    """

    _parts: ModelParts
    index: int
    copies: tuple[str, ...]
    _places: Sequence[ProxyPlace]
    outer: Mapping[str, Sequence[ProxyPlace]]

    def __post_init__(self) -> None:
        self.blocks = self._parts.cut.blocks(self.index)
        self.is_first = self.index == 0
        self.is_last = self.index == self._parts.cut.stages - 1

    @property
    def last_blocks(self) -> range:
        """The blocks whose tensors the last stage has: its own, and the one before."""
        blocks = self._parts.cut.blocks(self._parts.cut.stages - 1)
        return range(blocks.start - 1, blocks.stop)

    def receives(self, batch: MicroBatch) -> tuple[TensorMeta, ...]:
        """Return the facts of the tensors that ``run`` needs for these inputs, in order."""
        return () if self.is_first else self.metas(batch)[self.blocks.start - 1]

    def sends(self, batch: MicroBatch) -> tuple[TensorMeta, ...]:
        """Return the facts of the tensors for the next stage, for these inputs, in order."""
        return () if self.is_last else self.metas(batch)[self.blocks.stop - 1]

    def ends(self, batch: MicroBatch) -> tuple[TensorMeta, ...]:
        """Return the facts of the last block's output for these inputs, in order."""
        return self._shapes(batch).outputs[-1]

    def metas(self, batch: MicroBatch) -> Metas:
        """Return the facts of the tensors that cross the bound after each block, in order."""
        return tuple(crossing.metas for crossing in self._shapes(batch).crossings)

    def _shapes(self, batch: MicroBatch) -> CallShapes:
        return self._parts.shapes.of(batch.args, batch.kwargs)

    def left(self, batch: MicroBatch) -> Metas:
        """Return the facts of the tensors that the rest of a forward may need of each block.

        The first of them cross the bound after it.
        """
        shapes = self._shapes(batch)
        return tuple(tuple(shapes.left(block)[1]) for block in range(len(shapes.outputs)))

    def given(self, batch: MicroBatch) -> Metas:
        """Return the facts of the tensors that this stage has of each block.

        Of blocks of other stages it has at most those that cross the bound after them.
        """
        crossing, left = self.metas(batch), self.left(batch)
        return tuple(left[b] if b in self.blocks else crossing[b] for b in range(len(left)))

    def run(
        self,
        batch: MicroBatch,
        received: Sequence[Tensor] = (),
        kept: Collection[int] | None = None,
    ) -> StageOutput:
        """Run the model's forward with the blocks of this stage alone.

        Inputs are the same on every stage; ``receives`` describes the received tensors.

        Args:
            batch: the inputs of the model.
            received: the tensors that cross the bound before this stage.
            kept: blocks with bounds after them whose tensors are handed out. Then on the last
                stage, too, the forward goes on with proxies after the last block, as ``finish``
                computes the rest.

        Raises:
            UsageError: the blocks are called in another way than when the model was recorded, or
                one of this stage needs a tensor of another stage.
        """
        stops = kept is not None or not self.is_last
        given = {} if self.is_first else {self.blocks.start - 1: received}
        options = PassOptions(self.blocks, given, stops=stops, kept=kept or ())
        return self._pass(options, batch)

    def finish(
        self, batch: MicroBatch, given: Mapping[int, Sequence[Tensor]], watch: Watch | None = None
    ) -> Any:
        """Run the model's forward around blocks with given tensors; return its output.

        No block computes: it returns proxies, but for tensors that are given. These cross the bound
        after a block. A context, made for the pass, may watch it.
        """
        options = PassOptions(self.blocks, given, computes=False)
        return self._pass(options, batch, watch).output

    def run_ambient(self, batch: MicroBatch) -> Any:
        """Run the model's forward without any block, for the parts that every stage computes."""
        return self._pass(PassOptions(range(0), {}), batch).output

    def _pass(
        self, options: PassOptions, batch: MicroBatch, watch: Watch | None = None
    ) -> StageOutput:
        parts, args, kwargs = self._parts, batch.args, batch.kwargs
        # A word embedding that is also the head on the last stage would be looked up there for
        # nothing, and the result summed over tensor-parallel ranks.
        names = self.copies if options.own else self.outer
        unseen = [place for name in names for place in self.outer.get(name, ())]
        leaves = tree_flatten((args, kwargs))[0]
        conductor = StagePass(parts, options, self._shapes(batch), leaves, unseen)
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
        # What hooks collect for the output goes on to the last stage, where a loss is made of it.
        collected = {id(tensor) for tensor in conductor.collected}
        output = tree_map_only(
            Tensor, lambda x: StageProxy.of(x) if id(x) in collected else x, output
        )
        return StageOutput(conductor.sent, output, conductor.made)


@dataclass(frozen=True, slots=True)
class Split:
    """The stages that one rank holds of a model; made by ``split``.

    Attributes:
        parts: of the module that was cut.
        stages: in the order of their indices.
        ties: the parameters that several stages use, of all stages.
    """

    parts: ModelParts
    stages: tuple[Stage, ...]
    ties: tuple[Tie, ...]


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
    """
    device = device or next((p.device for p in model.parameters()), torch.device("cpu"))
    blocks = named_blocks(recording.names, model)
    phases = {phase for stage in owned for phase in cut.phases(stage)}
    here = {block.name for index, block in enumerate(recording.blocks) if index in phases}
    keep_padding(model)
    for place in foreign_places(model, recording, phases, device):
        place.module._parameters.pop(place.name, None)
        place.module._buffers.pop(place.name, None)
        place.module.__dict__[place.name] = place.proxy
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
        copies = tuple(tie.name for tie in tied if index in tie.copies)
        others = _of_other_stages(parts, index, len(owned))
        stages.append(Stage(parts, index, copies, others, _outer_of(parts, index)))
    return Split(parts, tuple(stages), tied)


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
    found = {}
    for first, use in parts.recording.parameters.items():
        if is_local(use, phases):
            places = [place_of(parts.model, name, parts.device) for name in use.names]
            found[first] = [place for place in places if id(place.module) not in inside]
    return found
