"""Uneven inputs: a rank that has no more batches stands in until the last one has finished.

Before each training forward the ranks exchange one number: which model runs, and whether its
backward will synchronise. A rank that left its loop keeps exchanging, takes part in what the others
do, and in the end takes over the state of one that went on to the last batch.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from drivetrain import communication
from drivetrain.errors import UsageError
from drivetrain.facade.core import Core, ModelEntry

_DONE = 0


class Joining(Core):
    """The uneven inputs of the Accelerator."""

    _joined: Sequence[ModelEntry] = ()
    _last_round: Sequence[int] = ()

    @contextmanager
    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> Iterator[None]:
        """Context of a training loop in which ranks may have different numbers of batches.

        Each forward of a joined model must be followed by one backward. The gradients of ranks
        without a batch count as zeros.

        Args:
            joinables: the prepared models of the loop; other objects are ignored.
            even_batches: while inside, whether prepared loaders fill up the last batches.

        Raises:
            UsageError: a strategy cannot stand in, or a loss scale needs all ranks in every step.
        """
        if self.scaler.is_enabled() and self.world.size > 1:
            raise UsageError(
                "expected precision no or bf16 in join_uneven_inputs, found fp16, whose loss scale "
                "all ranks agree on in every step; take bf16, or loaders with even_batches=True"
            )
        models = [item for item in joinables if isinstance(item, nn.Module)]
        before = [loader.even_batches for loader in self._dataloaders]
        if even_batches is not None:
            for loader in self._dataloaders:
                loader.even_batches = even_batches
        self._joined, self._last_round = list(self._entries_of(models)), ()
        try:
            yield
            if self.world.size > 1:
                self._stand_in()
        finally:
            self._joined = ()
            for loader, even in zip(self._dataloaders, before, strict=True):
                loader.even_batches = even

    def _announce(self, entry: ModelEntry, training: bool) -> None:
        """Tell the other ranks that a joined model runs forward."""
        if self._joined and training and self.world.size > 1 and entry in self._joined:
            synchronizes = self.gradient_state.sync_gradients or self.gradient_state.sync_each_batch
            self._exchange(2 * (self._joined.index(entry) + 1) + int(synchronizes))

    def _exchange(self, status: int) -> int:
        """Return what some rank is doing; all ranks that do something do the same."""
        mine = torch.tensor([status], device=self.device)
        statuses = communication.gather(mine).tolist()
        doing = max(statuses)
        if doing != _DONE:
            self._last_round = [rank for rank, each in enumerate(statuses) if each != _DONE]
        return int(doing)

    def _stand_in(self) -> None:
        while (doing := self._exchange(_DONE)) != _DONE:
            entry = self._joined[doing // 2 - 1]
            entry.strategy.stand_in(synchronize=bool(doing % 2))
        if len(self._last_round) in (0, self.world.size):
            return
        source = self._last_round[0]
        for entry in self._joined:
            entry.strategy.catch_up(source)
        self._catch_up(source)

    def _catch_up(self, source: int) -> None:
        """Take over learning rates and schedules, which moved with the steps of the others."""
        optimizers = [optimizer for entry in self._joined for optimizer in entry.optimizers]
        groups = [
            [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            for optimizer in optimizers
        ]
        schedules = [scheduler.state_dict() for scheduler in self._schedulers]
        steps = [optimizer.steps for optimizer in self._optimizers]
        groups, schedules, steps = communication.broadcast_object_list(
            [groups, schedules, steps], source
        )
        for optimizer, theirs in zip(optimizers, groups, strict=True):
            for group, values in zip(optimizer.param_groups, theirs, strict=True):
                group.update(values)
        for scheduler, state in zip(self._schedulers, schedules, strict=True):
            scheduler.load_state_dict(state)
        for prepared, taken in zip(self._optimizers, steps, strict=True):
            prepared.steps = taken
