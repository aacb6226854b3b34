"""A model as a pipeline: cut into this rank's stages, and called in an ordinary training loop."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from drivetrain.collectives import Communicator, connect
from drivetrain.collectives.facts import share_facts
from drivetrain.errors import UsageError
from drivetrain.log import get_logger
from drivetrain.model.guard import Arguments, Elsewhere, Function, Keywords
from drivetrain.model.modules import (
    NamedModule,
    UninheritedMethod,
    clean_name,
    named_parameters,
    unwrap_forward,
    wrap_forward,
)
from drivetrain.model.trace import ModelTrace
from drivetrain.shards import WeightSource
from drivetrain.strategy import Run, Strategy
from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.dropout import Dropout
from drivetrain_megatron.pipeline.cut import StageCut, chosen_cut
from drivetrain_megatron.pipeline.losses import (
    Evaluation,
    LossOrigin,
    PromisedLoss,
    WaitingCall,
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
from drivetrain_megatron.pipeline.runner import (
    LocalStages,
    LossOf,
    StageParts,
    StepTrace,
    find_loss,
)
from drivetrain_megatron.pipeline.schedules import Action, ActionKind
from drivetrain_megatron.pipeline.stage import SharedParameters, Split, split, with_copies
from drivetrain_megatron.pipeline.transfer import (
    Dims,
    DividedCall,
    Link,
    MicroBatch,
    announce_idle_rounding,
    cut_batch,
    first_rows,
)
from drivetrain_megatron.pipeline.trials import BatchTrial, LossTrial
from drivetrain_megatron.recording.calls import ExampleInputs
from drivetrain_megatron.recording.phases import Recording, named_blocks, recording_of
from drivetrain_megatron.recording.proxy import StageProxy, StandIns, resolve
from drivetrain_megatron.shares import Shares, on_shares
from drivetrain_megatron.tensor.behavior import Uncompiled
from drivetrain_megatron.tensor.linear import WeightGradients, defer_no_more, defer_weights
from drivetrain_megatron.tensor.operators import TokenShards

# --- calls and backwards of a model that is a pipeline ---

# Three levels, chosen by the script's loop:
#
# - The loss is made outside of the model (L1, ``WholeBatch``): the call runs all forwards (GPipe),
#   and the script makes one loss of the whole batch's output.
# - Micro-batches are those of an accumulation window (L1b, ``AccumulationWindow``): each call is
#   one forward, each backward the next of 1F1B.
# - The model makes its loss itself (L2), or a loss function is handed over (L3, both
#   ``PromisedLoss``): ``accelerator.backward(loss)`` runs the whole schedule, and the loss has its
#   value afterwards. A loss that cannot be cut is made as at L1.
#
# On every stage but the last a loss is a proxy; after backward it has the last stage's value.


logger = get_logger(__name__)


class AccumulationWindow:
    """The calls of one accumulation window on this rank.

    Attributes:
        waiting: numbers of those whose backward has not run.
    """

    def __init__(self, stages: LocalStages) -> None:
        self._stages = stages
        # 1F1B: so many forwards run before a backward can come, since later stages come first.
        self._ahead = stages.ranks - 1 - stages.rank
        self._started = 0
        self.waiting: list[int] = []
        self._asked = 0  # how many of them the script has asked for
        self._origins: list[LossOrigin] = []  # of those that it has not asked for

    def __len__(self) -> int:
        """Return how many calls wait for a backward of the script."""
        return len(self.waiting) - self._asked

    def call(self, batch: MicroBatch) -> Any:
        """Run the forward of one micro-batch; return the model's output, or proxies."""
        worker, number = self._stages.only, self._started
        worker.batches[number] = batch
        self._started += 1
        self._stages.act([Action(ActionKind.FORWARD, self._stages.rank, number)])
        self.waiting.append(number)
        output = behind_inputs(handed_out(worker.outputs.pop(number)), batch)
        origin = LossOrigin()
        origin.mark(output)
        mark_elsewhere(output, self._stages.last_blocks)
        self._origins.append(origin)
        return output

    def backward(
        self, loss: Tensor, origins: frozenset[LossOrigin], synchronize: bool, *, counts: bool
    ) -> None:
        """Run the next backwards of 1F1B, for a loss made of some calls, which counts or not.

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
        worker, number = self._stages.only, self.waiting[self._asked]
        self._stages.note([number], counts=counts)
        if worker.stage.is_last:
            worker.losses_to_run[number] = loss
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
        numbers, self.waiting = self.waiting[:count], self.waiting[count:]
        self._asked -= count
        self._stages.only.final = numbers[-1] if synchronize else None
        self._stages.act([Action(ActionKind.BACKWARD, self._stages.rank, each) for each in numbers])

    def clear(self) -> None:
        """Forget calls whose backward nobody asked for."""
        self.waiting, self._origins, self._started, self._asked = [], [], 0, 0


class PipelinedModel:
    """The stages of this rank in the script's loop; a trace keeps the times of each step.

    ``windowed`` says whether micro-batches are those of an accumulation window; ``shares`` are the
    model's parameters of which ranks have parts.

    Attributes:
        shares_outputs: whether outputs of training get their values on every stage at once, which
            takes all forwards before the first backward.
        units: the blocks of this rank's stages, by name.
        counts: whether the loss of a backward counts; one that does not adds zeros.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: LocalStages,
        config: MegatronConfig,
        windowed: bool,
        trace: StepTrace | None,
        shares: Shares,
    ) -> None:
        self.stages, self._shares = stages, shares
        self._config, self._windowed = config, windowed
        self._trace = trace
        self._window = AccumulationWindow(stages)
        shards = config.sequence_parallel and config.tp > 1
        self._batches = BatchTrial(model, stages, TokenShards() if shards else None)
        self._losses = LossTrial(model, stages)
        self._evaluation = Evaluation(stages)
        self._pending: WeakKeyDictionary[LossOrigin, WaitingCall] = WeakKeyDictionary()
        self._started = 0
        self._synchronized = False
        self._unpublished: list[Tensor] = []
        self._said: set[str] = set()
        self.shares_outputs = False
        self.counts = True
        self.units: Mapping[str, nn.Module] = {}

    # --- forward ---

    @with_copies
    def call(self, args: Arguments, kwargs: Keywords) -> Any:
        """Carry out a call of the model; return its output, or proxies."""
        self.stages.refresh()
        if not torch.is_grad_enabled():
            call = self._divided(args, kwargs)
            dims = self._outputs(call)
            return self._evaluation.run(call, dims)
        self._begin()
        if self.shares_outputs:
            self._announce("L1", "all forwards, then all backwards; every stage gets the output")
            call = self._divided(args, kwargs)
            return self._forward_all(call, self._outputs(call), shared=True).hand_over()
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
            return self._forward_all(call, self._outputs(call)).hand_over()
        weights = self._weights(call, loss_in)
        self._announce("L2", f"the model makes its loss: {self._order(weights)}")
        if weights is Weights.NONE:
            return self._forward_all(call).hand_over()
        promised = PromisedLoss(self.stages, call.parts, loss.dtype, weights)
        self._pending[promised.origin] = promised
        mark_beside(outline)
        found = promised.hand_over()
        return tree_map(lambda x: found if x is loss else x, outline)

    @on_shares
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
        call = self._divided(tuple(args), dict(kwargs), targets)
        weights = self._weights(call, loss_fn, handed_over=True)
        self._announce("L3", f"a loss function was handed over: {self._order(weights)}")
        dtype = self.stages.dtype(call.parts[0])
        if weights is Weights.NONE:
            return self._forward_all(call).loss(targets, loss_fn, dtype)
        promised = PromisedLoss(self.stages, call.parts, dtype, weights, loss_fn)
        self._pending[promised.origin] = promised
        return cast(Tensor, promised.hand_over())

    @property
    def _count(self) -> int:
        """Into how many micro-batches a call is cut, if it can be."""
        return self._config.micro_batches or self.stages.ranks

    def in_pieces(self) -> int:
        """Cut each call from now on, also in a window; return into how many micro-batches."""
        self._window.catch_up()
        self._windowed = False
        return self._count

    def _begin(self) -> None:
        """Forget calls whose backward nobody can ask for, and after a step those before it."""
        if self._synchronized:
            self._pending.clear()
            self._window.clear()
            self._started = 0
        called = itertools.chain(*(call.numbers for call in self._pending.values()))
        self.stages.clear({*called, *self._window.waiting})
        if self._trace is None:
            self.stages.spans.clear()
        self._synchronized = False

    def _divided(self, args: Arguments, kwargs: Keywords, targets: Any = None) -> DividedCall:
        """Cut a call as the trial of its kind says."""
        count = self._count
        whole = MicroBatch(tuple(args), kwargs, targets=targets)
        kind = self._batches.kind(whole)
        division = self._batches.division(kind, whole, cuts=count > 1)
        if division.dims is None:
            if count > 1 and first_rows(whole.flat()[0]) > 1:
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
        return DividedCall(kind, replace(whole, rows=rows, number=first), parts, division)

    def _weights(self, call: DividedCall, loss_of: LossOf, *, handed_over: bool = False) -> Weights:
        if len(call.parts) == 1:
            return Weights.ROWS
        found = self._losses.weights(call, loss_of, handed_over=handed_over)
        if found is Weights.NONE:
            self._say(
                "the loss is no weighted sum of its micro-batches' losses: it is made of the whole "
                "batch, after the forwards of all micro-batches"
            )
        return found

    def _outputs(self, call: DividedCall) -> Dims | None:
        """Return how outputs of micro-batches are joined; None where they are not."""
        one = len(call.parts) == 1
        return () if one else self._losses.outputs(call)

    def _order(self, weights: Weights) -> str:
        return "all forwards first" if weights is Weights.NONE else self._config.schedule

    def _forward_all(
        self, call: DividedCall, outputs: Dims | None = None, *, shared: bool = False
    ) -> WholeBatch:
        numbers = range(self._started, self._started + len(call.parts))
        made = WholeBatch(self.stages, call, numbers, outputs)
        if shared:
            made.share()
        self._started += len(call.parts)
        self._pending[made.origin] = made
        return made

    def _announce(self, level: str, meaning: str) -> None:
        """Say which level the loop has, once."""
        self._say(f"level {level}, {meaning}")

    def _say(self, line: str) -> None:
        """Say something once."""
        if line not in self._said:
            self._said.add(line)
            logger.announce(f"pipeline of {self.stages.count} stages: {line}")

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
        self.stages.link.begin()
        with running(origins):
            if origins <= {*self._pending}:
                self._run(origins, loss, synchronize)
            elif self._windowed:
                self._window.backward(loss, origins, synchronize, counts=self.counts)
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
        for call in calls:
            self.stages.note(call.numbers, counts=self.counts)
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
        self.stages.link.flush()
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
            values.copy_(torch.stack([one.reshape(()) for one in losses]))
        self.stages.share(values, "values of losses")
        for one, value in zip(losses, values, strict=True):
            if isinstance(one, StageProxy):
                resolve(one, value.reshape(one.shape))  # torch takes one element in any shape


# --- calls of the model inside of a model of ``peft`` go through the pipeline of the whole ---

# ``PeftModel.generate`` calls the model inside by itself. The stages are those of the whole model,
# whose forward hands its arguments on to the one inside, unless it puts learned prompts before
# them.


_WHOLE, _INSIDE = "_forward_before_passes", "_forward_before_calls_inside"


class AdaptedModel:
    """A model of ``peft`` before it is cut into stages; other models stay as they are.

    Args:
        model: whole.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._inside = _inside(model)
        self._passes = 0
        if self._inside is not None:
            wrap_forward(model, _WHOLE, self._pass)

    def redirect(self) -> None:
        """Let calls of the model inside be calls of the whole, from now on."""
        if self._inside is not None:
            wrap_forward(self._inside, _INSIDE, self._call)

    def close(self) -> None:
        """Give both their own forward back."""
        if self._inside is not None:
            unwrap_forward(self._inside, _INSIDE)
            unwrap_forward(self._model, _WHOLE)

    def _pass(self, module: nn.Module, compute: Function, args: Arguments, kwargs: Keywords) -> Any:
        """Run the whole forward, in which the model inside computes by itself."""
        self._passes += 1
        try:
            return compute(*args, **kwargs)
        finally:
            self._passes -= 1

    def _call(self, module: nn.Module, compute: Function, args: Arguments, kwargs: Keywords) -> Any:
        """Compute the model inside, as a part of the whole or for a caller of its own."""
        if self._passes:
            return compute(*args, **kwargs)
        if getattr(getattr(self._model, "active_peft_config", None), "is_prompt_learning", False):
            raise UsageError(
                "expected a call of the prepared model, found one of the model inside of it, as "
                "generate() of peft makes them: with learned prompts the two differ, and the "
                "pipeline's stages are those of the whole. Generate after training in one process, "
                "or use no pipeline (pp: 1)"
            )
        return self._model(*args, **kwargs)


def _inside(model: nn.Module) -> nn.Module | None:
    """Return the model inside of a model of peft, and None for others."""
    answer = getattr(model, "get_base_model", None)
    inside = answer() if callable(answer) else None
    return inside if isinstance(inside, nn.Module) and inside is not model else None


_ORIGINAL = "_forward_before_stages"


class PipelineBuilder:
    """Builds the pipeline of one model, step by step, as ``prepare`` needs it.

    The pipeline's ranks lie on one axis, the ranks that share layers on another.

    Attributes:
        blocks: the modules between whose calls stages begin, whichever rank they are on.
        stand_ins: the parameters of other stages, after ``split``.
        copied_buffers: names of the buffers here that count on an earlier rank of the pipeline.
    """

    _planned: tuple[Recording, StageCut]
    _split: Split
    _shared: SharedParameters
    _adapted: AdaptedModel
    stand_ins: StandIns

    def __init__(
        self, config: MegatronConfig, run: Run, axis: Communicator, layers: Communicator
    ) -> None:
        self._config = config
        self._run = run
        self._axis = axis
        self._layers = layers
        self._replicas = connect(run.mesh["dp"], run.traffic, run.world.device, run.world.timeout)
        self._stages = config.pp * config.chunks
        self._link = Link.of(run, self._stages)
        announce_idle_rounding(run)
        self.blocks: Sequence[NamedModule] = ()
        self._uncompiled = Uncompiled()
        self._weights = WeightGradients()
        self._deferring: list[nn.Module] = []
        self._optimizers: tuple[Optimizer, ...] = ()
        self._handles: list[RemovableHandle] = []
        self._methods: list[UninheritedMethod] = []
        self._pipeline: PipelinedModel | None = None
        self.copied_buffers: frozenset[str] = frozenset()

    def plan(self, model: nn.Module, inputs: ExampleInputs) -> None:
        """Record the whole model and find where the stages may begin.

        Raises:
            ConfigError: the model or the configured list does not allow it.
        """
        check_only_reads(inputs.trace)
        recording = recording_of(model, inputs.trace)
        self._planned = recording, chosen_cut(self._config, model, recording, inputs.trace)
        self.blocks = named_blocks(recording.names, model)

    def agree(self) -> None:
        """Let the stages begin on all ranks where they do on rank 0. Collective.

        A cut that was measured differs from rank to rank, also from replica to replica.
        """
        recording, cut = self._planned
        bounds = share_facts(list(cut.bounds), list[int], doing="the choice of stages")
        self._planned = recording, StageCut(tuple(bounds))

    def split(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        shapes: Mapping[str, Sequence[int]],
    ) -> None:
        """Reduce the model to this rank's stages, and the optimizers to their parameters.

        Shapes are those of the user's whole parameters, by name.
        """
        recording, cut = self._planned
        if self._run.mesh["tp"].size == 1:
            shared = "because ranks share its blocks; compile the blocks instead"
            self._uncompiled.set(model, _around_blocks(recording, model), shared)
        rank = self._axis.rank
        owned = list(range(rank, self._stages, self._axis.size))
        self.copied_buffers = frozenset(
            name
            for use in recording.buffers.values()
            for name in use.names
            if cut.stage_of(min(use.phases, default=0)) % self._axis.size != rank
        )
        homes = {
            clean_name(name): cut.stage_of(min(use.phases, default=0)) % self._axis.size
            for name, use in recording.parameters.items()
        }
        device = self._run.world.device
        self.stand_ins = StandIns(model, shapes, homes, self._axis, self._run)
        self._adapted = AdaptedModel(model)
        whole = named_parameters(model).values()
        self._split = split(model, recording, cut, owned, device)
        self._shared = SharedParameters(model, self._split.ties, owned, self._axis.size, self._link)
        here = {id(parameter) for parameter in named_parameters(model).values()}
        elsewhere = {id(parameter) for parameter in whole} - here
        for optimizer in optimizers:
            _take_out(optimizer, elsewhere)
        self.stand_ins.free()
        self._optimizers = tuple(optimizers)
        for stage, line in stage_report(recording, cut, self._axis.size).items():
            logger.info(f"stage {stage}: {line}")

    def materialize(self, source: WeightSource) -> None:
        """Give copies of shared parameters their values, in a model that was built without any."""
        self._shared.materialize(source, self._run.world.device)

    def start(
        self, model: nn.Module, inner: Strategy[Any], dropout: Dropout, shares: Shares
    ) -> PipelinedModel:
        """Take over the model's calls, after the data-parallel strategy has prepared it."""
        windowed = self._run.accumulation > 1 and not self._config.micro_batches
        if self._config.schedule == "zb-h1":
            self._deferring = defer_weights(model, self._weights)
        between = (self._link, self._axis, (self._axis, self._layers), self._replicas)
        device = self._run.world.device
        parts = StageParts(inner, device, *between, self._shared, self._weights, dropout)
        stages = LocalStages(self._split, parts)
        pipeline = PipelinedModel(model, stages, self._config, windowed, self._trace(), shares)
        self._pipeline = pipeline
        mine = {index for worker in stages.workers.values() for index in worker.stage.blocks}
        pipeline.units = {name: b for i, (name, b) in enumerate(self.blocks) if i in mine}
        for optimizer in self._optimizers:
            self.follow(optimizer)
        self._put(pipeline.catches_up(model))

        def call(module: nn.Module, compute: Any, args: Any, kwargs: Any) -> Any:
            # A copy, of all parameters, computes by itself.
            return pipeline.call(args, kwargs) if module is model else compute(*args, **kwargs)

        wrap_forward(model, _ORIGINAL, call)
        self._adapted.redirect()
        self.stand_ins.put()
        self._shared.hide(self.stand_ins.has_gradients, device)
        return pipeline

    def follow(self, optimizer: Optimizer) -> None:
        """Let an optimizer step this rank's parameters, and copies of shared ones follow."""
        held = [p for group in optimizer.param_groups for p in group["params"]]
        _take_out(optimizer, {id(p) for p in held if isinstance(p, Elsewhere)})
        # A forward between backward and step refreshes copies, but of values before the step.
        if (pipeline := self._pipeline) is not None:
            hook = optimizer.register_step_post_hook(lambda *_: pipeline.stages.outdate())
            self._handles.append(hook)
            self._put(pipeline.catches_up(optimizer))

    def _put(self, method: UninheritedMethod) -> None:
        method.put()
        self._methods.append(method)

    def _trace(self) -> StepTrace | None:
        """Return the writer of traces, if asked for; other pipelines have traces of their own."""
        if not self._config.trace_dir:
            return None
        others = "-".join(f"{name}{self._run.mesh[name].position}" for name in ("dp", "tp"))
        return StepTrace(Path(self._config.trace_dir), f"pipeline-{others}", self._axis.axis)

    def close(self, model: nn.Module) -> None:
        """Give the model's calls back; parameters of other stages stay away."""
        for handle in self._handles:
            handle.remove()
        for method in self._methods:
            method.take_off()
        unwrap_forward(model, _ORIGINAL)
        self._adapted.close()
        defer_no_more(self._deferring)
        self._split.parts.gates.close()
        self._uncompiled.undo()
        self._replicas.close()
        self._link.close()


def check_only_reads(trace: ModelTrace) -> None:
    """Check that a forward leaves parameters as they are.

    Raises:
        UsageError: names a parameter that it writes into.
    """
    names = {number: name for name, number in trace.parameters.items()}
    shown: dict[int, int] = {}  # whose memory a view shows
    for operation in trace.operations:
        for number in operation.changed:
            if name := names.get(shown.get(number, number)):
                raise UsageError(
                    f"expected a forward that reads its parameters alone, found that "
                    f"{operation.name}() writes into {name!r}: in a pipeline the forwards of other "
                    "micro-batches run before the backward of this one, which would meet changed "
                    "weights. Change them after optimizer.step(), under torch.no_grad(), or use "
                    "no pipeline (pp: 1)"
                )
        shown |= {view.made: shown.get(view.base, view.base) for view in operation.views}


def _around_blocks(recording: Recording, model: nn.Module) -> list[nn.Module]:
    """Return the modules outside of blocks: every rank runs them, with proxies among the tensors.

    Proxies cannot be compiled.
    """
    blocks = [block for _, block in named_blocks(recording.names, model)]
    inside = {id(module) for block in blocks for module in block.modules()}
    return [module for module in model.modules() if id(module) not in inside]


def _take_out(optimizer: Optimizer, elsewhere: set[int]) -> None:
    """Take parameters of other ranks out of an optimizer; those of other models stay."""
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) not in elsewhere]
    for parameter in [p for p in optimizer.state if id(p) in elsewhere]:
        del optimizer.state[parameter]


def stage_report(recording: Recording, cut: StageCut, ranks: int) -> Mapping[int, str]:
    """Return the share of each stage, in words."""
    costs = recording.costs()
    costs[0] += recording.between[0]
    costs[-1] += recording.between[-1]
    total = sum(costs) or 1.0
    return {
        stage: f"blocks {cut.blocks(stage).start} to {cut.blocks(stage).stop - 1} on pipeline rank "
        f"{stage % ranks}, {sum(costs[i] for i in cut.blocks(stage)) / total:.0%} of the work"
        for stage in range(cut.stages)
    }
