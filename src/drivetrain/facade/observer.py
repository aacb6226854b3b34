"""Who watches a run: told of each event of a training step, and asked before anything is made."""

from collections.abc import Callable, Mapping
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
    """Several observers, told of each event one after the other.

    Args:
        observers: the first is told first; batches and choices pass through all of them.
    """

    def __init__(self, *observers: Observer) -> None:
        self._all = observers

    def choice(self, choice: StrategyChoice | None) -> StrategyChoice | None:
        """Return a model's strategy, as the last observer says."""
        for each in self._all:
            choice = each.choice(choice)
        return choice

    def delivered(self, batch: Any) -> Any:
        """Return the batch, as the last observer says."""
        for each in self._all:
            batch = each.delivered(batch)
        return batch


def _told(event: str) -> Callable[..., None]:
    def tell(self: Observers, *arguments: Any) -> None:
        for each in self._all:
            getattr(each, event)(*arguments)

    return tell


for _event in vars(Observer):
    if not _event.startswith("_") and _event not in {*vars(Observers), "configured"}:
        setattr(Observers, _event, _told(_event))
