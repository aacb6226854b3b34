"""The stages of one rank at work, as a schedule says: receive, compute, send the result on."""

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drivetrain.collectives import Communicator
from drivetrain.errors import UsageError
from drivetrain.model import LeftBehind
from drivetrain.ranges import STAGE, named_range
from drivetrain.strategy import Strategy
from drivetrain_megatron.dropout import Dropout
from drivetrain_megatron.pipeline.batches import MicroBatch
from drivetrain_megatron.pipeline.other_stages import SharedParameters
from drivetrain_megatron.pipeline.schedules import Action, ActionKind
from drivetrain_megatron.pipeline.stages import Split, Stage
from drivetrain_megatron.pipeline.timeline import Span
from drivetrain_megatron.pipeline.transfer import Arrival, Direction, Link, Message
from drivetrain_megatron.pipeline.worker import Send, StageWorker
from drivetrain_megatron.tensor.linear import WeightGradients


class Interpreter:
    """Runs schedules on this rank, of ``count`` stages on all ranks."""

    def __init__(self, stages: Mapping[int, StageWorker], count: int, link: Link) -> None:
        self._stages = stages
        self._count = count
        self._link = link
        self._arrivals: dict[Message, Arrival] = {}

    def run(
        self, actions: Sequence[Action], stages: Mapping[int, StageWorker] | None = None
    ) -> list[Span]:
        """Run some actions of this rank in order, perhaps with other workers than its own.

        Returns:
            When each ran, in seconds of ``time.perf_counter``, without the time of waiting for
            messages.

        Raises:
            CollectiveError: a neighbor ended or did not send in time.
        """
        spans = []
        own, self._stages = self._stages, stages or self._stages
        try:
            for index, action in enumerate(actions):
                self._expect(action)
                for following in actions[index + 1 : index + 2]:
                    self._expect(following)
                spans.append(self._do(action))
        except BaseException:
            self._arrivals.clear()
            self._link.reset()
            self._link.alarm()
            raise
        finally:
            self._stages = own
        return spans

    def _expect(self, action: Action) -> None:
        """Post the receive of an action's inputs from another rank."""
        message = self._needed(action)
        if message is None or message in self._arrivals:
            return
        stage = self._stages[action.stage]
        forward = message.direction is Direction.FORWARD
        if message.source in self._stages and not self._link.is_here(message):
            return  # an action in between makes it
        metas = stage.input_metas if forward else stage.output_metas
        self._arrivals[message] = self._link.receive(message, metas(action.micro_batch))

    def _needed(self, action: Action) -> Message | None:
        if action.kind is ActionKind.FORWARD:
            first = action.stage == 0
            return None if first else Message.input_of(action.stage, action.micro_batch)
        last = action.stage == self._count - 1
        if last or not action.kind.returns:
            return None
        return Message.gradient_of(action.stage, action.micro_batch)

    def _do(self, action: Action) -> Span:
        message = self._needed(action)
        given = self._arrivals.pop(message).wait() if message is not None else ()
        stage, micro_batch = self._stages[action.stage], action.micro_batch
        start = time.perf_counter()
        with named_range(STAGE, f"{action.stage}: {action.kind.name.lower()} {micro_batch}"):
            self._compute(action, stage, given)
        return Span(action, start, time.perf_counter())

    def _compute(self, action: Action, stage: StageWorker, given: Sequence[Tensor]) -> None:
        """Run an action whose inputs are there; its results are sent."""
        micro_batch = action.micro_batch
        if action.kind is ActionKind.FORWARD:
            outputs = stage.forward(micro_batch, given)
            if action.stage + 1 < self._count:
                self._link.send(Message.input_of(action.stage + 1, micro_batch), outputs)
        elif action.kind is ActionKind.WEIGHT:
            stage.backward_weight(micro_batch)
        else:
            half = action.kind is ActionKind.INPUT
            run = stage.backward_input if half else stage.backward
            run(micro_batch, given, self._sender(action))

    def _sender(self, action: Action) -> Send:
        def send(gradients: Sequence[Tensor]) -> None:
            if action.stage:
                message = Message.gradient_of(action.stage - 1, action.micro_batch)
                self._link.send(message, gradients)

        return send


@dataclass(frozen=True, slots=True)
class StageParts:
    """The connections between the stages of a pipeline, and the objects that stages share.

    The cell's axes are those whose ranks hold one replica together, the pipeline's among them. The
    replicas are on the axis of data parallelism.
    """

    link: Link
    axis: Communicator
    cell: Sequence[Communicator]
    replicas: Communicator
    shared: SharedParameters
    weights: WeightGradients
    dropout: Dropout


class LocalStages:
    """The stages of this rank at work.

    Attributes:
        workers: by index of the stage.
        count: how many stages there are on all ranks.
        left: what a forward changes outside of blocks, so that it does so once in each call.
        shared: the parameters that stages share.
        replicas_decide: whether the ranks of other replicas take part in decisions.
        spans: when the actions of this step ran.
    """

    def __init__(
        self, split: Split, inner: Strategy[Any], parts: StageParts, device: torch.device
    ) -> None:
        self.inner = inner
        self.device = device
        self.dropout = parts.dropout
        self._axis, self._link = parts.axis, parts.link
        # Replicas whose forwards need each other must run as many: they decide together.
        self.replicas_decide = inner.forward_is_collective and parts.replicas.size > 1
        together = (*parts.cell, parts.replicas) if self.replicas_decide else parts.cell
        self._together = [axis for axis in together if axis.size > 1]
        self.shared, self._weights = parts.shared, parts.weights
        self.ranks, self.rank = parts.axis.size, parts.axis.rank
        self.count = parts.axis.size * len(split.stages)
        self.left = LeftBehind(split.model, split.inside)
        self.workers = {stage.index: self._worker(stage) for stage in split.stages}
        self._interpreter = Interpreter(self.workers, self.count, parts.link)
        self._stale, self._trained = False, True
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
    def last_blocks(self) -> range:
        """The blocks whose tensors the last stage has."""
        return next(iter(self.workers.values())).stage.last_blocks

    @property
    def last(self) -> StageWorker | None:
        """The worker of the last stage; None on other ranks."""
        return self.workers.get(self.count - 1)

    def act(self, actions: Sequence[Action]) -> None:
        """Run some actions in order."""
        self.spans += self._interpreter.run(actions)

    def outline(self, batch: MicroBatch) -> Any:
        """Return the model's output as proxies, without computing any block."""
        stage = next(iter(self.workers.values())).stage
        with self.left.undone(), self.dropout.forward(batch.number), self.inner.running():
            return stage.run_ambient(batch.args, batch.kwargs)

    def dtype(self, batch: MicroBatch) -> torch.dtype:
        """Return in which dtype a loss is made, the same on every rank: fp32, or fp64 of fp64."""
        stage = next(iter(self.workers.values())).stage
        dtypes = {meta.dtype for meta in stage.ends(batch.args, batch.kwargs)}
        return torch.float64 if torch.float64 in dtypes else torch.float32

    def finish(
        self,
        stage: Stage,
        batch: MicroBatch,
        given: Mapping[int, Sequence[Tensor]],
        *,
        again: bool = False,
    ) -> Any:
        """Return the model's output for a whole batch whose blocks gave these tensors.

        Args:
            stage: this one.
            batch: whole.
            given: by block.
            again: whether an earlier pass of the whole batch has left all behind.

        Raises:
            UsageError: as in ``Stage.run``; other stages are told that this one fails.
        """
        left = self.left.undone(everything=again)
        with self.telling(), left, self.dropout.forward(batch.number), self.inner.running():
            return stage.finish(batch.args, batch.kwargs, given)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Context after whose failure no other stage waits for this one."""
        try:
            yield
        except BaseException:
            self._link.reset()
            self._link.alarm()
            raise

    def run_forwards(
        self, batches: Sequence[MicroBatch], kept: Collection[int] | None
    ) -> dict[int, StageWorker]:
        """Run blocks without backward, by workers of their own; return these, by their stage."""
        workers = {index: self._worker(worker.stage) for index, worker in self.workers.items()}
        for worker in workers.values():
            # One batch alone has its whole output on the last stage.
            goes_on = worker.stage.is_last and len(batches) == 1
            worker.batches, worker.kept = dict(enumerate(batches)), None if goes_on else kept
        self._interpreter.run(self.forwards(range(len(batches))), workers)
        return workers

    def forwards(self, numbers: Iterable[int]) -> list[Action]:
        """Return the forwards of micro-batches on this rank: a stage's, then the next stage's."""
        stages = sorted(self.workers)
        chosen = list(numbers)
        return [Action(ActionKind.FORWARD, stage, number) for stage in stages for number in chosen]

    def backwards(self, numbers: Iterable[int]) -> list[Action]:
        """Return the backwards of micro-batches on this rank, from the last stage on."""
        stages = sorted(self.workers, reverse=True)
        chosen = list(numbers)
        return [Action(ActionKind.BACKWARD, stage, number) for stage in stages for number in chosen]

    def mark_final(self, actions: Sequence[Action]) -> None:
        """Tell a worker which of its backwards is the last of this rank; without any, none is."""
        for worker in self.workers.values():
            worker.final = worker.final_weight = None
        final = next((action for action in reversed(actions) if action.kind.frees), None)
        if final is None:
            return
        worker = self.workers[final.stage]
        if final.kind is ActionKind.WEIGHT:
            worker.final_weight = final.micro_batch
        else:
            worker.final = final.micro_batch

    def share(self, values: Tensor, source: int, label: str) -> None:
        """Give every rank, in place, the values of one stage."""
        self._axis.broadcast(values, source % self.ranks, label=label).wait()

    def agree(self, values: Sequence[int]) -> list[int]:
        """Return the largest of each number over the ranks that decide together.

        These are the ranks of the cell, and those of other replicas that need each other in a
        forward.
        """
        found = torch.tensor(list(values), dtype=torch.int64, device=self.device)
        for axis in self._together:
            axis.all_reduce(found, reduction="max", label="decision of a pipeline").wait()
        return found.tolist()

    def is_new(self, unknown: bool) -> bool:
        """Return whether a kind of call is unknown on this rank, or on a replica that decides too.

        The ranks of a cell get the same calls; other replicas may get batches of another kind.
        """
        return bool(self.agree([unknown])[0]) if self.replicas_decide else unknown

    def broadcast(self, values: Tensor, label: str) -> None:
        """Give every stage, in place, the values of the last."""
        self.share(values, self.count - 1, label)

    def refresh(self) -> None:
        """Bring copies of shared parameters up to date, if values have changed.

        Between training and evaluation a script may have swapped values by itself (an average of
        weights). Elsewhere such a change is an error, as the copies' ranks cannot know of it.
        """
        trains = torch.is_grad_enabled()
        if self._stale or trains != self._trained:
            self.shared.refresh(self.inner)
        elif not self.inner.forward_is_collective:  # else parameters lie in shards
            with self.telling():
                self.shared.check_unchanged()
        self._stale, self._trained = False, trains

    def outdate(self) -> None:
        """Say that values have changed: copies are made anew before the next forward."""
        self._stale = True

    def flush(self) -> None:
        """Return when everything that was sent is through."""
        self._link.flush()

    def clear(self) -> None:
        """Forget micro-batches whose backward nobody asked for."""
        for worker in self.workers.values():
            worker.clear()

    def _worker(self, stage: Stage) -> StageWorker:
        is_first_here = stage.index == self.rank
        left = nullcontext if is_first_here else self.left.undone
        return StageWorker(
            stage, self.inner, self.shared, self._weights, self.dropout, self.device, left
        )
