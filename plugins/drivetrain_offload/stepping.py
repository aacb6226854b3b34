"""Steps of an optimizer on shards that a store keeps: all but where their tensors lie.

``submit`` reads the hyperparameters and counts, and leaves; the arithmetic is done by threads of
the stepper. Every shard counts for itself, as parameters do in torch. A shard that has not taken a
step has no states yet: its first step fills them, so none have to be written before, and nothing
is left of those that ``set_states`` took away.

The tensors of a block lie one after the other, the states of all shards in one range of bytes per
state, masters in another. Shards whose master is kept come first, so that every shard has the same
offset in each of them.
"""

import atexit
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from drivetrain.errors import UsageError
from drivetrain.store import Pending, ShardSpec, ShardStep
from drivetrain_offload.rules import Group, Rule, Step
from drivetrain_offload.tiles import Piece

Then = Callable[[], None] | None
"""What is called when a step is done."""
MASTER = "master"
"""The name of a kept master beside those of states; torch has no state called so."""


class Submission:
    """A step of a block that goes on in the background: a ``Pending``.

    Args:
        future: ends with the step.
    """

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
class Shard:
    """A shard of a block.

    Attributes:
        index: its place in the block.
        spec: what it is.
        offset: where it begins in each of the block's tensors, in bytes.
        taken: the steps behind it, as torch counts them.
        fresh: whether it has no states yet.
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
        """Return its part of one of the block's tensors, which is 1-D, of bytes."""
        return whole[self.offset : self.offset + self.nbytes].view(self.spec.dtype)


@dataclass(slots=True)
class Block:
    """What one optimizer steps in one unit.

    Attributes:
        name: its name.
        shards: in the order of their indices.
        states: their names.
        nbytes: of each state of all shards together, and of the kept masters, by name.
        last: the step that was submitted last.
    """

    name: str
    shards: list[Shard]
    states: frozenset[str]
    nbytes: dict[str, int]
    last: "Future[None] | None" = None

    def names(self, shard: Shard) -> list[str]:
        """Return the names of what is kept for a shard."""
        return [*sorted(self.states), *([MASTER] if shard.spec.kept else [])]


@dataclass(slots=True)
class Work:
    """A step of a shard, whatever becomes of its param group and counter meanwhile.

    Attributes:
        shard: the shard.
        wanted: gradient, master and output.
        step: hyperparameters and kernel.
        initial: what states are filled with before; nothing but in a first step.
        out: the output, once it is needed.
    """

    shard: Shard
    wanted: ShardStep
    step: Step
    initial: Mapping[str, float]
    out: Tensor | None = None

    def piece(self, tensors: Mapping[str, Tensor], where: slice) -> Piece:
        """Return what a tile of this step reads and writes.

        Args:
            tensors: what the store keeps of this range.
            where: the range, in elements of the shard.

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
    """Steps shards: a ``ShardStepper`` but for where tensors lie.

    Calls come from one thread at a time. The end of the process lets steps end first. After a step
    that failed, steps and tensors of its block are refused with its error.

    Args:
        rule: how the optimizer updates.
        alignment: bytes; shards begin at multiples of it.
    """

    def __init__(self, rule: Rule, alignment: int) -> None:
        self._rule = rule
        self._alignment = alignment
        self._blocks: dict[str, Block] = {}
        self._closed = False
        self._at_exit = atexit.register(partial(_close, weakref.ref(self)))

    def adopt(self, block: str, shards: Sequence[ShardSpec], group: Group) -> None:
        """Take room for the states of a block's shards, which have not taken a step.

        Args:
            block: a new name.
            shards: its shards.
            group: a param group; those of later steps have the same states.

        Raises:
            UsageError: the name is taken, or the stepper closed.
            StorageError: there is too little room.
        """
        self._check_open()
        if block in self._blocks:
            raise UsageError(f"expected a new block, found {block!r}, which was adopted before")
        placed, end, kept = _place(shards, self._alignment)
        names = frozenset(self._rule.states(group))
        adopted = Block(block, placed, names, {MASTER: kept} | dict.fromkeys(names, end))
        self._take_room(adopted)
        self._blocks[block] = adopted

    def submit(
        self,
        block: str,
        steps: Sequence[ShardStep],
        then: Then = None,
    ) -> Pending:
        """Take a step for some shards of a block; their tensors must stay until it is over.

        Args:
            block: its name.
            steps: what to do, at most once for each shard.
            then: called in the background when masters and outputs are there; the step is over
                when it has returned. It is not called after an error.

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
        """Yield the states of a shard as torch names them, and its counter ``step``, if any.

        Waits for what was submitted for the block. Yields nothing before the first step.
        """
        found = self._settled(block)
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
        found = self._settled(block)
        return self._fetch(found, self._keeping(found, index), MASTER)

    def set_states(self, block: str, index: int, states: Mapping[str, Any]) -> None:
        """Replace the states of a shard; none: as before the first step.

        Args:
            block: its block.
            index: which shard.
            states: as torch names them; of any shape and floating dtype, but with the shard's
                elements. ``step`` is a number or 0-D. What is None is not there.

        Raises:
            UsageError: other states than this optimizer's, or of another size.
        """
        found = self._settled(block)
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
        shard.taken = float(self._rule.taken(given))
        shard.fresh = not given

    def set_master(self, block: str, index: int, values: Tensor) -> None:
        """Replace the master of a shard that the store keeps.

        Raises:
            UsageError: it is not kept, or of another size.
        """
        found = self._settled(block)
        shard = self._keeping(found, index)
        _check_length(f"{block}: master", values, shard)
        self._keep(found, shard, MASTER, values)

    def close(self) -> None:
        """Let what was submitted end, and release memory and threads; may be called again."""
        self._closed = True
        atexit.unregister(self._at_exit)
        self._release()
        self._blocks.clear()

    @abstractmethod
    def _take_room(self, block: Block) -> None:
        """Take room for a new block's tensors."""

    @abstractmethod
    def _start(self, block: Block, works: Sequence[Work], then: Then) -> "Future[None]":
        """Begin a step; returns at once."""

    @abstractmethod
    def _fetch(self, block: Block, shard: Shard, name: str) -> Tensor:
        """Return one tensor of a shard."""

    @abstractmethod
    def _keep(self, block: Block, shard: Shard, name: str, values: Tensor) -> None:
        """Replace one tensor of a shard."""

    @abstractmethod
    def _release(self) -> None:
        """Wait for what was submitted, and give everything up; may be called again."""

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("expected a stepper in use, found one that was closed")

    def _settled(self, block: str) -> Block:
        """Return a block after what was submitted for it."""
        self._check_open()
        found = self._blocks[block]
        if found.last is not None:
            found.last.result()
        return found

    def _keeping(self, block: Block, index: int) -> Shard:
        shard = block.shards[index]
        if not shard.spec.kept:
            raise UsageError(
                f"{block.name}: expected a shard whose master the store keeps, found shard "
                f"{index}, whose master stays elsewhere"
            )
        return shard

    def _count(self, block: Block, steps: Sequence[ShardStep]) -> list[Work]:
        """Return the work of a step; shards with equal group and counter share one ``Step``."""
        for wanted in steps:
            _check_step(block, wanted)
        if len({wanted.index for wanted in steps}) < len(steps):
            raise UsageError(f"{block.name}: expected one step per shard, found several for one")
        begun: dict[tuple[int, float, float], tuple[Step, float]] = {}
        works = []
        for wanted in steps:
            shard = block.shards[wanted.index]
            alike = (id(wanted.group), shard.taken, wanted.factor)
            if alike not in begun:
                begun[alike] = self._begin(block, wanted, shard.taken)
            step, _ = begun[alike]
            initial = self._rule.states(wanted.group) if shard.fresh else {}
            works.append(Work(shard, wanted, step, initial))
        for work in works:
            shard = work.shard
            _, shard.taken = begun[id(work.wanted.group), shard.taken, work.wanted.factor]
            shard.fresh = False
        return works

    def _begin(self, block: Block, wanted: ShardStep, taken: float) -> tuple[Step, float]:
        """Return a step for shards that have taken so many, and how many it makes."""
        if self._rule.states(wanted.group).keys() != block.states:
            raise UsageError(
                f"{block.name}: expected a param group with the states {sorted(block.states)}, as "
                f"the block was adopted with, found {sorted(self._rule.states(wanted.group))}"
            )
        counter = torch.tensor(taken, dtype=torch.float32)
        return self._rule.step(wanted.group, counter, factor=wanted.factor), float(counter)


def _close(stepper: "weakref.ref[Stepper]") -> None:
    if (found := stepper()) is not None:
        found.close()


def _place(specs: Sequence[ShardSpec], alignment: int) -> tuple[list[Shard], int, int]:
    """Return shards in their order, and where those end that lie last, and last with a master."""
    placed: dict[int, Shard] = {}
    end = kept = 0
    for index in sorted(range(len(specs)), key=lambda index: not specs[index].kept):
        placed[index] = Shard(index, specs[index], end)
        end += -(-placed[index].nbytes // alignment) * alignment
        kept = end if specs[index].kept else kept
    return [placed[index] for index in range(len(specs))], end, kept


def _check_step(block: Block, wanted: ShardStep) -> None:
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


def _check_length(what: str, tensor: Tensor, shard: Shard) -> None:
    if tensor.numel() != shard.spec.numel:
        raise UsageError(
            f"{what}: expected {shard.spec.numel:,} elements, found {tensor.numel():,} of shape "
            f"{tuple(tensor.shape)}"
        )
