"""The shapes that blocks return for given inputs, known before anything is computed or received."""

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only

from drivetrain.log import get_logger
from drivetrain.model.guard import STANDS_FOR, Arguments, Function, Keywords, targets
from drivetrain.model.modules import BlockHooks, hooks_of_script
from drivetrain.model.untouched import without_values
from drivetrain.model.valueless import SEED, ValuelessTensor, filled, random_like
from drivetrain.nested import tensors_in
from drivetrain.runtime import rng
from drivetrain_megatron.recording.phases import (
    PLAIN,
    Block,
    CallPlace,
    Crossing,
    Origin,
    Recording,
    Step,
    TensorMeta,
    changed,
    crossings,
    writes_in_place,
)
from drivetrain_megatron.recording.proxy import StageProxy

# --- tensors that hooks collect inside of blocks, such as router logits for an auxiliary loss ---

# A forward hook on a module inside of a block may keep the module's result for code after the
# block. On a stage where the block does not run, the hook is called with the tensors that this
# stage has received, or with proxies.


Modules: TypeAlias = Mapping[str, nn.Module]


class SeenCall(NamedTuple):
    """A call of a module inside of a block: its name there, its arguments, its result."""

    name: str
    given: Any
    result: Any


@dataclass(frozen=True, slots=True)
class HookedCall:
    """The facts of a call of a module with hooks.

    Attributes:
        name: of the module inside of its block.
        given: its arguments (args, kwargs), with a ``TensorMeta`` in the place of a tensor.
        result: likewise.
        leaf: the place of its first tensor among those that the block makes.
    """

    name: str
    given: Any
    result: Any
    leaf: int

    @property
    def metas(self) -> list[TensorMeta]:
        """The facts of the tensors in its result, in order."""
        return [leaf for leaf in tree_leaves(self.result, _is_meta) if _is_meta(leaf)]

    @property
    def leaves(self) -> range:
        """The places of the tensors in its result among all tensors of the block."""
        return range(self.leaf, self.leaf + len(self.metas))


def hooked_modules(block: nn.Module) -> Modules:
    """Return the modules inside of a block on which the script has put forward hooks."""
    return {
        name: module for name, module in block.named_modules() if name and hooks_of_script(module)
    }


@contextmanager
def calls_of(modules: Modules) -> Iterator[list[SeenCall]]:
    """Context that yields the calls of modules, in the order of their ends."""
    seen: list[SeenCall] = []

    def noted(name: str) -> Callable[..., None]:
        return lambda _, args, kwargs, result: seen.append(SeenCall(name, (args, kwargs), result))

    handles = [
        module.register_forward_hook(noted(name), with_kwargs=True)
        for name, module in modules.items()
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def facts_of_calls(seen: Sequence[SeenCall], first: int) -> list[HookedCall]:
    """Return the facts of a block's calls, whose tensors follow those of the block's result."""
    found: list[HookedCall] = []
    for call in seen:
        given, result = tree_map(_fact, (call.given, call.result))
        found.append(HookedCall(call.name, given, result, first))
        first += len(found[-1].metas)
    return found


def run_with_hooks(
    name: str, block: nn.Module, expected: Sequence[HookedCall], compute: Callable[[], Any]
) -> tuple[Any, list[Tensor]]:
    """Return the result of a block, and the tensors that hooks collect inside, in order.

    Raises:
        UsageError: modules with hooks were called in another way than expected.
    """
    with calls_of({call.name: block.get_submodule(call.name) for call in expected}) as seen:
        result = compute()
    found = [[leaf for leaf in tree_leaves(c.result) if isinstance(leaf, Tensor)] for c in seen]
    calls = [(call.name, len(tensors)) for call, tensors in zip(seen, found, strict=True)]
    if calls != (wanted := [(call.name, len(call.metas)) for call in expected]):
        what = "results (module, tensors) for hooks to collect"
        raise changed(name, f"{what} {calls}", f"{what} {wanted}")
    return result, [tensor for tensors in found for tensor in tensors]


def tell_hooks(
    block: nn.Module, calls: Sequence[HookedCall], tensors: Sequence[Tensor], device: torch.device
) -> None:
    """Call the script's hooks inside of a block.

    Given tensors are in the results, in order; proxies are the arguments.
    """
    waiting = iter(tensors)
    for call in calls:
        module = block.get_submodule(call.name)
        args, kwargs = _filled(call.given, lambda meta: StageProxy.like(*meta[:2], device))
        result = _filled(call.result, lambda _: next(waiting))
        for number, hook in hooks_of_script(module).items():
            named = (kwargs,) if number in module._forward_hooks_with_kwargs else ()
            hook(module, args, *named, result)


def _fact(leaf: Any) -> Any:
    """Return the facts of a tensor, and plain values as they are: objects are not kept alive."""
    if isinstance(leaf, Tensor):
        return TensorMeta(tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
    return leaf if isinstance(leaf, PLAIN) else None


def _filled(tree: Any, make: Callable[[TensorMeta], Tensor]) -> Any:
    return tree_map(lambda leaf: make(leaf) if _is_meta(leaf) else leaf, tree, is_leaf=_is_meta)


def _is_meta(leaf: Any) -> bool:
    return isinstance(leaf, TensorMeta)


# --- the functions of torch that the code around blocks calls, each at its place ---


CallFunction: TypeAlias = Callable[[CallPlace, Function, Arguments, Keywords], Any]
"""Returns the result of a function that is called around blocks, and has not been called yet."""


class AroundBlocks(TorchFunctionMode):
    """Hands functions of torch to a caller while it is entered, except inside of blocks."""

    def __init__(self, called: CallFunction) -> None:
        super().__init__()
        self._called = called
        self._phase = 0
        self._calls: Counter[tuple[str, tuple[tuple[int, ...], ...]]] = Counter()
        self._is_inside = False
        self._depth = 0

    def __enter__(self) -> Self:
        """Begin to see functions."""
        super().__enter__()  # type: ignore[no-untyped-call]
        self._depth = torch._C._len_torch_function_stack()
        return self

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Arguments = (), kwargs: Any = None
    ) -> Any:
        """Let the watching code call a function."""
        kwargs = kwargs or {}
        if self._is_inside:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "function")
        given = tuple(tuple(tensor.shape) for tensor in tensors_in((args, kwargs)))
        place = CallPlace(self._phase, name, given, self._calls[name, given])
        self._calls[name, given] += 1
        return self._called(place, func, args, kwargs)

    def begin_phase(self, phase: int) -> None:
        """Say how many blocks have been called."""
        self._phase = phase
        self._calls.clear()

    @contextmanager
    def inside_block(self) -> Iterator[None]:
        """Context of a block's own forward, whose functions are not seen."""
        outer, self._is_inside = self._is_inside, True
        try:
            # A mode of the model's own may lie above this one.
            is_top = self._depth and torch._C._len_torch_function_stack() == self._depth
            with _pop_mode_temporarily() if is_top else nullcontext():
                yield
        finally:
            self._is_inside = outer


# --- the facts of the tensors that one block makes for given inputs, by a run of the block ---


logger = get_logger(__name__)

Known = TypeVar("Known")

_KEPT = 512
"""Combinations of input shapes that are remembered."""


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


def shapes_key(args: Arguments, kwargs: Keywords) -> Any:
    """Return a key that is equal for arguments of the same shapes, dtypes and plain values."""
    leaves, tree = tree_flatten((tuple(args), dict(kwargs)))
    return str(tree), tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf)
        for leaf in leaves
    )


def _remembered(known: dict[Any, Known], key: Any, find: Callable[[], Known]) -> Known:
    """Return what is known of a key, and find it if nothing is; the oldest of many is forgotten."""
    if key not in known:
        if len(known) >= _KEPT:
            known.pop(next(iter(known)))
        known[key] = find()
    return known[key]


def _run(block: nn.Module, compute: Function, args: Arguments, kwargs: Keywords) -> Any:
    """Return the result of a block with random values."""
    values, named = tree_map_only(
        StageProxy,
        lambda leaf: random_like(leaf.facts, leaf.requires_grad).clone(),  # it may be written into
        (args, kwargs),
    )
    with rng.fork(SEED), filled(block) as pairs, torch.enable_grad():
        for proxy, value in pairs:
            setattr(value, STANDS_FOR, proxy)  # as wide as the share of its rank
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


# --- the shapes of all blocks ---


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
        self._random: dict[Any, tuple[Any, Sequence[SeenCall]]] = {}

    def of(self, args: Arguments, kwargs: Keywords) -> CallShapes:
        """Return the facts of the tensors of each block.

        Raises:
            UsageError: a block returns another structure than when it was recorded.
        """
        mode = self._mode()
        key = (mode, shapes_key(args, kwargs))
        return _remembered(self._known, key, lambda: self._run(mode, args, kwargs))

    def _mode(self) -> Any:
        """Return the state on which dtypes depend besides the inputs."""
        casts = tuple(
            torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
            for kind in sorted({"cpu", self._device.type})
        )
        return casts, self._model.training

    def _run(self, mode: Any, args: Arguments, kwargs: Keywords) -> CallShapes:
        trusted = self._alike.get(mode, 0) >= _TRUSTED
        blocks = self._gates.blocks
        shaper = _Shaper(self._recording, blocks, trusted, self._device, self._random)
        try:
            crossed = self._around_blocks(shaper, args, kwargs)
        except _HooksSeen:
            again = replace(shaper, known=shaper.facts, seen=_SeenSteps(), facts=[])
            crossed = self._around_blocks(again, args, kwargs)
        if not trusted:
            alike = all(facts.alike for facts in shaper.facts)
            self._alike[mode] = self._alike.get(mode, 0) + 1 if alike else -(1 << 30)
        outputs = tuple(facts.metas for facts in shaper.facts)
        return CallShapes(outputs, crossed, _collected(shaper.facts, crossed))

    def _around_blocks(
        self, shaper: "_Shaper", args: Arguments, kwargs: Keywords
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
    found = []
    for number, block in enumerate(facts, start=1):
        place = CallPlace(number)
        crossing = [c for c in block.hooked if origins & {Origin(place, leaf) for leaf in c.leaves}]
        names = {call.name for call in crossing}
        found.append(tuple(call for call in block.hooked if call.name in names))
    return tuple(found)


class _SeenSteps:
    """The steps of one forward without values, and its tensors by their numbers.

    Attributes:
        code: the mode in which functions around blocks are seen.
    """

    def __init__(self) -> None:
        self.code = AroundBlocks(self.called)
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


@dataclass(eq=False)
class _Shaper:
    """Runs blocks on proxies, with random values where they cannot, or only hands their inputs on.

    Blocks of one class are taken to return the same shapes for arguments of the same shapes. With
    the facts of an earlier forward no block runs, and hooks inside of blocks get proxies.

    Attributes:
        blocks: by index.
        trusted: whether the shapes of arguments say those of results, without a run.
        random: results of runs with random values.
        known: the facts of the earlier forward.
        facts: of the blocks that were called.
        seen: the steps of the forward.
    """

    recording: Recording
    blocks: Sequence[nn.Module]
    trusted: bool
    device: torch.device
    random: dict[Any, tuple[Any, Sequence[SeenCall]]]
    known: Sequence[BlockFacts] | None = None
    seen: _SeenSteps = field(default_factory=_SeenSteps)
    facts: list[BlockFacts] = field(default_factory=list)

    def call(self, index: int, compute: Function, args: Arguments, kwargs: Keywords) -> Any:
        """Note the output of a block."""
        number = len(self.facts)
        block, module = self.recording.called(number, index), self.blocks[index]
        leaves, _ = tree_flatten((tuple(args), dict(kwargs)))
        with self.seen.code.inside_block():
            facts = (
                self._facts(block, module, compute, args, kwargs)
                if self.known is None
                else self.known[number]
            )
            self.facts.append(facts)
            made = self._proxies(facts.metas)
            hooked = self._proxies([meta for call in facts.hooked for meta in call.metas])
            result = block.output.build(block.name, made, leaves)
            if self.known is not None:
                tell_hooks(module, facts.hooked, hooked, self.device)
        is_last = len(self.facts) == len(self.recording.blocks)
        if self.known is None and is_last and any(each.hooked for each in self.facts):
            raise _HooksSeen
        self.seen.block(len(self.facts), leaves, made, hooked)
        return result

    def _facts(
        self, block: Block, module: nn.Module, compute: Function, args: Arguments, kwargs: Keywords
    ) -> BlockFacts:
        """Return the facts of the tensors that a block makes."""
        leaves, _ = tree_flatten((tuple(args), dict(kwargs)))
        hooked = hooked_modules(module)
        as_recorded = len(leaves) == block.output.arguments  # else places are of other arguments
        places = block.like if as_recorded else [None] * len(block.like)
        likes = [leaves[place] if place is not None else None for place in places]
        kept = [(tuple(like.shape), like.dtype) for like in likes if like is not None]
        calls: Sequence[SeenCall] = ()
        alike = True
        found = kept
        if not (self.trusted and as_recorded and not hooked):
            try:
                result, calls = self._result(module, hooked, compute, args, kwargs)
            except Exception as error:
                if len(kept) < len(block.output.metas) or hooked:
                    raise
                logger.warning_once(
                    f"pipeline: the shapes that block {block.name!r} returns are not known for "
                    "these inputs, and taken to be those of the arguments that they equalled when "
                    "the model was recorded: without values, and with random ones, the block "
                    f"raised {type(error).__name__}: {error}"
                )
            else:
                carried = block.output.carried(block.name, result)
                found = [(tuple(tensor.shape), tensor.dtype) for tensor in carried]
            alike = not as_recorded or all(
                isinstance(like, Tensor) and (tuple(like.shape), like.dtype) == facts
                for like, facts in zip(likes, found, strict=True)
            )
        metas = tuple(
            TensorMeta(*facts, recorded.requires_grad)
            for facts, recorded in zip(found, block.output.metas, strict=True)
        )
        return BlockFacts(metas, facts_of_calls(calls, len(metas)), alike)

    def _result(
        self,
        block: nn.Module,
        hooked: Modules,
        compute: Function,
        args: Arguments,
        kwargs: Keywords,
    ) -> tuple[Any, Sequence[SeenCall]]:
        """Return the result of a block, and its calls of modules with hooks.

        It is computed without values if the block can do so.
        """
        again = tree_map(_copied, (tuple(args), dict(kwargs)))  # a failed run may fill a cache
        try:
            with calls_of(hooked) as seen:
                return compute(*args, **kwargs), seen
        except Exception as error:  # it may depend on values
            reason = f"{type(block).__name__} runs with random values: {error}"

            def run() -> tuple[Any, Sequence[SeenCall]]:
                # Shapes of such a run are as right as without values: no news for the user.
                logger.debug(reason)
                with calls_of(hooked) as seen:
                    result = _run(block, compute, *again)
                found: tuple[Any, Sequence[SeenCall]]
                found = tree_map_only(Tensor, StageProxy.of, (result, seen))
                return found

            key = type(block), tuple(hooked), shapes_key(args, kwargs)
            return _remembered(self.random, key, run)

    def _proxies(self, metas: Sequence[TensorMeta]) -> list[StageProxy]:
        return [StageProxy.like(m.shape, m.dtype, self.device, m.requires_grad) for m in metas]


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
