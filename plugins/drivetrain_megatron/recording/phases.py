"""Divides one trace of a model into phases: its blocks in order, and the uses of each parameter.

The calls of the model's blocks divide a forward into phases: phase 0 comes before the first block,
phase ``k`` is the rest up to and with block ``k``, phase ``n`` follows the last of ``n`` blocks.
Every tensor that follows from parameters belongs to the phase where it is made. A stage holds whole
phases, and gets all tensors that cross its bound. A tensor that cannot cross is a dependency that
keeps phases together.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten

from drivetrain.errors import UsageError
from drivetrain.model.guard import Arguments, Function, Keywords
from drivetrain.model.modules import NamedModule, clean_name, repeated_blocks, uncompiled
from drivetrain.model.trace import BlockCall, ModelOperation, ModelTrace, trace_model

# --- the result of a block: which tensors travel to the next, which values stay everywhere ---

# A result is a tree. Of its leaves, tensors that the block made are *carried*: they exist where the
# block ran. A leaf that the block only handed through and that every stage has, such as a mask, is
# *passed*: the argument of the call takes its place. Plain values such as None are *constants*.


PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, Enum)


class TensorMeta(NamedTuple):
    """The facts of a tensor that the receiver must know in advance.

    The last says whether a gradient goes back.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False


class Carried(NamedTuple):
    """A tensor that the block made, by its place among the carried tensors of the result."""

    place: int


class Passed(NamedTuple):
    """An argument that the block returned, by its place among the leaves of the arguments."""

    place: int


class Constant(NamedTuple):
    """A value that is the same in every call."""

    value: Any


Leaf: TypeAlias = Carried | Passed | Constant


@dataclass(frozen=True, slots=True)
class Structure:
    """The tree that a block returns.

    Attributes:
        tree: the shape of the tree.
        leaves: the kinds of its leaves.
        arguments: how many leaves the arguments of the call had.
        metas: of the carried tensors, in order.
    """

    tree: TreeSpec
    leaves: tuple[Leaf, ...]
    arguments: int
    metas: tuple[TensorMeta, ...]

    def carried(self, block: str, result: Any) -> tuple[Tensor, ...]:
        """Return the tensors of a result of a block that travel, in order.

        Raises:
            UsageError: the result is another tree than the recorded one.
        """
        leaves, tree = tree_flatten(result)
        if tree != self.tree:
            found, expected = _in_words(tree), _in_words(self.tree)
            raise changed(block, f"a result of {found}", f"a result of {expected}")
        chosen = [
            leaf
            for leaf, kind in zip(leaves, self.leaves, strict=True)
            if isinstance(kind, Carried)
        ]
        for leaf in chosen:
            if not isinstance(leaf, Tensor):
                raise changed(block, f"a {type(leaf).__name__} in its result", "a tensor")
        return tuple(chosen)

    def build(self, block: str, tensors: Sequence[Tensor], arguments: Sequence[Any]) -> Any:
        """Return the tree with given tensors, and with leaves of the arguments of this call.

        Raises:
            UsageError: arguments are returned, and the call has another number of them than the
                recorded one.
        """
        passes = any(isinstance(leaf, Passed) for leaf in self.leaves)
        if passes and len(arguments) != self.arguments:
            raise changed(block, f"{len(arguments)} arguments", f"{self.arguments}")

        def fill(leaf: Leaf) -> Any:
            if isinstance(leaf, Carried):
                return tensors[leaf.place]
            return arguments[leaf.place] if isinstance(leaf, Passed) else leaf.value

        return self.tree.unflatten([fill(leaf) for leaf in self.leaves])


def _in_words(tree: TreeSpec) -> str:
    """Return the structure of a result in one line, such as ``tuple (value, list of 3 values)``."""
    if tree.is_leaf():
        return "value"
    parts, kind = tree.children(), tree.type.__name__
    if len(parts) > 1 and all(part.is_leaf() for part in parts):
        return f"{kind} of {len(parts)} values"
    return f"{kind} ({', '.join(map(_in_words, parts))})"


def changed(block: str, found: str, expected: str) -> UsageError:
    """Return the error for a block that is not called as when the model was recorded."""
    return UsageError(
        f"expected block {block!r} to be called as in the recording of the model, with {expected}, "
        f"found {found}: the stages of a pipeline need the same structure in every forward; call "
        "the model with the same arguments, or give model.example_inputs those that it trains with"
    )


def described(call: BlockCall, trace: ModelTrace, follows: Callable[[int], bool]) -> Structure:
    """Return the structure of a block's result; ``follows`` tells tensors that not all stages have.

    Raises:
        UsageError: the result holds an object that other stages cannot have.
    """
    kinds: list[Leaf] = []
    metas: list[TensorMeta] = []
    for leaf in call.returned:
        is_plain = leaf.number is None and isinstance(leaf.value, PLAIN)
        shared = leaf.number is None or not follows(leaf.number)
        if leaf.argument is not None and not is_plain and shared:
            kinds.append(Passed(leaf.argument))
        elif leaf.number is not None:
            kinds.append(Carried(len(metas)))
            facts = trace.tensors[leaf.number].facts
            metas.append(TensorMeta(facts.shape, facts.dtype, leaf.requires_grad))
        elif is_plain:
            kinds.append(Constant(leaf.value))
        else:
            raise UsageError(
                f"expected block {call.name!r} to return tensors, plain values or its own "
                f"arguments, found a {type(leaf.value).__name__}: other pipeline stages cannot "
                "have this object; return its tensors in a tuple or dict, or make it before the "
                "first block"
            )
    return Structure(call.tree, tuple(kinds), len(call.given), tuple(metas))


# --- the modules that count as blocks: repeated ones, or modules called in turn ---

# A model without repeated blocks, such as a Sequential of unlike layers, is taken apart along its
# modules, the costliest first, until the pieces are small against a stage. A module that is called
# several times is several pieces.


_PIECES = 2
"""Pieces per stage: no piece that can be taken apart has more than this part of a stage's work."""


def blocks_for(
    model: nn.Module, args: Arguments, kwargs: Keywords, stages: int
) -> list[NamedModule]:
    """Return the modules that count as blocks, under the names of the user's uncompiled model.

    Args:
        model: uncompiled, not changed.
        args: example inputs.
        kwargs: example inputs by name.
        stages: how many the pipeline has.
    """
    repeated = repeated_blocks(model)
    if len(repeated) >= stages:
        return repeated
    trace = trace_model(model, args, kwargs, blocks=(), training=True)
    return _Pieces(model, trace).chosen(stages) or repeated


def named_blocks(names: Iterable[str], model: nn.Module) -> list[NamedModule]:
    """Return the blocks of these names, such as the candidates of a trace, called or not.

    Names are those of the uncompiled model; of a compiled module the outside is returned.
    """
    modules: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        modules.setdefault(clean_name(name), module)
    return [(name, modules[name]) for name in names]


class _Pieces:
    """The modules of a model that are called, by the work of their costliest call."""

    def __init__(self, model: nn.Module, trace: ModelTrace) -> None:
        self._modules = dict(model.named_modules())
        self._total = trace.work
        self._work: dict[str, int] = {}
        for call in trace.modules:
            work = sum(operation.work for operation in trace.inside(call))
            self._work[call.name] = max(self._work.get(call.name, 0), work)

    def chosen(self, stages: int) -> list[NamedModule]:
        """Return as few modules as stages can be made of evenly."""
        pieces = self._parts("")
        limit = self._total / (_PIECES * stages)
        while True:
            large = [p for p in pieces if self._work[p] > limit or len(pieces) < stages]
            divisible = [piece for piece in large if len(self._parts(piece)) > 1]
            if not divisible:
                return [(clean_name(piece), self._modules[piece]) for piece in pieces]
            costliest = max(divisible, key=self._work.__getitem__)
            place = pieces.index(costliest)
            pieces[place : place + 1] = self._parts(costliest)

    def _parts(self, name: str) -> list[str]:
        """Return the outermost called modules with parameters inside of a module."""
        module = self._modules[name]
        is_layer = type(module).__module__.startswith("torch.nn.") and name in self._work
        if is_layer and not isinstance(module, nn.Sequential):
            return []  # whatever it is made of
        found: list[str] = []
        for child in module._modules:
            full = f"{name}.{child}" if name else child
            if full not in self._modules or not any(True for _ in self._modules[full].parameters()):
                continue  # registered under another name before, or without parameters
            found += [full] if full in self._work else self._parts(full)
        return found


# --- the tensors that cross a bound between blocks: made before a cut, and used behind ---

# A forward is a sequence of steps: calls of blocks, and functions of torch in the code around them.
# Between two blocks there are several positions for a cut; the one with the fewest bytes counts.
# After ``h = h + block(h)`` a single tensor crosses, before the sum there are two.


class CallPlace(NamedTuple):
    """One call in a forward.

    Attributes:
        phase: how many blocks have been called before, the block itself included.
        function: name of the function of torch; empty for the block.
        given: the shapes of its tensors, which tell the calls for a mask, as many as its values
            ask for, from the calls for activations.
        call: how many calls of the function with these shapes came before it in the phase.
    """

    phase: int
    function: str = ""
    given: tuple[tuple[int, ...], ...] = ()
    call: int = 0


class Origin(NamedTuple):
    """The place where a tensor is made, and its place among the tensors of the result.

    Behind those of a block's result come those that hooks collect inside of it.
    """

    place: CallPlace
    leaf: int


@dataclass(frozen=True, slots=True)
class Step:
    """A block's call, or a function's call outside of blocks; tensors are numbers.

    Attributes:
        place: of the call.
        inputs: tensors that follow from parameters; None for others.
        outputs: tensors that are returned, likewise.
        changed: those that are written into.
        bases: of outputs that show the memory of other tensors, by output.
        hooked: tensors inside of a block that hooks of the script get.
    """

    place: CallPlace
    inputs: Sequence[int | None]
    outputs: Sequence[int | None]
    changed: Sequence[int] = ()
    bases: Sequence[tuple[int, int]] = ()
    hooked: Sequence[int | None] = ()

    @property
    def made(self) -> Sequence[int | None]:
        """All tensors that code after the step may use."""
        return (*self.outputs, *self.hooked)


@dataclass(frozen=True, slots=True)
class Crossing:
    """The tensors that cross the bound after a block.

    Attributes:
        origins: of these tensors, in order.
        metas: of these tensors.
        position: the call right before the cut.
        changes: the functions that write into them before the cut: not called again after it.
        handed: where code after the block returns them for the last time before the cut.
        rewritten: the origins of tensors that functions write into after the cut.
        obstacle: the reason why no stage can begin here; empty where one can.
    """

    origins: tuple[Origin, ...]
    metas: tuple[TensorMeta, ...]
    position: CallPlace
    changes: frozenset[CallPlace]
    handed: frozenset[Origin]
    rewritten: frozenset[Origin]
    obstacle: str = ""

    @property
    def rank(self) -> tuple[bool, int, int]:
        """The lower, the better a cut here: few bytes, and no copies of tensors written into."""
        return bool(self.obstacle), self.nbytes, len(self.rewritten)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(prod(meta.shape) * meta.dtype.itemsize for meta in self.metas)


MetaOf: TypeAlias = Callable[[int], TensorMeta]


def crossings(
    steps: Sequence[Step], meta_of: MetaOf, output: Collection[int | None] = ()
) -> tuple[Crossing, ...]:
    """Return the crossing after each block, in the order of the blocks' calls.

    Args:
        steps: of one forward, in order.
        meta_of: returns the facts of a tensor.
        output: the tensors in the model's output.
    """
    return _Sweep(steps, meta_of, output).run()


def writes_in_place(func: Function, args: Arguments, kwargs: Keywords) -> bool:
    """Whether the argument ``inplace`` tells a function of torch to write into its input."""
    if "inplace" not in kwargs and not any(arg is True for arg in args):
        return False
    try:
        given = inspect.signature(func).bind(*args, **kwargs).arguments
    except ValueError:  # a function of C++, which has no such argument
        return False
    return bool(given.get("inplace"))


@dataclass(slots=True)
class _Live:
    """A tensor that may cross: the index of its step, and its origin."""

    step: int
    origin: Origin


class _Sweep:
    """Goes once through the steps, with the tensors that are still to be used."""

    def __init__(
        self, steps: Sequence[Step], meta_of: MetaOf, output: Collection[int | None]
    ) -> None:
        self._steps, self._meta_of = steps, meta_of
        self._roots: dict[int, int] = {}
        self._last_use: dict[int, int] = {}
        self._changes: defaultdict[int, list[int]] = defaultdict(list)  # steps, by memory
        self._live: dict[int, _Live] = {}
        self._known: set[int] = set()  # tensors that steps have made
        for index, step in enumerate(steps):
            self._roots |= {made: self._root(base) for made, base in step.bases}
            self._last_use |= {n: index for n in (*step.inputs, *step.changed) if n is not None}
            for number in step.changed if step.place.function else ():
                self._changes[self._root(number)].append(index)
        self._blocks = [i for i, step in enumerate(steps) if not step.place.function]
        self._see_unseen_uses()
        hooked = {n for step in steps for n in step.hooked if n is not None}
        self._last_use |= dict.fromkeys(hooked.intersection(output), len(steps))

    def run(self) -> tuple[Crossing, ...]:
        found: list[Crossing] = []
        begun = 0
        for block in self._blocks:
            self._advance(begun, block + 1)
            here = [self._crossing(block, block)]
            begun = block + 1
            # The rest of the model begins right after the last block: its code may mix rows.
            while self._moves(begun) and (block != self._blocks[-1] or here[-1].obstacle):
                self._advance(begun, begun + 1)
                here.append(self._crossing(block, begun))
                begun += 1
            found.append(min(here, key=lambda crossing: crossing.rank))
        return tuple(found)

    def _see_unseen_uses(self) -> None:
        """Keep results of blocks that no step uses: the model or a custom function may.

        Such a function, which autograd alone sees, may lie between a block and the next.
        """
        for block, following in pairwise([*self._blocks, len(self._steps)]):
            for number in self._steps[block].outputs:
                is_last = following == len(self._steps)
                if number is not None and (is_last or number not in self._last_use):
                    self._last_use[number] = following

    def _root(self, number: int) -> int:
        return self._roots.get(number, number)

    def _moves(self, index: int) -> bool:
        """Whether a step can be computed before a cut: of tensors that other steps made alone."""
        if index == len(self._steps):
            return False
        step = self._steps[index]
        return bool(step.place.function) and self._known.issuperset(step.inputs)

    def _advance(self, start: int, stop: int) -> None:
        for index in range(start, stop):
            step = self._steps[index]
            for leaf, number in enumerate(step.made):
                if number is not None and number not in step.inputs:
                    self._live[number] = _Live(index, Origin(step.place, leaf))
                    self._known.add(number)
            gone = [n for n in self._live if self._last_use.get(n, -1) <= index]
            for number in gone:
                del self._live[number]

    def _crossing(self, block: int, index: int) -> Crossing:
        """Return the crossing right after a step, which follows a block."""
        changes: set[CallPlace] = set()
        handed: set[Origin] = set()
        rewritten: set[Origin] = set()
        obstacle = ""
        roots = [self._root(number) for number in self._live]
        for number, made in self._live.items():
            root = self._root(number)
            past = [i for i in self._changes[root] if made.step < i <= index]
            later = [i for i in self._changes[root] if i > index]
            changes |= {self._steps[i].place for i in past}
            # From here the code of the stage before has the tensor, which it may hand out last.
            last = past[-1] if past else made.step
            if last > block and number in self._steps[last].outputs:
                leaf = [*self._steps[last].outputs].index(number)
                handed.add(Origin(self._steps[last].place, leaf))
            keeps = last < block or (last == block and index > block)
            rewritten |= {made.origin} if later else set()
            if later and (keeps or roots.count(root) > 1):
                function = self._steps[later[0]].place.function
                obstacle = f"a tensor that {function} writes into later, and other code has, too,"
        return Crossing(
            tuple(made.origin for made in self._live.values()),
            tuple(self._meta_of(number) for number in self._live),
            self._steps[index].place,
            frozenset(changes),
            frozenset(handed),
            frozenset(rewritten),
            obstacle,
        )


# --- the phases ---


@dataclass(frozen=True, slots=True)
class Block:
    """One block as it was called.

    Attributes:
        name: of the module, as in the user's uncompiled model.
        arguments: names of the leaves of its arguments.
        output: the structure of its result.
        like: for each carried tensor of the output, the place of an argument of the same shape and
            dtype; None without such an argument.
        work: floating point operations of its matrix products, for the recorded inputs.
    """

    name: str
    arguments: tuple[str, ...]
    output: Structure
    like: tuple[int | None, ...]
    work: int


@dataclass(frozen=True, slots=True)
class Dependency:
    """A tensor that an earlier phase makes, a later one needs, and that cannot cross a bound.

    Attributes:
        source: the phase of its values.
        consumer: the phase with the need.
        what: the block and its argument, in words.
    """

    source: int
    consumer: int
    what: str


@dataclass(frozen=True, slots=True)
class Use:
    """Where a parameter or buffer is used.

    Attributes:
        names: all its names in the model; checkpoints have the first.
        phases: of its uses, if there are any; a parameter of a block is used in the block's phase.
        ambient: of a buffer, whether every stage computes with it outside of blocks, without
            parameters.
    """

    names: tuple[str, ...]
    phases: frozenset[int]
    ambient: bool = False


@dataclass(frozen=True, slots=True)
class Recording:
    """The phases of one forward of a model.

    Attributes:
        blocks: the calls of blocks in order.
        names: of the distinct blocks, in the order of their first calls.
        parameters: the distinct parameters by their first name.
        buffers: the buffers by name.
        between: floating point operations outside of blocks, for each phase.
        dependencies: the tensors that keep phases together.
        crossings: the tensors for a stage that begins after each block.
    """

    blocks: tuple[Block, ...]
    names: tuple[str, ...]
    parameters: Mapping[str, Use]
    buffers: Mapping[str, Use]
    between: tuple[int, ...]
    dependencies: tuple[Dependency, ...]
    crossings: tuple[Crossing, ...]

    def called(self, number: int, index: int) -> Block:
        """Return a call of a block by its number, for the block of an index among the names.

        Raises:
            UsageError: in the recording this call is another block's.
        """
        found, calls = self.names[index], self.blocks
        if number >= len(calls) or calls[number].name != found:
            expected = calls[number].name if number < len(calls) else "after the last"
            raise changed(expected, f"a call of {found!r} in its place", "one call in order")
        return calls[number]

    def costs(self) -> list[float]:
        """Return the estimated cost of each block, with the operations since the block before.

        The cost before the first block and after the last is in ``between[0]`` and ``between[-1]``.
        """
        n = len(self.blocks)
        return [
            float(block.work + (self.between[k] if 0 < k < n else 0))
            for k, block in enumerate(self.blocks)
        ]


def recording_of(model: nn.Module, trace: ModelTrace) -> Recording:
    """Divide a trace, with the model's blocks isolated, into phases.

    Raises:
        UsageError: the trace has no blocks, leaves one out, or calls one inside of another.
    """
    if not trace.candidates:
        raise UsageError(
            f"expected a model with modules that can be blocks, found none in "
            f"{type(model).__name__}: a pipeline cuts between calls of modules with parameters"
        )
    replay = _Replay(trace)
    replay.run()
    return replay.recording("" if uncompiled(model) is model else "_orig_mod.")


class _Replay:
    """Follows a trace with blocks isolated, and keeps the phase of each tensor."""

    def __init__(self, trace: ModelTrace) -> None:
        self._trace = trace
        self._made_in: dict[int, int] = {}  # phases of tensors that follow from parameters
        self._names = {number: name for name, number in trace.parameters.items()}
        self._buffers = {number: name for name, number in trace.buffers.items()}
        self._used: dict[str, set[int]] = {name: set() for name in trace.parameters}
        self._buffer_used: dict[str, set[int]] = {name: set() for name in trace.buffers}
        self._ambient: set[str] = set()
        self._blocks: list[Block] = []
        self._dependencies: dict[tuple[int, int], Dependency] = {}
        # Tensors that a block made: the code after it gets others.
        self._inside: dict[int, str] = {}
        self._steps: list[Step] = []
        self._between = [0]

    @property
    def phase(self) -> int:
        """The phase that is followed."""
        return len(self._blocks)

    def run(self) -> None:
        """Follow the whole forward.

        Raises:
            UsageError: a block calls another one, or is left out.
        """
        for call in self._trace.blocks:
            if call.caller is not None:
                raise UsageError(
                    f"expected blocks one after another, found {call.name!r} called by "
                    f"{call.caller!r}: a pipeline cuts between blocks that do not call each other"
                )
        position = 0
        for call in self._trace.blocks:
            self._between[-1] += self._follow(range(position, call.operations.start), None)
            self._follow_block(call)
            self._between.append(0)
            position = call.operations.stop
        self._between[-1] += self._follow(range(position, len(self._trace.operations)), None)
        called = {call.name for call in self._trace.blocks}
        missing = [name for name in self._trace.candidates if name not in called]
        if missing:
            raise UsageError(
                f"expected every repeated block to be called in a forward, found that "
                f"{', '.join(missing[:3])} and {max(len(missing) - 3, 0)} more were not: blocks "
                "must not be skipped, also not at random (LayerDrop)"
            )

    def _follow_block(self, call: BlockCall) -> None:
        work = self._follow(call.operations, call)
        output = described(call, self._trace, self._follows)
        like = self._like(output, call)
        self._blocks.append(Block(call.name, call.names, output, like, work))
        made = {number for each in self._trace.inside(call) for number in each.outputs}
        hooked = [number for number in self._collected(call) if number in made]
        self._inside |= dict.fromkeys(made - {*call.given} - {*self._names} - {*hooked}, call.name)
        handed = [
            leaf.handed
            for leaf, kind in zip(call.returned, output.leaves, strict=True)
            if leaf.handed is not None and isinstance(kind, Carried)
        ]
        given = [self._dependent(n) for n in call.given if n is not None]
        self._made_in |= dict.fromkeys(handed, self.phase)
        known = [self._dependent(number) for number in hooked]
        self._steps.append(Step(CallPlace(self.phase), given, handed, hooked=known))

    def _collected(self, call: BlockCall) -> list[int]:
        """Return the tensors inside of a block that hooks of the script get."""
        return [
            number
            for inner in self._trace.modules
            if inner.hooked
            and call.operations.start <= inner.operations.start
            and inner.operations.stop <= call.operations.stop
            for number in inner.outputs
        ]

    def _follow(self, operations: range, block: BlockCall | None) -> int:
        """Follow operations in one phase, of a block or between blocks; return their work."""
        work = 0
        for index in operations:
            operation = self._trace.operations[index]
            work += 0 if operation.known else operation.work
            self._follow_one(operation, block)
        return work

    def _follow_one(self, operation: ModelOperation, block: BlockCall | None) -> None:
        if any(self._follows(number) for number in operation.inputs):
            for number in {*operation.outputs} - {*operation.inputs} | {*operation.changed}:
                if not self._trace.tensors[number].known:
                    self._made_in[number] = self.phase
        dependent = any(self._follows(number) for number in operation.outputs)
        if block is None:
            self._add_step(operation)
        for number in operation.inputs:
            self._note(number, dependent, None if block is None else block.name)
            if block is None and number in self._inside:
                owner = f"block {self._inside[number]!r} made and did not return"
                self._depend(number, f"a tensor that {operation.name} uses and that {owner},")
            if block is not None and number not in block.given:
                what = f"{operation.name} in block {block.name!r}"
                what = f"a tensor that {what} uses and that is no argument of the block"
                self._depend(number, what)

    def _add_step(self, operation: ModelOperation) -> None:
        """Note an operation outside of blocks whose results are not on every stage."""
        changed = {*operation.changed}
        if writes_in_place(operation.function, operation.args, operation.kwargs):
            changed |= {*operation.outputs} & {*operation.inputs}
        written = [number for number in changed if self._follows(number)]
        outputs = [self._dependent(number) for number in operation.outputs]
        if written or any(number is not None for number in outputs):
            inputs = [self._dependent(number) for number in operation.inputs]
            bases = [(view.made, view.base) for view in operation.views]
            place = CallPlace(self.phase, operation.name)
            self._steps.append(Step(place, inputs, outputs, written, bases))

    def _note(self, number: int, dependent: bool, block: str | None) -> None:
        """Note the use of a parameter or buffer."""
        if number in self._names:
            self._used[self._names[number]].add(self.phase)
        buffer = self._buffers.get(number)
        if buffer is not None:
            self._buffer_used[buffer].add(self.phase)
            if block is None and not dependent:
                self._ambient.add(buffer)

    def _follows(self, number: int) -> bool:
        """Whether a tensor follows from parameters, and is not on every stage."""
        return number in self._names or number in self._made_in

    def _dependent(self, number: int) -> int | None:
        return number if self._follows(number) else None

    def _depend(self, number: int, what: str) -> None:
        """Note a tensor that comes from an earlier phase, and cannot cross a bound."""
        source = self._made_in.get(number, self.phase)
        if source < self.phase:
            key = (source, self.phase)
            self._dependencies.setdefault(key, Dependency(*key, what))

    def _like(self, output: Structure, call: BlockCall) -> tuple[int | None, ...]:
        """Return for each carried tensor the first carried argument of its shape and dtype."""
        found: list[int | None] = []
        for shape, dtype, _ in output.metas:
            same = []
            for place, number in enumerate(call.given):
                if number is not None:
                    facts = self._trace.tensors[number].facts
                    if facts.shape == shape and facts.dtype == dtype:
                        same.append((not self._follows(number), place))
            found.append(min(same)[1] if same else None)
        return tuple(found)

    def recording(self, prefix: str) -> Recording:
        """Return the recording; names of parameters and buffers get a prefix."""
        aliases = self._trace.aliases
        for phase, block in enumerate(self._blocks):
            inside = block.name + "."
            for first, names in aliases.items():
                if any(clean_name(name).startswith(inside) for name in names):
                    self._used[first].add(phase)
            for name in self._buffer_used:
                if clean_name(name).startswith(inside):
                    self._buffer_used[name].add(phase)
        used = {first: min(phases) for first, phases in self._used.items() if phases}
        for first, phases in self._used.items():
            phases.update(() if phases else _phases_near(first, used))
        parameters = {
            prefix + first: Use(tuple(prefix + name for name in aliases[first]), frozenset(phases))
            for first, phases in self._used.items()
        }
        buffers = {
            prefix + name: Use((prefix + name,), frozenset(phases), name in self._ambient)
            for name, phases in self._buffer_used.items()
        }
        output = [number for _, number in self._trace.output]
        crossed = crossings(self._steps, self._meta_of, output)
        dependencies = [*self._dependencies.values()]
        dependencies += [
            Dependency(block, block + 1, crossing.obstacle)
            for block, crossing in enumerate(crossed[:-1])
            if crossing.obstacle
        ]
        return Recording(
            tuple(self._blocks),
            tuple(dict.fromkeys(block.name for block in self._blocks)),
            parameters,
            buffers,
            tuple(self._between),
            tuple(dependencies),
            crossed,
        )

    def _meta_of(self, number: int) -> TensorMeta:
        facts, requires_grad, _ = self._trace.tensors[number]
        return TensorMeta(tuple(facts.shape), facts.dtype, requires_grad)


def _phases_near(name: str, used: Mapping[str, int]) -> set[int]:
    """Return the first phase of the closest module around a parameter that no code used.

    Another call may use it in the place of one beside it: the head of which peft trains a copy.
    """
    while "." in name:
        name = name.rpartition(".")[0]
        near = [phase for other, phase in used.items() if other.startswith(name + ".")]
        if near:
            return {min(near)}
    return set()
