"""L1: the script makes the loss of a whole batch: all forwards run before any backward (GPipe)."""

from collections.abc import Sequence

from torch import Tensor

from drivetrain_megatron.pipeline.actions import Action, Kind
from drivetrain_megatron.pipeline.batches import MicroBatch, cut_from_graph, join_outputs
from drivetrain_megatron.pipeline.local import LocalStages
from drivetrain_megatron.pipeline.origins import Origin


class WholeBatch:
    """A call of the model whose backward has not come.

    Args:
        stages: of this rank.
        batches: the micro-batches of the call.
        first: number of the first one among those that wait.

    Attributes:
        output: what the call returns: real on the last stage, proxies before it.
        origin: the call, as its output knows it.
    """

    def __init__(self, stages: LocalStages, batches: Sequence[MicroBatch], first: int) -> None:
        self._stages = stages
        self._worker = worker = stages.only
        self._numbers = range(first, first + len(batches))
        worker.batches |= dict(zip(self._numbers, batches, strict=True))
        stages.act([Action(Kind.FORWARD, stages.rank, number) for number in self._numbers])
        outputs = [worker.outputs.pop(number) for number in self._numbers]
        # The script's loss begins a graph of its own, at leaves that stand for the roots of ours.
        self._leaves: list[Tensor] = []
        self._roots: list[list[Tensor]] = []
        if worker.stage.is_last:
            cuts = [cut_from_graph(output) for output in outputs]
            outputs = [output for output, _, _ in cuts]
            self._leaves = [leaf for _, leaves, _ in cuts for leaf in leaves]
            self._roots = [roots for _, _, roots in cuts]
        self.output = join_outputs(outputs, batches)
        self.origin = Origin()
        self._nodes = self.origin.mark(self.output)

    def begin(self, loss: Tensor) -> None:
        """Run backward of a loss down to what it was made of: the outputs of this call and others.

        Args:
            loss: made of ``output``.
        """
        if self._worker.stage.is_last:
            with self._stages.inner.accumulating():
                self._stages.inner.backward(loss)

    def backward(self, synchronize: bool) -> None:
        """Run the backward of every micro-batch.

        Args:
            synchronize: whether gradients are averaged over data-parallel ranks now.
        """
        worker = self._worker
        if worker.stage.is_last:
            self._seed()
        worker.final = self._numbers[-1] if synchronize else None
        self._stages.act(
            [Action(Kind.BACKWARD, self._stages.rank, number) for number in self._numbers]
        )

    def _seed(self) -> None:
        """Let each micro-batch's backward begin at the gradients that the loss gave its output."""
        gradients = iter(self._leaves)
        for number, roots in zip(self._numbers, self._roots, strict=True):
            given = [next(gradients).grad for _ in roots]
            self._worker.begin_at(
                number,
                [root for root, gradient in zip(roots, given, strict=True) if gradient is not None],
                [gradient for gradient in given if gradient is not None],
            )
