"""Uneven inputs: a rank without further batches stands in until the last rank has finished.

Before each training forward the ranks exchange one number: which model runs, and whether its
backward will synchronise. A rank that left its loop keeps exchanging, takes part in the others'
collectives, and in the end takes over the state of a rank that went on to the last batch.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from drivetrain import communication
from drivetrain.errors import UsageError
from drivetrain.facade.prepared import PreparedModel, PreparedObjects
from drivetrain.runtime.gradient_state import GradientState
from drivetrain.runtime.scaler import LossScaler
from drivetrain.runtime.world import World

_DONE = 0


class UnevenInputs:
    """The loops of one Accelerator in which ranks have different numbers of batches.

    Args:
        prepared: the models, and the schedules that follow their steps.
        state: the accumulation window.
        scaler: must be off, since all ranks agree on a loss scale in every step.
        world: all ranks.
    """

    def __init__(
        self, prepared: PreparedObjects, state: GradientState, scaler: LossScaler, world: World
    ) -> None:
        self._prepared = prepared
        self._state = state
        self._scaler = scaler
        self._world = world
        self._joined: Sequence[PreparedModel] = ()
        self._last_round: Sequence[int] = ()

    @contextmanager
    def joined(self, joinables: Sequence[Any], even_batches: bool | None) -> Iterator[None]:
        """Context of one such loop over these models; see ``join_uneven_inputs``."""
        if self._scaler.is_enabled() and self._world.size > 1:
            raise UsageError(
                "expected precision no or bf16 in join_uneven_inputs, found fp16, whose loss scale "
                "all ranks agree on in every step; take bf16, or loaders with even_batches=True"
            )
        models = [item for item in joinables if isinstance(item, nn.Module)]
        before = [loader.even_batches for loader in self._prepared.loaders]
        if even_batches is not None:
            for loader in self._prepared.loaders:
                loader.even_batches = even_batches
        self._joined, self._last_round = self._prepared.chosen(models), ()
        self._state.uneven = True
        try:
            yield
            if self._world.size > 1:
                self._stand_in()
        finally:
            self._joined = ()
            self._state.uneven = False
            for loader, even in zip(self._prepared.loaders, before, strict=True):
                loader.even_batches = even

    def announce(self, entry: PreparedModel, training: bool) -> None:
        """Tell the other ranks that a joined model runs forward; nothing outside of such a loop."""
        if self._joined and training and self._world.size > 1 and entry in self._joined:
            synchronizes = self._state.sync_gradients or self._state.sync_each_batch
            self._exchange(2 * (self._joined.index(entry) + 1) + int(synchronizes))

    def _exchange(self, status: int) -> int:
        """Return the largest status of any rank: all ranks with a batch have the same one."""
        mine = torch.tensor([status], device=self._world.device)
        statuses = communication.gather(mine).tolist()
        doing = max(statuses)
        if doing != _DONE:
            self._last_round = [rank for rank, each in enumerate(statuses) if each != _DONE]
        return int(doing)

    def _stand_in(self) -> None:
        while (doing := self._exchange(_DONE)) != _DONE:
            entry = self._joined[doing // 2 - 1]
            entry.strategy.stand_in(synchronize=bool(doing % 2))
        if len(self._last_round) in (0, self._world.size):
            return
        source = self._last_round[0]
        for entry in self._joined:
            entry.strategy.catch_up(source)
        self._catch_up(source)

    def _catch_up(self, source: int) -> None:
        """Take over learning rates and schedules, which moved with the steps of the others."""
        optimizers = [optimizer for entry in self._joined for optimizer in entry.optimizers]
        groups = [groups for entry in self._joined for groups in entry.param_groups()]
        schedules = [scheduler.state_dict() for scheduler in self._prepared.schedulers]
        steps = [optimizer.steps for optimizer in self._prepared.optimizers]
        groups, schedules, steps = communication.broadcast_object_list(
            [groups, schedules, steps], source
        )
        for optimizer, theirs in zip(optimizers, groups, strict=True):
            for group, values in zip(optimizer.param_groups, theirs, strict=True):
                group.update(values)
        for scheduler, state in zip(self._prepared.schedulers, schedules, strict=True):
            scheduler.load_state_dict(state)
        for prepared, taken in zip(self._prepared.optimizers, steps, strict=True):
            prepared.steps = taken
