"""What all ranks exchange at a step: a number that is not finite, a notice to end.

The exchange is eight bytes for each rank, in every step, or in fast steps only now and then. How
many steps pass until the next exchange follows from the slowest rank, alike on all ranks.

Ranks that take their steps apart from each other wait at nothing else in a step. Between them the
eight bytes may queue on a slow link behind a message of megabytes, so there exchanges that took
long become rare.

A run that is told to end saves after a step that all ranks agree on, and asks to be restarted.

The notice of one rank is enough: ranks exchange what they heard when they step.
"""

import math
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from drivetrain.collectives.facts import gather_facts, meet, named, refuse_other_operation
from drivetrain.errors import ConfigError, NonFiniteError
from drivetrain.facade.prepared import PreparedModel, RunState, parameters_of
from drivetrain.log import get_logger
from drivetrain.runtime.board import PREEMPTED, Notice
from drivetrain.runtime.gradient_state import ActivePass
from drivetrain.runtime.mesh import Axis
from drivetrain.runtime.world import World, is_launched

# --- numbers that a device is still computing: copied without a wait, read when they are there ---


@runtime_checkable
class Promised(Protocol):
    """A tensor of a pipeline, which gets its value later; no import is made for its class."""

    def value(self) -> Tensor | None:
        """Return the value, None as long as it is not known."""

    def __float__(self) -> float:
        """Return the number, once it is known."""


class LateNumbers:
    """Numbers of the host, and scalar tensors of any device, by name.

    Args:
        values: by name, or another key; each tensor has one element. Tensors of an accelerator are
            copied in the order of its stream, to memory where the host finds them later. Losses of
            a pipeline may get their values later.
    """

    def __init__(self, values: Mapping[Any, float | Tensor]) -> None:
        self._numbers: dict[Any, float] = {}
        self._names: Sequence[Any] = ()
        self._event: torch.Event | None = None
        self._awaited: dict[Any, Promised] = {}
        waiting: dict[Any, Tensor] = {}
        for name, value in values.items():
            if not isinstance(value, Tensor):
                self._numbers[name] = float(value)
            elif isinstance(value, Promised) and value.value() is None:
                self._awaited[name] = value
            elif value.device.type == "cpu":
                self._numbers[name] = float(value.detach())
            else:
                waiting[name] = value.detach().reshape(()).to(torch.float32)
        if waiting:
            self._names = tuple(waiting)
            stacked = torch.stack(list(waiting.values()))
            self._copy = torch.empty(len(waiting), dtype=torch.float32, pin_memory=True)
            self._copy.copy_(stacked, non_blocking=True)
            self._event = torch.Event(stacked.device)
            self._event.record(torch.accelerator.current_stream(stacked.device))

    def ready(self) -> bool:
        """Whether ``read`` would return at once."""
        if any(value.value() is None for value in self._awaited.values()):
            return False
        return self._event is None or bool(self._event.query())

    def read(self) -> Mapping[Any, float]:
        """Return all numbers by name; waits for those of a device."""
        if self._event is not None:
            self._event.synchronize()
            self._numbers.update(zip(self._names, self._copy.tolist(), strict=True))
            self._event = None
        self._numbers.update({name: float(value) for name, value in self._awaited.items()})
        return self._numbers


# --- facts that a single rank may have, exchanged at a step ---

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
        self._left, self._pause, self._steps = 1, 1, 0
        self._since = time.monotonic()
        self._waited = self._longest = 0.0

    def is_due(self) -> bool:
        """Count a step, and return whether ranks exchange in it: the same on every rank."""
        self._steps += 1
        self._left -= 1
        return self._left <= 0

    def tell(self, *, told: bool, bad: bool, apart: bool = False) -> tuple[bool, bool]:
        """Send facts of this rank, and return those of all the ranks together. Collective.

        Args:
            told: whether a rank has heard a scheduler's notice.
            bad: whether a rank has found a number that is not finite.
            apart: whether ranks wait for each other at nothing else in a step.

        Raises:
            CollectiveError: a rank does not come, or came to another collective.
        """
        if self._group is None and self._size > 1:  # a group of all that needs no accelerator
            world = self._world
            self._group = (
                dist.group.WORLD
                if "gloo" in world.backend
                else dist.new_group(backend="gloo", timeout=world.timeout)
            )
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
        return any(word & _TOLD for word in words), any(word & _BAD for word in words)

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


# --- the first infinite or NaN loss or gradient: all ranks stop, skip the step or go back ---

# Looking must cost next to nothing. A norm that the script clips by tells about all gradients, on
# all ranks. Without one, a part of the gradients is looked at in each step, in turn: a weight that
# is not finite makes all later gradients so. Losses are of one rank alone: ranks exchange what they
# found. Skipping needs the whole answer before the step, so it looks at everything.
#
# A read of the newest numbers would wait until an accelerator has done all of its work, and leave
# it idle until the next kernels come. So there an exchange reads the numbers that the exchange
# before it has copied.


logger = get_logger(__name__)

TURNS = 16
"""Without a norm, a step looks at every so manieth piece of the gradients."""

MOST_IN_A_ROW = 10
"""So many steps are skipped one after the other; then the run stops."""

MOST_RETURNS = 3
"""A run goes back so many times without a save in between; then it stops."""

_NORM, _GRADIENTS = "the norm of the gradients", "the sum of a gradient"


@dataclass(frozen=True, slots=True)
class Watched:
    """A number that should be finite; nothing waits for its value yet.

    Attributes:
        step: the optimizer step it belongs to, from 1.
        what: in words.
        value: 0-d.
    """

    step: int
    what: str
    value: Tensor


@dataclass(eq=False)
class FiniteCheck:
    """Looks at losses and gradients, and does as ``on_nonfinite`` says.

    With a loss scale an infinite gradient is no mistake: the scale skips such steps by itself.

    Attributes:
        state: of the run; its optimizers count the steps.
        losses: those of the window's micro-batches that count, each with the identity of the entry
            if a pipeline ran; nothing waits for their values.
        norms: of all gradients of models, by the identity of their entries, where they are known.
        returns: how often the run went back since its last save in storage.
    """

    state: RunState
    losses: list[tuple[int | None, Tensor]] = field(default_factory=list)
    norms: dict[int, Tensor] = field(default_factory=dict)
    returns: int = 0
    _watched: list[Watched] = field(default_factory=list)
    _copied: tuple[list[Watched], LateNumbers] | None = None
    _found: str = ""
    _turns: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Steps that were looked at, by the identities of model and optimizer."""
    _in_a_row: int = 0

    @property
    def _policy(self) -> str:
        return self.state.config.run.on_nonfinite

    @property
    def _looks(self) -> bool:
        return self._policy != "ignore" and not self.state.scaler.enabled  # which has its own rule

    def look(self, optimizer: Optimizer) -> None:
        """Look once at the losses of the window, and at gradients that are about to be used.

        Args:
            optimizer: of the step, which uses the gradients of its own parameters alone.

        Raises:
            ConfigError: the policy lets ranks leave out steps that others take, now or later; or
                steps that began in backward.
        """
        entries = self.state.trained_by(optimizer)
        for entry in entries:
            self._check_policy(entry.strategy.pace.later)
            if entry.strategy.pace.begun:
                self._check_never_skips()
        losses, self.losses = self.losses, []
        if not self._looks:
            return
        # A pipeline has the values of a window's losses at its own last backward.
        here = {None, *map(id, entries)}
        self.losses = [each for each in losses if each[0] not in here]
        step, known = self._step(), [loss for which, loss in losses if which in here]
        for number, loss in enumerate(known, 1):
            self._watched.append(Watched(step, f"the loss of micro-batch {number}", loss))
        for entry in entries:
            norm = self.norms.get(id(entry))
            if norm is not None:
                self._watched.append(Watched(step, _NORM, norm))
            else:
                self._look_at_gradients(entry, optimizer, step)
        if self._on_cpu:
            self._evaluate(optimizer)

    def _check_policy(self, ranks: Axis | None) -> None:
        """Refuse a policy for which all ranks must leave out the same steps.

        Args:
            ranks: those that come to each step together; None means all.

        Raises:
            ConfigError: the policy lets ranks leave out steps that others take.
        """
        if ranks is not None and self._policy in ("skip", "rollback"):
            raise ConfigError(
                f"on_nonfinite: expected stop or ignore where ranks do not wait for each other at "
                f"a step, found {self._policy}: they could not leave out the same steps; change "
                "it, or let the strategy wait for all ranks"
            )

    def _check_never_skips(self) -> None:
        """Refuse policies that leave out steps where steps begin in backward.

        Raises:
            ConfigError: names the policy.
        """
        skips = "precision: fp16" if self.state.scaler.enabled else ""
        skips = "on_nonfinite: skip" if self._policy == "skip" else skips
        if skips:
            raise ConfigError(
                f"expected no {skips} with offload.in_backward: true, found it: it leaves out "
                "steps, which have begun by then; change one of them"
            )

    def must_tell(self, optimizer: Optimizer) -> bool:
        """Whether ranks must tell each other in this step, whatever that costs."""
        alone = self._on_cpu and self.state.world.size == 1
        known = all(id(entry) in self.norms for entry in self.state.trained_by(optimizer))
        return alone or (self._looks and self._policy == "skip" and not known)

    def is_norm_bad(self, optimizer: Optimizer) -> bool:
        """Whether a norm, which all ranks know, is not finite; False where that means waiting."""
        if not self._looks:
            return False
        if not self._on_cpu and self._policy != "skip":
            return False
        entries = self.state.trained_by(optimizer)
        known = [self.norms[id(entry)] for entry in entries if id(entry) in self.norms]
        return not all(math.isfinite(float(norm)) for norm in known)

    def found(self, optimizer: Optimizer) -> bool:
        """Whether this rank has found a number that is not finite.

        To skip a step it waits for an accelerator; otherwise it reads what the exchange before has
        copied.
        """
        if self._on_cpu or self._policy == "skip":
            self._evaluate(optimizer)
        else:
            self._read_copied()
            self._copied, self._watched = self._copies(), []
        return bool(self._found)

    def act(self, optimizer: Optimizer, ranks: Axis | None, go_back: Callable[[], str]) -> None:
        """Do as the policy says, on every rank: the step is not taken. Collective.

        Args:
            optimizer: of the step.
            ranks: those that come to the step together; None means all.
            go_back: loads the newest finite checkpoint, and returns its directory.

        Raises:
            NonFiniteError: on every one of the ranks: names step, ranks, micro-batch or parameter.
        """
        self._evaluate(optimizer)
        where = self._said(ranks)
        self.forget()
        if self._policy == "stop":
            raise _error(where, "on_nonfinite: stop ends the run")
        if self._policy == "rollback":
            self.returns += 1
            if self.returns > MOST_RETURNS:
                again = f"the run went back {MOST_RETURNS} times without a save in between"
                raise _error(where, again)
            directory = go_back()
            logger.warning(str(_error(where, f"going on from {directory}, with the next batches")))
            return
        self._in_a_row += 1
        if self._in_a_row > MOST_IN_A_ROW:
            raise _error(where, f"{MOST_IN_A_ROW} steps in a row were skipped")
        logger.warning(str(_error(where, "this step is skipped")))

    def step_is_good(self) -> None:
        """Note that a step is taken."""
        self._in_a_row = 0

    def forget(self) -> None:
        """Forget all that was found: other weights are loaded."""
        self.losses.clear()
        self.norms.clear()
        self._watched.clear()
        self._copied = None
        self._found = ""

    def before_save(self) -> None:
        """Stop a run that has found something since ranks last told each other. Collective.

        Raises:
            NonFiniteError: on every rank.
        """
        self._evaluate()
        if self._policy == "stop" and (where := self._said()):
            raise _error(where, "nothing was saved")

    def _said(self, ranks: Axis | None = None) -> str:
        """Return the findings of all the ranks in words. Collective."""
        doing = "the exchange of numbers that are not finite"
        everyone = gather_facts(self._found, str, doing=doing, group=ranks)
        numbers = range(len(everyone)) if ranks is None else ranks.ranks
        found = zip(numbers, everyone, strict=True)
        return "; ".join(f"rank {rank}: {each}" for rank, each in found if each)

    @property
    def _on_cpu(self) -> bool:
        """Whether reading a number waits for nothing."""
        return self.state.world.device.type == "cpu"

    def _look_at_gradients(self, entry: PreparedModel, optimizer: Optimizer, step: int) -> None:
        pieces = list(entry.strategy.gradients(entry.subset(parameters_of(optimizer))))
        taken = self._turns[id(entry), id(optimizer)]
        self._turns[id(entry), id(optimizer)] += 1
        first = taken % max(1, min(TURNS, len(pieces)))
        chosen = pieces if self._policy == "skip" else pieces[first::TURNS]
        self._watched.extend(Watched(step, _GRADIENTS, _sum(each)) for each in chosen)

    def _evaluate(self, optimizer: Optimizer | None = None) -> None:
        """Read the watched numbers, and put the first that is not finite into words."""
        self._read_copied(optimizer)
        self._copied, self._watched = self._copies(), []
        self._read_copied(optimizer)

    def _copies(self) -> tuple[list[Watched], LateNumbers]:
        """Begin to copy the watched numbers to the host."""
        values = {str(number): each.value for number, each in enumerate(self._watched)}
        return self._watched, LateNumbers(values)

    def _read_copied(self, optimizer: Optimizer | None = None) -> None:
        """Put the first copied number that is not finite into words."""
        if self._copied is None:
            return
        (watched, numbers), self._copied = self._copied, None
        if self._found:
            return
        values = numbers.read()
        for number, each in enumerate(watched):
            value = values[str(number)]
            if math.isfinite(value):
                continue
            what = f"{each.what} is {value}"
            if each.what in (_NORM, _GRADIENTS) and optimizer and each.step == self._step():
                what = _bad_gradients(self.state.trained_by(optimizer), optimizer)
            if what:  # a norm may be bad for another rank's gradients, and a sum be too large
                self._found = f"in step {each.step} {what}"
                return

    def _step(self) -> int:
        """Return the number of the step at hand; optimizers count it when it begins."""
        return max((each.steps for each in self.state.optimizers), default=1)


def _error(where: str, what: str) -> NonFiniteError:
    return NonFiniteError(
        f"expected finite losses and gradients, found {where or 'a norm too large'}: {what}; "
        "look at the batch of that rank, lower the learning rate, or clip gradients"
    )


def _sum(piece: Tensor) -> Tensor:
    """Return the sum, which is finite only if all elements are; it reads them once."""
    real = torch.view_as_real(piece.resolve_conj()) if piece.is_complex() else piece
    return real.sum(dtype=torch.float64 if real.dtype == torch.float64 else torch.float32)


def _bad_gradients(entries: Sequence[PreparedModel], optimizer: Optimizer) -> str:
    """Return which gradients of an optimizer are not finite on this rank, "" without any."""
    names: list[str] = []
    all_names: list[str] = []
    for entry in entries:
        only = entry.subset(parameters_of(optimizer))
        chosen = None if only is None else {id(parameter) for parameter in only}
        for name, parameter in entry.model.named_parameters():
            if not parameter.requires_grad or (chosen is not None and id(parameter) not in chosen):
                continue
            all_names.append(name)
            pieces = entry.strategy.gradients([parameter])
            if not all(bool(piece.isfinite().all()) for piece in pieces):
                names.append(name)
    if not names:
        return ""
    more = f" and {len(names) - 1} others" if len(names) > 1 else ""
    every = len(names) == len(all_names) > 1
    return "the gradient of every parameter" if every else f"the gradient of {names[0]}{more}"


# --- a run that is told to end saves after a step that all ranks agree on ---


@dataclass(eq=False)
class Preemption:
    """The end of a run after a scheduler's notice.

    Attributes:
        state: of the run: whether a window is complete, and which pass is under way.
        between_steps: is called whenever the training loop asks for a batch after a whole step.
        save: method that saves the run under an automatic name, and returns the directory; its
            object is not kept alive: loaders hold this one, and finalizers hold them.
        told: whether a rank has told all the others of a notice.
    """

    state: RunState
    between_steps: Callable[[], None]
    save: "weakref.WeakMethod[Callable[..., str]]"
    told: bool = False
    _notice: Notice = field(default_factory=Notice)
    _by_script: bool = False
    _trained: ActivePass | None = None

    @property
    def heard(self) -> bool:
        """Whether this rank has heard a notice."""
        return bool(self._notice.heard)

    @property
    def agreed(self) -> bool:
        """Whether all ranks know of a notice: the same on every rank after the same step."""
        return self.told if self.state.world.size > 1 else self.heard

    def asked(self) -> bool:
        """Return ``agreed`` to a script, which handles notices from now on."""
        self._by_script = True
        self._notice.listen()
        return self.agreed

    def listen(self) -> None:
        """Hear notices that a launcher hands on, if there is somewhere to save to."""
        project = self.state.project
        named = project.project_dir is not None and project.automatic_checkpoint_naming
        if named and is_launched():
            self._notice.listen()

    def after_step(self) -> None:
        """Note which pass over a loader the training loop makes."""
        self._trained = self.state.window.trained_pass

    def between_batches(self, one: ActivePass) -> None:
        """Take a turn between two steps, and end the run here after a notice.

        A pass is asked for a batch; that of the training loop counts.

        Raises:
            SystemExit: with the code of a saved run, on every rank.
        """
        window = self.state.window
        complete = window.sync_gradients and one is self._trained
        if not complete or window.uneven:
            return
        self.between_steps()
        save = self.save()
        if self._by_script or not self.agreed or save is None:
            return
        self._by_script = True  # once
        directory = save()
        heard = f" ({self._notice.heard})" if self._notice.heard else ""
        logger.announce(
            f"preempted{heard}: saved {directory}; exit code {PREEMPTED} asks to be started again"
        )
        raise SystemExit(PREEMPTED)

    def close(self) -> None:
        """Hear notices no longer."""
        self._notice.close()
        self._trained = None
