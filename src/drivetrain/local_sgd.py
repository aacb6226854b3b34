"""Local SGD: every rank steps by itself, and the ranks average their parameters now and then.

Paper: Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019, algorithm 1.
"""

from contextlib import ExitStack
from types import TracebackType

import torch
from torch import nn

from drivetrain.accelerator import Accelerator
from drivetrain.errors import UsageError


class LocalSGD:
    """Context of a training loop in which gradients stay local.

    A loop calls ``step()`` once per micro-batch. Parameters are averaged over the data-parallel
    ranks after each ``local_sgd_steps`` of these calls, and at the end of the context. The states
    of the optimizer stay each rank's own.

    Args:
        accelerator: prepared the model.
        model: a prepared model that every rank holds whole.
        local_sgd_steps: calls of ``step()`` between two averages, at least 1.
        enabled: False leaves the loop as it is.

    Raises:
        UsageError: ``local_sgd_steps`` is below 1, or ranks divide the model or its optimizer.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        local_sgd_steps: int,
        enabled: bool = True,
    ) -> None:
        self.enabled = enabled and accelerator.num_processes > 1
        self.local_sgd_steps = local_sgd_steps
        self.num_steps = 0
        self._accelerator = accelerator
        self._model = model
        self._contexts = ExitStack()
        if self.enabled:
            _check(accelerator, model, local_sgd_steps)

    def __enter__(self) -> "LocalSGD":
        if self.enabled:
            self._contexts.enter_context(self._accelerator.no_sync(self._model))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._contexts.close()
        if self.enabled and error is None:  # after an error the other ranks may be elsewhere
            self._average()

    def step(self) -> None:
        """Count a micro-batch; the last of each ``local_sgd_steps`` averages. Collective then."""
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._average()

    @torch.no_grad()
    def _average(self) -> None:
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                parameter.copy_(self._accelerator.reduce(parameter.detach(), "mean"))


def _check(accelerator: Accelerator, model: nn.Module, steps: int) -> None:
    if steps < 1:
        raise UsageError(f"expected local_sgd_steps of at least 1, found {steps}")
    strategy = accelerator.strategy_of(model)
    # Names of tensors in place of parameters: the optimizer of a rank holds a part alone.
    if strategy.pace.forwards or strategy.state.names():
        raise UsageError(
            "expected a strategy whose ranks can step by themselves for LocalSGD, found "
            f"{type(strategy).__name__}, which divides the model or its optimizer; take ddp, or "
            "LocalSGD(..., enabled=False)"
        )
