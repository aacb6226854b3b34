"""Calls and backwards of a model that is a pipeline, in an ordinary training loop.

Three levels, chosen by the script's loop:

- The loss is made outside of the model (L1, ``WholeBatch``): the call runs all forwards (GPipe),
  and the script makes one loss of the whole batch's output.
- Micro-batches are those of an accumulation window (L1b, ``AccumulationWindow``): each call is one
  forward, each backward the next of 1F1B.
- The model makes its loss itself (L2), or a loss function is handed over (L3, both
  ``PromisedLoss``): ``accelerator.backward(loss)`` runs the whole schedule, and the loss has its
  value afterwards. A loss that cannot be cut is made as at L1.

On every stage but the last a loss is a proxy; after backward it has the last stage's value.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from drivetrain.errors import UsageError
from drivetrain.log import get_logger
from drivetrain.parts.wrapping import UninheritedMethod
from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.pipeline.batches import Dims, Division, MicroBatch, cut_batch
from drivetrain_megatron.pipeline.losses import (
    Evaluation,
    LossOrigin,
    PromisedLoss,
    Weights,
    WholeBatch,
    behind_inputs,
    handed_out,
    loss_in,
    mark_beside,
    mark_elsewhere,
    origins_of,
    refuse_options,
    running,
)
from drivetrain_megatron.pipeline.runner import LocalStages, LossOf, StepTrace, find_loss
from drivetrain_megatron.pipeline.schedules import Action, ActionKind
from drivetrain_megatron.pipeline.stage import with_copies
from drivetrain_megatron.pipeline.trials import BatchTrial, LossTrial
from drivetrain_megatron.recording.proxy import StageProxy, resolve

logger = get_logger(__name__)


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
        output = behind_inputs(handed_out(worker.outputs.pop(number)), batch)
        origin = LossOrigin()
        origin.mark(output)
        mark_elsewhere(output, self._stages.last_blocks)
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
        self._run(self._asked if synchronize else self._asked - self._ahead, synchronize)
        if synchronize:
            self._started = 0

    def catch_up(self) -> None:
        """Run all backwards that the script has asked for: it clears their gradients."""
        self._run(self._asked, synchronize=False)

    def _run(self, count: int, synchronize: bool) -> None:
        if count <= 0:
            return
        numbers, self._waiting = self._waiting[:count], self._waiting[count:]
        self._asked -= count
        self._stages.only.final = numbers[-1] if synchronize else None
        self._stages.act([Action(ActionKind.BACKWARD, self._stages.rank, each) for each in numbers])

    def clear(self) -> None:
        """Forget calls whose backward nobody asked for."""
        self._waiting, self._origins, self._started, self._asked = [], [], 0, 0


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of the model, and its micro-batches."""

    kind: Hashable
    whole: MicroBatch
    parts: Sequence[MicroBatch]
    division: Division


class PipelinedModel:
    """The stages of this rank in the script's loop; a trace keeps the times of each step.

    ``windowed`` says whether micro-batches are those of an accumulation window.

    Attributes:
        shares_outputs: whether outputs of training get their values on every stage at once, which
            takes all forwards before the first backward.
        units: the blocks of this rank's stages, by name.
        counts: whether the loss of a backward counts; one that does not may be no number.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: LocalStages,
        config: MegatronConfig,
        windowed: bool,
        trace: StepTrace | None,
    ) -> None:
        self.stages = stages
        self._config, self._windowed = config, windowed
        self._trace = trace
        self._window = AccumulationWindow(stages)
        self._batches = BatchTrial(model, stages)
        self._losses = LossTrial(model, stages)
        self._evaluation = Evaluation(stages)
        self._pending: dict[LossOrigin, WholeBatch | PromisedLoss] = {}
        self._started = 0
        self._synchronized = False
        self._unpublished: list[Tensor] = []
        self._said: set[str] = set()
        self._level = ""
        self.shares_outputs = False
        self.counts = True
        self.units: Mapping[str, nn.Module] = {}

    # --- forward ---

    @with_copies
    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Carry out a call of the model; return its output, or proxies."""
        self.stages.refresh()
        if not torch.is_grad_enabled():
            call = self._divided(args, kwargs)
            dims = self._outputs(call)
            return self._evaluation.run(call.kind, call.parts, call.whole, call.division, dims)
        self._begin()
        if self.shares_outputs:
            self._announce("L1", "all forwards, then all backwards; every stage gets the output")
            call = self._divided(args, kwargs)
            return self._forward_all(call, self._outputs(call), shared=True).output
        if self._windowed:
            self._announce("L1b", "1F1B over the accumulation window")
            first = self.stages.dropout.take(1)
            (batch,) = cut_batch(MicroBatch(tuple(args), kwargs), 1)
            return self._window.call(replace(batch, number=first))
        call = self._divided(args, kwargs)
        outline = self.stages.outline(call.whole) if len(call.parts) > 1 else None
        loss = find_loss(outline)
        if loss is None:
            self._announce("L1", "all forwards, then all backwards")
            return self._forward_all(call, self._outputs(call)).output
        weights = self._weights(call, loss_in)
        self._announce("L2", f"the model makes its loss: {self._order(weights)}")
        if weights is Weights.NONE:
            return self._forward_all(call).output
        promised = PromisedLoss(self.stages, call.parts, loss.dtype, weights)
        self._pending[promised.origin] = promised
        mark_beside(outline)
        return tree_map(lambda x: promised.loss if x is loss else x, outline)

    @with_copies
    def loss(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], targets: Any, loss_fn: LossOf
    ) -> Tensor:
        """Return the loss of a batch, whose value comes with its backward (L3).

        The loss function gets (output, targets) of a micro-batch; where the loss of the batch does
        not follow from those of micro-batches, of the whole batch.
        """
        self.stages.refresh()
        self._begin()
        call = self._divided(args, kwargs, targets)
        weights = self._weights(call, loss_fn, handed_over=True)
        self._announce("L3", f"a loss function was handed over: {self._order(weights)}")
        dtype = self.stages.dtype(call.parts[0])
        if weights is Weights.NONE:
            return self._forward_all(call).loss(targets, loss_fn, dtype)
        promised = PromisedLoss(self.stages, call.parts, dtype, weights, loss_fn)
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

    def _divided(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], targets: Any = None
    ) -> "_Call":
        """Cut a call as the trial of its kind says."""
        count = self._config.micro_batches or self.stages.ranks
        whole = MicroBatch(tuple(args), kwargs, targets=targets)
        kind = self._batches.kind(whole)
        division = self._batches.division(kind, whole, cuts=count > 1)
        if division.dims is None:
            if count > 1:
                raised = f" Parts of a batch raised {division.failure}." if division.failure else ""
                self._say(
                    "these calls are not cut into micro-batches: for no dim of the inputs do the "
                    "blocks give, and leave in buffers, for parts what they do for the whole "
                    f"(BatchNorm in training does not).{raised} Stages wait for each other"
                )
            count = 1
        batches = cut_batch(whole, count, division.dims)
        if self.stages.replicas_decide:  # the batch of another replica may have fewer rows
            fewest = -self.stages.agree([-len(batches)])[0]
            batches = cut_batch(whole, fewest, division.dims)
        first = self.stages.dropout.take(len(batches))
        parts = [replace(batch, number=first + index) for index, batch in enumerate(batches)]
        rows = sum(batch.rows for batch in batches)
        return _Call(kind, replace(whole, rows=rows, number=first), parts, division)

    def _weights(self, call: "_Call", loss_of: LossOf, *, handed_over: bool = False) -> Weights:
        if len(call.parts) == 1:
            return Weights.ROWS
        found = self._losses.weights(
            call.kind, call.whole, call.division, loss_of, handed_over=handed_over
        )
        if found is Weights.NONE:
            self._say(
                "the loss is no weighted sum of its micro-batches' losses: it is made of the whole "
                "batch, after the forwards of all micro-batches"
            )
        return found

    def _outputs(self, call: "_Call") -> Dims | None:
        """Return how outputs of micro-batches are joined; None where they are not."""
        one = len(call.parts) == 1
        return () if one else self._losses.outputs(call.kind, call.whole, call.division)

    def _order(self, weights: Weights) -> str:
        return "all forwards first" if weights is Weights.NONE else self._config.schedule

    def _forward_all(
        self, call: "_Call", outputs: Dims | None = None, *, shared: bool = False
    ) -> WholeBatch:
        numbers = range(self._started, self._started + len(call.parts))
        made = WholeBatch(self.stages, call.parts, numbers, call.whole, call.division, outputs)
        if shared:
            made.share()
        self._started += len(call.parts)
        self._pending[made.origin] = made
        return made

    def _announce(self, level: str, meaning: str) -> None:
        """Say which level the loop has, once."""
        if level != self._level:
            self._level = level
            logger.announce(f"pipeline of {self.stages.count} stages, level {level}: {meaning}")

    def _say(self, line: str) -> None:
        """Say something once."""
        if line not in self._said:
            self._said.add(line)
            logger.announce(f"pipeline: {line}")

    # --- backward ---

    def catches_up(self, owner: nn.Module | Optimizer) -> UninheritedMethod:
        """Return a ``zero_grad`` that first runs the backwards which the script has asked for."""
        given = owner.zero_grad

        def zero_grad(set_to_none: bool = True) -> None:
            self._window.catch_up()
            given(set_to_none=set_to_none)

        return UninheritedMethod(owner, "zero_grad", zero_grad)

    @with_copies
    def backward(self, /, loss: Tensor, *, synchronize: bool, **options: Any) -> None:
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
        if not self.counts and not isinstance(loss, StageProxy):
            loss = torch.zeros_like(loss, requires_grad=True)  # reaches nothing
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
            promised[0].backward(loss, synchronize, self._config.schedule, counts=self.counts)
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
