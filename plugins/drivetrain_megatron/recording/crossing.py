"""The tensors that cross a bound between blocks: made before a cut, and used behind.

A forward is a sequence of steps: calls of blocks, and functions of torch in the code around them.
Between two blocks there are several positions for a cut; the one with the fewest bytes counts.
After ``h = h + block(h)`` a single tensor crosses, before the sum there are two.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import NamedTuple, TypeAlias

from drivetrain.parts.guard import Arguments, Function, Keywords
from drivetrain_megatron.recording.structure import TensorMeta


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
