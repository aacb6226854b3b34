"""The pipeline side of one model: what a call of it and a backward do, in an ordinary loop.

Three levels, chosen by what the loop does:

- The loss is made outside of the model (L1): the call runs all forwards (GPipe), and the script
  makes one loss of the joined outputs.
- Micro-batches are those of an accumulation window (L1b): each call is one forward, each backward
  the one that 1F1B has next; what is left runs at the end of the window.
- The model makes its loss itself, or a loss function is handed over (L2): the call computes
  nothing yet. ``accelerator.backward(loss)`` runs the whole schedule, and the loss has its value
  afterwards.

On every stage but the last a loss is a proxy; after backward it has the last stage's value.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from drivetrain.errors import UsageError
from drivetrain.parts.collectives import Communicator
from drivetrain.strategy import Run, Strategy
from drivetrain_megatron.pipeline.actions import Action, Kind
from drivetrain_megatron.pipeline.batches import MicroBatch, cut_batch, cut_from_graph, join_outputs
from drivetrain_megatron.pipeline.interpreter import Interpreter
from drivetrain_megatron.pipeline.proxy import (
    StageProxy,
    proxy_like,
    resolve,
    slope_of,
    value_of,
)
from drivetrain_megatron.pipeline.schedules import make_schedule
from drivetrain_megatron.pipeline.shares import shares_of
from drivetrain_megatron.pipeline.simulate import Span
from drivetrain_megatron.pipeline.stages import Split, Stage
from drivetrain_megatron.pipeline.ties import SharedParameters
from drivetrain_megatron.pipeline.transfer import Link
from drivetrain_megatron.pipeline.weights import WeightGradients
from drivetrain_megatron.pipeline.worker import LossOf, StageWorker, find_loss


@dataclass(frozen=True, slots=True)
class Plan:
    """How a pipeline runs.

    Attributes:
        schedule: name of the schedule of L2.
        chunks: stages per rank.
        micro_batches: into how many parts a call cuts its batch; 0: as many as there are ranks.
        windowed: whether micro-batches are those of an accumulation window.
    """

    schedule: str
    chunks: int
    micro_batches: int
    windowed: bool


@dataclass(frozen=True, slots=True)
class Parts:
    """What connects the stages of a pipeline, and what they share.

    Attributes:
        link: this rank's end of the pipeline.
        axis: collectives over the axis ``pp``.
        shared: parameters that several stages use.
        weights: products whose weights' gradients are computed later.
    """

    link: Link
    axis: Communicator
    shared: SharedParameters
    weights: WeightGradients


@dataclass(slots=True)
class _Pending:
    """A call whose backward has not come.

    Attributes:
        batches: its micro-batches.
        loss: the proxy that stands for the model's own loss (L2); None for L1.
        loss_of: finds the loss in what the model returns.
        outside: leaves that the script's loss was made of (L1, last stage).
        inside: what they stand for, by micro-batch.
        numbers: of its micro-batches among those of the window.
        autocast: (device type, dtype, enabled) during the call.
    """

    batches: list[MicroBatch]
    loss: StageProxy | None = None
    loss_of: LossOf | None = None
    outside: tuple[Tensor, ...] = ()
    inside: tuple[tuple[Tensor, ...], ...] = ()
    numbers: tuple[int, ...] = ()
    autocast: tuple[str, torch.dtype, bool] = ("cpu", torch.bfloat16, False)


class Pipeline:
    """The stages of this rank at work.

    Args:
        split: the stages.
        run: the run.
        inner: the data-parallel strategy of the cell.
        parts: what connects the stages.
        plan: how it runs.
    """

    def __init__(
        self,
        split: Split,
        run: Run,
        inner: Strategy[Any],
        parts: Parts,
        plan: Plan,
    ) -> None:
        self._run = run
        self._inner = inner
        self._axis = axis = parts.axis
        self._shared = parts.shared
        self._plan = plan
        self._device = run.world.device
        self._weights = parts.weights
        self._workers = {stage.index: self._worker(stage) for stage in split.stages}
        self._ranks, self._rank = axis.size, axis.rank
        self._stages = axis.size * plan.chunks
        self._interpreter = Interpreter(self._workers, self._stages, parts.link)
        self._pending: list[_Pending] = []
        self._window = 0
        self._behind = 0
        self._stale = False
        self._unpublished: list[Tensor] = []
        self.spans: list[Span] = []

    def _worker(self, stage: Stage) -> StageWorker:
        return StageWorker(stage, self._inner, self._shared, self._weights, self._device)

    @property
    def _last(self) -> StageWorker | None:
        return self._workers.get(self._stages - 1)

    # --- forward ---

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Do what a call of the model does, and return what it returns, or proxies."""
        self._refresh()
        if not torch.is_grad_enabled():
            return self._evaluate(args, kwargs)
        if self._plan.windowed:
            return self._forward_one(args, kwargs)
        batches = cut_batch(args, kwargs, self._plan.micro_batches or self._ranks)
        outline = self._outline(batches)
        if find_loss(outline) is not None:
            return self._promise(batches, outline)
        return self._forward_all(batches)

    def loss(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], targets: Any, loss_fn: LossOf
    ) -> Tensor:
        """Return the loss of a batch, whose value comes with its backward (L3).

        Args:
            args: positional inputs of the model.
            kwargs: inputs by name.
            targets: cut into micro-batches with the inputs.
            loss_fn: of (output, targets) of a micro-batch: the mean over its rows.
        """
        self._refresh()
        count = self._plan.micro_batches or self._ranks
        loss = self._promised(torch.float32)
        self._pending.append(
            _Pending(
                cut_batch(args, kwargs, count, targets),
                loss,
                loss_fn,
                autocast=_autocast(self._device),
            )
        )
        return loss

    def _outline(self, batches: Sequence[MicroBatch]) -> Any:
        """Return what the model returns for a batch, without computing any block."""
        worker = next(iter(self._workers.values()))
        with torch.enable_grad():
            found = [worker.stage.run_ambient(b.args, b.kwargs) for b in batches[:1]]
        return found[0]

    def _loss_outline(self, pending: _Pending, batch: MicroBatch) -> Any:
        """Make the loss of a micro-batch without computing any block."""
        worker = next(iter(self._workers.values()))
        output = worker.stage.run_ambient(batch.args, batch.kwargs)
        return pending.loss_of(output, batch.targets) if pending.loss_of else output

    def _promise(self, batches: list[MicroBatch], outline: Any) -> Any:
        """Return proxies; the schedule runs in backward."""
        found = find_loss(outline)
        if found is None:
            raise UsageError("expected a model that returns its loss, found none")
        loss = self._promised(found.dtype)
        self._pending.append(_Pending(batches, loss, _loss_in, autocast=_autocast(self._device)))
        return tree_map(lambda x: loss if x is found else x, outline)

    def _promised(self, dtype: torch.dtype) -> StageProxy:
        return proxy_like((), dtype, self._device, requires_grad=True)

    def _forward_all(self, batches: list[MicroBatch]) -> Any:
        self._check_chunks()
        numbers = self._add(batches)
        self._act([Action(Kind.FORWARD, self._rank, number) for number in numbers])
        worker = self._workers[self._rank]
        outputs = [worker.outputs.pop(number) for number in numbers]
        pending = _Pending(batches, numbers=numbers, autocast=_autocast(self._device))
        if worker.stage.is_last:
            cuts = [cut_from_graph(output) for output in outputs]
            outputs = [output for output, _, _ in cuts]
            pending.outside = tuple(leaf for _, leaves, _ in cuts for leaf in leaves)
            pending.inside = tuple(tuple(roots) for _, _, roots in cuts)
        self._pending.append(pending)
        return join_outputs(outputs, batches)

    def _forward_one(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self._check_chunks()
        (batch,) = cut_batch(args, kwargs, 1)
        (number,) = self._add([batch])
        self._act([Action(Kind.FORWARD, self._rank, number)])
        self._pending.append(_Pending([batch], numbers=(number,)))
        return self._workers[self._rank].outputs.pop(number)

    def _evaluate(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run forward only, and give every stage what the last one returns."""
        batches = cut_batch(args, kwargs, self._plan.micro_batches or self._ranks)
        workers = {index: self._worker(worker.stage) for index, worker in self._workers.items()}
        for worker in workers.values():
            worker.batches = dict(enumerate(batches))
        actions = [
            Action(Kind.FORWARD, stage, number)
            for number in range(len(batches))
            for stage in sorted(workers)
        ]
        self._interpreter.run_actions(actions, workers)
        last = workers[max(workers)]
        whole = join_outputs([last.outputs[number] for number in range(len(batches))], batches)
        return self._share(whole)

    def _share(self, output: Any) -> Any:
        """Broadcast the last stage's tensors: metrics and generation then need no pipeline."""
        source = (self._stages - 1) % self._ranks

        def share(x: Any) -> Any:
            if not isinstance(x, Tensor) or self._ranks == 1:
                return x
            if self._rank == source:
                values = x.detach().contiguous()
            elif isinstance(x, StageProxy):
                values = torch.empty(x.shape, dtype=x.dtype, device=self._device)
            else:
                return x
            self._axis.broadcast(values, source, label="outputs of the last stage").wait()
            return values

        return tree_map(share, output)

    # --- backward ---

    def backward(self, loss: Tensor, *, synchronize: bool, **options: Any) -> None:
        """Run the backward of a call on all stages.

        Args:
            loss: what the script made of the call's output.
            synchronize: whether gradients are averaged over data-parallel ranks now.
            options: those of ``Tensor.backward``.
        """
        if not self._pending:
            raise UsageError(
                "expected a forward of the model before backward(), found none that waits; each "
                "forward has one backward under pipeline parallelism"
            )
        if self._plan.windowed:
            self._backward_one(loss, synchronize, options)
        else:
            pending = self._pending.pop(0)
            if pending.loss is not None:
                self._run_schedule(pending, loss, synchronize)
            else:
                self._backward_all(pending, loss, synchronize, options)
        if synchronize:
            self._interpreter.flush()
            self._stale = True

    def publish(self, loss: Tensor) -> None:
        """Give the value of a loss, which the last stage has, to all stages.

        Within an accumulation window values wait for its end: no stage may wait for the last one
        before.
        """
        if self._ranks == 1 or (isinstance(loss, StageProxy) and value_of(loss) is not None):
            return
        self._unpublished.append(loss.detach() if type(loss) is Tensor else loss)
        if self._plan.windowed and not self._stale:
            return
        losses, self._unpublished = self._unpublished, []
        source = (self._stages - 1) % self._ranks
        values = torch.zeros(len(losses), dtype=losses[0].dtype, device=self._device)
        if self._rank == source:
            values.copy_(torch.stack(losses))
        self._axis.broadcast(values, source, label="values of losses").wait()
        for one, value in zip(losses, values, strict=True):
            if isinstance(one, StageProxy):
                resolve(one, value)

    def _run_schedule(self, pending: _Pending, loss: Tensor, synchronize: bool) -> None:
        count = len(pending.batches)
        factor = _factor(loss, pending.loss)
        shares = shares_of(pending.batches, functools.partial(self._loss_outline, pending))
        schedule = make_schedule(self._plan.schedule, self._ranks, count, self._plan.chunks)
        actions = schedule.ranks[self._rank]
        for worker in self._workers.values():
            worker.batches = dict(enumerate(pending.batches))
            worker.loss_of = pending.loss_of
            worker.seeds = {i: factor * share for i, share in enumerate(shares) if share}
        if synchronize:
            final = next(action for action in reversed(actions) if action.kind.frees)
            worker = self._workers[final.stage]
            if final.kind is Kind.WEIGHT:
                worker.final_weight = final.micro_batch
            else:
                worker.final = final.micro_batch
        with _casting(pending.autocast), torch.enable_grad():
            self.spans = self._interpreter.run_actions(actions)
        total = torch.zeros((), dtype=pending.loss.dtype, device=self._device)  # type: ignore[union-attr]
        if self._last is not None:
            for index, share in enumerate(shares):
                if share:
                    total += self._last.losses[index] * share
        self._axis.broadcast(
            total, (self._stages - 1) % self._ranks, label="value of the loss"
        ).wait()
        resolve(pending.loss, total)  # type: ignore[arg-type]
        for worker in self._workers.values():
            worker.clear()
            worker.loss_of = None

    def _backward_all(
        self, pending: _Pending, loss: Tensor, synchronize: bool, options: Mapping[str, Any]
    ) -> None:
        worker = self._workers[self._rank]
        if worker.stage.is_last:
            with self._inner.accumulating():
                self._inner.backward(loss, **options)
            self._seed(worker, pending)
        worker.final = pending.numbers[-1] if synchronize else None
        self._act([Action(Kind.BACKWARD, self._rank, number) for number in pending.numbers])
        if not self._pending:
            worker.clear()

    def _seed(self, worker: StageWorker, pending: _Pending) -> None:
        """Let each micro-batch's backward begin at the gradients that the loss gave its output."""
        gradients = iter(pending.outside)
        for number, roots in zip(pending.numbers, pending.inside, strict=True):
            given = [next(gradients).grad for _ in roots]
            worker.begin_at(
                number,
                [root for root, gradient in zip(roots, given, strict=True) if gradient is not None],
                [gradient for gradient in given if gradient is not None],
            )

    def _backward_one(self, loss: Tensor, synchronize: bool, options: Mapping[str, Any]) -> None:
        worker = self._workers[self._rank]
        number = self._pending[-1].numbers[0]
        if worker.stage.is_last:
            worker.losses_to_run[number] = (loss, dict(options))
        self._behind += 1
        ahead = self._ranks - 1 - self._rank
        ready = self._behind if synchronize else max(self._behind - ahead, 0)
        numbers = [self._pending.pop(0).numbers[0] for _ in range(ready)]
        self._behind -= ready
        worker.final = numbers[-1] if synchronize else None
        self._act([Action(Kind.BACKWARD, self._rank, each) for each in numbers])
        if synchronize:
            worker.clear()
            self._window = 0

    def _check_chunks(self) -> None:
        if self._plan.chunks > 1:
            raise UsageError(
                f"expected the loss inside of the model with {self._plan.chunks} chunks per rank, "
                "found one that is made outside: an interleaved schedule needs the whole batch at "
                "once; return the loss from the model, use accelerator.pipeline_step(batch, "
                "loss_fn), or set chunks: 1"
            )

    def _add(self, batches: Sequence[MicroBatch]) -> tuple[int, ...]:
        numbers = tuple(range(self._window, self._window + len(batches)))
        self._window += len(batches)
        for number, batch in zip(numbers, batches, strict=True):
            self._workers[self._rank].batches[number] = batch
        return numbers

    def _act(self, actions: Sequence[Action]) -> None:
        self.spans = self._interpreter.run_actions(actions)

    def _refresh(self) -> None:
        if self._stale:
            self._shared.refresh(lambda p: self._inner.gathered(p, modify=False))
            self._stale = False

    def outdate(self) -> None:
        """Say that values have changed: copies are made anew before the next forward."""
        self._stale = True


def _loss_in(output: Any, targets: Any) -> Tensor:
    loss = find_loss(output)
    if loss is None:
        raise UsageError("expected a model that returns its loss for every micro-batch, found none")
    return loss


def _factor(loss: Tensor, promised: StageProxy | None) -> Tensor:
    """Return by how much a loss grows with the model's own: what its gradient is multiplied by."""
    if not isinstance(loss, StageProxy) or promised is None:
        raise UsageError(
            "expected the loss that the model returned, or a multiple of it, found another tensor; "
            "under pipeline parallelism a model that makes its loss is asked for nothing else"
        )
    return slope_of(loss, promised)


def _autocast(device: torch.device) -> tuple[str, torch.dtype, bool]:
    kind = device.type
    return kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)


@contextmanager
def _casting(autocast: tuple[str, torch.dtype, bool]) -> Iterator[None]:
    kind, dtype, enabled = autocast
    with torch.autocast(kind, dtype=dtype, enabled=enabled):
        yield
