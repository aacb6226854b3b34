"""Makes the pipeline of a model: cuts it, leaves each rank its stages, and takes over its calls."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from drivetrain.building import WeightSource
from drivetrain.collectives import Communicator, connect
from drivetrain.collectives.facts import share_facts
from drivetrain.errors import UsageError
from drivetrain.log import get_logger
from drivetrain.model.look import Look
from drivetrain.parts.blocks import NamedModule
from drivetrain.parts.guard import Arguments, Elsewhere, Function, Keywords
from drivetrain.parts.naming import clean_name, named_parameters
from drivetrain.parts.wrapping import UninheritedMethod, unwrap_forward, wrap_forward
from drivetrain.strategy import Run, Strategy
from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.dropout import Dropout
from drivetrain_megatron.pipeline.cut import (
    StageCut,
    chosen_cut,
)
from drivetrain_megatron.pipeline.levels import PipelinedModel
from drivetrain_megatron.pipeline.runner import LocalStages, StageParts, StepTrace
from drivetrain_megatron.pipeline.stage import SharedParameters, Split, split
from drivetrain_megatron.pipeline.stand_ins import StandIns
from drivetrain_megatron.pipeline.transfer import Link, announce_idle_rounding
from drivetrain_megatron.recording.calls import ExampleInputs
from drivetrain_megatron.recording.phases import Recording, block_order, recording_of
from drivetrain_megatron.tensor.behavior import Uncompiled
from drivetrain_megatron.tensor.linear import WeightGradients, defer_no_more, defer_weights

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


# --- the pipeline ---


logger = get_logger(__name__)

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
        check_only_reads(inputs.look)
        recording = recording_of(model, inputs.look)
        self._planned = recording, chosen_cut(self._config, model, recording, inputs.look)
        self.blocks = block_order(recording, model)

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
        self.stand_ins = StandIns(model, shapes, homes, self._axis, device)
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
            logger.announce(f"stage {stage}: {line}")

    def materialize(self, source: WeightSource) -> None:
        """Give copies of shared parameters their values, in a model that was built without any."""
        self._shared.materialize(source, self._run.world.device)

    def start(self, model: nn.Module, inner: Strategy[Any], dropout: Dropout) -> PipelinedModel:
        """Take over the model's calls, after the data-parallel strategy has prepared it."""
        windowed = self._run.accumulation > 1 and not self._config.micro_batches
        if self._config.schedule == "zb-h1":
            self._deferring = defer_weights(model, self._weights)
        between = (self._link, self._axis, (self._axis, self._layers), self._replicas)
        device = self._run.world.device
        parts = StageParts(inner, device, *between, self._shared, self._weights, dropout)
        stages = LocalStages(self._split, parts)
        pipeline = PipelinedModel(model, stages, self._config, windowed, self._trace())
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

    def whole(
        self, parameters: Sequence[nn.Parameter], modify: bool
    ) -> AbstractContextManager[None]:
        """Return the context in which parameters of all stages are whole on each.

        Those of this rank's stages are whole already.
        """
        return self.stand_ins.whole(parameters, modify=modify)

    def _trace(self) -> StepTrace | None:
        """Return the writer of traces, if asked for; other pipelines have traces of their own."""
        if not self._config.trace_dir:
            return None
        others = "-".join(f"{name}{self._run.mesh[name].position}" for name in ("dp", "tp"))
        folder = Path(self._config.trace_dir)
        return StepTrace(folder, f"pipeline-{others}", self._axis, self._run.world.device)

    def close(self, model: nn.Module) -> None:
        """Give the model's calls back; parameters of other stages stay away."""
        for handle in self._handles:
            handle.remove()
        for method in self._methods:
            method.take_off()
        unwrap_forward(model, _ORIGINAL)
        self._adapted.close()
        defer_no_more(self._deferring)
        self._split.close()
        self._uncompiled.undo()
        self._replicas.close()


def check_only_reads(look: Look) -> None:
    """Check that a forward leaves parameters as they are.

    Raises:
        UsageError: names a parameter that it writes into.
    """
    names = {number: name for name, number in look.parameters.items()}
    shown: dict[int, int] = {}  # whose memory a view shows
    for operation in look.operations:
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
    blocks = [block for _, block in block_order(recording, model)]
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
