"""Optimizer steps of shards in a store, for steppers that say where the tensors lie.

``submit`` reads the hyperparameters, counts the step and returns; threads of the stepper do the
arithmetic. Every shard has a counter of its own, as parameters have in torch. A shard has no states
before its first step, which fills them with their initial values: nothing has to be written before,
and ``set_states`` with nothing takes a shard back to there.

A block has a tensor of bytes for each state, and another for masters; the shards lie in each tensor
side by side. Shards whose master the store keeps come first: so every shard has the same offset in
the states as in the shorter tensor of masters.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drivetrain.errors import UsageError
from drivetrain.store import Pending, ShardSpec, ShardStep
from drivetrain_offload.steps.rules import GroupStep, ParamGroup, Rule
from drivetrain_offload.steps.tiles import Piece

Then = Callable[[], None] | None
"""Called when a step is done."""
MASTER = "master"
"""The name of a kept master beside those of states; torch has no state called so."""


class Submission:
    """A step of a block in the background, until a future ends: a ``Pending`` of the contract."""

    __slots__ = ("_future",)

    def __init__(self, future: "Future[None]") -> None:
        self._future = future

    def wait(self) -> None:
        """Return when masters and outputs are there; raises the step's error, at every call."""
        self._future.result()

    def done(self) -> bool:
        """Whether it is over, or failed."""
        return self._future.done()


@dataclass(slots=True)
class SteppedShard:
    """A shard of a block, and its counter of steps.

    Attributes:
        index: its place in the block.
        spec: its length and dtype, and whether the store keeps its master.
        offset: its first byte in each of the block's tensors.
        taken: the number of its steps, as torch counts them.
        fresh: whether there are no states yet.
    """

    index: int
    spec: ShardSpec
    offset: int
    taken: float = 0.0
    fresh: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes of each of its tensors."""
        return self.spec.numel * self.spec.dtype.itemsize

    def of(self, whole: Tensor) -> Tensor:
        """Return the shard's part of one of the block's tensors of bytes, (bytes,)."""
        return whole[self.offset : self.offset + self.nbytes].view(self.spec.dtype)


@dataclass(slots=True)
class ShardBlock:
    """The shards that one optimizer steps in one unit.

    Attributes:
        name: of the block.
        shards: in the order of their indices.
        states: the names of the shards' states.
        nbytes: of each state of all shards together, and of the kept masters, by name.
        last: the step that was submitted last.
    """

    name: str
    shards: list[SteppedShard]
    states: frozenset[str]
    nbytes: dict[str, int]
    last: "Future[None] | None" = None

    def names(self, shard: SteppedShard) -> list[str]:
        """Return the names of the tensors that the store keeps for a shard."""
        return [*sorted(self.states), *([MASTER] if shard.spec.kept else [])]


@dataclass(slots=True)
class ShardWork:
    """A step of a shard, as its param group and counter were when it was submitted.

    Attributes:
        shard: the shard.
        wanted: gradient, master and output.
        step: hyperparameters and kernel.
        initial: the values that fill states before a first step, by name; empty later.
        out: the output, once needed.
    """

    shard: SteppedShard
    wanted: ShardStep
    step: GroupStep
    initial: Mapping[str, float]
    out: Tensor | None = None

    def piece(self, tensors: Mapping[str, Tensor], where: slice) -> Piece:
        """Return the tensors that this step reads and writes in a range of the shard's elements.

        The states of the range, and the master if the store keeps the master, come by name.

        Raises:
            UsageError: the output that a function returned does not fit.
        """
        states = {name: tensors[name] for name in self.step.states}
        for name, value in self.initial.items():
            states[name].fill_(value)
        wanted = self.wanted
        master = tensors[MASTER] if wanted.master is None else wanted.master[where]
        out = self._output()
        return Piece(master, wanted.gradient[where], states, None if out is None else out[where])

    def _output(self) -> Tensor | None:
        if self.out is None and self.wanted.out is not None:
            out = self.wanted.out
            self.out = out if isinstance(out, Tensor) else out()
            _check_length(f"out of shard {self.wanted.index}", self.out, self.shard)
        return self.out


class Stepper(ABC):
    """Steps shards: a ``ShardStepper``, whose subclasses say where tensors lie.

    Calls come from one thread at a time. The process lets submitted steps end before it ends. After
    a step that failed, steps and tensors of its block are refused with its error.

    Args:
        rule: how the optimizer updates.
        alignment: bytes; shards begin at multiples.
    """

    def __init__(self, rule: Rule, alignment: int) -> None:
        self._rule = rule
        self._alignment = alignment
        self._blocks: dict[str, ShardBlock] = {}
        self._closed = False
        self._at_exit: weakref.finalize[[weakref.ref[Stepper]], Stepper] | None = None

    def adopt(self, block: str, shards: Sequence[ShardSpec], group: ParamGroup) -> None:
        """Take room for the states of a block's shards; see ``ShardStepper.adopt``.

        Raises:
            UsageError: the name is taken, or the stepper closed.
            StorageError: there is too little room.
        """
        self._check_open()
        if block in self._blocks:
            raise UsageError(f"expected a new block, found {block!r}, which was adopted before")
        placed, end, kept = _place(shards, self._alignment)
        names = frozenset(self._rule.states(group))
        adopted = ShardBlock(block, placed, names, {MASTER: kept} | dict.fromkeys(names, end))
        self._take_room(adopted)
        self._blocks[block] = adopted
        if self._at_exit is None:  # now: finalizers made later run before those of the threads
            self._at_exit = weakref.finalize(self, _close, weakref.ref(self))

    def submit(self, block: str, steps: Sequence[ShardStep], then: Then = None) -> Pending:
        """Take a step for some shards of a block; see ``ShardStepper.submit``.

        Raises:
            KeyError: there is no such block.
            UsageError: a step that does not fit its shard; then none was taken.
            StorageError: the disk failed before.
        """
        self._check_open()
        found = self._blocks[block]
        if found.last is not None and found.last.done():
            found.last.result()
        found.last = self._start(found, self._count(found, steps), then)
        return Submission(found.last)

    def states(self, block: str, index: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the states of a shard and its counter ``step``; see ``ShardStepper.states``."""
        found = self._at_rest(block)
        shard = found.shards[index]
        if shard.fresh:
            return
        if self._rule.counted:
            yield "step", torch.tensor(shard.taken, dtype=torch.float32)
        for name in sorted(found.states):
            yield name, self._fetch(found, shard, name)

    def master(self, block: str, index: int) -> Tensor:
        """Return the master of a shard that the store keeps, 1-D.

        Raises:
            UsageError: the master is not kept.
        """
        found = self._at_rest(block)
        return self._fetch(found, self._keeping(found, index), MASTER)

    def set_states(self, block: str, index: int, states: Mapping[str, Any]) -> None:
        """Replace the states of a shard; none: as before the first step.

        States may have any shape and floating dtype; ``step`` is a number or 0-D. A state that is
        None counts as missing.

        Raises:
            UsageError: other states than this optimizer's, or of another size.
        """
        found = self._at_rest(block)
        shard = found.shards[index]
        given = {name: state for name, state in states.items() if state is not None}
        if given:
            wanted = {*found.states, *(["step"] if self._rule.counted else [])}
            if given.keys() != wanted:
                raise UsageError(
                    f"{block}: expected the states {sorted(wanted)}, found {sorted(given)}: load "
                    "those of the same optimizer, with the same options"
                )
            for name in found.states:
                _check_length(f"{block}: {name}", given[name], shard)
            for name in found.states:
                self._keep(found, shard, name, given[name])
        shard.taken = self._rule.taken(given)
        shard.fresh = not given

    def set_master(self, block: str, index: int, values: Tensor) -> None:
        """Replace the master of a shard that the store keeps.

        Raises:
            UsageError: it is not kept, or of another size.
        """
        found = self._at_rest(block)
        shard = self._keeping(found, index)
        _check_length(f"{block}: master", values, shard)
        self._keep(found, shard, MASTER, values)

    def close(self) -> None:
        """Let submitted steps end, and release memory and threads; may be called again."""
        self._closed = True
        if self._at_exit is not None:
            self._at_exit.detach()
        self._release()
        self._blocks.clear()

    @abstractmethod
    def _take_room(self, block: ShardBlock) -> None:
        """Take room for a new block's tensors."""

    @abstractmethod
    def _start(self, block: ShardBlock, works: Sequence[ShardWork], then: Then) -> "Future[None]":
        """Begin a step; returns at once."""

    @abstractmethod
    def _fetch(self, block: ShardBlock, shard: SteppedShard, name: str) -> Tensor:
        """Return one tensor of a shard."""

    @abstractmethod
    def _keep(self, block: ShardBlock, shard: SteppedShard, name: str, values: Tensor) -> None:
        """Replace one tensor of a shard."""

    @abstractmethod
    def _release(self) -> None:
        """Wait for submitted steps, and give everything up; may be called again."""

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("expected a stepper in use, found one that was closed")

    def _at_rest(self, block: str) -> ShardBlock:
        """Return a block when its submitted steps are over."""
        self._check_open()
        found = self._blocks[block]
        if found.last is not None:
            found.last.result()
        return found

    def _keeping(self, block: ShardBlock, index: int) -> SteppedShard:
        shard = block.shards[index]
        if not shard.spec.kept:
            raise UsageError(
                f"{block.name}: expected a shard whose master the store keeps, found shard "
                f"{index}, whose master stays elsewhere"
            )
        return shard

    def _count(self, block: ShardBlock, steps: Sequence[ShardStep]) -> list[ShardWork]:
        """Return the work of a step; shards of equal group and counter share a ``GroupStep``."""
        for wanted in steps:
            _check_step(block, wanted)
        if len({wanted.index for wanted in steps}) < len(steps):
            raise UsageError(f"{block.name}: expected one step per shard, found several for one")
        begun: dict[tuple[int, float, float], GroupStep] = {}
        works = []
        for wanted in steps:
            shard = block.shards[wanted.index]
            alike = (id(wanted.group), shard.taken, wanted.factor)
            if alike not in begun:
                begun[alike] = self._begin(block, wanted, shard.taken)
            initial = self._rule.states(wanted.group) if shard.fresh else {}
            works.append(ShardWork(shard, wanted, begun[alike], initial))
        for work in works:  # after the last error that a step may raise
            work.shard.taken += 1
            work.shard.fresh = False
        return works

    def _begin(self, block: ShardBlock, wanted: ShardStep, taken: float) -> GroupStep:
        """Begin the next step of shards that have taken so many steps."""
        if self._rule.states(wanted.group).keys() != block.states:
            raise UsageError(
                f"{block.name}: expected a param group with the states {sorted(block.states)}, as "
                f"the block was adopted with, found {sorted(self._rule.states(wanted.group))}"
            )
        return self._rule.step(wanted.group, taken, wanted.factor)


def _close(stepper: "weakref.ref[Stepper]") -> None:
    if (found := stepper()) is not None:
        found.close()


def _place(specs: Sequence[ShardSpec], alignment: int) -> tuple[list[SteppedShard], int, int]:
    """Lay shards out side by side; return them, their end, and the end of shards with a master."""
    placed: dict[int, SteppedShard] = {}
    end = kept = 0
    for index in sorted(range(len(specs)), key=lambda index: not specs[index].kept):
        placed[index] = SteppedShard(index, specs[index], end)
        end += -(-placed[index].nbytes // alignment) * alignment
        kept = end if specs[index].kept else kept
    return [placed[index] for index in range(len(specs))], end, kept


def _check_step(block: ShardBlock, wanted: ShardStep) -> None:
    shard = block.shards[wanted.index]
    if (wanted.master is None) is not shard.spec.kept:
        raise UsageError(
            f"{block.name}: expected {'no' if shard.spec.kept else 'a'} master for shard "
            f"{wanted.index}, whose master the store {'keeps' if shard.spec.kept else 'lacks'}"
        )
    for name in ("gradient", "master", "out"):
        tensor = getattr(wanted, name)
        if isinstance(tensor, Tensor):
            _check_length(f"{block.name}: {name} of shard {wanted.index}", tensor, shard)
    if wanted.master is not None and wanted.master.dtype != shard.spec.dtype:
        raise UsageError(
            f"{block.name}: expected a master of {shard.spec.dtype} for shard {wanted.index}, "
            f"found {wanted.master.dtype}"
        )


def _check_length(name: str, tensor: Tensor, shard: SteppedShard) -> None:
    if tensor.numel() != shard.spec.numel:
        raise UsageError(
            f"{name}: expected {shard.spec.numel:,} elements, found {tensor.numel():,} of shape "
            f"{tuple(tensor.shape)}"
        )
