"""The state of one run: what it was resolved to, the objects it has prepared, who watches it."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from drivetrain.checkpoint.commit import Resumption, gather
from drivetrain.checkpoint.loading import ModelReader
from drivetrain.compression.automatic import Sender, choose_links
from drivetrain.compression.methods import LinkMethods
from drivetrain.config import Layer, Resolved, ValueOrigin, dump_yaml, resolve
from drivetrain.config.document import STRATEGY
from drivetrain.config.schema import FarConfig, dtype_word
from drivetrain.cost import Cost, ModelSpec, TensorSpec, Traffic
from drivetrain.data import PreparedLoader
from drivetrain.data.examples import ExampleBatches
from drivetrain.errors import CheckpointError, ConfigError, UsageError
from drivetrain.facade.settings import (
    Handlers,
    ProjectConfiguration,
    StrategyChoice,
    resolve_strategy,
)
from drivetrain.facade.stepping import PreparedOptimizer, PreparedScheduler
from drivetrain.log import get_logger
from drivetrain.losses import restore_loss
from drivetrain.model.fp8 import restore_products
from drivetrain.model.modules import (
    UninheritedContext,
    UninheritedMethod,
    all_names,
    clean_name,
    named_parameters,
    restore_forward,
    uncompiled,
)
from drivetrain.parallel.backward import UserHooks
from drivetrain.parallel.whole_state import (
    KERNELS,
    GivenGroups,
    Holder,
    WholeOptimizer,
    refuse_parts,
    saving_methods,
)
from drivetrain.runtime.gradient_state import GradientState
from drivetrain.runtime.mesh import Mesh
from drivetrain.runtime.precision import LossScaler, Precision
from drivetrain.runtime.world import World, memory_folder
from drivetrain.strategy import Run, Strategy, StrategyPick, find_strategy

logger = get_logger(__name__)

RECOMPUTE = "recompute"
"""The section of activation recompute; a choice respects it where somebody has set it."""

RECOMPUTE_MODES = ("none", "selective", "full")
RECORDED = 100_000
"""Allocations that torch remembers for ``memory_snapshot``, with their stacks."""

CHOICE_FILE = "strategy.yaml"
"""The file in the project's folder in which a choice can be found, and pinned."""

# --- a prepared model ---


@dataclass(slots=True, eq=False)
class PreparedModel:
    """One prepared model, its strategy, and the loss scale of its gradients.

    Attributes:
        model: the module that the script holds.
        strategy: the strategy object of this model alone.
        optimizers: the strategy's optimizers, unwrapped, in the order given.
        names: parameter name by identity, as the user's model has it.
        given: the facts of the model as the script made it, without the module.
        scale: loss scale of the gradients at hand; None before the first backward.
        unscaled: whether the gradients at hand were divided by their scale, and carry 1.0.
        made_with: the loss scale that divided them.
        overflow: optimizers of which the gradients at hand are infinite somewhere.
        notes: handles of the hooks that note which model runs, how its forward ends, and loads.
        used: whether a step has used the gradients at hand.
        methods: those that the model has in place of its class's, while it is prepared.
        applied: whether something was done to all its tensors since, such as a conversion.
        compared: whether the ranks' values were compared before their first gradients.
        accumulated: whether a window kept gradients local, and no step or window has come since.
        checked: whether the last backward has looked for parameters that came later.
        parameters: those of the module, tied ones once.
        known: their identities.
        hooks: those that the script has put on parameters.
        mixing: its layers whose results for a row depend on other rows, by name.
    """

    model: nn.Module
    strategy: Strategy[Any]
    optimizers: tuple[Optimizer, ...] = ()
    names: dict[int, str] = field(default_factory=dict)
    given: ModelSpec = ModelSpec(())
    scale: float | None = None
    unscaled: bool = False
    made_with: float = 1.0
    overflow: set[Optimizer] = field(default_factory=set)
    notes: tuple[RemovableHandle, ...] = ()
    used: bool = False
    methods: list[UninheritedMethod] = field(default_factory=list)
    applied: bool = False
    compared: bool = False
    accumulated: bool = False
    checked: bool = False
    parameters: tuple[nn.Parameter, ...] = field(init=False)
    known: frozenset[int] = field(init=False)
    hooks: UserHooks = field(init=False)
    mixing: dict[str, nn.Module] = field(init=False)

    def __post_init__(self) -> None:
        """Remember which parameters the model has now."""
        # Also those that other ranks hold, whose gradients are none of this rank's.
        self.parameters = tuple(each for _, each in self.model.named_parameters())
        self.known = frozenset(map(id, self.parameters))
        self.hooks = UserHooks(self.parameters)
        modules = self.model.named_modules()
        self.mixing = {name: each for name, each in modules if isinstance(each, _BatchNorm)}

    @property
    def states(self) -> int:
        """How many tensors the optimizers keep for most of their parameters; 0 before a step."""
        counts = Counter(
            sum(isinstance(value, Tensor) and value.dim() > 0 for value in state.values())
            for optimizer in self.optimizers
            for state in optimizer.state.values()
            if isinstance(state, Mapping)
        )
        return counts.most_common(1)[0][0] if counts else 0

    def promised(self, states: int) -> Cost:
        """Return what the strategy promises to hold and send, with so many states.

        Raises:
            DrivetrainError: sizes alone are not enough for the strategy.
        """
        given = replace(self.given, states=states)
        return type(self.strategy).cost(self.strategy.config, given, self.strategy.run)

    def averages(self, ends: bool) -> bool:
        """Whether gradients are averaged now, after a backward that may end a window."""
        return ends and not self.strategy.pace.waits

    def check_parameters(self, *, due: bool) -> None:
        """Refuse parameters that came after ``prepare``: nobody would average their gradients.

        Args:
            due: whether to look; in a window each parameter's gradient is averaged at its end.
        """
        self.checked |= due
        # Every backward comes here: by identity, since the known ones may be slow to ask anything.
        modules, known, seen = [self.model] if due else [], self.known, set()
        while modules:
            module = modules.pop()
            if module in seen:
                continue
            seen.add(module)
            for parameter in module._parameters.values():
                if parameter is not None and id(parameter) not in known and parameter.requires_grad:
                    self._refuse_parameter(parameter)
            modules += [each for each in module._modules.values() if each is not None]

    def _refuse_parameter(self, found: nn.Parameter) -> NoReturn:
        name = next(name for name, each in self.model.named_parameters() if each is found)
        raise UsageError(
            f"expected the parameters that the model had in prepare(), found another one, "
            f"{name!r}; change the model before prepare(), write new values into the old parameter "
            "inside 'with accelerator.gathered(model):', or set requires_grad=False on what is not "
            "trained"
        )

    def check_dtypes(self, given: Sequence[TensorSpec], precision: Precision) -> None:
        """Compare the dtypes of the strategy's parameters and masters with the policy.

        ``given`` are the model's parameters before ``prepare``.

        Raises:
            ConfigError: names the first parameter that forward reads, or an optimizer updates, in
                another dtype.
        """
        specs = {clean_name(spec.name): spec for spec in given}
        for name, parameter in named_parameters(self.model).items():
            if name in specs:
                expected = precision.forward_dtype(specs[name].dtype, specs[name].shape)
                self._check_dtype("param", name, expected, parameter.dtype)
        names = self.held_names()
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            for parameter in group["params"]:
                spec = specs.get(names.get(id(parameter), ""))
                if spec is not None:
                    expected = precision.master_dtype(spec.dtype, spec.shape)
                    self._check_dtype("master", spec.name, expected, parameter.dtype)

    def _check_dtype(self, key: str, name: str, expected: torch.dtype, found: torch.dtype) -> None:
        if found is not expected:
            raise ConfigError(
                f"{type(self.strategy).__name__}: expected {dtype_word(expected)} for {name}, as "
                f"dtypes.{key} says, found {dtype_word(found)}; the strategy does not honour it: "
                f"take another strategy, or leave dtypes.{key} out"
            )

    def check_converted(self, error: RuntimeError | None = None) -> None:
        """Refuse parameters of another dtype than ``prepare`` left, which an error follows from."""
        if error is None and not self.applied:
            return
        self.applied = False
        precision = self.strategy.run.precision
        specs = {clean_name(spec.name): spec for spec in self.given.parameters}
        for name, parameter in named_parameters(self.model).items():
            if name in specs:
                expected = precision.forward_dtype(specs[name].dtype, specs[name].shape)
                if parameter.dtype is not expected:
                    raise UsageError(
                        f"expected {name!r} in {dtype_word(expected)}, as prepare() left it, found "
                        f"{dtype_word(parameter.dtype)}, as after model.half() or model.to(dtype); "
                        "convert the model before prepare(), or choose precision: bf16"
                    ) from error

    def _lies_on(self, device: torch.device) -> bool:
        """Return whether all tensors lie on a device, or, of other ranks, nowhere."""
        home = self.strategy.run.world.device
        held = {each.device for each in (*self.model.parameters(), *self.model.buffers())}
        same = device.type == home.type and device.index in (None, home.index)
        return same and held <= {home, torch.device("meta")}

    def held_names(self) -> dict[int, str]:
        """Return parameter names by identity, those of the optimizers' fragments included."""
        return {**self.names, **self.strategy.state.names()}

    def subset(self, given: Iterable[Tensor]) -> list[nn.Parameter] | None:
        """Return the parameters among those given; None when nothing trainable is missing."""
        wanted = {id(parameter) for parameter in given}
        with torch._C.DisableTorchFunctionSubclass():  # a guarded parameter answers slowly
            trainable = [each for each in self.parameters if each.requires_grad]
        chosen = [parameter for parameter in trainable if id(parameter) in wanted]
        if len(chosen) == len(trainable):
            return None
        if wanted - self.names.keys():  # an optimizer's groups may hold something else
            held = self.strategy.state.names()
            names = {name for key, name in held.items() if key in wanted}
            chosen += [each for each in trainable if self.names.get(id(each)) in names]
        return chosen

    def forget_gradients(self) -> None:
        """Drop the gradients at hand, with their loss scale."""
        self.used = True  # or a window that no step has used would be spared
        self.model.zero_grad()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.scale, self.unscaled, self.overflow = None, False, set()

    def scalars(self) -> dict[int, dict[str, dict[str, Any]]]:
        """Return the optimizers' state that is no tensor, by optimizer and parameter name."""
        result: dict[int, dict[str, dict[str, Any]]] = {}
        names = self.held_names()
        for i, optimizer in enumerate(self.optimizers):
            result[i] = {
                names[id(parameter)]: plain
                for parameter, state in optimizer.state.items()
                if id(parameter) in names
                and (plain := {k: v for k, v in state.items() if not isinstance(v, Tensor)})
            }
        return result

    def param_groups(self) -> list[list[dict[str, Any]]]:
        """Return the hyperparameters of each group of each optimizer."""
        return [
            [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            for optimizer in self.optimizers
        ]

    def check_param_groups(self, saved: list[list[dict[str, Any]]]) -> None:
        """Refuse hyperparameters of other optimizers, or of another number of groups."""
        check_count("optimizers of a model", len(self.optimizers), len(saved))
        for optimizer, groups in zip(self.optimizers, saved, strict=True):
            check_count("parameter groups", len(optimizer.param_groups), len(groups))

    def load_param_groups(self, saved: list[list[dict[str, Any]]]) -> None:
        """Put hyperparameters of ``param_groups`` back into the groups of the optimizers."""
        self.check_param_groups(saved)
        for optimizer, groups in zip(self.optimizers, saved, strict=True):
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                for key, value in values.items():
                    if key in KERNELS:
                        continue
                    if isinstance(group.get(key), Tensor) and isinstance(value, Tensor):
                        group[key].copy_(value)
                    else:
                        group[key] = value

    def aliases(self) -> dict[str, str]:
        """Return the further names of tied parameters and buffers -> the first name of each."""
        names = all_names(self.model)
        return {name: first for first, each in names.items() for name in each if name != first}

    def converted(self, reader: ModelReader, world: World) -> str:
        """Return which weights a load had to convert, "" when none. Collective.

        The saved dtypes are compared with the dtypes of the strategy's shards, or of their masters.
        """
        if reader.partial:
            return ""
        mine: dict[str, str] = {}
        for shard in self.strategy.state.shards():
            if not shard.state and shard.tensor.dtype != reader.dtype(shard.name):
                saved = reader.dtype(shard.name)
                mine[shard.name] = f"from {saved} to {shard.tensor.dtype}"
        told = gather(world, mine, dict[str, str])
        kinds = Counter({name: kind for each in told for name, kind in each.items()}.values())
        return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))

    def offer_methods(self, window: GradientState) -> None:
        """Give the model methods: ``no_sync`` of torch's wrapper, and some of its own anew."""
        self.model.__dict__[_READ_BY_DDP] = _Taken()
        if not hasattr(self.model, "no_sync"):
            self.model.__dict__["no_sync"] = UninheritedContext(self.strategy.accumulating)
        given = self.model.zero_grad

        def clear(set_to_none: bool) -> None:
            self.used = False
            given(set_to_none)

        def zero_grad(set_to_none: bool = True) -> None:
            window.clear(partial(clear, set_to_none), used=self.used)

        move = self.model.to
        apply: Callable[..., nn.Module] = self.model._apply

        def _apply(*args: Any, **kwargs: Any) -> nn.Module:
            self.applied = True
            return apply(*args, **kwargs)

        def to(*args: Any, **kwargs: Any) -> nn.Module:
            device, *others = torch._C._nn._parse_to(*args, **kwargs)
            if device is not None and others[0] is others[2] is None and self._lies_on(device):
                return self.model  # strategies that divide have no values to move
            moved: nn.Module = move(*args, **kwargs)
            return moved

        for method in (_apply, to, zero_grad):
            self.methods.append(UninheritedMethod(self.model, method.__name__, method))
        self.methods += saving_methods(uncompiled(self.model), self.strategy.state)
        for method in self.methods:
            method.put()

    def close(self) -> None:
        """Make the model an ordinary one again."""
        restore_forward(self.model)
        for name in ("no_sync", _READ_BY_DDP):
            self.model.__dict__.pop(name, None)
        for method in self.methods:
            method.take_off()
        for note in self.notes:
            note.remove()
        self.strategy.close()
        restore_loss(self.model)
        restore_products(self.model)


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield what the groups of an optimizer hold."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


_READ_BY_DDP = "_ddp_params_and_buffers_to_ignore"
"""What torch's DistributedDataParallel reads of a module before it touches any value."""


class _Taken:
    """Marks a prepared model, and refuses torch's wrapper; copies have an empty list."""

    def __iter__(self) -> Iterator[str]:
        raise UsageError(
            "expected no DistributedDataParallel around a prepared model: backward averages its "
            "gradients already; leave the wrapper out"
        )

    def __reduce__(self) -> tuple[type[list[str]], tuple[()]]:
        return list, ()


def refuse_taken(model: nn.Module) -> None:
    """Refuse a model whose gradients somebody else averages, in it or around it.

    Raises:
        UsageError: torch's wrapper, or a model that is prepared.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise UsageError(
                f"expected a model without torch's wrapper, found DistributedDataParallel around "
                f"{type(module.module).__name__}: gradients would be averaged twice; leave the "
                "wrapper out, and choose strategy: ddp"
            )
        if isinstance(module.__dict__.get(_READ_BY_DDP), _Taken):
            raise UsageError(
                f"expected a model that is not prepared yet, found {type(module).__name__}"
                f"{name and f' at {name!r}'}, which is, by another Accelerator or as a model of "
                "its own: gradients would be averaged twice; go on with what prepared it, call "
                "free_memory() of that Accelerator first, or build the model anew"
            )


# --- who watches a run: told of each event of a step, and asked before anything is made ---


class Observer:
    """Watches nothing and changes nothing: the run is an ordinary one.

    All ranks call the methods at the same places of a script, so that these may communicate.
    """

    def configured(self, config: Resolved) -> Resolved:
        """Return the configuration to run with."""
        return config

    def attach(self, state: "RunState") -> None:
        """Take the state of the run, before any model is prepared."""

    def choice(self, choice: StrategyChoice | None) -> StrategyChoice | None:
        """Return a model's strategy, given the choice of the script."""
        return choice

    def before_prepare(self, model: nn.Module) -> None:
        """See a model as the script made it."""

    def after_prepare(self, entry: PreparedModel) -> None:
        """See a prepared model."""

    def fetching(self, loader: DataLoader[Any]) -> None:
        """See that the script asks a prepared loader for a batch."""

    def exhausted(self) -> None:
        """See that the loader which was asked had no more batch."""

    def delivered(self, batch: Any) -> Any:
        """Return a batch of a prepared loader as the script gets it."""
        return batch

    def handed_over(self, args: Any, kwargs: Mapping[str, Any], targets: Any) -> None:
        """See a batch that goes to the strategy, without a call of the model."""

    def before_forward(self, entry: PreparedModel) -> None:
        """See that a prepared model is about to compute, with gradients."""

    def before_backward(self) -> None:
        """See that a backward is about to run."""

    def after_backward(self, loss: Tensor, weight: float | Tensor | None) -> None:
        """See the loss of one backward, with its value on every rank."""

    def gradients(self, entry: PreparedModel) -> None:
        """See a model's gradients, averaged and unscaled, before they are clipped or used."""

    def before_update(self) -> None:
        """See that gradients are about to be unscaled, clipped or used."""

    def clipped(self, norm: Tensor) -> None:
        """See the global norm of the gradients before they were clipped, 0-d, on every rank."""

    def after_step(self) -> None:
        """See that an optimizer has stepped, or left out a step."""

    def out_of_memory(self, error: Exception) -> None:
        """See an allocator's error that leaves a step, on this rank alone: do not communicate."""


class Observers(Observer):
    """Several observers, told one after the other of the events that they do something with.

    Args:
        observers: the first is told first; batches and choices pass through all of them.
    """

    def __init__(self, *observers: Observer) -> None:
        for event, nothing in _EVENTS.items():
            act = [getattr(o, event) for o in observers if getattr(type(o), event) is not nothing]
            setattr(self, event, partial(_passed if event in _PASSING else _told, act))


_EVENTS = {event: function for event, function in vars(Observer).items() if event[0] != "_"}
_PASSING = ("configured", "choice", "delivered")
"""Events whose observers may change what they are about."""


def _told(act: Sequence[Callable[..., None]], *arguments: Any) -> None:
    for each in act:
        each(*arguments)


def _passed(act: Sequence[Callable[[Any], Any]], passing: Any) -> Any:
    for each in act:
        passing = each(passing)
    return passing


# --- the state of a run ---


@dataclass(eq=False, repr=False, kw_only=True)
class RunState:
    """What one Accelerator knows, and has prepared, each kind in the order of ``prepare``.

    Attributes:
        config: the resolved configuration.
        world: this process among all processes.
        window: the accumulation window.
        handlers: the option objects of the script.
        project: where checkpoints go, from which the run may go on, and the file of a choice.
        observer: is told of each event.
        memory: folder for checkpoints in this host's memory; None without them.
        resumption: the continuation of the run after an end.
        run: all facts that a strategy may know, for models without a strategy of their own.
        scaler: the loss scale of fp16.
        plan: the choice of the run's strategy at prepare; None where it was not left open.
        step: micro-batch of the window, from 1; kept in checkpoints.
        models: the models.
        optimizers: the optimizers as the script holds them.
        schedulers: the learning-rate schedulers as the script holds them.
        loaders: the loaders as the script holds them.
        bound: pairs of an optimizer as given and the strategy's optimizer made of it.
        groups: those of each optimizer as the script made them.
        trains: the loader that was prepared in one call with an optimizer, if any.
        last_run: the model whose forward ran last with gradients; None before the first.
        last_call: arguments of that forward, by position and by name, after a backward without
            values; None after a step.
    """

    config: Resolved
    world: World
    window: GradientState
    handlers: Handlers
    project: ProjectConfiguration
    observer: Observer = field(default_factory=Observer)
    memory: Path | None = field(init=False)
    resumption: Resumption = field(init=False)
    run: Run = field(init=False)
    scaler: LossScaler = field(init=False)
    plan: StrategyPick | None = None
    step: int = 0
    models: list[PreparedModel] = field(default_factory=list)
    optimizers: list[PreparedOptimizer] = field(default_factory=list)
    schedulers: list[PreparedScheduler] = field(default_factory=list)
    loaders: list[PreparedLoader] = field(default_factory=list)
    bound: list[tuple[Optimizer, Optimizer]] = field(default_factory=list)
    groups: dict[Optimizer, GivenGroups] = field(default_factory=dict)
    trains: PreparedLoader | None = None
    last_run: PreparedModel | None = None
    last_call: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None
    _meshes: dict[tuple[tuple[str, int], ...], Mesh] = field(default_factory=dict)
    _told_of_links: bool = False

    def __post_init__(self) -> None:
        """Lay the ranks out as the configuration says. Collective."""
        settings, split = self.config.run, self.config.run.data.split_batches
        precision = Precision.configured(settings)
        links = LinkMethods(undoable=settings.skips_steps)
        if settings.links.far != FarConfig():
            links = LinkMethods.configured(settings.links, undoable=links.undoable)
        if settings.memory_snapshot and self.world.device.type == "cuda":
            torch.cuda.memory._record_memory_history(max_entries=RECORDED)
        self.memory = _memory_of(self.config)
        self.resumption = Resumption(
            settings.launch.resume,
            self.project.checkpoints,
            divides=split,
            world=self.world,
            memory=self.memory,
        )
        mesh = self._mesh(self.config)
        steps = self.resumption.accumulation(self.window.num_steps, mesh["dp"].size)
        self.window.num_steps = steps
        self.run = Run(
            world=self.world,
            mesh=mesh,
            precision=precision,
            accumulation=steps,
            traffic=Traffic(),
            examples=ExampleBatches(self.world, split=split),
            links=links,
        )
        scaling = self.handlers.scaler
        self.scaler = LossScaler(scaling, enabled=scaling.enabled and precision.needs_scaling)

    @property
    def steps(self) -> int:
        """How many steps the run has taken, by its optimizers' count."""
        return max((optimizer.steps for optimizer in self.optimizers), default=0)

    # --- the strategies of its models ---

    def run_of(self, choice: StrategyChoice | None) -> tuple[Resolved, Run]:
        """Return the configuration and the run of a model's strategy; None takes the run's."""
        if choice is None:
            return self.config, self.run
        resolved = resolve_strategy(choice, self.config)
        return resolved, self._lay_out(resolved)

    def choose(self, model: nn.Module, choice: StrategyChoice | None) -> StrategyChoice | None:
        """Let the strategy of a model choose another one in its place. Collective.

        The choice for a model of the run's own strategy becomes the run's, and is written into its
        folder.

        Returns:
            The strategy of the model; None for that of the run.

        Raises:
            ConfigError: nothing can be chosen.
        """
        resolved, run = self.run_of(choice)
        kind, options = find_strategy(resolved.strategy, resolved.strategy_config)
        free = choice is None and not any(key.startswith(RECOMPUTE) for key in resolved.origins)
        modes: Sequence[str] = RECOMPUTE_MODES if free else (resolved.run.recompute.mode,)
        if free and resolved.run.compile != "none":
            modes = [mode for mode in modes if mode != "selective"]
        pick = kind.planning().choose(options, model, run, modes)
        if pick is None:
            return choice
        logger.announce(f"strategy {resolved.strategy}: {pick.reason}")
        if choice is not None:
            return dict(pick.section)
        self.config = _with_choice(self.config, pick)
        self.run = self._lay_out(self.config)
        self.plan = pick
        if self.project.project_dir is not None and self.world.rank == 0:
            _write_choice(Path(self.project.project_dir), pick)
        return None

    def strategy(
        self, choice: StrategyChoice | None, tensors: Sequence[TensorSpec]
    ) -> Strategy[Any]:
        """Return the strategy of one more model; None takes the default. Collective.

        Args:
            choice: of the model.
            tensors: its parameters, by which methods for slow links are chosen where the
                configuration leaves it to drivetrain.

        Raises:
            ConfigError: its options do not fit together, or not to the run.
        """
        resolved, run = self.run_of(choice)
        kind, options = find_strategy(resolved.strategy, resolved.strategy_config)
        kind.check_options(options, run.precision)
        kind.check_links(options, run.links, run.precision)
        sender = Sender(kind, options, run.precision)
        links, lines = choose_links(run.links, sender, tensors, run.world)
        for line in lines:
            logger.announce(line)
        return kind(options, replace(run, links=links))

    def announce_links(self) -> None:
        """Say once which approximations cross between hosts, and how honest each method is."""
        links, told = self.run.links, self._told_of_links
        self._told_of_links = True
        spans = self.world.spans_hosts
        open_still = links.auto is not None and not spans  # over hosts, the choice has its own line
        if (links.active or open_still) and not told:
            kind, options = find_strategy(self.config.strategy, self.config.strategy_config)
            crossed = spans or (links.active and kind.planning().crosses_links(options, self.world))
            alone = "" if crossed else "; all ranks are on one host, so that nothing is approximate"
            logger.announce(f"{links.describe(kind.channels(options))}{alone}")

    def __repr__(self) -> str:
        world = self.world
        return (
            f"strategy={self.config.strategy!r}, {self.run.mesh!r}, rank {world.rank} of "
            f"{world.size} on {world.device}, precision {self.run.precision}"
        )

    def _mesh(self, resolved: Resolved) -> Mesh:
        """Lay the world out as the strategy asks; equal layouts share their process groups."""
        kind, options = find_strategy(resolved.strategy, resolved.strategy_config)
        sizes = kind.axes(options, self.world.size)
        key = tuple(sizes.items())
        if key not in self._meshes:
            self._meshes[key] = Mesh.build(sizes, self.world)
        return self._meshes[key]

    def _lay_out(self, resolved: Resolved) -> Run:
        mesh, steps = self._mesh(resolved), self.window.num_steps
        return replace(self.run, mesh=mesh, accumulation=steps)

    # --- what it has prepared ---

    def samples_per_step(self, accumulation: int) -> int:
        """Return the samples of a step over all ranks; 0 where batches have no one size."""
        try:
            return self.trains.total_batch_size * accumulation if self.trains is not None else 0
        except UsageError:
            return 0

    def has(self, model: nn.Module) -> bool:
        """Whether a model was prepared here."""
        return any(entry.model is model for entry in self.models)

    def model(self, model: nn.Module) -> PreparedModel:
        """Return the entry of a model, as ``prepare`` returned it or as the script made it.

        Raises:
            UsageError: the model was not prepared here.
        """
        for entry in self.models:
            if entry.model is model:
                return entry
        raise UsageError(
            f"expected a model that this Accelerator prepared, found {type(model).__name__}; "
            "pass it to prepare() first and use what it returns"
        )

    def chosen(self, models: Sequence[nn.Module]) -> list[PreparedModel]:
        """Return the entries of models, or of modules inside them; of all models without any."""
        return [self._around(model) for model in models] if models else list(self.models)

    def _around(self, module: nn.Module) -> PreparedModel:
        """Return the entry of a model, or of the model that a module is part of."""
        inside = [entry for entry in self.models if any(m is module for m in entry.model.modules())]
        return inside[0] if inside else self.model(module)

    def trained_by(self, optimizer: Optimizer) -> list[PreparedModel]:
        """Return the models of an optimizer that a strategy handed back."""
        return [entry for entry in self.models if any(o is optimizer for o in entry.optimizers)]

    def whole(self, optimizer: Optimizer) -> WholeOptimizer | None:
        """Return the whole of an optimizer that a strategy divides; None: each rank has all."""
        entries = self.trained_by(optimizer)
        if not any(entry.strategy.state.divided for entry in entries):
            return None
        holders = [
            Holder(each.strategy, each.optimizers.index(optimizer), each.names, each.known)
            for each in entries
        ]
        return WholeOptimizer(optimizer, self.groups[optimizer], holders)

    def note_groups(self, optimizers: Iterable[Optimizer]) -> None:
        """Remember the groups of optimizers before a strategy may divide them."""
        for optimizer in optimizers:
            if optimizer not in self.groups:
                self.groups[optimizer] = GivenGroups(optimizer)
                refuse_parts(optimizer, self.whole)
                optimizer.register_load_state_dict_post_hook(lambda *_: self.run.traffic.load())

    def owners_of(self, parameters: Sequence[Tensor]) -> list[PreparedModel]:
        """Return the models of these parameters, or of what optimizers hold in their place.

        All models, where other ranks may have parameters of other models among theirs: in groups of
        optimizers, and of a part of a model, a rank may have none.

        Raises:
            UsageError: a parameter belongs to no prepared model.
        """
        wanted = {id(parameter) for parameter in parameters}
        owners = [entry for entry in self.models if wanted & entry.names.keys()]
        others = wanted.difference(*(entry.names.keys() for entry in owners))
        foreign = others and others.difference(
            *(entry.strategy.state.names() for entry in self.models)
        )
        if foreign:
            raise UsageError(
                f"expected parameters of prepared models, found {len(foreign)} of {len(wanted)} "
                "that belong to none; pass model.parameters() of what prepare() returned"
            )
        parts = any(
            entry.strategy.planning().stages(entry.strategy.config) for entry in self.models
        )
        return list(self.models) if others or parts or not wanted else owners

    def running(self) -> PreparedModel:
        """Return the model whose forward ran last: backward is a matter of its strategy.

        Raises:
            UsageError: no model was prepared.
        """
        if not self.models:
            raise UsageError(
                "expected a prepared model before backward(), found none; call "
                "model = accelerator.prepare(model)"
            )
        return self.last_run or self.models[-1]

    def reached(self, loss: Tensor) -> set[PreparedModel]:
        """Return the models to whose parameters a backward brings gradients."""
        owners = {id(each): entry for entry in self.models for each in entry.parameters}
        nodes: list[Any] = [loss.grad_fn]
        seen, found = set(), set()
        while nodes:
            if (node := nodes.pop()) is None or node in seen:
                continue
            seen.add(node)
            found.add(owners.get(id(getattr(node, "variable", None))))
            nodes += [each for each, _ in node.next_functions]
        return {entry for entry in found if entry is not None}

    @contextmanager
    def in_backward(self, loss: Tensor, *, counts: bool, averages: bool) -> Iterator[None]:
        """Context of a backward, in which hooks of the script wait for averaged gradients.

        Args:
            loss: where it begins.
            counts: False leaves all gradients what they are: the loss has the weight 0.
            averages: whether the backward ends with averaged gradients.
        """
        with ExitStack() as stack:
            for entry in self.models:
                # In one process hooks run as ever.
                hooked = entry.hooks.found() if self.world.size > 1 else []
                if hooked and (entry is self.running() or entry in self.reached(loss)):
                    averaged = partial(entry.averages, averages)
                    stack.enter_context(entry.hooks.aside(hooked, averaged))
                if not counts:
                    stack.enter_context(_uncounted(entry))
            yield

    def forget(self) -> None:
        """Make all models ordinary ones again, and let go of everything."""
        for entry in self.models:
            entry.close()
        for kept in (self.models, self.optimizers, self.schedulers, self.loaders, self.bound):
            kept.clear()
        self.groups.clear()
        self.last_run = self.last_call = None
        self.trains = None


@contextmanager
def _uncounted(entry: PreparedModel) -> Iterator[None]:
    """Context around the backward of a micro-batch that counts nothing: it adds zeros.

    Its loss, and whatever its graph computes, may be no numbers.
    """
    pipeline = entry.strategy.pipeline
    trained = [p for p in named_parameters(entry.model).values() if p.requires_grad]
    with ExitStack() as stack:
        if pipeline is None:
            for each in trained:
                hook = each.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
                stack.callback(hook.remove)
        else:
            pipeline.counts = False
            stack.callback(setattr, pipeline, "counts", True)
        yield


def check_count(subject: str, expected: int, found: int) -> None:
    """Refuse a checkpoint that holds another number of something."""
    if expected != found:
        raise CheckpointError(
            f"expected a checkpoint with {expected} {subject}, found {found}; prepare and register "
            "the same objects in the same order as the run that saved it"
        )


_places = itertools.count()
"""Numbers of this process's Accelerators with checkpoints in memory: by their order each finds its
own again after a restart."""


def _memory_of(config: Resolved) -> Path | None:
    """Return an Accelerator's own place in the launcher's folder in memory, made for it.

    None where the run has no checkpoints in memory.

    Raises:
        ConfigError: no launcher keeps one.
    """
    if config.run.checkpoint.local == "none":
        return None
    if not (folder := memory_folder()):
        raise ConfigError(
            "checkpoint.local: memory needs a launcher that keeps the memory while ranks end and "
            "start again, found none; start the script with 'drivetrain launch --set "
            "checkpoint.local=memory', or leave it out of the script's own configuration"
        )
    place = Path(folder) / str(next(_places))
    place.mkdir(mode=0o700, parents=True, exist_ok=True)  # the ranks of a host share it
    return place


def _with_choice(base: Resolved, pick: StrategyPick) -> Resolved:
    """Return the configuration with a chosen strategy and its settings."""
    values = {key: value for key, value in base.to_dict().items() if key != STRATEGY}
    origin = ValueOrigin("file", f"strategy: {base.strategy}")
    layer = Layer(values, dict.fromkeys(values, origin))
    chosen = Layer({STRATEGY: dict(pick.section), **pick.settings}, {STRATEGY: origin})
    resolved = resolve(layer, chosen)
    return replace(resolved, origins={**base.origins, **resolved.origins})


def _write_choice(folder: Path, pick: StrategyPick) -> None:
    """Write the choice beside the run, for users who pin a choice."""
    text = dump_yaml({STRATEGY: dict(pick.section), **pick.settings})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CHOICE_FILE).write_text(f"# {pick.reason}\n{text}", encoding="utf-8")
