"""The first infinite or NaN loss or gradient of a run: all ranks stop, skip the step or go back.

Looking must cost next to nothing. A norm that the script clips by tells about all gradients, on all
ranks. Without one, a part of the gradients is looked at in each step, in turn: a weight that is not
finite makes all later gradients so. Losses are of one rank alone: ranks exchange what they found.
Skipping needs the whole answer before the step, so it looks at everything.

A read of the newest numbers would wait until an accelerator has done all of its work, and leave it
idle until the next kernels come. So there an exchange reads the numbers that the exchange before it
has copied.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drivetrain.collectives.facts import gather_facts
from drivetrain.errors import ConfigError, NonFiniteError
from drivetrain.facade.prepared import PreparedModel, PreparedObjects
from drivetrain.facade.settings import Runs
from drivetrain.log import get_logger
from drivetrain.runtime.late import LateNumbers
from drivetrain.runtime.mesh import Axis
from drivetrain.runtime.scaler import LossScaler

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


class FiniteCheck:
    """Looks at losses and gradients, and does as ``on_nonfinite`` says.

    With a loss scale an infinite gradient is no mistake: the scale skips such steps by itself.

    Args:
        prepared: the optimizers count the steps.
        runs: of the Accelerator.
        scaler: the loss scale of fp16.

    Attributes:
        go_back: loads the newest finite checkpoint, and returns its directory.
    """

    def __init__(self, prepared: PreparedObjects, runs: Runs, scaler: LossScaler) -> None:
        self.go_back: Callable[[], str] | None = None
        self._policy = runs.config.run.on_nonfinite
        self._prepared = prepared
        self._runs = runs
        self._scaler = scaler
        self._losses: list[Tensor] = []
        self._watched: list[Watched] = []
        self._copied: tuple[list[Watched], LateNumbers] | None = None
        self._found = ""
        self._norms: dict[int, Tensor] = {}
        self._turn = 0
        self._in_a_row = 0
        self._returns = 0

    def start_window(self) -> None:
        """Forget the losses and norms of the window before."""
        self._losses.clear()
        self._norms.clear()

    def see_loss(self, loss: Tensor) -> None:
        """Keep the loss of a micro-batch; nothing waits for its value yet."""
        if self._looks:
            self._losses.append(loss.detach())  # a pipeline publishes its value later

    def see_norm(self, entries: Iterable[PreparedModel], norm: Tensor) -> None:
        """Keep the norm of all gradients of models."""
        self._norms.update((id(entry), norm.detach()) for entry in entries)

    def look(self, entries: Sequence[PreparedModel]) -> None:
        """Look at the losses of the window, and at gradients that are about to be used.

        Raises:
            ConfigError: the policy lets ranks leave out steps that others take, now or later.
        """
        for entry in entries:
            self._check_policy(entry.strategy.will_step_with)
        if not self._looks:
            return
        step = self._step()
        for number, loss in enumerate(self._losses, 1):
            self._watched.append(Watched(step, f"the loss of micro-batch {number}", loss))
        self._losses.clear()
        for entry in entries:
            norm = self._norms.get(id(entry))
            if norm is not None:
                self._watched.append(Watched(step, _NORM, norm))
            else:
                self._look_at_gradients(entry, step)
        if self._on_cpu:
            self._evaluate(entries)

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

    def must_tell(self, entries: Sequence[PreparedModel]) -> bool:
        """Whether ranks must tell each other in this step, whatever that costs."""
        alone = self._on_cpu and self._runs.default.world.size == 1
        known = all(id(entry) in self._norms for entry in entries)
        return alone or (self._looks and self._policy == "skip" and not known)

    def is_norm_bad(self, entries: Sequence[PreparedModel]) -> bool:
        """Whether a norm, which all ranks know, is not finite; False where that means waiting."""
        if not self._looks:
            return False
        if not self._on_cpu and self._policy != "skip":
            return False
        known = [self._norms[id(entry)] for entry in entries if id(entry) in self._norms]
        return not all(math.isfinite(float(norm)) for norm in known)

    def found(self, entries: Sequence[PreparedModel]) -> bool:
        """Whether this rank has found a number that is not finite.

        To skip a step it waits for an accelerator; otherwise it reads what the exchange before has
        copied.
        """
        if self._on_cpu or self._policy == "skip":
            self._evaluate(entries)
        else:
            self._read_copied()
            self._copied, self._watched = self._copies(), []
        return bool(self._found)

    def act(self, entries: Sequence[PreparedModel], ranks: Axis | None = None) -> None:
        """Do as the policy says, on every rank: the step is not taken. Collective.

        Args:
            entries: the models of the step.
            ranks: those that come to the step together; None means all.

        Raises:
            NonFiniteError: on every one of the ranks: names step, ranks, micro-batch or parameter.
        """
        self._evaluate(entries)
        where = self._said(ranks)
        self.forget()
        if self._policy == "stop":
            raise _error(where, "on_nonfinite: stop ends the run")
        if self._policy == "rollback" and self.go_back is not None:
            self._returns += 1
            if self._returns > MOST_RETURNS:
                again = f"the run went back {MOST_RETURNS} times without a save in between"
                raise _error(where, again)
            directory = self.go_back()
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
        self.start_window()
        self._watched.clear()
        self._copied = None
        self._found = ""

    def before_save(self) -> None:
        """Stop a run that has found something since ranks last told each other. Collective.

        Raises:
            NonFiniteError: on every rank.
        """
        self._evaluate(())
        self._returns = 0
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
    def _looks(self) -> bool:
        """Whether there is anything to look at: a loss scale has a rule of its own."""
        return self._policy != "ignore" and not self._scaler.is_enabled()

    @property
    def _on_cpu(self) -> bool:
        """Whether reading a number waits for nothing."""
        return self._runs.default.world.device.type == "cpu"

    def _look_at_gradients(self, entry: PreparedModel, step: int) -> None:
        pieces = list(entry.strategy.gradients())
        first = self._turn % max(1, min(TURNS, len(pieces)))
        chosen = pieces if self._policy == "skip" else pieces[first::TURNS]
        self._turn += 1
        self._watched.extend(Watched(step, _GRADIENTS, _sum(each)) for each in chosen)

    def _evaluate(self, entries: Sequence[PreparedModel]) -> None:
        """Read the watched numbers, and put the first that is not finite into words."""
        self._read_copied(entries)
        self._copied, self._watched = self._copies(), []
        self._read_copied(entries)

    def _copies(self) -> tuple[list[Watched], LateNumbers]:
        """Begin to copy the watched numbers to the host."""
        values = {str(number): each.value for number, each in enumerate(self._watched)}
        return self._watched, LateNumbers(values)

    def _read_copied(self, entries: Sequence[PreparedModel] = ()) -> None:
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
            if each.what in (_NORM, _GRADIENTS) and entries and each.step == self._step():
                what = _bad_gradients(entries)
            if what:  # a norm may be bad for another rank's gradients, and a sum be too large
                self._found = f"in step {each.step} {what}"
                return

    def _step(self) -> int:
        """Return the number of the step at hand; optimizers count it when it begins."""
        return max((each.steps for each in self._prepared.optimizers), default=1)


def _error(where: str, what: str) -> NonFiniteError:
    return NonFiniteError(
        f"expected finite losses and gradients, found {where or 'a norm too large'}: {what}; "
        "look at the batch of that rank, lower the learning rate, or clip gradients"
    )


def _sum(piece: Tensor) -> Tensor:
    """Return the sum, which is finite only if all elements are; it reads them once."""
    real = torch.view_as_real(piece.resolve_conj()) if piece.is_complex() else piece
    return real.sum(dtype=torch.float64 if real.dtype == torch.float64 else torch.float32)


def _bad_gradients(entries: Sequence[PreparedModel]) -> str:
    """Return which gradients of this rank are not finite, "" without any."""
    names: list[str] = []
    all_names: list[str] = []
    for entry in entries:
        for name, parameter in entry.module.named_parameters():
            if not parameter.requires_grad:
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
