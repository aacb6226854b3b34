"""Who watches a run: told of each event of a training step, and asked before anything is made."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader

from drivetrain.config import Resolved
from drivetrain.facade.prepared import PreparedModel, PreparedObjects, WholeWeights
from drivetrain.facade.settings import Runs, StrategyChoice


class Observer:
    """Watches nothing and changes nothing: the run is an ordinary one.

    All ranks call the methods at the same places of a script, so that these may communicate.
    """

    def configured(self, config: Resolved) -> Resolved:
        """Return the configuration to run with."""
        return config

    def attach(self, prepared: PreparedObjects, weights: WholeWeights, runs: Runs) -> None:
        """Take the objects of the run, before any model is prepared."""

    def choice(self, choice: StrategyChoice | None) -> StrategyChoice | None:
        """Return a model's strategy, given the choice of the script."""
        return choice

    def before_prepare(self, model: nn.Module) -> None:
        """See a model as the script made it."""

    def after_prepare(self, entry: PreparedModel) -> None:
        """See a prepared model."""

    def fetching(self, loader: DataLoader[Any]) -> None:
        """See that the script asks a prepared loader for a batch."""

    def exhausted(self) -> None:
        """See that the loader which was asked had no more batch."""

    def delivered(self, batch: Any) -> Any:
        """Return a batch of a prepared loader as the script gets it."""
        return batch

    def handed_over(self, args: Any, kwargs: Mapping[str, Any], targets: Any) -> None:
        """See a batch that goes to the strategy, without a call of the model."""

    def before_forward(self, entry: PreparedModel) -> None:
        """See that a prepared model is about to compute, with gradients."""

    def before_backward(self) -> None:
        """See that a backward is about to run."""

    def after_backward(self, loss: Tensor, weight: float | Tensor | None) -> None:
        """See the loss of one backward, with its value on every rank."""

    def gradients(self, entry: PreparedModel) -> None:
        """See a model's gradients, averaged and unscaled, before they are clipped or used."""

    def before_update(self) -> None:
        """See that gradients are about to be unscaled, clipped or used."""

    def clipped(self, norm: Tensor) -> None:
        """See the global norm of the gradients before they were clipped, 0-d, on every rank."""

    def after_step(self) -> None:
        """See that an optimizer has stepped, or left out a step."""

    def out_of_memory(self, error: Exception) -> None:
        """See an allocator's error that leaves a step, on this rank alone: do not communicate."""


class Observers(Observer):
    """Several observers, told one after the other of the events that they do something with.

    Args:
        observers: the first is told first; batches and choices pass through all of them.
    """

    def __init__(self, *observers: Observer) -> None:
        for event, nothing in _EVENTS.items():
            act = [getattr(o, event) for o in observers if getattr(type(o), event) is not nothing]
            setattr(self, event, partial(_passed if event in _PASSING else _told, act))


_EVENTS = {event: function for event, function in vars(Observer).items() if event[0] != "_"}
_PASSING = ("configured", "choice", "delivered")
"""Events whose observers may change what they are about."""


def _told(act: Sequence[Callable[..., None]], *arguments: Any) -> None:
    for each in act:
        each(*arguments)


def _passed(act: Sequence[Callable[[Any], Any]], passing: Any) -> Any:
    for each in act:
        passing = each(passing)
    return passing
