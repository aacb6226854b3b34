"""The link between hosts: the bytes of a step and their seconds, and the choice of methods."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from torch import Tensor, nn

from drivetrain.collectives.facts import gather_facts
from drivetrain.compression.automatic import COUNTED, WARM_UP, Sender, settle_links
from drivetrain.cost import ModelSpec, TensorSpec
from drivetrain.facade.observer import Observer
from drivetrain.facade.prepared import PreparedModel, PreparedObjects, WholeWeights
from drivetrain.facade.settings import Runs
from drivetrain.log import get_logger
from drivetrain.observe.figures import StepFigures, StepSums
from drivetrain.runtime.gradient_state import GradientState
from drivetrain.strategy import Run, Strategy
from drivetrain.traffic import Traffic


class LinkLoad:
    """Warns once where the link takes longer than the work of a step: then steps wait for it.

    The time of the link is the bytes over the measured bandwidth. Where a rank's waiting is not
    known, because its device waits, the time of the link is taken for it.

    Args:
        run: the run of the strategy.
        link: bytes per second between hosts, as the launchers measured it.
        warn: shows a line.
    """

    def __init__(self, run: Run, link: float, warn: Callable[[str], None]) -> None:
        self._run, self._link, self._warn = run, link, warn
        self._judged = False
        self._sums = StepSums(lambda each: each.steps >= COUNTED, self._judge, skip=WARM_UP)

    def take(self, figures: StepFigures) -> None:
        """Take the record of a step."""
        if not self._judged:
            self._sums.add(figures)

    def _judge(self, figures: StepFigures) -> None:
        self._judged = True
        parts = ((key.partition("/"), count) for key, count in figures.sent.items())
        sent = {(axis, operation): count for (axis, _, operation), count in parts}
        nbytes = self._run.bytes_between_hosts(sent)
        link_s = nbytes / self._link
        waiting_s = sum(figures.waiting.values()) or min(link_s, figures.seconds)
        working_s = figures.seconds - waiting_s
        if link_s <= working_s:
            return
        self._warn(
            f"the link between hosts is too slow for this strategy: a step sends "
            f"{nbytes / COUNTED / 1e6:,.1f} MB from each host, {link_s / COUNTED:.3g} s at "
            f"the measured {self._link / 1e6:,.4g} MB/s, and works for {working_s / COUNTED:.3g} "
            "s; accumulate more micro-batches per step, keep sharding inside of hosts, or send "
            "less: 'drivetrain estimate' lists the bytes of every strategy"
        )


# --- the seconds of a backward in the first steps, by which methods are chosen ---

# ``links.far: auto`` lets traffic hide behind compute, so the choice needs the seconds of a
# backward. Ranks time the first steps, in which all traffic is exact; then they agree on one
# figure, and take methods for the rest of the run. The figure is that of the slowest rank: all
# others wait for it.


logger = get_logger(__name__)


@dataclass(slots=True)
class TimedModel:
    """A model whose methods are chosen when its backward has been timed.

    Attributes:
        entry: the prepared model.
        tensors: its parameters, as the script made it.
        has_run: whether its forward ran since the last step, so that a backward may reach it.
        last_s: seconds of the last backward since the last step; None before one.
        steps: seconds of the last backward of each step.
    """

    entry: PreparedModel
    tensors: Sequence[TensorSpec]
    has_run: bool = False
    last_s: float | None = None
    steps: list[float] = field(default_factory=list)

    @property
    def strategy(self) -> Strategy[Any]:
        """The strategy of the model."""
        return self.entry.strategy

    @property
    def is_open(self) -> bool:
        """Whether the choice is still to come: a checkpoint may have brought it."""
        links = self.strategy.run.links
        return any(links.is_open(use) for use in links.awaited)


class LinkChoice(Observer):
    """Times backwards until the methods of each model are chosen.

    Args:
        state: tells whether ranks take equally many steps.
        traffic: knows how long this rank has waited for others.
    """

    def __init__(self, state: GradientState, traffic: Traffic) -> None:
        self._state, self._traffic = state, traffic
        self._prepared = PreparedObjects()
        self._tensors: Sequence[TensorSpec] = ()
        self._timed: list[TimedModel] = []
        self._begun = 0.0

    def attach(self, prepared: PreparedObjects, weights: WholeWeights, runs: Runs) -> None:
        """Take the models of the run."""
        self._prepared = prepared

    def before_prepare(self, model: nn.Module) -> None:
        """Note the parameters that cross: a strategy may cut them."""
        self._tensors = ModelSpec.of(model).parameters

    def after_prepare(self, entry: PreparedModel) -> None:
        """Time a model whose choice is open."""
        timed = TimedModel(entry, self._tensors)
        if timed.is_open:
            self._timed.append(timed)

    def before_forward(self, entry: PreparedModel) -> None:
        """Note a forward of training."""
        for each in self._timed:
            each.has_run |= each.entry is entry

    def before_backward(self) -> None:
        """Note the time."""
        if self._timed:
            self._begun = time.perf_counter() - self._traffic.waited_s

    def after_backward(self, loss: Tensor, weight: float | Tensor | None) -> None:
        """Note the seconds of a backward, without its waiting for other ranks.

        Where gradients accumulate, the last backward of a window counts: sums cross beside it. A
        loss may reach several models; a strategy may run a model without calling it.
        """
        for each in self._timed:
            if each.has_run or each.entry is self._prepared.running():
                now = time.perf_counter() - self._traffic.waited_s
                each.last_s = max(0.0, now - self._begun)

    def after_step(self) -> None:
        """Count a step of each model with a backward; choose after enough steps."""
        for each in self._timed:
            if each.last_s is not None and not self._state.uneven:
                each.steps.append(each.last_s)
            each.last_s, each.has_run = None, False
            if each.is_open and len(each.steps) == WARM_UP + COUNTED:
                _settle(each)
        known = self._prepared.models
        self._timed = [each for each in self._timed if each.is_open and each.entry in known]


def _settle(timed: TimedModel) -> None:
    """Choose the methods of a model, by the slowest rank's usual backward. Collective."""
    mine = median(timed.steps[WARM_UP:])
    slowest = max(gather_facts(mine, float, doing="the seconds of a backward"))
    strategy = timed.strategy
    sender = Sender(type(strategy), strategy.config, strategy.run.precision)
    links, lines = settle_links(strategy.run.links, sender, timed.tensors, slowest)
    strategy.take_links(links)
    for line in lines:
        logger.announce(line)
