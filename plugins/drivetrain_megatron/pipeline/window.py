"""L1b: micro-batches are the calls of an accumulation window, in the order of 1F1B.

Each call is one forward; each backward of the script is the one that 1F1B has next, and what is
left runs at the end of the window. On a stage with ``a`` stages after it, 1F1B runs the forwards of
``a`` more micro-batches before the first backward.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from drivetrain_megatron.pipeline.actions import Action, Kind
from drivetrain_megatron.pipeline.batches import MicroBatch
from drivetrain_megatron.pipeline.local import LocalStages


class Window:
    """The calls of one accumulation window on this rank.

    Args:
        stages: of this rank.
    """

    def __init__(self, stages: LocalStages) -> None:
        self._stages = stages
        self._ahead = stages.ranks - 1 - stages.rank
        self._started = 0
        self._waiting: list[int] = []  # numbers whose backward has not run
        self._asked = 0  # how many of them the script has asked for

    def __len__(self) -> int:
        """Return how many calls wait for a backward of the script."""
        return len(self._waiting) - self._asked

    def call(self, batch: MicroBatch) -> Any:
        """Run the forward of one micro-batch; return what the model returns, or proxies."""
        worker, number = self._stages.only, self._started
        worker.batches[number] = batch
        self._started += 1
        self._stages.act([Action(Kind.FORWARD, self._stages.rank, number)])
        self._waiting.append(number)
        return worker.outputs.pop(number)

    def backward(self, loss: Tensor, synchronize: bool, options: Mapping[str, Any]) -> None:
        """Run the backwards that 1F1B has next.

        Args:
            loss: made of what the last call returned.
            synchronize: whether the window ends, and gradients are averaged over dp.
            options: those of ``Tensor.backward``.
        """
        worker = self._stages.only
        if worker.stage.is_last:
            worker.losses_to_run[self._waiting[-1]] = (loss, dict(options))
        self._asked += 1
        ready = self._asked if synchronize else max(self._asked - self._ahead, 0)
        numbers, self._waiting = self._waiting[:ready], self._waiting[ready:]
        self._asked -= ready
        worker.final = numbers[-1] if synchronize else None
        self._stages.act([Action(Kind.BACKWARD, self._stages.rank, each) for each in numbers])
        if synchronize:
            self._started = 0
