"""Who watches a run: told of each event of a training step, and asked before anything is made."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from drivetrain.config import Resolved
from drivetrain.facade.prepared import PreparedModel, PreparedObjects
from drivetrain.facade.settings import Runs, StrategyChoice
from drivetrain.facade.weights import WholeWeights


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

    def delivered(self, batch: Any) -> Any:
        """Return a batch of a prepared loader as the script gets it."""
        return batch

    def handed_over(self, args: Any, kwargs: Mapping[str, Any], targets: Any) -> None:
        """See a batch that goes to the strategy, without a call of the model."""

    def after_backward(self, loss: Tensor, weight: float | Tensor | None) -> None:
        """See the loss of one backward, with its value on every rank."""

    def gradients(self, entry: PreparedModel) -> None:
        """See a model's gradients, averaged and unscaled, before they are clipped or used."""

    def after_step(self) -> None:
        """See that an optimizer has stepped."""
