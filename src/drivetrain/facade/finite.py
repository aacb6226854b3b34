"""A run stops at its first infinite or NaN loss or gradient, and names step, rank and parameter.

Looking costs a wait for the device and two small messages per optimizer step, so it is an option.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from drivetrain import communication
from drivetrain.errors import NonFiniteError
from drivetrain.facade.prepared import PreparedModel, PreparedObjects
from drivetrain.facade.settings import Runs
from drivetrain.runtime.scaler import LossScaler


class FiniteCheck:
    """Looks at the losses and the gradients of each accumulation window, if the run asks for it.

    With a loss scale an infinite gradient is no mistake: then losses alone are looked at.

    Args:
        prepared: the optimizers count the steps.
        runs: of the Accelerator; all ranks learn what one of them found.
        scaler: the loss scale of fp16.
    """

    def __init__(self, prepared: PreparedObjects, runs: Runs, scaler: LossScaler) -> None:
        self.enabled = runs.config.run.stop_at_nonfinite
        self._prepared = prepared
        self._runs = runs
        self._scaler = scaler
        self._losses: list[Tensor] = []
        self._looked: set[int] = set()
        self._step = 1

    def start_window(self) -> None:
        """Forget the window before."""
        self._losses.clear()
        self._looked.clear()
        self._step = 1 + max(
            (optimizer.steps for optimizer in self._prepared.optimizers), default=0
        )

    def see_loss(self, loss: Tensor) -> None:
        """Keep the loss of a micro-batch; nothing waits for its value yet."""
        if self.enabled:
            self._losses.append(loss.detach())  # a pipeline publishes its value later

    def check(self, entry: PreparedModel) -> None:
        """Look at a model's averaged gradients, once per window. Collective where it is enabled.

        Raises:
            NonFiniteError: on every rank: names step, ranks, micro-batch or parameter.
        """
        if not self.enabled or id(entry) in self._looked:
            return
        self._looked.add(id(entry))
        mine = self._first_loss() or self._first_gradient(entry)
        found = torch.tensor(bool(mine), device=self._runs.default.world.device)
        if not bool(communication.reduce(found, "max")):
            return
        everyone = communication.gather_object([mine])
        where = "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(everyone) if each)
        raise NonFiniteError(
            "expected finite losses and gradients, as stop_at_nonfinite says, found in step "
            f"{self._step}: {where}; look at the batch of that rank, lower the learning rate, or "
            "clip gradients"
        )

    def _first_loss(self) -> str:
        """Return the first loss of this rank's window that is not finite, in words."""
        values = torch.stack(self._losses).flatten().tolist() if self._losses else []
        for number, value in enumerate(values, 1):
            if not torch.isfinite(torch.tensor(value)):
                return f"the loss of micro-batch {number} is {value}"
        return ""

    def _first_gradient(self, entry: PreparedModel) -> str:
        """Return the first parameter of this rank whose gradient is not finite, in words."""
        strategy = entry.strategy
        if self._scaler.is_enabled() or _all_finite(strategy.gradients()):
            return ""
        for name, parameter in entry.module.named_parameters():
            if parameter.requires_grad and not _all_finite(strategy.gradients([parameter])):
                return f"the gradient of {name}"
        return "a gradient"


def _all_finite(pieces: Iterable[Tensor]) -> bool:
    return all(bool(piece.isfinite().all()) for piece in pieces)
