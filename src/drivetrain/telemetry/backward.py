"""The seconds of a backward in the first steps, by which methods for slow links are chosen.

``links.far: auto`` lets traffic hide behind compute, so the choice needs the seconds of a backward.
Ranks time the first steps, in which all traffic is exact; then they agree on one figure, and take
methods for the rest of the run. The figure is that of the slowest rank: all others wait for it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from drivetrain.collectives.facts import gather_facts
from drivetrain.cost import ModelSpec, TensorSpec
from drivetrain.facade.observer import Observer
from drivetrain.facade.prepared import PreparedModel, PreparedObjects
from drivetrain.facade.settings import Runs
from drivetrain.facade.weights import WholeWeights
from drivetrain.links.automatic import COUNTED, WARM_UP, Sender, settle_links
from drivetrain.log import get_logger
from drivetrain.runtime.gradient_state import GradientState
from drivetrain.strategy import Strategy
from drivetrain.traffic import Traffic

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
        hook: handle of the hook that notes forwards.
    """

    entry: PreparedModel
    tensors: Sequence[TensorSpec]
    hook: RemovableHandle | None = None
    has_run: bool = False
    last_s: float | None = None
    steps: list[float] = field(default_factory=list)

    def note_forward(self, *_: Any) -> None:
        """Note a forward of training: a hook of the model."""
        self.has_run = self.has_run or torch.is_grad_enabled()

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
            timed.hook = entry.model.register_forward_pre_hook(timed.note_forward)

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
        for each in self._timed:
            if each.hook and not (each.is_open and each.entry in known):
                each.hook.remove()
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
