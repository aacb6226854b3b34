"""Calls and backwards of a model that is a pipeline, in an ordinary training loop.

Three levels, chosen by the script's loop:

- The loss is made outside of the model (L1, ``WholeBatch``): the call runs all forwards (GPipe),
  and the script makes one loss of the joined outputs.
- Micro-batches are those of an accumulation window (L1b, ``AccumulationWindow``): each call is one
  forward, each backward the next of 1F1B.
- The model makes its loss itself (L2), or a loss function is handed over (L3, both
  ``PromisedLoss``): ``accelerator.backward(loss)`` runs the whole schedule, and the loss has its
  value afterwards.

On every stage but the last a loss is a proxy; after backward it has the last stage's value.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from drivetrain.errors import UsageError
from drivetrain.log import get_logger
from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.pipeline.batches import MicroBatch, cut_batch, cut_from_graph, join_outputs
from drivetrain_megatron.pipeline.local import LocalStages
from drivetrain_megatron.pipeline.loss import (
    LossOrigin,
    PromisedLoss,
    origins_of,
    refuse_options,
    running,
)
from drivetrain_megatron.pipeline.schedules import Action, ActionKind
from drivetrain_megatron.pipeline.timing import StepTrace
from drivetrain_megatron.pipeline.worker import LossOf, find_loss
from drivetrain_megatron.recording.proxy import StageProxy, resolve

logger = get_logger(__name__)


class WholeBatch:
    """A call of the model whose backward has not come.

    Attributes:
        output: the result of the call: real on the last stage, proxies before it.
        origin: the call, as its output knows it.
    """

    def __init__(self, stages: LocalStages, batches: Sequence[MicroBatch], first: int) -> None:
        self._stages = stages
        self._worker = worker = stages.only
        self._numbers = range(first, first + len(batches))
        worker.batches |= dict(zip(self._numbers, batches, strict=True))
        stages.act([Action(ActionKind.FORWARD, stages.rank, number) for number in self._numbers])
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
        self.origin = LossOrigin()
        self._nodes = self.origin.mark(self.output)

    def begin(self, loss: Tensor) -> None:
        """Run backward of a loss down to the outputs of this call and of others."""
        if self._worker.stage.is_last:
            with self._stages.inner.accumulating():
                self._stages.inner.backward(loss)

    def backward(self, synchronize: bool) -> None:
        """Run the backward of every micro-batch; to synchronize averages gradients over dp."""
        worker = self._worker
        if worker.stage.is_last:
            self._seed()
        worker.final = self._numbers[-1] if synchronize else None
        self._stages.act(
            [Action(ActionKind.BACKWARD, self._stages.rank, number) for number in self._numbers]
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


class AccumulationWindow:
    """The calls of one accumulation window on this rank."""

    def __init__(self, stages: LocalStages) -> None:
        self._stages = stages
        # 1F1B: so many forwards run before a backward can come, since later stages come first.
        self._ahead = stages.ranks - 1 - stages.rank
        self._started = 0
        self._waiting: list[int] = []  # numbers whose backward has not run
        self._asked = 0  # how many of them the script has asked for
        self._origins: list[LossOrigin] = []  # of those that it has not asked for

    def __len__(self) -> int:
        """Return how many calls wait for a backward of the script."""
        return len(self._waiting) - self._asked

    def call(self, batch: MicroBatch) -> Any:
        """Run the forward of one micro-batch; return the model's output, or proxies."""
        worker, number = self._stages.only, self._started
        worker.batches[number] = batch
        self._started += 1
        self._stages.act([Action(ActionKind.FORWARD, self._stages.rank, number)])
        self._waiting.append(number)
        output, origin = worker.outputs.pop(number), LossOrigin()
        origin.mark(output)
        self._origins.append(origin)
        return output

    def backward(self, loss: Tensor, origins: frozenset[LossOrigin], synchronize: bool) -> None:
        """Run the next backwards of 1F1B, for a loss made of some calls.

        To synchronize ends the window, and averages gradients over data-parallel ranks.

        Raises:
            UsageError: the loss is not that of the first call that waits.
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
        self._stages.act([Action(ActionKind.BACKWARD, self._stages.rank, each) for each in numbers])
        if synchronize:
            self._started = 0

    def clear(self) -> None:
        """Forget calls whose backward nobody asked for."""
        self._waiting, self._origins, self._started, self._asked = [], [], 0, 0


class PipelinedModel:
    """The stages of this rank in the script's loop; a trace keeps the times of each step.

    ``windowed`` says whether micro-batches are those of an accumulation window.
    """

    def __init__(
        self, stages: LocalStages, config: MegatronConfig, windowed: bool, trace: StepTrace | None
    ) -> None:
        self.stages = stages
        self._config, self._windowed = config, windowed
        self._trace = trace
        self._window = AccumulationWindow(stages)
        self._pending: dict[LossOrigin, WholeBatch | PromisedLoss] = {}
        self._started = 0
        self._synchronized = False
        self._unpublished: list[Tensor] = []
        self._level = ""

    # --- forward ---

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Carry out a call of the model; return its output, or proxies."""
        self.stages.refresh()
        if not torch.is_grad_enabled():
            return self.stages.evaluate(self._cut(args, kwargs))
        self._begin()
        if self._windowed:
            self._announce("L1b", "1F1B over the accumulation window")
            return self._window.call(*self._cut(args, kwargs, count=1))
        batches = self._cut(args, kwargs)
        with torch.enable_grad():
            outline = self.stages.outline(batches[0])
        loss = find_loss(outline)
        if loss is None:
            self._announce("L1", "all forwards, then all backwards")
            return self._forward_all(batches)
        self._announce("L2", f"the model makes its loss: {self._config.schedule}")
        promised = PromisedLoss(self.stages, batches, loss.dtype)
        self._pending[promised.origin] = promised
        return tree_map(lambda x: promised.loss if x is loss else x, outline)

    def loss(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], targets: Any, loss_fn: LossOf
    ) -> Tensor:
        """Return the loss of a batch, whose value comes with its backward (L3).

        Targets are cut into micro-batches with the inputs. The loss function gets (output, targets)
        of a micro-batch, and returns the mean over the rows.
        """
        self._announce("L3", f"a loss function was handed over: {self._config.schedule}")
        self.stages.refresh()
        self._begin()
        batches = self._cut(args, kwargs, targets)
        promised = PromisedLoss(self.stages, batches, self.stages.dtype(batches[0]), loss_fn)
        self._pending[promised.origin] = promised
        return promised.loss

    def _begin(self) -> None:
        """After a step, forget the calls before it whose backward nobody asked for."""
        if self._synchronized:
            self._pending.clear()
            self._window.clear()
            self.stages.clear()
            self._started = 0
        self._synchronized = False

    def _cut(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        targets: Any = None,
        count: int | None = None,
    ) -> list[MicroBatch]:
        count = count or self._config.micro_batches or self.stages.ranks
        batches = cut_batch(args, kwargs, count, targets)
        first = self.stages.dropout.take(len(batches))
        return [replace(batch, number=first + index) for index, batch in enumerate(batches)]

    def _forward_all(self, batches: list[MicroBatch]) -> Any:
        call = WholeBatch(self.stages, batches, self._started)
        self._started += len(batches)
        self._pending[call.origin] = call
        return call.output

    def _announce(self, level: str, meaning: str) -> None:
        """Say which level the loop has, once."""
        if level != self._level:
            self._level = level
            logger.announce(f"pipeline of {self.stages.count} stages, level {level}: {meaning}")

    # --- backward ---

    def backward(self, loss: Tensor, *, synchronize: bool, **options: Any) -> None:
        """Run the backward of calls on all stages, for a loss made of their outputs.

        To synchronize averages gradients over data-parallel ranks now.

        Raises:
            UsageError: no such call waits, or the loss or the options ask for more than a pipeline
                can do.
        """
        refuse_options(options)
        if not self._pending and not len(self._window):
            raise UsageError(
                "expected a forward of the model before backward(), found none that waits; each "
                "forward has one backward under pipeline parallelism"
            )
        origins = origins_of(loss)
        with running(origins):
            if origins <= self._pending.keys():
                self._run(origins, loss, synchronize)
            elif self._windowed:
                self._window.backward(loss, origins, synchronize)
            else:
                raise UsageError(
                    "expected a loss whose backward has not run, found one of a forward whose "
                    "backward has, or that came before the last step: each forward has one "
                    "backward under pipeline parallelism"
                )
        if synchronize:
            self._end_step()

    def _run(self, origins: frozenset[LossOrigin], loss: Tensor, synchronize: bool) -> None:
        # In the order of the calls, which is the same on every rank.
        calls = [call for origin, call in self._pending.items() if origin in origins]
        whole = [call for call in calls if isinstance(call, WholeBatch)]
        promised = [call for call in calls if isinstance(call, PromisedLoss)]
        if len(promised) == len(calls) == 1:
            promised[0].backward(loss, synchronize, self._config.schedule)
        elif len(whole) == len(calls):
            whole[0].begin(loss)
            for call in whole:
                call.backward(synchronize and call is whole[-1])
        else:
            raise UsageError(
                f"expected the loss of one forward, found one made of {len(calls)} forwards of a "
                "model that makes its loss itself: run backward for each of them; gradients add up"
            )
        for origin in origins:
            del self._pending[origin]
        if not self._pending:
            self._started = 0
            self.stages.clear()

    def _end_step(self) -> None:
        self.stages.flush()
        if self._windowed:
            self.stages.clear()
        self.stages.outdate()
        self._synchronized = True
        spans, self.stages.spans = self.stages.spans, []
        if self._trace is not None:
            self._trace.save(spans)

    def publish(self, loss: Tensor) -> None:
        """Give the value of a loss, which the last stage has, to all stages.

        Within an accumulation window values wait for its end: no stage may wait for the last one
        before.
        """
        known = isinstance(loss, StageProxy) and loss.value() is not None
        if self.stages.ranks == 1 or known:
            return
        self._unpublished.append(loss.detach() if type(loss) is Tensor else loss)
        if self._windowed and not self._synchronized:
            return
        losses, self._unpublished = self._unpublished, []
        values = torch.zeros(len(losses), dtype=losses[0].dtype, device=self.stages.device)
        if self.stages.last is not None:
            values.copy_(torch.stack(losses))
        self.stages.broadcast(values, "values of losses")
        for one, value in zip(losses, values, strict=True):
            if isinstance(one, StageProxy):
                resolve(one, value)
