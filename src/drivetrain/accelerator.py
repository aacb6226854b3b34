"""The facade: one small object that an ordinary training loop talks to.

Its verbs stand in the order of a training script. They delegate to the strategy of the model at
hand, or to a collaborator in ``drivetrain.facade``, and never ask which strategy there is.
"""

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from drivetrain import communication, data
from drivetrain.aliases import AnswersArguments, extract_model_from_parallel
from drivetrain.checkpoint import encoding
from drivetrain.config import RecomputeConfig
from drivetrain.data import PreparedLoader
from drivetrain.errors import UsageError
from drivetrain.facade.checkpoints import Decode, Encode, RunCheckpoints, add_hook, check_safe
from drivetrain.facade.exchange import FiniteCheck, Preemption
from drivetrain.facade.gradients import SharedCollections, WindowGradients
from drivetrain.facade.pieces import Pieces
from drivetrain.facade.preparation import Constructions, Preparation, Recomputations, is_scheduler
from drivetrain.facade.prepared import Observer, Observers, RunState
from drivetrain.facade.settings import (
    AutocastKwargs,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    Handlers,
    ProfileKwargs,
    ProjectConfiguration,
    StrategyChoice,
    announce_unused,
    check_unchanged,
    given_values,
    joined_world,
    project_of,
    resolve_run,
)
from drivetrain.facade.stepping import PreparedOptimizer, PreparedScheduler
from drivetrain.facade.uneven import UnevenInputs, gather_for_metrics
from drivetrain.facade.weights import WholeWeights
from drivetrain.log import Bar, get_logger
from drivetrain.model.modules import restore_forward
from drivetrain.observe.profile import StepProfiler
from drivetrain.observe.recorder import ExplainsShortage, LinkChoice, LiveFigures, RunFigures
from drivetrain.observe.report import RunReport
from drivetrain.observe.trackers import Trackers
from drivetrain.processes import Processes, StaysInProcess
from drivetrain.runtime.mesh import Mesh
from drivetrain.runtime.world import leave_others, record_request
from drivetrain.strategy import Run, Strategy

T = TypeVar("T")

logger = get_logger(__name__)


def _launched_observer() -> Observer:
    """Return the recorder that this process was started with, or an observer that does nothing."""
    path = record_request()
    if not path:
        return Observer()
    from drivetrain.verify import launched_recorder  # no other run needs it

    return launched_recorder(path)


class Accelerator(AnswersArguments, StaysInProcess, Processes):
    """Runs an ordinary PyTorch loop under any strategy.

    Names and arguments follow Hugging Face Accelerate. Nothing about it is global: several
    Accelerators, each with several models, live in one process.

    Args:
        strategy: name, or name and options, of the strategy; None takes the configuration's.
        config: a YAML file or a mapping with the configuration; values given here in code win.
        mixed_precision: ``no``, ``bf16``, ``fp16`` or ``fp8``.
        gradient_accumulation_steps: micro-batches per optimizer step.
        cpu: compute on the CPU even when there is an accelerator.
        device_placement: move models and batches to the rank's device.
        split_batches: divide a loader's batch over the ranks instead of giving one to each.
        dataloader_config: all options of loaders.
        gradient_accumulation_plugin: all options of accumulation.
        rng_types: generators that follow rank 0 at the start of each epoch.
        log_with: names or objects of experiment trackers, or ``"all"``.
        project_dir: root folder of checkpoints and logs.
        project_config: all options of that folder.
        step_scheduler_with_optimizer: False steps schedulers on every call.
        kwargs_handlers: option objects, one of each class.

    Attributes:
        config: the resolved configuration, with the origin of each value.
        world: this process among all processes.
        precision: the dtypes of the run.
        traffic: the ledger of the bytes that this rank has sent.
        report: the figures of the run; ``report(**figures)`` adds figures of the script's own.
        scaler: the loss scale of fp16.
        gradient_state: where the run stands in its accumulation window.
        handlers: the option objects of ``kwargs_handlers``.
        device_placement: whether models and batches are moved to the rank's device.
        even_batches: whether prepared loaders fill up the last batches.
        step_scheduler_with_optimizer: whether schedulers step with their optimizer alone.
        rng_types: generators that follow rank 0 at the start of each epoch.

    Raises:
        ConfigError: a wrong configuration, or code and command line contradict each other.
        PreflightError: the ranks cannot find each other.
        RankMismatchError: the ranks have different configurations.
    """

    # --- construction: one resolved run, alike on all ranks ---

    def __init__(  # noqa: PLR0913 - the arguments of Accelerate
        self,
        *,
        strategy: StrategyChoice | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: Literal["no", "bf16", "fp16", "fp8"] | str | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool | None = None,
        dataloader_config: DataLoaderConfiguration | None = None,
        rng_types: Sequence[str] | None = None,
        log_with: Any = None,
        project_dir: str | Path | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: list[Any] | None = None,
    ) -> None:
        handlers = Handlers.of(kwargs_handlers)
        given = [
            ("precision", "mixed_precision", mixed_precision),
            ("launch.device", "cpu", "cpu" if cpu else None),
            *given_values(
                gradient_accumulation_steps,
                split_batches,
                dataloader_config,
                gradient_accumulation_plugin,
                handlers.process_group.timeout,
            ),
        ]
        observer = _launched_observer()
        self.config = observer.configured(resolve_run(config, strategy, given, handlers))
        self._owns_group = not dist.is_initialized()
        self.world = joined_world(self.config, handlers.process_group.backend)
        super().__init__(self.world)
        announce_unused(handlers, self.config)
        self.handlers = handlers
        plugin = gradient_accumulation_plugin or GradientAccumulationPlugin()
        self.gradient_state = plugin.window(self.config.run.accumulation)
        self.device_placement = device_placement
        self.even_batches = self.config.run.data.even_batches
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.rng_types = tuple(rng_types) if rng_types is not None else ("generator",)
        self._assemble(project_of(project_config, project_dir), log_with)
        self.observe(observer)

    def _assemble(self, project: ProjectConfiguration, log_with: Any) -> None:
        """Make the state of the run, and the parts of the facade over it."""
        self._state = state = RunState(
            config=self.config,
            world=self.world,
            window=self.gradient_state,
            handlers=self.handlers,
            project=project,
        )
        self.precision, self.traffic = state.run.precision, state.run.traffic
        self.scaler = state.scaler
        finite = FiniteCheck(state)
        self._weights = WholeWeights(state)
        self._checkpoints = RunCheckpoints(state, finite)
        self._preemption = Preemption(
            state, self._checkpoints.save_in_memory, weakref.WeakMethod(self.save_state)
        )
        self._preemption.listen()
        garbage = SharedCollections(self.config.run.collect_garbage_every)
        self._uneven = UnevenInputs(state)
        self._gradients = WindowGradients(
            state, self._weights, finite, self._checkpoints, self._preemption, garbage, self._uneven
        )
        self._constructions = Constructions(self.world.device)
        self._recomputations = Recomputations(state)
        self._preparation = Preparation(
            state, self._constructions, self._recomputations, self._gradients
        )
        self._pieces = Pieces(state, self._gradients)
        self._trigger = False
        self._trackers = Trackers(
            log_with, logging_dir=self.logging_dir, is_main=self.world.is_main
        )
        self.report = RunReport(state, self._preemption)
        replicas = state.run.mesh["dp"].size
        if log_with is not None:
            self.report.listen(RunFigures(self._trackers, replicas).take)
        self._live = LiveFigures(replicas)
        self.report.listen(self._live.add)
        self._profiler = StepProfiler(state)
        for end in (self.report.close, self._profiler.end):
            weakref.finalize(self, end)  # also where the script forgets to end it

    def observe(self, observer: Observer) -> None:
        """Let an observer, such as a ``drivetrain.verify.Recorder``, follow each training step.

        Args:
            observer: told of the events of all models; the last one that was given counts.
        """
        state = self._state
        observer.attach(state)
        links = [LinkChoice(state)] if self.run.links.auto is not None else []
        state.observer = Observers(
            self.report.observer, self._profiler, *links, ExplainsShortage(state), observer
        )

    def __repr__(self) -> str:
        return f"Accelerator({self._state!r})"

    # --- the run as it was resolved ---

    @property
    def state(self) -> "Accelerator":
        """The run's state; an Accelerator holds it itself."""
        return self

    @property
    def run(self) -> Run:
        """All facts that a strategy may know, for models without a strategy of their own."""
        return self._state.run

    @property
    def mesh(self) -> Mesh:
        """The named axes of the run's strategy."""
        return self.run.mesh

    @property
    def should_save_model(self) -> bool:
        """Whether this process writes a model that all have gathered: the first of all does."""
        return self.is_main_process

    @property
    def tensor_parallel_rank(self) -> int:
        """This process's place among those that share layers; 0 where none do."""
        return self._place("tp")

    @property
    def pipeline_parallel_rank(self) -> int:
        """This process's stage of the pipeline; 0 where there is none."""
        return self._place("pp")

    @property
    def data_parallel_rank(self) -> int:
        """This process's place among those that have samples of their own."""
        return self._place("dp")

    def _place(self, axis: str) -> int:
        return self.mesh[axis].rank if axis in self.mesh else 0

    @property
    def mixed_precision(self) -> str:
        """The precision of the run: no, bf16 or fp16."""
        return self.precision.name

    @property
    def native_amp(self) -> bool:
        """Whether forward computes in another dtype than the parameters'."""
        return self.precision.compute is not None

    @native_amp.setter
    def native_amp(self, value: bool) -> None:
        check_unchanged("native_amp", value, self.native_amp, "mixed_precision")

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch is divided over the ranks."""
        return self.config.run.data.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether rank 0 alone reads and sends."""
        return self.config.run.data.dispatch_batches

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether loaders know their position: always."""
        return True

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether the shuffle order derives from seed and epoch."""
        return self.config.run.data.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether batches are copied to the device asynchronously."""
        return self.config.run.data.non_blocking

    @property
    def project_configuration(self) -> ProjectConfiguration:
        """Where checkpoints and logs go."""
        return self._state.project

    @project_configuration.setter
    def project_configuration(self, project: ProjectConfiguration) -> None:
        self._state.project = project

    @property
    def project_dir(self) -> str | None:
        """Root folder of the run."""
        folder = self.project_configuration.project_dir
        return None if folder is None else str(folder)

    @property
    def logging_dir(self) -> str | None:
        """Folder of the trackers."""
        folder = self.project_configuration.logging_dir or self.project_configuration.project_dir
        return None if folder is None else str(folder)

    # --- models, optimizers, loaders, schedulers ---

    def building(self, weights: str | Path | None = None) -> AbstractContextManager[None]:
        """Context in which a model is constructed without ever existing whole on a rank.

        Every tensor made inside has a shape, and no memory; all operations on it are recorded.
        ``prepare`` then makes the values, tensor by tensor, as the strategy needs them. They are
        bit for bit those of ordinary construction with the same seed, whatever the number of
        ranks; every rank must have seeded alike. A tensor's values can be read inside, at the price
        of making them; random initialisation runs twice.

        Args:
            weights: an exported model to take the values from, in Hugging Face's layout: a
                directory, its index, or one safetensors file. Each rank reads it tensor by tensor.

        Raises:
            UsageError: a ``building()`` is active already.
            CheckpointError: ``weights`` is not an exported model.
        """
        return self._constructions.building(weights)

    def recompute(
        self,
        model: nn.Module,
        *,
        mode: Literal["none", "full", "selective"] = "full",
        blocks: Sequence[str] | str = (),
        every: int = 1,
        keep: Literal["device", "cpu"] = "device",
        partition: str | None = None,
    ) -> nn.Module:
        """Let blocks of a model forget their activations and compute them again in backward.

        For this model it takes the place of the configuration's ``recompute``, also when it is
        called before ``prepare``; the last call counts.

        Args:
            model: the user's module or a prepared one; changed in place.
            mode: ``full`` keeps a block's inputs; ``selective`` also the results of its
                projections; ``none`` recomputes nothing.
            blocks: names of modules, in which ``*`` stands for any text; none for the blocks that
                the model repeats.
            every: recompute the first of each ``every`` blocks.
            keep: where inputs wait for backward.
            partition: mesh axis over which inputs are split; its ranks must hold equal inputs.

        Returns:
            The model.

        Raises:
            UsageError: an unknown mode, place or axis; nothing repeats, or a name matches nothing;
                a compiled block that cannot be recomputed.
        """
        options = RecomputeConfig(
            mode=mode,
            blocks=blocks if isinstance(blocks, str) else ",".join(blocks),
            every=every,
            keep=keep,
            partition=partition or "",
        )
        self._recomputations.recompute(model, options)
        return model

    def prepare(
        self,
        *args: Any,
        device_placement: Sequence[bool] | None = None,
        strategy: StrategyChoice | None = None,
    ) -> Any:
        """Prepare models, optimizers, loaders and schedulers, in any order.

        Args:
            args: the objects to prepare; objects of other kinds, None, lists, and objects that were
                prepared before come back untouched.
            device_placement: for each argument whether it is moved to the rank's device; None means
                as the constructor says.
            strategy: another strategy for the models of this call.

        Returns:
            The prepared objects in the order given; one object alone is not put into a tuple.

        Raises:
            UsageError: an optimizer over foreign parameters.
            RankMismatchError: the ranks hold different models.
        """
        places = [None] * len(args) if device_placement is None else list(device_placement)
        if len(places) != len(args):
            raise UsageError(
                f"expected device_placement for each of the {len(args)} arguments, found "
                f"{len(places)} values"
            )
        args = tuple(map(self._preparation.as_given, args))
        results = list(args)
        optimizers = [item for item in args if isinstance(item, Optimizer)]
        new = [item for item in optimizers if not isinstance(item, PreparedOptimizer)]
        # Models first: strategies replace the parameters that optimizers hold, and schedulers
        # follow the optimizers. A strategy may look at a batch of the loaders.
        self._preparation.show([item for item in args if isinstance(item, DataLoader)])
        for i, item in enumerate(args):
            if isinstance(item, nn.Module):
                placed = self._is_placed(places[i])
                results[i] = self._preparation.model(item, new, strategy, placed=placed)
            elif isinstance(item, DataLoader):
                results[i] = self.prepare_data_loader(item, places[i])
        self._preparation.refuse_foreign_parameters(new)
        for i, item in enumerate(args):
            if isinstance(item, Optimizer):
                results[i] = self.prepare_optimizer(item)
        for i, item in enumerate(args):
            if is_scheduler(item):
                results[i] = self.prepare_scheduler(item)
        return self._preparation.handed_back(results)

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
        *,
        strategy: StrategyChoice | None = None,
    ) -> nn.Module:
        """Prepare one model.

        Args:
            model: the user's module; the same object comes back unless the strategy must wrap it.
            device_placement: whether it is moved to the rank's device.
            evaluation_mode: place it and set its precision only; it is not trained.
            strategy: another strategy for this model.
        """
        placed = self._is_placed(device_placement)
        if evaluation_mode:
            return self._preparation.evaluated(model, placed=placed)
        return self._preparation.model(model, [], strategy, placed=placed)

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Any = None,
    ) -> PreparedLoader:
        """Divide one loader over the data-parallel axis.

        Args:
            data_loader: the user's loader.
            device_placement: whether its batches are moved to the rank's device.
            slice_fn_for_dispatch: not supported; batches are cut along dim 0.
        """
        if slice_fn_for_dispatch is not None:
            raise UsageError("expected no slice_fn_for_dispatch; batches are cut along dim 0")
        return self._preparation.loader(
            data_loader,
            placed=self._is_placed(device_placement),
            even_batches=self.even_batches,
            rng_types=self.rng_types,
        )

    def prepare_optimizer(
        self, optimizer: Optimizer, device_placement: bool | None = None
    ) -> PreparedOptimizer:
        """Wrap one optimizer, which then steps at the end of an accumulation window."""
        del device_placement  # state follows its parameters
        return self._preparation.optimizer(self._preparation.as_given(optimizer))

    def prepare_scheduler(self, scheduler: Any) -> PreparedScheduler:
        """Wrap one learning-rate scheduler, which then steps when its optimizer has stepped."""
        return self._preparation.scheduler(
            self._preparation.as_given(scheduler), with_optimizer=self.step_scheduler_with_optimizer
        )

    def _is_placed(self, device_placement: bool | None) -> bool:
        return self.device_placement if device_placement is None else device_placement

    def strategy_of(self, model: nn.Module) -> Strategy[Any]:
        """Return the strategy object of a prepared model.

        Raises:
            UsageError: the model was not prepared here.
        """
        return self._state.model(model).strategy

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Return the user's own module.

        Args:
            model: a prepared model, or one in torch's DataParallel or DistributedDataParallel.
            keep_fp32_wrapper: False gives forward back as it was before prepare().
            keep_torch_compile: False returns the module inside a compiled one.
        """
        if not keep_fp32_wrapper:
            restore_forward(model)
        return extract_model_from_parallel(model, keep_torch_compile=keep_torch_compile)

    # --- the loop ---

    def progress(
        self,
        iterable: Iterable[T],
        *,
        total: float | None = None,
        desc: str = "",
        every: int = 0,
        disable: bool = False,
    ) -> Bar[T]:
        """Return the iterable of a loop with a bar on rank 0, which shows the run's figures.

        Behind count, rate and times stand the loss of rank 0, tokens or samples per second of all
        ranks, and the memory of rank 0. Where standard error is no terminal, lines take the place
        of the bar.

        Args:
            iterable: a loader, or anything else; a ``range``, as of epochs, is counted alone.
            total: its length, when it does not know it.
            desc: text before the bar.
            every: steps from line to line; 0 writes one each 30 seconds.
            disable: iterate without a bar.
        """
        return self._live.bar(iterable, total, desc, every, disable or not self.is_main_process)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return the loader positioned ``num_batches`` from the start of its epoch.

        The position is absolute, so a script that calls this after ``load_state`` does not skip
        twice; ``load_state`` alone is enough.

        Args:
            dataloader: a prepared loader, or any other one.
            num_batches: batches of this rank to pass over, without reading them.
        """
        return data.skip_first_batches(dataloader, num_batches)

    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """Context of a training loop in which ranks may have different numbers of batches.

        Gradients are means over all ranks: those of ranks without a batch count as zeros. While
        there are such ranks, each call of ``backward`` is for one joined model, without a weight.

        Args:
            joinables: the prepared models of the loop; other objects are ignored.
            even_batches: while inside, whether prepared loaders fill up the last batches.

        Raises:
            UsageError: a strategy cannot stand in, or a loss scale needs all ranks in every step.
        """
        return self._uneven.joined(joinables, even_batches)

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Context of one micro-batch.

        Inside, optimizer and scheduler do nothing and gradients stay local until the window is
        complete: after ``gradient_accumulation_steps`` micro-batches or at the end of the loader.
        ``zero_grad()``, wherever it stands, clears only gradients that a step has used. Inside of
        another one it adds models to the same micro-batch.

        Args:
            models: the models that accumulate; none means all that were prepared.
        """
        return self._gradients.micro_batch(models)

    def micro_batches(self, batch: Any, *models: nn.Module) -> Iterator[Any]:
        """Iterate over the pieces of a rank's batch that ``micro_batch`` of the configuration asks.

        The pieces are one micro-batch of the window, as one ``accumulate`` would be: a loop runs
        forward and ``backward`` on each, and one step after the last. A loss counts with the rows
        of its piece, so that the gradient is that of the mean over all rows of all ranks. Where it
        is a mean of something else, such as tokens, pass their number: ``backward(loss, weight)``.
        Collective, unless ``micro_batch`` is ``whole``.

        Args:
            batch: tensors in lists, tuples and dicts, the first dimension counts samples; ranks may
                have different numbers.
            models: the models that accumulate; none means all that were prepared.

        Raises:
            UsageError: no common first dimension, or a layer such as BatchNorm that mixes rows; the
                batch before was left early.
        """
        return self._pieces.of(batch, models)

    def each_piece(self, function: Callable[[Any], T], batch: Any, *models: nn.Module) -> list[T]:
        """Call a function on each of the ``micro_batches``, and again where memory runs out.

        With ``micro_batch: auto``, an allocator's error in a piece that is larger than all before
        is no end: nothing of the try counts, and the function gets its rows in smaller pieces.
        Where ranks need each other within a piece (``zero3`` and ``fsdp`` on several ranks, ``tp``,
        ``pp``), the error stays one. Collective, unless ``micro_batch`` is ``whole``.

        Args:
            function: runs forward and ``backward`` on a piece; it may be called again with rows
                that it had, so it uses no other ranks and keeps nothing: what it returns counts.
            batch: as for ``micro_batches``.
            models: as for ``micro_batches``.

        Returns:
            What the function returned for each piece, in the order of the rows.
        """
        return self._pieces.each(function, batch, models)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step; may be changed between steps."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        if value < 1:
            raise UsageError(f"expected gradient_accumulation_steps of at least 1, found {value}")
        self.gradient_state.num_steps = value

    @property
    def sync_gradients(self) -> bool:
        """Whether the micro-batch at hand ends the accumulation window."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.gradient_state.sync_gradients = value

    @property
    def step(self) -> int:
        """Micro-batch of the accumulation window that ``accumulate`` entered last, from 1."""
        return self._state.step

    @step.setter
    def step(self, value: int) -> None:
        self._state.step = value

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Context in which backward keeps this model's gradients local."""
        return self._state.model(model).strategy.accumulating()

    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """Context inside ``no_sync`` in which backward synchronises after all."""
        return self._state.model(model).strategy.accumulating(False)

    @contextmanager
    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> Iterator[None]:
        """Context that computes in the run's precision, for code outside a model's forward."""
        handler = autocast_handler or self.handlers.autocast
        with self.precision.autocast(
            self.device, enabled=handler.enabled, cache_enabled=handler.cache_enabled
        ):
            yield

    def backward(
        self, loss: Tensor, *, weight: float | Tensor | None = None, **options: Any
    ) -> None:
        """Run backward; at the end of a window the gradients are synchronised and exact means.

        Args:
            loss: 0-d, the mean over this rank's micro-batch.
            weight: how much this micro-batch counts among all micro-batches of the window and all
                ranks, for example its number of tokens; None for all alike. With 0 the loss may be
                NaN, and adds nothing.
            options: those of ``Tensor.backward``, for example ``retain_graph=True``.

        Raises:
            UsageError: the loss is not a 0-d tensor that requires grad.
        """
        self._gradients.backward(loss, weight, options)

    def pipeline_step(
        self,
        model: nn.Module,
        inputs: Any,
        targets: Any = None,
        *,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        weight: float | Tensor | None = None,
    ) -> Tensor:
        """Run forward and backward of a batch, in whatever order the strategy is fastest with.

        The same loop works under every strategy; a pipeline may use any schedule, since it has the
        whole batch at once.

        Args:
            model: a prepared model.
            inputs: a mapping of inputs by name, a tuple of positional ones, or one tensor.
            targets: the second argument of the loss function; cut into micro-batches as inputs are.
            loss_fn: of (output, targets), the mean over the rows; None where the model returns its
                loss.
            weight: how much this batch counts, see ``backward``.

        Returns:
            The loss, 0-d, detached, with its value on every rank.
        """
        loss = self._gradients.loss_of(model, inputs, targets, loss_fn)
        self.backward(loss, weight=weight)
        return loss.detach()

    def unscale_gradients(self, optimizer: Optimizer | Iterable[Optimizer] | None = None) -> None:
        """Divide gradients by the loss scale; happens by itself before clipping and stepping.

        Args:
            optimizer: prepared optimizers whose models' gradients are unscaled; None means all.
        """
        self._gradients.unscale(optimizer)

    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0
    ) -> Tensor | None:
        """Scale the gradients of a model to a global norm of at most max_norm.

        Args:
            parameters: ``model.parameters()``, or some of them in any order, or what an optimizer's
                groups hold; the norm of nothing is 0.
            max_norm: the largest norm allowed.
            norm_type: 2.0 for Euclid, ``float("inf")`` for the largest element.

        Returns:
            The true global norm before clipping, 0-d, the same on every rank; None inside an
            unfinished accumulation window, where nothing is clipped.

        Raises:
            UsageError: a parameter belongs to no prepared model.
        """
        return self._gradients.clip_norm(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Clamp every gradient element of a model to [-clip_value, clip_value]."""
        self._gradients.clip_value(parameters, clip_value)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step of any optimizer was skipped because of an infinite gradient."""
        return any(optimizer.step_was_skipped for optimizer in self._state.optimizers)

    def profile(
        self, profile_handler: ProfileKwargs | None = None
    ) -> AbstractContextManager[torch.profiler.profile]:
        """Context that profiles with ``torch.profiler``; collective where a folder is given.

        The trace has ranges for collectives, for waits, for the forward and backward of the parts
        of prepared models, and for pipeline stages.

        Args:
            profile_handler: options; None takes those of ``kwargs_handlers``.

        Yields:
            torch's profiler.
        """
        options = profile_handler or self.handlers.profile
        return self._profiler.profiled(options)

    # --- metrics, and other words among the ranks ---

    def gather(self, tensor: Any) -> Any:
        """Concatenate tensors of all data-parallel ranks along dim 0; every rank gets the result.

        Ranks that share a batch, as tensor- and pipeline-parallel ones do, count once. The result
        is detached.

        Args:
            tensor: a tensor or nested containers of tensors, of equal shapes on all ranks; 0-d
                tensors become one element each.

        Raises:
            RankMismatchError: shapes, dtypes or structure differ; on every rank.
        """
        return communication.gather(tensor, group=self.mesh["dp"])

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather, and drop the samples that only repeat others to fill the last batch.

        Args:
            input_data: tensors with the batch on dim 0, nested or not, or any objects.
            use_gather_object: gather as objects even when these are tensors, for example because
                their shapes differ.
        """
        return gather_for_metrics(self._state, input_data, as_objects=use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Combine tensors of all data-parallel ranks element by element.

        Args:
            tensor: a tensor or nested containers of tensors, of equal shapes on all ranks.
            reduction: ``sum``, ``mean``, ``max`` or ``none``.
            scale: factor of the result.
        """
        return communication.reduce(tensor, reduction, scale, group=self.mesh["dp"])

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        """Pad tensors along a dim to the longest of any rank, so that they can be gathered."""
        return communication.pad_across_processes(
            tensor, dim, pad_index, pad_first, group=self.mesh["dp"]
        )

    def metric_mean(self, value: float | Tensor, count: int) -> float:
        """Return the mean over all data-parallel ranks of a rank's mean over ``count`` samples.

        With count 0 the value may be NaN, and adds nothing; a mean over nothing at all is NaN.
        """
        counted = float(value) * count if count else 0.0  # the mean of nothing may be no number
        total = torch.tensor([counted, float(count)], dtype=torch.float64, device=self.device)
        summed = communication.reduce(total, "sum", group=self.mesh["dp"])
        return float(summed[0] / summed[1])

    def set_trigger(self) -> None:
        """Raise a flag on this rank that ``check_trigger`` shows on every rank."""
        self._trigger = True

    def check_trigger(self) -> bool:
        """Return whether any rank raised its flag, and lower all flags. Collective."""
        flag = torch.tensor(int(self._trigger), device=self.device)
        raised = bool(communication.reduce(flag, "max").item())
        if raised:
            self._trigger = False
        return raised

    # --- whole parameters ---

    def gathered(
        self,
        what: nn.Module | Tensor | Iterable[Tensor],
        parameters: Sequence[nn.Parameter] | None = None,
    ) -> AbstractContextManager[None]:
        """Context for reading, initialising and changing whole parameters. Collective.

        Changes made inside are kept, under every strategy. Make the same change on every rank, or
        on rank 0 alone: its values become those of all ranks.

        Args:
            what: a prepared model, or parameters of prepared models.
            parameters: which parameters of the model; None means all.

        Raises:
            UsageError: a parameter belongs to no prepared model.
        """
        return self._weights.gathered(what, parameters)

    def inference(self, model: nn.Module) -> AbstractContextManager[nn.Module]:
        """Context for generation and long evaluation. Collective.

        Inside, the model is in evaluation mode and no gradients are computed. Where ranks divide
        parameters, these are gathered once, and forward needs no communication: ranks may run it
        as often as they like, each on its own. Where ranks divide the computation itself (tensor
        and pipeline parallelism), the ranks of a cell still run every forward together.

        Args:
            model: a prepared model.

        Yields:
            The user's own module.
        """
        return self._weights.inference(model)

    # --- a scheduler's notice ---

    @property
    def preempted(self) -> bool:
        """Whether a scheduler has told the run to end soon, by SIGTERM or SIGUSR1.

        The notice of one rank is enough, and all ranks learn of it after the same step. A script
        that reads this decides itself what happens; otherwise, with automatic names of checkpoints,
        the run saves and ends with exit code 75 when the training loop asks for the next batch.
        """
        return self._preemption.asked()

    # --- checkpoints: the whole state of the run ---

    def register_for_checkpointing(
        self, *objects: Any, encode: Encode | None = None, decode: Decode | None = None
    ) -> None:
        """Keep the state of more objects in every checkpoint.

        Args:
            objects: anything with ``state_dict()`` and ``load_state_dict()`` whose state is tensors
                and plain values.
            encode: opt-in for state of any other kind: makes bytes of it, which are stored as they
                are in a file of their own. This library reads no pickle; a ``decode`` of yours that
                does so runs any code in the file.
            decode: makes the state of these bytes again; without it they are never read.

        Raises:
            UsageError: names the arguments that lack these methods, or the missing half of the
                codec.
        """
        self._checkpoints.register(objects, encode, decode)

    def register_save_state_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Call ``hook(models, weights, output_dir)`` before each ``save_state``.

        Files that a hook writes into the directory become part of the checkpoint. A hook keeps a
        model's weights out by popping from ``models`` or from ``weights``; the state of its
        optimizer is saved even so. Rank 0's lists decide.
        """
        return add_hook(self._checkpoints.save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Call ``hook(models, input_dir)`` before each ``load_state``.

        A hook keeps a model's weights as they are by popping it from models. The state of its
        optimizer is loaded even so, if a hook of ``save_state`` took the model out.
        """
        return add_hook(self._checkpoints.load_hooks, hook)

    @property
    def save_iteration(self) -> int:
        """Number of the next automatically named checkpoint."""
        return self.project_configuration.iteration

    def save_state(
        self,
        output_dir: str | Path | None = None,
        safe_serialization: bool = True,
        *,
        overwrite: bool = False,
        wait: bool = True,
    ) -> str:
        """Save everything that an exact resume needs. Collective.

        Models, optimizers, schedulers, loss scale, loader positions, random number generators of
        every rank, and registered objects go into one directory, complete or not at all. Inside of
        an accumulation window, loaders and random numbers are those of the window's start, where a
        resumed run goes on.

        Args:
            output_dir: the directory; None with automatic naming means the next
                ``project_dir/checkpoints/checkpoint_N``.
            safe_serialization: must be True: checkpoints hold no pickles.
            overwrite: replace a checkpoint of this name; the old one goes only when the new one
                is complete.
            wait: False returns when this rank's shards are copied to host memory, which takes as
                many bytes as its files until they are written; a thread writes them while
                training goes on. State in a store on a disk is written before it returns. One
                save at a time: the next save or load, ``free_memory`` and ``end_training`` wait
                for it, as ``wait_for_checkpoint`` does.

        Returns:
            The directory.

        Raises:
            CheckpointError: the directory exists, the disk is full, a state is not plain, ranks
                are at different steps, or the save before this one failed in the background; on
                every rank, and an earlier checkpoint is still there.
        """
        check_safe(safe_serialization)
        with self.report.section("checkpoint"):
            self.wait_for_checkpoint()
            return self._checkpoints.save(output_dir, overwrite=overwrite, wait=wait)

    def wait_for_checkpoint(self) -> None:
        """Return when the save in the background is complete; at once when there is none.

        Raises:
            CheckpointError: that save failed; on every rank, and an earlier checkpoint is still
                there.
        """
        self._checkpoints.background.wait()

    def load_state(self, input_dir: str | Path | None = None, *, verify: str = "full") -> str:
        """Continue from a checkpoint of any strategy and any number of ranks. Collective.

        Weights that were saved in another dtype are converted, and a warning says how many.

        Args:
            input_dir: the directory; None means the last automatically named one. If that one is
                damaged, the one before it is taken, with a warning.
            verify: ``full`` checks the checksum of every file first, ``size`` its size only.

        Returns:
            The directory.

        Raises:
            CheckpointError: not a checkpoint, damaged, or of other models; on every rank, and
                nothing has changed. Or the save in the background failed.
        """
        self.wait_for_checkpoint()
        return self._went_on(self._checkpoints.load(input_dir, verify=verify))

    def resume(self, input_dir: str | Path | None = None, *, verify: str = "full") -> bool:
        """Continue from the newest whole checkpoint, or start anew where there is none. Collective.

        One line after ``prepare`` for a script that may be killed and started again at any time.
        With ``checkpoint.local: memory`` it is taken out of the memory of the hosts, unless that
        of storage is newer; a line says which.

        Args:
            input_dir: the directory of a script that names its checkpoints; None means the last
                automatically named one, as for ``load_state``.
            verify: as of ``load_state``.

        Returns:
            Whether a checkpoint was loaded. ``launch.resume: never`` loads only those that this
            run has saved.

        Raises:
            CheckpointError: there are checkpoints, and none of them can be loaded: a run never
                starts anew beside them. On every rank, and nothing has changed.
        """
        self.wait_for_checkpoint()
        found = self._checkpoints.resume(input_dir, verify=verify)
        if found:
            steps = self._state.steps
            logger.announce(f"resumed at step {steps}, from {found}")
            self.report.went_on_at = steps
        return bool(found and self._went_on(found))

    def _went_on(self, directory: str) -> str:
        self.report.resumed(directory)
        self.wait_for_everyone()
        return directory

    # --- exports: one model's weights, or one object ---

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """Return the whole model's state on every rank's CPU, with the user's names. Collective.

        Every rank needs host memory for the whole model; ``save_model`` needs room for one tensor.
        Beyond that, sharded parameters are gathered a few at a time. Tied names share one tensor.
        """
        del unwrap  # names are the user's own either way
        return self._weights.state_dict(model)

    def dtensors(self, model: nn.Module) -> Mapping[str, Tensor]:
        """Return the shards of a model's parameters as torch's DTensors, by name. Collective.

        For torch's distributed checkpoints and other tools that read them. They share the shards'
        memory: the model computes next with the values that are loaded into them.

        Raises:
            UsageError: the model's strategy does not keep rows of each parameter.
        """
        return self._state.model(model).strategy.state.dtensors()

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | Path,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
        *,
        only_trainable: bool = False,
    ) -> None:
        """Write a model's weights in Hugging Face's layout: safetensors with an index. Collective.

        Tied weights are written once. Sharded parameters are gathered a few at a time: no process
        holds more than the largest of them, or 32 MiB.

        Args:
            model: a prepared model, or one that every rank has whole.
            save_directory: gets ``model.safetensors``, or numbered files and their index.
            max_shard_size: bytes per file, as a number or a text such as ``"5GB"``.
            safe_serialization: must be True.
            only_trainable: leave out frozen parameters and buffers, as for an adapter.

        Raises:
            UsageError: nothing is left to write.
            CheckpointError: weights on the meta device, or the directory cannot be written.
        """
        options = max_shard_size, safe_serialization, only_trainable
        self._weights.save(model, save_directory, *options)

    def save(self, obj: Any, f: str | Path, safe_serialization: bool = False) -> None:
        """Save an object from the main process only.

        Args:
            obj: a mapping of tensors for safetensors, or anything for ``torch.save``.
            f: the file.
            safe_serialization: write safetensors.
        """
        if self.is_main_process:
            encoding.save(obj, f, safe_serialization=safe_serialization)

    # --- experiment trackers: only the main process writes ---

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Start the trackers of ``log_with``.

        Args:
            project_name: name of the project that the run belongs to.
            config: the run's settings, stored by each tracker.
            init_kwargs: arguments of each tracker by its name.
        """
        self._trackers.start(project_name, config, init_kwargs)

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Write values to every tracker.

        Args:
            values: numbers or strings by name.
            step: the step they belong to.
            log_kwargs: arguments of each tracker's ``log`` by its name.
        """
        self._trackers.log(values, step, log_kwargs)

    @property
    def trackers(self) -> list[Any]:
        """The trackers that ``init_trackers`` started; empty on other processes."""
        return self._trackers.active

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker by name, or the object it wraps; inert on other processes."""
        return self._trackers.get(name, unwrap)

    # --- the end ---

    def free_memory(self, *objects: Any) -> list[None]:
        """Forget everything prepared and empty the device's cache.

        Objects registered for checkpoints stay registered, as in Accelerate.

        Returns:
            A None for each object, so that ``model, optimizer = accelerator.free_memory(model,
            optimizer)`` drops the script's references too.

        Raises:
            CheckpointError: the save in the background failed; all is forgotten even so.
        """
        try:
            self._checkpoints.background.close()
        finally:
            self._forget()
        return [None for _ in objects]

    def clear(self, *objects: Any) -> list[None]:
        """The same as ``free_memory``."""
        return self.free_memory(*objects)

    def end_training(self) -> None:
        """Finish the trackers, take the strategies off, and leave the process group.

        Raises:
            CheckpointError: the save in the background failed; all the rest is done.
        """
        try:
            self.report.finish()
            self._profiler.end()
            self._trackers.finish()
            self.free_memory()
        finally:
            self._preemption.close()
            if self._owns_group and dist.is_initialized():
                leave_others()
            self.report.close()

    def _forget(self) -> None:
        self._preparation.forget()
        self._recomputations.stop()
        self._constructions.forget()
        self.step = 0
        gc.collect()
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()
