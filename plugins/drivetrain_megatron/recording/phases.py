"""Divides one look at a model into phases: its blocks in order, and the uses of each parameter.

The calls of the model's blocks divide a forward into phases: phase 0 comes before the first block,
phase ``k`` is the rest up to and with block ``k``, phase ``n`` follows the last of ``n`` blocks.
Every tensor that follows from parameters belongs to the phase where it is made. A stage holds whole
phases, and gets all tensors that cross its bound (``crossing``). A tensor that cannot cross is a
dependency that keeps phases together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from drivetrain.errors import UsageError
from drivetrain.model.look import BlockCall, Look, ModelOperation
from drivetrain.model.recorder import look_at
from drivetrain.parts.blocks import NamedModule
from drivetrain.parts.naming import clean_name, uncompiled
from drivetrain_megatron.recording.crossing import (
    CallPlace,
    Crossing,
    Step,
    crossings,
    writes_in_place,
)
from drivetrain_megatron.recording.proxy import StageProxy
from drivetrain_megatron.recording.structure import (
    Carried,
    Structure,
    TensorMeta,
    changed,
    described,
)
from drivetrain_megatron.recording.units import modules_by_name


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


def record(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Recording:
    """Look once at a model, also on the meta device, and divide the look into phases.

    Raises:
        UsageError: the model has no repeated blocks, or depends on values.
    """
    look = look_at(uncompiled(model), args, kwargs, kind=StageProxy, isolated=True)
    return recording_of(model, look)


def recording_of(model: nn.Module, look: Look) -> Recording:
    """Divide a look, with the model's blocks isolated, into phases.

    Raises:
        UsageError: the look has no blocks, leaves one out, or calls one inside of another.
    """
    if not look.candidates:
        raise UsageError(
            f"expected a model with modules that can be blocks, found none in "
            f"{type(model).__name__}: a pipeline cuts between calls of modules with parameters"
        )
    replay = _Replay(look)
    replay.run()
    return replay.recording("" if uncompiled(model) is model else "_orig_mod.")


def block_order(recording: Recording, model: nn.Module) -> list[NamedModule]:
    """Return a model's distinct blocks in the order of their first calls."""
    modules = modules_by_name(model)
    return [(name, modules[name]) for name in recording.names]


class _Replay:
    """Follows a look with blocks isolated, and keeps the phase of each tensor."""

    def __init__(self, look: Look) -> None:
        self._look = look
        self._made_in: dict[int, int] = {}  # phases of tensors that follow from parameters
        self._names = {number: name for name, number in look.parameters.items()}
        self._buffers = {number: name for name, number in look.buffers.items()}
        self._used: dict[str, set[int]] = {name: set() for name in look.parameters}
        self._buffer_used: dict[str, set[int]] = {name: set() for name in look.buffers}
        self._ambient: set[str] = set()
        self._blocks: list[Block] = []
        self._dependencies: dict[tuple[int, int], Dependency] = {}
        self._inside: dict[
            int, str
        ] = {}  # tensors that a block made: the code after it gets others
        self._steps: list[Step] = []
        self._between = [0]

    @property
    def phase(self) -> int:
        """The phase that is followed."""
        return len(self._blocks)

    def run(self) -> None:
        """Follow the whole forward."""
        _check_calls(self._look.blocks)
        position = 0
        for call in self._look.blocks:
            self._between[-1] += self._follow(range(position, call.operations.start), None)
            self._follow_block(call)
            self._between.append(0)
            position = call.operations.stop
        self._between[-1] += self._follow(range(position, len(self._look.operations)), None)
        self._finish()

    def _follow_block(self, call: BlockCall) -> None:
        work = self._follow(call.operations, call)
        output = described(call, self._look, self._everywhere)
        like = self._like(output, call)
        self._blocks.append(Block(call.name, call.names, output, like, work))
        made = {number for each in self._look.inside(call) for number in each.outputs}
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
            for inner in self._look.modules
            if inner.hooked
            and call.operations.start <= inner.operations.start
            and inner.operations.stop <= call.operations.stop
            for number in inner.outputs
        ]

    def _follow(self, operations: range, block: BlockCall | None) -> int:
        """Follow operations in one phase, of a block or between blocks; return their work."""
        work = 0
        for index in operations:
            operation = self._look.operations[index]
            work += 0 if operation.known else operation.work
            self._follow_one(operation, block)
        return work

    def _follow_one(self, operation: ModelOperation, block: BlockCall | None) -> None:
        if any(self._follows(number) for number in operation.inputs):
            for number in {*operation.outputs} - {*operation.inputs} | {*operation.changed}:
                if not self._look.tensors[number].known:
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
                self._depend(
                    number, f"a tensor that {what} uses and that is no argument of the block"
                )

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

    def _everywhere(self, number: int) -> bool:
        """Whether every stage has a tensor itself: it depends on no parameter."""
        return not self._follows(number)

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
                    facts = self._look.tensors[number].facts
                    if facts.shape == shape and facts.dtype == dtype:
                        same.append((self._everywhere(number), place))
            found.append(min(same)[1] if same else None)
        return tuple(found)

    def _finish(self) -> None:
        """Check that no block was left out."""
        called = {call.name for call in self._look.blocks}
        missing = [name for name in self._look.candidates if name not in called]
        if missing:
            raise UsageError(
                f"expected every repeated block to be called in a forward, found that "
                f"{', '.join(missing[:3])} and {max(len(missing) - 3, 0)} more were not: blocks "
                "must not be skipped, also not at random (LayerDrop)"
            )

    def recording(self, prefix: str) -> Recording:
        """Return the recording; names of parameters and buffers get a prefix."""
        aliases = self._look.aliases
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
        output = [number for _, number in self._look.output]
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
        facts, requires_grad, _ = self._look.tensors[number]
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


def _check_calls(calls: Sequence[BlockCall]) -> None:
    """Check that blocks are called in turn."""
    for call in calls:
        if call.caller is not None:
            raise UsageError(
                f"expected blocks one after another, found {call.name!r} called by "
                f"{call.caller!r}: a pipeline cuts between blocks that do not call each other"
            )
