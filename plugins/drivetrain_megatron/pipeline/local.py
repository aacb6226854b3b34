"""The stages of one rank: their workers, the interpreter that drives them, the way to others."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from drivetrain.collectives import Communicator
from drivetrain.errors import UsageError
from drivetrain.strategy import Strategy
from drivetrain_megatron.pipeline.actions import Action, ActionKind
from drivetrain_megatron.pipeline.batches import MicroBatch, join_outputs
from drivetrain_megatron.pipeline.interpreter import Interpreter
from drivetrain_megatron.pipeline.stages import Split, Stage
from drivetrain_megatron.pipeline.ties import SharedParameters
from drivetrain_megatron.pipeline.timeline import Span
from drivetrain_megatron.pipeline.transfer import Link
from drivetrain_megatron.pipeline.weights import WeightGradients
from drivetrain_megatron.pipeline.worker import Forwards, StageWorker
from drivetrain_megatron.recording.proxy import StageProxy


@dataclass(frozen=True, slots=True)
class StageParts:
    """The connections between the stages of a pipeline, and their shared parameters.

    Attributes:
        link: this rank's end of the pipeline.
        axis: collectives over the axis ``pp``.
        shared: parameters that several stages use.
        weights: products whose weights' gradients are computed later.
        forwards: counts the model's forwards.
    """

    link: Link
    axis: Communicator
    shared: SharedParameters
    weights: WeightGradients
    forwards: Forwards


class LocalStages:
    """The stages of this rank at work.

    Args:
        split: the stages.
        inner: the data-parallel strategy of the cell.
        parts: connections to the other stages.
        device: where they compute.

    Attributes:
        workers: by index of the stage.
        ranks: how many ranks the pipeline has.
        rank: this one.
        count: how many stages there are on all ranks.
        forwards: counts the model's forwards.
        spans: when the actions of this step ran.
    """

    def __init__(
        self, split: Split, inner: Strategy[Any], parts: StageParts, device: torch.device
    ) -> None:
        self.inner = inner
        self.device = device
        self.forwards = parts.forwards
        self._axis, self._shared, self._weights = parts.axis, parts.shared, parts.weights
        self.ranks, self.rank = parts.axis.size, parts.axis.rank
        self.count = parts.axis.size * len(split.stages)
        self.workers = {stage.index: self._worker(stage) for stage in split.stages}
        self._interpreter = Interpreter(self.workers, self.count, parts.link)
        self._stale = False
        self.spans: list[Span] = []

    @property
    def only(self) -> StageWorker:
        """The worker of this rank's stage.

        Raises:
            UsageError: it has several.
        """
        if len(self.workers) > 1:
            raise UsageError(
                f"expected the loss inside of the model with {len(self.workers)} chunks per rank, "
                "found one that is made outside: an interleaved schedule needs the whole batch at "
                "once; return the loss from the model, use accelerator.pipeline_step(model, "
                "inputs, targets, loss_fn=...), or set chunks: 1"
            )
        return self.workers[self.rank]

    @property
    def last(self) -> StageWorker | None:
        """The worker of the last stage; None on other ranks."""
        return self.workers.get(self.count - 1)

    def act(self, actions: Sequence[Action]) -> None:
        """Run some actions in order."""
        self.spans += self._interpreter.run_actions(actions)

    def outline(self, batch: MicroBatch) -> Any:
        """Return the model's output as proxies, without computing any block."""
        stage = next(iter(self.workers.values())).stage
        with self.forwards.forward(batch.number), self.inner.running():
            return stage.run_ambient(batch.args, batch.kwargs)

    def dtype(self, batch: MicroBatch) -> torch.dtype:
        """Return in which dtype a loss is made, the same on every rank: fp32, or fp64 of fp64."""
        stage = next(iter(self.workers.values())).stage
        dtypes = {meta.dtype for meta in stage.ends(batch.args, batch.kwargs)}
        return torch.float64 if torch.float64 in dtypes else torch.float32

    def evaluate(self, batches: Sequence[MicroBatch]) -> Any:
        """Run forward only, and give every stage the output of the last."""
        workers = {index: self._worker(worker.stage) for index, worker in self.workers.items()}
        for worker in workers.values():
            worker.batches = dict(enumerate(batches))
        actions = [
            Action(ActionKind.FORWARD, stage, number)
            for number in range(len(batches))
            for stage in sorted(workers)
        ]
        self._interpreter.run_actions(actions, workers)
        last = workers[max(workers)]
        whole = join_outputs([last.outputs[number] for number in range(len(batches))], batches)
        # Metrics and generation then need to know of no pipeline.
        return tree_map(self._from_last, whole)

    def broadcast(self, values: Tensor, label: str) -> None:
        """Give every stage, in place, the values of the last."""
        self._axis.broadcast(values, (self.count - 1) % self.ranks, label=label).wait()

    def refresh(self) -> None:
        """Bring copies of shared parameters up to date, if values have changed."""
        if self._stale:
            self._shared.refresh(self.inner)
            self._stale = False

    def outdate(self) -> None:
        """Say that values have changed: copies are made anew before the next forward."""
        self._stale = True

    def flush(self) -> None:
        """Return when everything that was sent is through."""
        self._interpreter.flush()

    def clear(self) -> None:
        """Forget micro-batches whose backward nobody asked for."""
        for worker in self.workers.values():
            worker.clear()

    def _worker(self, stage: Stage) -> StageWorker:
        return StageWorker(
            stage, self.inner, self._shared, self._weights, self.forwards, self.device
        )

    def _from_last(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or self.ranks == 1:
            return x
        if self.last is not None:
            values = x.detach().contiguous()
        elif isinstance(x, StageProxy):
            values = torch.empty(x.shape, dtype=x.dtype, device=self.device)
        else:
            return x
        self.broadcast(values, "outputs of the last stage")
        return values
