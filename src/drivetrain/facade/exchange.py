"""At a step ranks exchange facts that a single rank may have: a notice, a bad number.

The exchange is eight bytes for each rank, in every step, or in fast steps only now and then. How
many steps pass until the next exchange follows from the slowest rank, alike on all ranks.

Ranks that take their steps apart from each other wait at nothing else in a step. Between them the
eight bytes may queue on a slow link behind a message of megabytes, so there exchanges that took
long become rare.
"""

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from drivetrain.collectives.facts import refuse_other_operation
from drivetrain.collectives.meeting import meet, named
from drivetrain.runtime.mesh import Axis
from drivetrain.runtime.world import World

PERIOD_S = 0.5
"""Ranks exchange in every step, or in steps of less than this every so many seconds."""

MOST_STEPS = 16
"""Ranks exchange at least every so many steps, and at the start of a run after twice as many each
time: fast steps may become slow ones, and a notice must not wait for many of those."""

WAITING = 0.02
"""The share of their time that ranks which step apart may wait in exchanges."""

LONGEST_S = 5.0
"""For this they leave out exchanges, but for no longer: a notice gives a run half a minute."""

_FADING = 0.7
"""Of how long the ranks waited so much counts at the next exchange, which may be a quick one."""

_MARK, _MARK_BITS = 0x5EED, 48
"""The upper bits of a word: other ranks' collectives of eight bytes hold something else."""

_TOLD, _BAD, _TIME_BITS, _UNIT_S = 1 << 47, 1 << 46, 23, 1e-4
"""Two flags, and two times below them, in units that go up to 14 minutes."""


@dataclass(frozen=True, slots=True)
class Exchanged:
    """The facts of all ranks together.

    Attributes:
        told: whether a rank has heard a scheduler's notice.
        bad: whether a rank has found a number that is not finite.
    """

    told: bool
    bad: bool


class Exchange:
    """The exchanges of ranks, at steps that they all come to.

    Args:
        world: this process among all processes.
        ranks: those that exchange, over gloo; None means all.
    """

    def __init__(self, world: World, ranks: Axis | None = None) -> None:
        self._world = world
        self._size = world.size if ranks is None else ranks.size
        self._group = None if ranks is None else ranks.group
        self._left = self._pause = 1
        self._steps = 0
        self._since = time.monotonic()
        self._waited = 0.0
        self._longest = 0.0

    def is_due(self) -> bool:
        """Count a step, and return whether ranks exchange in it: the same on every rank."""
        self._steps += 1
        self._left -= 1
        return self._left <= 0

    def tell(self, *, told: bool, bad: bool, apart: bool = False) -> Exchanged:
        """Send facts of this rank, and return those of all the ranks together. Collective.

        Args:
            told: see ``Exchanged``.
            bad: see ``Exchanged``.
            apart: whether ranks wait for each other at nothing else in a step.

        Raises:
            CollectiveError: a rank does not come, or came to another collective.
        """
        if self._group is None and self._size > 1:
            self._group = self._common_group()
        begun, steps = time.monotonic(), max(1, self._steps)
        seconds = (begun - self._since) / steps
        mine = _packed(told, bad, seconds, self._waited)
        words = [mine] if self._size == 1 else self._gathered(mine)
        self._since, self._steps = time.monotonic(), 0
        slowest = max(map(_seconds, words))
        # For slower ranks this one waits sooner or later, however rare exchanges are.
        self._waited = max(0.0, self._since - begun - (slowest - seconds) * steps)
        longest = max(self._longest * _FADING, *map(_waited, words))
        self._longest = min(longest, WAITING * LONGEST_S)
        period = self._longest / WAITING if apart else 0.0
        self._left = self._pause = min(_steps_within(period, slowest), 2 * self._pause)
        return Exchanged(any(word & _TOLD for word in words), any(word & _BAD for word in words))

    def _gathered(self, mine: int) -> list[int]:
        word = torch.tensor([mine], dtype=torch.int64, device="cpu")
        words = word.new_empty(self._size, 1)
        doing = "optimizer.step(), where ranks exchange what they found"
        with named(doing, self._group) as wait:
            work = dist.all_gather(list(words.unbind()), word, group=self._group, async_op=True)
            meet(work, wait, self._group, self._world.timeout)
        found: list[int] = words.flatten().tolist()
        if any(each >> _MARK_BITS != _MARK for each in found):
            refuse_other_operation(doing, self._group, doing)
        return found

    def _common_group(self) -> dist.ProcessGroup | None:
        """Return a group of all ranks that needs no accelerator."""
        if "gloo" in self._world.backend:
            return dist.group.WORLD
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=self._world.timeout)
        return group


class StepExchanges:
    """The exchanges of all ranks, and of groups that step by themselves.

    Args:
        world: this process among all processes.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._made: dict[tuple[int, ...], Exchange] = {}

    def among(self, ranks: Axis | None) -> Exchange:
        """Return the exchange of some ranks; None means all."""
        key = () if ranks is None else ranks.ranks
        if key not in self._made:
            self._made[key] = Exchange(self._world, ranks)
        return self._made[key]


def _steps_within(period: float, step: float) -> int:
    """Return after how many steps of so many seconds ranks exchange again."""
    steps = int(max(period, PERIOD_S) / max(step, PERIOD_S / MOST_STEPS, _UNIT_S))
    return min(max(1, steps), MOST_STEPS)


def _packed(told: bool, bad: bool, seconds: float, waited: float) -> int:
    """Return one integer of 63 bits: of a step's seconds, and of the exchange before."""
    step, before = (min(int(each / _UNIT_S), (1 << _TIME_BITS) - 1) for each in (seconds, waited))
    flags = (_TOLD * told) | (_BAD * bad)
    return (_MARK << _MARK_BITS) | flags | (before << _TIME_BITS) | step


def _seconds(word: int) -> float:
    return (word & ((1 << _TIME_BITS) - 1)) * _UNIT_S


def _waited(word: int) -> float:
    return _seconds(word >> _TIME_BITS)
