"""L2 and L3: the loss of a batch is promised, and made while its backward runs, in any schedule.

L2: the model returns its loss. L3: the script hands a loss function over. The call computes
nothing yet but what the loss will look like; its value comes with ``accelerator.backward(loss)``.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from drivetrain.errors import UsageError
from drivetrain_megatron.pipeline.actions import Action, Kind
from drivetrain_megatron.pipeline.batches import MicroBatch
from drivetrain_megatron.pipeline.local import LocalStages
from drivetrain_megatron.pipeline.origins import Origin, origins_of
from drivetrain_megatron.pipeline.proxy import StageProxy, proxy_like, resolve, slope_of
from drivetrain_megatron.pipeline.schedules import make_schedule
from drivetrain_megatron.pipeline.shares import shares_of
from drivetrain_megatron.pipeline.worker import LossOf, find_loss


class PromisedLoss:
    """A batch of which nothing has been computed.

    Args:
        stages: of this rank.
        batches: the micro-batches.
        dtype: of the loss.
        loss_of: makes the loss of what the model returns (L3); None if that has it (L2).

    Attributes:
        loss: stands for the mean over the batch.
        origin: the call, as the loss knows it.
    """

    def __init__(
        self,
        stages: LocalStages,
        batches: Sequence[MicroBatch],
        dtype: torch.dtype,
        loss_of: LossOf | None = None,
    ) -> None:
        self._stages = stages
        self._batches = batches
        self._loss_of = functools.partial(self._made, loss_of) if loss_of else _loss_in
        self._made_outside = loss_of is not None
        self._autocast = _autocast(stages.device)
        self.loss: StageProxy = proxy_like((), dtype, stages.device, requires_grad=True)
        self.origin = Origin()
        self.origin.mark(self.loss)

    def backward(self, loss: Tensor, synchronize: bool, schedule: str) -> None:
        """Run the whole schedule; ``loss`` has its value afterwards.

        Args:
            loss: the promised one, or a multiple of it.
            synchronize: whether gradients are averaged over data-parallel ranks now.
            schedule: its name.
        """
        stages = self._stages
        factor = _factor(loss, self.loss)
        shares = shares_of(self._batches, self._outline)
        plan = make_schedule(schedule, stages.ranks, len(self._batches), len(stages.workers))
        actions = plan.ranks[stages.rank]
        for worker in stages.workers.values():
            worker.batches = dict(enumerate(self._batches))
            worker.loss_of = self._loss_of
            worker.seeds = {i: factor * share for i, share in enumerate(shares) if share}
        if synchronize:
            self._mark_final(actions)
        try:
            with _casting(self._autocast), torch.enable_grad():
                stages.act(actions)
        finally:
            for worker in stages.workers.values():
                worker.loss_of = None
        total = torch.zeros((), dtype=self.loss.dtype, device=stages.device)
        if stages.last is not None:
            for index, share in enumerate(shares):
                if share:  # the loss of others may be no number
                    total += stages.last.losses[index] * share
        stages.broadcast(total, "value of the loss")
        resolve(self.loss, total)

    def _mark_final(self, actions: Sequence[Action]) -> None:
        """Tell the worker of this rank's last backward that it is the one."""
        final = next(action for action in reversed(actions) if action.kind.frees)
        worker = self._stages.workers[final.stage]
        if final.kind is Kind.WEIGHT:
            worker.final_weight = final.micro_batch
        else:
            worker.final = final.micro_batch

    def _made(self, loss_of: LossOf, output: Any, targets: Any) -> Tensor:
        """Make the loss of what the model returned; whatever else goes in must want no gradient."""
        if not torch.is_grad_enabled():
            return loss_of(output, targets)
        self.origin.mark(output)
        loss = loss_of(output, targets)
        if loss.requires_grad:
            origins_of(loss)
        return loss

    def _outline(self, batch: MicroBatch) -> Any:
        """Make the loss of a micro-batch without computing any block."""
        output = self._stages.outline(batch)
        return self._loss_of(output, batch.targets) if self._made_outside else output


def _loss_in(output: Any, targets: Any) -> Tensor:
    loss = find_loss(output)
    if loss is None:
        raise UsageError("expected a model that returns its loss for every micro-batch, found none")
    return loss


def _factor(loss: Tensor, promised: StageProxy) -> Tensor:
    """Return by how much a loss grows with the promised one: what its gradient is multiplied by."""
    if not isinstance(loss, StageProxy):
        raise UsageError(
            "expected the loss that the model returned, or a multiple of it, found another tensor; "
            "under pipeline parallelism a model that makes its loss is asked for nothing else"
        )
    return slope_of(loss, promised)


_Autocast = tuple[str, torch.dtype, bool]
"""Kind of device, dtype, whether it is on."""


def _autocast(device: torch.device) -> _Autocast:
    kind = device.type
    return kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)


@contextmanager
def _casting(autocast: _Autocast) -> Iterator[None]:
    kind, dtype, enabled = autocast
    with torch.autocast(kind, dtype=dtype, enabled=enabled):
        yield
