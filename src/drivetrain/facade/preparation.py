"""prepare(): models go to strategies; loaders, optimizers and schedulers follow the window.

Two lines, at the start and at the end of a run, tell it in the user's words: dtypes, samples per
step, steps per epoch, the schedule's length. Accelerate steps a schedule once per rank, so scripts
multiply its length by the number of ranks. Here such a schedule is too long, and users can see it.

Models that are constructed without memory, and get their values when they are prepared.
"""

import dataclasses
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from drivetrain.collectives import Communicator, connect
from drivetrain.config import RecomputeConfig, options_of
from drivetrain.config.outline import check_forward
from drivetrain.config.schema import dtype_word
from drivetrain.cost import ModelSpec, TensorSpec
from drivetrain.data import Delivery, PreparedLoader, prepare_data_loader
from drivetrain.errors import DrivetrainError, UsageError
from drivetrain.facade.gradients import WindowGradients
from drivetrain.facade.prepared import PreparedModel, RunState, refuse_taken
from drivetrain.facade.settings import StrategyChoice, agree
from drivetrain.facade.stepping import PreparedOptimizer, PreparedScheduler
from drivetrain.log import get_logger
from drivetrain.losses import compute_in_pieces, restore_loss
from drivetrain.model.deferred import (
    ConstructionRecording,
    RecordedWeights,
    become,
    fill,
    meta_tensors,
    stray_tensors,
    unknown_values,
)
from drivetrain.model.fp8 import compute_in_fp8, restore_products
from drivetrain.model.modules import (
    UninheritedHook,
    clean_name,
    compile_blocks,
    compute_in,
    restore_blocks,
    widen_norms,
)
from drivetrain.model.recompute import KeptInputs, attach, choose_blocks, is_attached, restore
from drivetrain.parallel.suitability import check_forward_writes
from drivetrain.parallel.whole_state import KERNELS
from drivetrain.runtime.mesh import Axis
from drivetrain.runtime.precision import DTYPES, Precision
from drivetrain.shards import WeightSource
from drivetrain.strategy import Run

if TYPE_CHECKING:
    from drivetrain.checkpoint.export import ExportedWeights

# --- models that are constructed without memory ---


class Construction(NamedTuple):
    """One ``with building():``.

    Attributes:
        recording: every operation on the tensors made inside.
        weights: the export that parameters get their values from, or None.
    """

    recording: ConstructionRecording
    weights: "ExportedWeights | None"


@dataclass(frozen=True, slots=True)
class Values:
    """Where a model's missing values come from.

    Attributes:
        source: knows them; None for a model that has all its values.
        facts: must be alike on all ranks, so that they get the same values.
        failure: why there is no source though one is needed.
    """

    source: WeightSource | None = None
    facts: Sequence[str] = ()
    failure: DrivetrainError | None = None

    def check(self) -> None:
        """Raise why there is no source, if there is none."""
        if self.failure is not None:
            raise self.failure


@dataclass(eq=False)
class Constructions:
    """The constructions of one Accelerator's models without memory, and their values.

    Attributes:
        device: where values are made that no strategy looks after.
    """

    device: torch.device
    _constructions: list[Construction] = field(default_factory=list)
    _is_building: bool = False

    @contextmanager
    def building(self, weights: str | Path | None) -> Iterator[None]:
        """Context in which tensors are made without memory, and recorded; see ``building``."""
        if self._is_building:
            raise UsageError("expected one building() at a time, found one inside of another")
        from drivetrain.checkpoint.export import (
            ExportedWeights,  # loaded by who exports, or reads it
        )

        exported = None if weights is None else ExportedWeights(Path(weights))
        construction = Construction(ConstructionRecording(), exported)
        self._constructions.append(construction)
        self._is_building = True
        try:
            with construction.recording.active():
                yield
        finally:
            self._is_building = False

    def values_of(self, model: nn.Module) -> Values:
        """Find out where the missing values of a model come from.

        The returned values hold a failure, too: ranks compare failures first, and none raises
        alone.

        Raises:
            UsageError: called inside ``building()``.
        """
        if self._is_building:
            raise UsageError(
                "expected prepare() after building(), found it inside; leave the context first"
            )
        missing = meta_tensors(model)
        try:
            strays = self._strays(model)
            if not missing and not strays:
                return Values()
            return self._known_values(model, missing, strays)
        except DrivetrainError as error:
            return Values(facts=[f"no values: {error}"], failure=error)

    def _known_values(
        self, model: nn.Module, missing: Mapping[str, Tensor], strays: Mapping[str, Tensor]
    ) -> Values:
        everything = {**strays, **missing}
        used = [c for c in self._constructions if any(map(c.recording.knows, everything.values()))]
        unknown = [
            name
            for name, tensor in everything.items()
            if not any(c.recording.knows(tensor) for c in used)
        ]
        if unknown:
            raise UsageError(unknown_values(unknown))
        for construction in used:
            construction.recording.versions.check(everything)
        source: WeightSource = RecordedWeights([c.recording for c in used])
        recorded = list(everything.values())
        for weights in {id(c.weights): c.weights for c in used if c.weights is not None}.values():
            from drivetrain.checkpoint.export import StreamedWeights

            streamed = StreamedWeights(weights, model, source)
            streamed.fill_real()
            source, recorded = streamed, streamed.remaining(everything)
        facts = [
            fact
            for c in used
            for fact in c.recording.facts([t for t in recorded if c.recording.knows(t)])
        ]
        return Values(source, [f"built without values: {len(missing)} tensors", *facts])

    def give_whole_values(self, model: nn.Module) -> None:
        """Give its missing values to a model that no strategy takes over."""
        values = self.values_of(model)
        values.check()
        if values.source is not None:
            self.fill_beside(model)
            fill(model, meta_tensors(model), values.source, self.device)

    def forget(self) -> None:
        """Let go of all recordings."""
        self._constructions.clear()

    def fill_beside(self, model: nn.Module, optimizers: Sequence[Optimizer] = ()) -> None:
        """Give values to what no strategy looks after: plain attributes, and made states."""
        for name, tensor in self._strays(model).items():
            become(tensor, self._recorded(tensor, name), name)
        for optimizer in optimizers:
            for state in optimizer.state.values():
                for key, tensor in state.items():
                    if isinstance(tensor, Tensor) and tensor.is_meta:
                        name = f"state {key} of {type(optimizer).__name__}"
                        state[key] = self._recorded(tensor, name)

    def _strays(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the plain attributes to be filled; others are on meta in any construction."""
        recordings = [construction.recording for construction in self._constructions]
        return {
            name: tensor
            for name, tensor in stray_tensors(model).items()
            if any(recording.knows(tensor) for recording in recordings)
        }

    def _recorded(self, tensor: Tensor, name: str) -> Tensor:
        """Return the values of one tensor where ordinary construction would have put them."""
        for construction in self._constructions:
            if construction.recording.knows(tensor):
                return construction.recording.materialize([tensor])[0]
        raise UsageError(unknown_values([name]))


def place(model: nn.Module, device: torch.device) -> None:
    """Move a model to a device; tensors without values stay until they have some."""
    if not meta_tensors(model):
        model.to(device)
        return
    move: Callable[[Callable[[Tensor], Tensor]], nn.Module] = model._apply
    move(lambda tensor: tensor if tensor.is_meta else tensor.to(device))


# --- prepare ---

_STEPS = "num_training_steps"
"""Name of the length in the schedules of transformers and of diffusers."""

_ROUNDING = 0.02
"""Steps of an epoch are rounded up: a schedule may differ so much from a multiple of the steps."""


def describe_step(
    loader: PreparedLoader, ranks: int, accumulation: int, schedulers: Iterable[PreparedScheduler]
) -> str:
    """Return one line about the samples of a step; "" where batches have no one size."""
    try:
        total = loader.total_batch_size
    except UsageError:
        return ""
    line = (
        f"{ranks} rank{'s' * (ranks > 1)} x batch {total // ranks} x accumulation {accumulation} = "
        f"{total * accumulation} samples per step"
    )
    steps = 0
    with suppress(TypeError):  # an iterable dataset has no length
        steps = -(-len(loader) // accumulation)
        line += f", {steps} step{'s' * (steps != 1)} per epoch"
        if not steps:
            line += (
                ": expected a batch for each rank, found too few samples, and nothing is trained; "
                "take a smaller batch_size, fewer ranks, or drop_last=False"
            )
    lengths = {length for each in schedulers if (length := schedule_length(each)) is not None}
    if len(lengths) == 1:
        length = lengths.pop()
        line += f"; the learning-rate schedule has {length} steps"
        line += f", {length / steps:.4g} epochs of this loader" if steps else ""
    return line


def schedule_length(scheduler: PreparedScheduler) -> int | None:
    """Return how many optimizer steps a schedule is made for, None where it does not say."""
    inner = scheduler.scheduler
    total = getattr(inner, "total_steps", None)
    if isinstance(total, int):
        return total // scheduler.steps_per_call
    for function in getattr(inner, "lr_lambdas", ()):
        value = _given(function).get(_STEPS)
        if isinstance(value, int):
            return value // scheduler.steps_per_call
    return None


def describe_unused_schedule(scheduler: PreparedScheduler, ranks: int) -> str:
    """Return one line if a run on N ranks ends after 1/N of a schedule's steps, "" otherwise."""
    length, taken = schedule_length(scheduler), getattr(scheduler.scheduler, "last_epoch", 0)
    if length is None or ranks == 1 or scheduler.steps_per_call > 1 or not taken:
        return ""
    if abs(length - taken * ranks) > max(ranks, _ROUNDING * length):
        return ""
    return (
        f"the learning-rate schedule has {length} steps, and the run took {taken}: 1 of {ranks}, "
        "which is the number of ranks. A schedule moves once per optimizer step here: if the "
        "script multiplies by num_processes, or counts the batches of a loader before prepare(), "
        "delete that, or keep Accelerate's rule with --set step_scheduler_with=samples"
    )


def _given(function: Any) -> dict[str, Any]:
    """Return the values that a function was made with: of a partial, or of a closure."""
    if isinstance(function, functools.partial):
        return dict(function.keywords)
    cells = getattr(function, "__closure__", None) or ()
    names = function.__code__.co_freevars if cells else ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def describe_dtypes(
    model: nn.Module, given: Sequence[TensorSpec], precision: Precision, *, autocast: bool
) -> str:
    """Return one line with the dtypes of a model, and how many parameters have each.

    ``given`` are the parameters before ``prepare``; ``autocast`` tells whether forward computes in
    the policy's dtype.
    """
    elements: Counter[torch.dtype] = Counter()
    tensors: Counter[torch.dtype] = Counter()
    for spec in given:
        dtype = precision.forward_dtype(spec.dtype, spec.shape)
        elements[dtype] += spec.numel
        tensors[dtype] += 1
    order = [dtype for dtype, _ in elements.most_common()]
    param = " and ".join(
        f"{dtype_word(dtype)} ({elements[dtype]:,} in {tensors[dtype]:,})" for dtype in order
    )
    compute = [DTYPES[precision.compute]] if autocast and precision.compute else order
    trained = [spec for spec in given if spec.trainable]
    reduce = (
        precision.reduce_dtype(precision.forward_dtype(spec.dtype, spec.shape)) for spec in trained
    )
    master = (precision.master_dtype(spec.dtype, spec.shape) for spec in trained)
    return (
        f"precision of {type(model).__name__}: param {param}, compute {_words(compute)}, "
        f"reduce {_words(reduce)}, master {_words(master)}"
    )


def _words(dtypes: Iterable[torch.dtype]) -> str:
    return " and ".join(dict.fromkeys(map(dtype_word, dtypes))) or "none"


# --- activation recompute: as the configuration says, unless the script says otherwise ---


logger = get_logger(__name__)


@dataclass(eq=False)
class Recomputations:
    """The activation recompute of one Accelerator's models.

    Attributes:
        state: of the run; models that were not prepared may be recomputed too.
    """

    state: RunState
    _known: dict[int, tuple[nn.Module, Communicator | None]] = field(default_factory=dict)
    """By identity, the models as the script passed them, and the axis over which inputs are split;
    None keeps them whole."""

    def recompute(self, model: nn.Module, options: RecomputeConfig) -> None:
        """Attach recompute to a model as the script says; see ``Accelerator.recompute``."""
        for entry in self.state.models:
            if entry.model is model:
                self._attach(options, entry.model, entry.strategy.run)
                return
        self._attach(options, model, self.state.run)

    def before_prepare(self, model: nn.Module, choice: StrategyChoice | None) -> None:
        """Attach the configured recompute, unless the script has told its own for this model."""
        options = self.state.config.run.recompute
        told = is_attached(model) or id(model) in self._known
        if (options.mode != "none" or self._compiles) and not told:
            _, run = self.state.run_of(choice)
            self._attach(options, model, run)

    @property
    def _compiles(self) -> bool:
        return self.state.config.run.compile == "blocks"

    def stop(self) -> None:
        """Give every model back its own forwards."""
        for model, _ in list(self._known.values()):
            self._stop(model)

    def _attach(self, options: RecomputeConfig, model: nn.Module, run: Run) -> None:
        """Attach recompute with these options, in place of the one attached before."""
        _check("mode", options.mode)
        _check("keep", options.keep)
        if self._compiles and options.mode == "selective":
            raise UsageError(
                "compile: blocks: expected recompute full or none, found selective, which cannot "
                "tell the operations of a compiled block apart; change one of them"
            )
        axis = _axis_of_replicas(run, options.partition) if options.partition else None
        patterns = [name for name in map(str.strip, options.blocks.split(",")) if name]
        chosen = []
        if options.mode != "none":
            chosen = choose_blocks(model, patterns, every=options.every)
        self._stop(model)
        communicator = None
        if options.mode != "none" and axis is not None:
            communicator = connect(axis, run.traffic, run.world.device, run.world.timeout)
        self._known[id(model)] = model, communicator
        try:
            if self._compiles:  # first, so that recompute is around it
                compile_blocks(model, run.world.device)
            if options.mode != "none":
                attach(chosen, options.mode, KeptInputs(options.keep, communicator))
                logger.info("recompute %s: %d blocks", options.mode, len(chosen))
        except BaseException:
            self._stop(model)  # a script may mend what was refused, and prepare again
            raise

    def _stop(self, model: nn.Module) -> None:
        """Give the blocks of a model back their own forward."""
        if id(model) in self._known:
            _, communicator = self._known.pop(id(model))
            restore(model)
            restore_blocks(model)
            if communicator is not None:
                communicator.close()


def _check(name: str, value: str) -> None:
    (knob,) = (knob for knob in options_of(RecomputeConfig) if knob.name == name)
    if value not in knob.choices:
        raise UsageError(
            f"expected recompute's {name} to be one of {', '.join(knob.choices)}, found {value!r}"
        )


def _axis_of_replicas(run: Run, name: str) -> Axis:
    """Return the axis over which inputs are split; its ranks must hold equal batches."""
    axes = [axis for axis in run.mesh if axis != "dp"]
    if name not in axes:
        has = ", ".join(axes) or "no axis but dp"
        raise UsageError(
            "expected recompute's partition to be an axis whose ranks hold equal inputs, found "
            f"{name!r}; the mesh has {has}, and the ranks of dp hold different batches; leave "
            "partition empty to keep inputs whole"
        )
    return run.mesh[name]


# --- prepare() ---


@dataclass(eq=False)
class Preparation:
    """The ``prepare`` of one Accelerator, for each kind of object.

    Attributes:
        state: of the run; gets every prepared object.
        constructions: where missing values of models come from.
        recomputations: attaches the configured recompute.
        gradients: of the models; decides whether an optimizer may step.
    """

    state: RunState
    constructions: Constructions
    recomputations: Recomputations
    gradients: WindowGradients
    _handled: BaseException | None = None

    def model(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        choice: StrategyChoice | None,
        *,
        placed: bool,
    ) -> nn.Module:
        """Hand a model and its optimizers to a strategy; a prepared model comes back as it is.

        A module without parameters is placed, and is no model.

        Optimizers that hold other parameters stay behind. ``choice`` is another strategy than the
        run's; ``placed`` moves the model to the rank's device.
        """
        if any(entry.model is model for entry in self.state.models):
            return model
        # A loss function: no strategy has work with it. A model may return a list of parameters.
        if next(iter(model.parameters()), None) is None:
            self.constructions.give_whole_values(model)
            if placed:
                place(model, self.state.world.device)
            return model
        _check_layers(model, self.state.run.mesh["dp"].size)
        choice = self.state.choose(model, self.state.observer.choice(choice))
        self.recomputations.before_prepare(model, choice)
        self.state.observer.before_prepare(model)
        values = self.constructions.values_of(model)
        names = {id(p): clean_name(name) for name, p in model.named_parameters()}
        known = [*optimizers, *(prepared.optimizer for prepared in self.state.optimizers)]
        mine = [optimizer for optimizer in known if _holds(optimizer, names)]
        agree(
            self.state.world,
            f"the model {type(model).__name__}",
            [*self.state.run.links.facts(), *values.facts, *_facts(model, mine, names)],
        )
        values.check()
        given = dataclasses.replace(ModelSpec.of(model), module=None)
        strategy = self.state.strategy(choice, given.parameters)
        try:
            if values.source is not None:
                self.constructions.fill_beside(model, mine)
                strategy.materialize(model, values.source)
            if placed:
                place(model, self.state.world.device)
            self.state.note_groups(mine)
            module, bound = strategy.prepare(self._with_forward(model, strategy.run), mine)
            entry = PreparedModel(module, strategy, tuple(bound), names, given)
            entry.check_dtypes(given.parameters, self.state.run.precision)
        except BaseException:
            strategy.close()
            restore_loss(model)
            restore_products(model)
            raise
        self._announce_policies(model, given.parameters)
        self._bind(mine, bound)
        self.state.models.append(entry)
        self._compute_in_precision(module)
        self._follow_forwards(entry, module)
        entry.offer_methods(self.state.window)
        self.state.observer.after_prepare(entry)
        return module

    def _follow_forwards(self, entry: PreparedModel, module: nn.Module) -> None:
        before = UninheritedHook(functools.partial(self._note_forward, entry))
        after = UninheritedHook(self._note_end)
        load = UninheritedHook(lambda *_: self.state.run.traffic.load())  # where none was refused
        entry.notes = (
            # Before the strategy's own hook, which may communicate.
            module.register_forward_pre_hook(before, prepend=True),
            module.register_forward_hook(after, with_kwargs=True, always_call=True),
            *(m.register_load_state_dict_post_hook(load) for m in module.modules()),  # type: ignore[no-untyped-call]
        )

    def evaluated(self, model: nn.Module, *, placed: bool) -> nn.Module:
        """Give a model that is not trained its values, its place and its precision."""
        self.constructions.give_whole_values(model)
        if placed:
            place(model, self.state.world.device)
        self._compute_in_precision(model)
        self._announce_policies(model, ModelSpec.of(model).parameters)
        return model

    def as_given(self, item: Any) -> Any:
        """Return an object; of a wrapper that was let go of since, what is inside.

        That of another Accelerator, or from before ``free_memory``, waits for another window.
        """
        if isinstance(item, PreparedOptimizer) and item not in self.state.optimizers:
            return item.given
        if isinstance(item, PreparedScheduler) and item not in self.state.schedulers:
            return item.scheduler
        return item.known_to(self.state.window) if isinstance(item, PreparedLoader) else item

    def optimizer(self, optimizer: Optimizer) -> PreparedOptimizer:
        """Wrap an optimizer, after the strategies of its models have taken it over."""
        if isinstance(optimizer, PreparedOptimizer):
            return optimizer
        for prepared in self.state.optimizers:
            if optimizer is prepared.given:
                return prepared
        pairs = self.state.bound
        bound = next((after for given, after in pairs if given is optimizer), optimizer)
        for entry in self.state.models:
            if _holds(bound, entry.names) and not any(o is bound for o in entry.optimizers):
                facts = list(_facts_of_optimizers([bound], entry.names))
                agree(self.state.world, "an optimizer", facts)
                self.state.note_groups([bound])
                given, bound = bound, entry.strategy.bind(bound)
                self.state.groups[bound] = self.state.groups[given]
                entry.optimizers = (*entry.optimizers, bound)
        gradients = self.gradients
        prepared = PreparedOptimizer(
            optimizer,
            bound,
            self.state.window,
            gradients.before_step,
            gradients.after_step,
            self.state.whole,
            gradients.explained,
        )
        self.state.optimizers.append(prepared)
        return prepared

    def scheduler(self, scheduler: Any, *, with_optimizer: bool) -> PreparedScheduler:
        """Wrap a scheduler; ``with_optimizer=False`` steps it on every call."""
        if isinstance(scheduler, PreparedScheduler):
            return scheduler
        agree(self.state.world, "a scheduler", _facts_of_scheduler(scheduler))
        inner = getattr(scheduler, "optimizer", None)
        optimizers = self.state.optimizers
        mine = [o for o in optimizers if inner is o or inner is o.given or inner is o.optimizer]
        by_samples = self.state.config.run.step_scheduler_with == "samples"
        split = self.state.config.run.data.split_batches
        prepared = PreparedScheduler(
            scheduler,
            list(mine or optimizers),
            self.state.window,
            with_optimizer,
            self.state.run.mesh["dp"].size if by_samples and not split else 1,
        )
        self.state.schedulers.append(prepared)
        return prepared

    def show(self, loaders: Sequence[DataLoader[Any]]) -> None:
        """Let strategies ask for batches of these loaders, before they ask those of others."""
        self.state.run.examples.add(loaders)

    def loader(
        self,
        loader: DataLoader[Any],
        *,
        placed: bool,
        even_batches: bool,
        rng_types: Sequence[str],
    ) -> PreparedLoader:
        """Divide a loader over the axis ``dp``; ``placed`` moves batches to the rank's device."""
        loader = self.as_given(loader)
        if isinstance(loader, PreparedLoader):
            if loader not in self.state.loaders:
                self.state.loaders.append(loader)
            return loader
        self.show([loader])
        settings, run = self.state.config.run, self.state.run
        data = dataclasses.replace(settings.data, even_batches=even_batches)
        observer = self.state.observer
        prepared = prepare_data_loader(
            loader,
            axis=run.mesh["dp"],
            world=run.world,
            config=data,
            seed=settings.seed if data.data_seed is None else data.data_seed,
            delivery=Delivery(
                device=run.world.device if placed else None,
                observer=self.state.window,
                rng_types=tuple(rng_types),
                fetching=observer.fetching,
                exhausted=observer.exhausted,
                delivered=observer.delivered,
                between=self.gradients.preemption.between_batches,
            ),
        )
        self.state.loaders.append(prepared)
        return prepared

    def handed_back(self, results: Sequence[Any]) -> Any:
        """Return prepared objects as a script gets them, one object alone not in a tuple.

        Where they are a training loop, one line says what will run, and how many samples a step
        has.
        """
        loaders = [each for each in results if isinstance(each, PreparedLoader)]
        trains = any(isinstance(each, PreparedOptimizer) for each in results)
        ranks = self.state.run.mesh["dp"].size
        if trains and loaders:
            self.state.trains = loaders[0]
            schedulers = [each for each in results if isinstance(each, PreparedScheduler)]
            accumulation = self.state.window.num_steps
            if line := describe_step(loaders[0], ranks, accumulation, schedulers):
                compute = self.state.run.precision.compute
                given = [spec for each in self.state.models for spec in each.given.parameters]
                dtypes = compute or _words(spec.dtype for spec in given)
                elements = sum(spec.numel for spec in given)
                what = f"{self.state.config.strategy}, {dtypes}, {elements:,} parameters"
                logger.announce(f"{what}, {line}")
        return results[0] if len(results) == 1 else tuple(results)

    def forget(self) -> None:
        """Let go of everything prepared; warn of schedules that were made for too many steps."""
        ranks = self.state.run.mesh["dp"].size
        for scheduler in self.state.schedulers:
            if line := describe_unused_schedule(scheduler, ranks):
                logger.warning(line)
        self.gradients.garbage.release()
        self.state.window.forget()
        self.state.forget()
        self.state.window.forget()
        self.state.run.examples.forget()

    def refuse_foreign_parameters(self, optimizers: Sequence[Optimizer]) -> None:
        """Check that optimizers hold parameters of prepared models only, if there is a model."""
        known = {key for entry in self.state.models for key in entry.held_names()}
        for optimizer in optimizers:
            for i, group in enumerate(optimizer.param_groups):
                for parameter in group["params"]:
                    if self.state.models and id(parameter) not in known:
                        raise UsageError(
                            f"expected {type(optimizer).__name__} to hold parameters of prepared "
                            f"models, found a foreign one of shape {tuple(parameter.shape)} in "
                            f"group {i}; create the optimizer from the parameters of the model "
                            "passed to prepare(), and pass every model it trains"
                        )

    def _bind(self, given: Sequence[Optimizer], bound: Sequence[Optimizer]) -> None:
        """Remember the strategy's optimizers, also for those wrapped already."""
        pairs = list(zip(given, bound, strict=True))
        kept = [pair for pair in self.state.bound if pair[0] not in given]
        self.state.bound = kept + pairs
        for before, after in pairs:
            self.state.groups[after] = self.state.groups[before]
        for prepared in self.state.optimizers:
            for before, after in pairs:
                if prepared.optimizer is before:
                    prepared.optimizer = after

    def _with_forward(self, model: nn.Module, run: Run) -> nn.Module:
        """Let the model compute its loss in pieces, or products in fp8, as configured; return it.

        Of a run's models those without a head, or without blocks, are refused.
        """
        configured = self.state.config.run
        check_forward(configured, {axis: run.mesh[axis].size for axis in run.mesh})
        if configured.loss == "chunked":
            compute_in_pieces(model)
        if (recipe := run.precision.recipe) is not None:
            config, only = (
                self.state.handlers.fp8.config,
                self.state.handlers.fp8.module_filter_func,
            )
            compute_in_fp8(model, recipe, run.world.device, config=config, only=only)
        return model

    def _note_forward(self, entry: PreparedModel, module: nn.Module, inputs: Any) -> None:
        self._handled = sys.exception()  # the script's, around this call
        if torch.is_grad_enabled():
            self.state.last_run = entry
            self.state.observer.before_forward(entry)
        else:
            self.state.window.evaluate()

    def _note_end(self, module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        if torch.compiler.is_compiling():  # there, torch calls no hook for an error
            return
        if torch.is_grad_enabled():
            self.state.last_call = args, kwargs
        error = sys.exception()
        if isinstance(error, Exception) and error is not self._handled:
            self.gradients.explain(error)
        self._handled = None

    def _compute_in_precision(self, model: nn.Module) -> None:
        run = self.state.run
        if run.precision.param is not None:  # vectors keep fp32, what they meet is narrower
            widen_norms(model, run.world.device)
        if run.precision.compute is not None and self.state.handlers.autocast.enabled:
            # Nothing of this Accelerator inside: copies and pickles of the model hold it too.
            cached = self.state.handlers.autocast.cache_enabled
            autocast = functools.partial(
                run.precision.autocast, run.world.device, cache_enabled=cached
            )
            compute_in(model, autocast)

    def _announce_policies(self, model: nn.Module, given: Sequence[TensorSpec]) -> None:
        precision, scaler = self.state.run.precision, self.state.scaler
        line = describe_dtypes(
            model, given, precision, autocast=self.state.handlers.autocast.enabled
        )
        scale = scaler.get_scale()
        logger.info(f"{line}, loss scale {scale:g}" if scaler.enabled else line)
        self.state.announce_links()


def is_scheduler(item: Any) -> bool:
    """Return whether an argument of ``prepare`` is a learning-rate scheduler, torch's or not."""
    if isinstance(item, PreparedScheduler | torch.optim.lr_scheduler.LRScheduler):
        return True
    return (
        not isinstance(item, nn.Module | Optimizer | DataLoader)
        and hasattr(item, "optimizer")
        and hasattr(item, "step")
        and hasattr(item, "state_dict")
    )


def _check_layers(model: nn.Module, ranks: int) -> None:
    """Refuse what others have prepared, layers that ranks would step apart, and several devices.

    Transformers or Accelerate may have put them there.
    """
    refuse_taken(model)
    check_forward_writes(model, ranks)
    for module in model.modules():
        spread = getattr(module, "hf_device_map", None) or {}
        devices = {str(device) for device in spread.values()}
        quantized = any(getattr(module, f"is_loaded_in_{bits}bit", False) for bits in (4, 8))
        if len(devices) > 1 or "disk" in devices or (quantized and "cpu" in devices):
            raise UsageError(
                "expected a model whose weights lie on this rank's device, found hf_device_map "
                f"with {', '.join(sorted(devices))}; a model with CPU or disk offload of its own "
                "is for inference: load it without device_map, and choose strategy: offload"
            )


def _facts(
    model: nn.Module, optimizers: Sequence[Optimizer], names: Mapping[int, str]
) -> list[str]:
    """Return lines about each parameter, buffer and module, and about optimizers.

    A parameter has a name, a shape, a dtype, and trains or does not.
    """
    return (
        [
            f"module {name or 'itself'} of class {type(module).__name__}"
            for name, module in model.named_modules()
        ]
        + [
            f"parameter {name} {tuple(p.shape)} {p.dtype} trainable={p.requires_grad}"
            for name, p in model.named_parameters()
        ]
        + [f"buffer {name} {tuple(b.shape)} {b.dtype}" for name, b in model.named_buffers()]
        + [*_facts_of_optimizers(optimizers, names)]
    )


def _facts_of_optimizers(
    optimizers: Sequence[Optimizer], names: Mapping[int, str]
) -> Iterator[str]:
    """Yield lines about optimizers: class, hyperparameters and parameters of each group."""
    for number, optimizer in enumerate(optimizers):
        yield f"optimizer {number} of class {type(optimizer).__name__}"
        for index, group in enumerate(optimizer.param_groups):
            where = f"optimizer {number}, group {index}:"
            for key, value in group.items():
                if key != "params" and key not in KERNELS:
                    yield f"{where} {key} = {_plain(value)}"
            # Those of another model are compared with that one; a strategy may have cut them.
            for parameter in group["params"]:
                if id(parameter) in names:
                    yield f"{where} {names[id(parameter)]}"


def _facts_of_scheduler(scheduler: Any) -> list[str]:
    """Return lines about a scheduler: its class, and the plain values of its state."""
    lines = [f"scheduler of class {type(scheduler).__name__}"]
    state = scheduler.state_dict()
    return lines + [f"scheduler: {key} = {_plain(value)}" for key, value in sorted(state.items())]


def _plain(value: Any) -> str:
    """Return a value in words that are alike on ranks with the same script."""
    if isinstance(value, torch.Tensor):
        return str(value.tolist()) if value.numel() == 1 else f"a tensor {tuple(value.shape)}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_plain, value))}]"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    return f"a {type(value).__name__}"


def _holds(optimizer: Optimizer, names: dict[int, str]) -> bool:
    return any(id(p) in names for group in optimizer.param_groups for p in group["params"])
