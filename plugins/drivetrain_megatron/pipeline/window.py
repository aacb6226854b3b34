"""L1b: micro-batches are the calls of an accumulation window, in the order of 1F1B.

Each call is one forward; each backward of the script is the one that 1F1B has next, and what is
left runs at the end of the window. On a stage with ``a`` stages after it, 1F1B runs the forwards of
``a`` more micro-batches before the first backward.
"""

from typing import Any

from torch import Tensor

from drivetrain.errors import UsageError
from drivetrain_megatron.pipeline.actions import Action, Kind
from drivetrain_megatron.pipeline.batches import MicroBatch
from drivetrain_megatron.pipeline.local import LocalStages
from drivetrain_megatron.pipeline.origins import Origin


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
        self._origins: list[Origin] = []  # of those that it has not asked for

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
        output, origin = worker.outputs.pop(number), Origin()
        origin.mark(output)
        self._origins.append(origin)
        return output

    def backward(self, loss: Tensor, origins: frozenset[Origin], synchronize: bool) -> None:
        """Run the backwards that 1F1B has next.

        Args:
            loss: made of what a call returned.
            origins: the calls that it was made of.
            synchronize: whether the window ends, and gradients are averaged over dp.

        Raises:
            UsageError: the loss is not that of the first call that waits for one.
        """
        if origins != {*self._origins[:1]}:
            raise UsageError(
                f"expected the loss of the first of {len(self)} forwards that wait for their "
                f"backward in this accumulation window, found one made of {len(origins)} forwards, "
                "or of another: micro-batches go through the pipeline in order, each forward with "
                "one backward; call the model under torch.no_grad() for anything else"
            )
        worker = self._stages.only
        if worker.stage.is_last:
            worker.losses_to_run[self._waiting[self._asked]] = loss
        del self._origins[0]
        self._asked += 1
        ready = self._asked if synchronize else max(self._asked - self._ahead, 0)
        numbers, self._waiting = self._waiting[:ready], self._waiting[ready:]
        self._asked -= ready
        worker.final = numbers[-1] if synchronize else None
        self._stages.act([Action(Kind.BACKWARD, self._stages.rank, each) for each in numbers])
        if synchronize:
            self._started = 0

    def clear(self) -> None:
        """Forget calls whose backward nobody asked for."""
        self._waiting, self._origins, self._started, self._asked = [], [], 0, 0
