"""Divides one look at a model into phases: its blocks in order, and the uses of each parameter.

The model's repeated blocks divide a forward into phases: phase 0 comes before the first block,
phase ``k`` is the rest up to and with block ``k``, phase ``n`` follows the last of ``n`` blocks.
Every tensor that follows from parameters has phases: the sources of its values. A stage holds whole
phases and gets the output of the block before them; any other tensor that reaches over a boundary
is a dependency that keeps phases together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from drivetrain.errors import UsageError
from drivetrain.model.look import BlockCall, Look, ModelOperation
from drivetrain.model.recorder import look_at
from drivetrain.parts.blocks import NamedModule, repeated_blocks
from drivetrain.parts.naming import clean_name, uncompiled
from drivetrain_megatron.recording.proxy import StageProxy
from drivetrain_megatron.recording.structure import Carried, Structure, described


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
    """A tensor that an earlier phase makes and a later one needs, besides the outputs of blocks.

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
        blocks: in the order of their calls.
        parameters: the distinct parameters by their first name.
        buffers: the buffers by name.
        between: floating point operations outside of blocks, for each phase.
        dependencies: the tensors that keep phases together.
    """

    blocks: tuple[Block, ...]
    parameters: Mapping[str, Use]
    buffers: Mapping[str, Use]
    between: tuple[int, ...]
    dependencies: tuple[Dependency, ...]

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
        UsageError: the model has no repeated blocks, calls one twice, or depends on values.
    """
    _check_repeats(model)
    look = look_at(uncompiled(model), args, kwargs, kind=StageProxy, isolated=True)
    return recording_of(model, look)


def recording_of(model: nn.Module, look: Look) -> Recording:
    """Divide a look, with the model's blocks isolated, into phases.

    Raises:
        UsageError: the model has no repeated blocks, leaves one out, or calls one twice or inside
            of another.
    """
    _check_repeats(model)
    replay = _Replay(look)
    replay.run()
    return replay.recording("" if uncompiled(model) is model else "_orig_mod.")


def block_order(recording: Recording, model: nn.Module) -> list[NamedModule]:
    """Return a model's blocks in the order in which they are called."""
    modules = dict(repeated_blocks(model))
    return [(block.name, modules[block.name]) for block in recording.blocks]


def _check_repeats(model: nn.Module) -> None:
    if not repeated_blocks(model):
        raise UsageError(
            f"expected a model with repeated blocks, such as the layers of a transformer in an "
            f"nn.ModuleList, found none in {type(model).__name__}: a pipeline cuts between blocks; "
            "put what repeats, modules of several layers, into an nn.ModuleList or nn.Sequential"
        )


class _Replay:
    """Follows a look with blocks isolated, and keeps the phases of each tensor."""

    def __init__(self, look: Look) -> None:
        self._look = look
        self._phases: dict[int, frozenset[int]] = {}
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
        for argument, number in zip(call.names, call.given, strict=True):
            self._depend(number, f"argument {argument!r} of block {call.name!r}")
        work = self._follow(call.operations, call.name)
        output = described(call, self._look, self._everywhere)
        like = self._like(output, call)
        self._blocks.append(Block(call.name, call.names, output, like, work))
        made = {number for each in self._look.inside(call) for number in each.outputs}
        self._inside |= dict.fromkeys(made - {*call.given} - {*self._names}, call.name)
        for leaf, kind in zip(call.returned, output.leaves, strict=True):
            if leaf.handed is not None and isinstance(kind, Carried):
                self._phases[leaf.handed] = frozenset({self.phase})

    def _follow(self, operations: range, block: str | None) -> int:
        """Follow operations in one phase, of a block or between blocks; return their work."""
        work = 0
        for index in operations:
            operation = self._look.operations[index]
            work += 0 if operation.known else operation.work
            self._follow_one(operation, block)
        return work

    def _follow_one(self, operation: ModelOperation, block: str | None) -> None:
        phases = frozenset[int]().union(*(self._phases_of(n) for n in operation.inputs))
        for number in {*operation.outputs} - {*operation.inputs}:
            if not self._look.tensors[number].known:
                self._phases[number] = phases
        for number in operation.changed:
            if not self._look.tensors[number].known:
                self._phases[number] = self._phases.get(number, frozenset()) | phases
        dependent = any(self._phases_of(number) for number in operation.outputs)
        for number in operation.inputs:
            self._note(number, dependent, block)
            if block is None and number in self._inside:
                owner = f"block {self._inside[number]!r} made and did not return"
                self._depend(number, f"a tensor that {operation.name} uses and that {owner},")
            if block is not None:
                what = f"{operation.name} in block {block!r}"
                self._depend(
                    number, f"a tensor that {what} uses and that is no argument of the block"
                )

    def _note(self, number: int, dependent: bool, block: str | None) -> None:
        """Note the use of a parameter or buffer."""
        if number in self._names:
            self._used[self._names[number]].add(self.phase)
        buffer = self._buffers.get(number)
        if buffer is not None:
            self._buffer_used[buffer].add(self.phase)
            if block is None and not dependent:
                self._ambient.add(buffer)

    def _phases_of(self, number: int) -> frozenset[int]:
        if number in self._names:
            return frozenset({self.phase})  # a parameter is where it is used
        return self._phases.get(number, frozenset())

    def _everywhere(self, number: int) -> bool:
        """Whether every stage has a tensor itself: it depends on no parameter."""
        return not self._phases_of(number)

    def _depend(self, number: int | None, what: str) -> None:
        """Note a tensor that comes from an earlier phase."""
        phases = frozenset[int]() if number is None else self._phases_of(number)
        if phases and min(phases) < self.phase:
            key = (min(phases), self.phase)
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
        """Check that no block was left out, and note the needs of the model's output."""
        called = {call.name for call in self._look.blocks}
        missing = [name for name in self._look.candidates if name not in called]
        if missing:
            raise UsageError(
                f"expected every repeated block to be called in a forward, found that "
                f"{', '.join(missing[:3])} and {max(len(missing) - 3, 0)} more were not: blocks "
                "must not be skipped, also not at random (LayerDrop)"
            )
        for name, number in self._look.output:
            if number is not None and max(self._phases_of(number), default=-1) == self.phase:
                self._depend(number, f"the model's output {name!r}")

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
        parameters = {
            prefix + first: Use(tuple(prefix + name for name in aliases[first]), frozenset(phases))
            for first, phases in self._used.items()
        }
        buffers = {
            prefix + name: Use((prefix + name,), frozenset(phases), name in self._ambient)
            for name, phases in self._buffer_used.items()
        }
        dependencies = tuple(self._dependencies.values())
        return Recording(
            tuple(self._blocks), parameters, buffers, tuple(self._between), dependencies
        )


def _check_calls(calls: Sequence[BlockCall]) -> None:
    """Check that blocks are called in turn, and none twice."""
    seen: set[str] = set()
    for call in calls:
        if call.caller is not None:
            raise UsageError(
                f"expected blocks one after another, found {call.name!r} called by "
                f"{call.caller!r}: a pipeline cuts between blocks that do not call each other"
            )
        if call.name in seen:
            raise UsageError(
                f"expected every repeated block to be called once in a forward, found "
                f"{call.name!r} called twice: its weights would be needed on several stages at "
                "different times. Use a model whose layers have their own weights, or no pipeline "
                "(pp: 1)"
            )
        seen.add(call.name)
