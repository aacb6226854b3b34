"""The settings of a run, alike on all ranks, and option objects under Accelerate's names.

Option objects of the Accelerator's constructor, under the names that Accelerate's users know.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import timedelta
from enum import StrEnum
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from drivetrain.collectives.facts import differing
from drivetrain.compression.communicator import agreed_islands
from drivetrain.config import Layer, Resolved, ValueOrigin, read_file, resolve
from drivetrain.errors import ConfigError, RankMismatchError, UsageError
from drivetrain.log import get_logger
from drivetrain.runtime.gradient_state import GradientState
from drivetrain.runtime.precision import ScaleRule
from drivetrain.runtime.world import World, launched_config, reader_mark

# --- option objects of the Accelerator's constructor ---


@dataclass(slots=True)
class DataLoaderConfiguration:
    """How loaders are divided over the ranks; None leaves the choice to the configuration.

    Attributes:
        split_batches: divide the loader's batch over the ranks instead of giving one to each.
        dispatch_batches: rank 0 alone reads and sends.
        even_batches: repeat the first samples so that every rank has as many full batches.
        use_seedable_sampler: derive the shuffle order from the seed and the epoch.
        data_seed: seed of the shuffle order.
        non_blocking: copy batches to the device asynchronously.
        use_stateful_dataloader: without effect: every loader's position is in every checkpoint.
    """

    split_batches: bool | None = None
    dispatch_batches: bool | None = None
    even_batches: bool | None = None
    use_seedable_sampler: bool | None = None
    data_seed: int | None = None
    non_blocking: bool | None = None
    use_stateful_dataloader: bool = True


@dataclass(slots=True)
class GradientAccumulationPlugin:
    """How micro-batches make up an optimizer step.

    Attributes:
        num_steps: micro-batches per optimizer step; None leaves the number to the configuration.
        sync_with_dataloader: end the window at the end of the loader, however short it is.
        sync_each_batch: synchronise gradients on every micro-batch: more traffic, less memory for
            strategies that shard gradients.
        adjust_scheduler: without effect: a scheduler steps once per optimizer step.
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def window(self, num_steps: int) -> GradientState:
        """Return the accumulation window of a run with so many micro-batches per step."""
        return GradientState(
            num_steps,
            sync_with_dataloader=self.sync_with_dataloader,
            sync_each_batch=self.sync_each_batch,
        )


@dataclass(slots=True)
class ProjectConfiguration:
    """Where checkpoints and logs go.

    Attributes:
        project_dir: root folder of the run.
        logging_dir: folder of the trackers; None means project_dir.
        automatic_checkpoint_naming: ``save_state()`` without a name writes
            ``project_dir/checkpoints/checkpoint_N``.
        total_limit: how many automatically named checkpoints are kept.
        iteration: number of the next automatic checkpoint.
        save_on_each_node: without effect: every rank writes its own part, into a directory that all
            hosts share.
    """

    project_dir: str | Path | None = None
    logging_dir: str | Path | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    @property
    def checkpoints(self) -> Path | None:
        """Folder of the automatically named checkpoints; None without a project_dir."""
        return None if self.project_dir is None else Path(self.project_dir) / "checkpoints"

    def set_directories(self, project_dir: str | Path | None = None) -> None:
        """Set project_dir, and logging_dir when there is none."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir


@dataclass(slots=True)
class InitProcessGroupKwargs:
    """How the ranks are joined.

    Attributes:
        backend: communication library; None takes the device's own.
        init_method: None or ``env://``, which mean the same.
        timeout: how long a collective may wait; None leaves the choice to the configuration.
    """

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        if self.init_method not in (None, "env://"):
            raise UsageError(
                f"expected init_method None or 'env://', found {self.init_method!r}; initialise "
                "torch.distributed yourself before the Accelerator and it will be used as it is"
            )


@dataclass(kw_only=True, slots=True)
class GradScalerKwargs(ScaleRule):
    """The dynamic loss scale of fp16, with torch's names, and those of ``ScaleRule``.

    Attributes:
        enabled: False computes in fp16 without a scale.
    """

    enabled: bool = True


@dataclass(slots=True)
class AutocastKwargs:
    """How forward computes.

    Attributes:
        enabled: False computes in the parameters' dtype.
        cache_enabled: keep the casts of parameters for the length of the context.
    """

    enabled: bool = True
    cache_enabled: bool = True


@dataclass(slots=True)
class AORecipeKwargs:
    """Products in fp8 as a script says, in the place of ``dtypes.fp8``.

    Attributes:
        config: a ``Float8LinearConfig`` of torchao; None takes the recipe of the configuration.
        module_filter_func: called with a layer and its name; True computes in fp8. None takes the
            layers of the blocks.
    """

    config: Any = None
    module_filter_func: Callable[[nn.Module, str], bool] | None = None

    def __post_init__(self) -> None:
        if getattr(self.config, "enable_fsdp_float8_all_gather", False):
            raise UsageError(
                "expected a config without enable_fsdp_float8_all_gather, found it on; here "
                "dtypes.fp8: tensorwise_gathered says so: take it, and leave the other False"
            )


@dataclass(slots=True)
class ProfileKwargs:
    """Arguments of ``torch.profiler.profile``.

    Attributes:
        activities: names such as ``cpu`` and ``cuda``; None means those of the machine.
        schedule_option: arguments of ``torch.profiler.schedule``; None profiles everything.
        on_trace_ready: called with the profiler when a trace is ready.
        record_shapes: record the shapes of inputs.
        profile_memory: record allocations.
        with_stack: record source lines.
        with_flops: estimate floating point operations.
        with_modules: record the module hierarchy.
        output_trace_dir: folder for ``profile_RANK.json`` in Chrome's trace format, for the trace
            of all ranks, ``trace.json.gz``, and for the largest costs; on a disk that all hosts
            share.
    """

    activities: list[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[[Any], Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | Path | None = None


class DDPCommunicationHookType(StrEnum):
    """How gradients are compressed on the wire."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


COMMUNICATION_HOOKS = {
    "no": None,
    "fp16": "fp16",
    "bf16": "bf16",
    "power_sgd": "powersgd",
    "batched_power_sgd": "powersgd",
}
"""Torch's communication hooks, and ours."""

COMMUNICATION_WRAPPERS = {"no": None, "fp16": "fp16", "bf16": "bf16"}


@dataclass(slots=True)
class DistributedDataParallelKwargs:
    """Options of torch's DistributedDataParallel, translated into options of our strategy.

    ``find_unused_parameters``, ``static_graph``, ``gradient_as_bucket_view``,
    ``check_reduction`` and ``dim`` need no counterpart: parameters without a gradient are always
    handled, and gradients always are views of buckets.

    Attributes:
        bucket_cap_mb: size of a gradient bucket in MiB.
        broadcast_buffers: broadcast buffers from rank 0 after a backward.
        comm_hook: ``no``, ``fp16``, ``bf16`` or ``power_sgd``; ``batched_power_sgd`` is
            ``power_sgd``, which compresses each matrix by itself.
        comm_wrapper: ``fp16`` or ``bf16`` sends the factors of ``power_sgd`` in this dtype; with
            another hook it has no effect.
        comm_state_option: ``matrix_approximation_rank`` and ``start_powerSGD_iter`` of PowerSGD.
    """

    dim: int = 0
    broadcast_buffers: bool | None = None
    bucket_cap_mb: float | None = None
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = True
    static_graph: bool = False
    comm_hook: str = "no"
    comm_wrapper: str = "no"
    comm_state_option: Mapping[str, Any] | None = None

    def strategy_options(self) -> dict[str, Any]:
        """Return the options that differ from the strategy's defaults, by the strategy's names.

        Raises:
            UsageError: an unknown communication hook or wrapper.
        """
        hook = _choice("comm_hook", self.comm_hook, COMMUNICATION_HOOKS)
        wrapper = _choice("comm_wrapper", self.comm_wrapper, COMMUNICATION_WRAPPERS)
        state = self.comm_state_option or {}
        buffers = {True: "broadcast", False: "none", None: None}[self.broadcast_buffers]
        options = {
            "bucket_mib": self.bucket_cap_mb,
            "buffers": buffers,
            "hook": hook,
            "powersgd_dtype": wrapper if hook == "powersgd" else None,
            "powersgd_rank": state.get("matrix_approximation_rank"),
            "powersgd_start_step": state.get("start_powerSGD_iter"),
        }
        return {key: value for key, value in options.items() if value is not None}

    def options_of(self, config: Any) -> tuple[dict[str, Any], list[str]]:
        """Return the options that a strategy's configuration has, too, and the names of the rest.

        The rest means nothing under this strategy; a script may be launched with any.
        """
        known = {field.name for field in fields(config)}
        options = self.strategy_options()
        kept = {key: value for key, value in options.items() if key in known}
        return kept, sorted(options.keys() - known)


def _choice(name: str, value: Any, choices: Mapping[str, str | None]) -> str | None:
    word = getattr(value, "value", value)
    if word not in choices:
        raise UsageError(f"expected a {name} of {', '.join(choices)}, found {word!r}")
    return choices[word]


@dataclass(slots=True)
class Handlers:
    """The option objects of ``kwargs_handlers``, one of each class."""

    process_group: InitProcessGroupKwargs
    scaler: GradScalerKwargs
    autocast: AutocastKwargs
    fp8: AORecipeKwargs
    profile: ProfileKwargs
    ddp: DistributedDataParallelKwargs | None

    @classmethod
    def of(cls, handlers: list[Any] | None) -> "Handlers":
        """Sort the handlers by class; two of one class or an unknown class raise a UsageError."""
        usual: tuple[type[Any], ...] = (
            InitProcessGroupKwargs,
            GradScalerKwargs,
            AutocastKwargs,
            AORecipeKwargs,
            ProfileKwargs,
        )
        known = (*usual, DistributedDataParallelKwargs)
        found: dict[type, Any] = {}
        for handler in handlers or []:
            if type(handler) not in known:
                names = ", ".join(kind.__name__ for kind in known)
                raise UsageError(f"expected kwargs_handlers of {names}, found {handler!r}")
            if type(handler) in found:
                raise UsageError(f"expected one {type(handler).__name__}, found two; merge them")
            found[type(handler)] = handler
        made = (found.get(kind) or kind() for kind in usual)
        return cls(*[*made, found.get(DistributedDataParallelKwargs)])


Given: TypeAlias = tuple[str, str, Any]
"""A value of a script: key of the configuration, name in the script, value; None chooses none."""


def given_values(
    steps: int | None,
    split_batches: bool | None,
    dataloader: DataLoaderConfiguration | None,
    plugin: GradientAccumulationPlugin | None,
    timeout: timedelta | None,
) -> list[Given]:
    """Return the values of a script that stand in option objects, or beside them.

    Raises:
        UsageError: two arguments that say the same thing.
    """
    if plugin is not None and plugin.num_steps is not None:
        if steps not in (None, 1):
            raise UsageError(
                "expected gradient_accumulation_steps or a GradientAccumulationPlugin, found both: "
                f"{steps} and {plugin.num_steps}; give the number once"
            )
        steps = plugin.num_steps
    data = dataloader or DataLoaderConfiguration()
    split = data.split_batches if data.split_batches is not None else split_batches
    names = (
        "dispatch_batches",
        "even_batches",
        "use_seedable_sampler",
        "data_seed",
        "non_blocking",
    )
    return [
        ("accumulation", "gradient_accumulation_steps", steps),
        ("launch.timeout_s", "timeout", timeout.total_seconds() if timeout else None),
        ("data.split_batches", "split_batches", split),
        *((f"data.{name}", name, getattr(data, name)) for name in names),
    ]


def announce_unused(handlers: Handlers, resolved: Resolved) -> None:
    """Say which options of the handlers mean nothing under the run's strategy."""
    _, unused = handlers.ddp.options_of(resolved.strategy_config) if handlers.ddp else ({}, [])
    if unused:
        logger.announce(
            f"DistributedDataParallelKwargs: {', '.join(unused)} means nothing under "
            f"{resolved.strategy} and is left out"
        )


def project_of(
    config: ProjectConfiguration | None, project_dir: str | Path | None
) -> ProjectConfiguration:
    """Return the options of the folder of checkpoints and logs, with one root folder."""
    config = config or ProjectConfiguration()
    if project_dir is not None:
        if config.project_dir not in (None, project_dir):
            raise UsageError(
                f"expected one project_dir, found {project_dir} and {config.project_dir} in "
                "project_config; give it once"
            )
        config.project_dir = project_dir
    return config


def profiler_of(options: ProfileKwargs) -> torch.profiler.profile:
    """Return torch's profiler with these options, not started; it refuses unknown activities."""
    schedule = options.schedule_option
    names = options.activities
    kinds = {
        kind.name.lower(): kind for kind in torch.profiler.ProfilerActivity.__members__.values()
    }
    unknown = [name for name in names or [] if name.lower() not in kinds]
    if unknown:
        raise UsageError(f"expected profiler activities of {sorted(kinds)}, found {unknown}")
    return torch.profiler.profile(
        activities=[kinds[name.lower()] for name in names] if names else None,
        schedule=torch.profiler.schedule(**schedule) if schedule else None,
        on_trace_ready=options.on_trace_ready,
        record_shapes=options.record_shapes,
        profile_memory=options.profile_memory,
        with_stack=options.with_stack,
        with_flops=options.with_flops,
        with_modules=options.with_modules,
        # Collectives run in threads of their own.
        experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True),
    )


# --- the settings of a run ---

logger = get_logger(__name__)

HOSTS_OWN = ("launch.node_rank", "launch.nproc_per_node", "launch.log_dir")
"""Keys of the configuration in which hosts may differ."""

StrategyChoice: TypeAlias = str | Mapping[str, Any]
"""A strategy by name, or its name and options: ``{"name": "ddp", "bucket_mib": 50}``."""


def resolve_run(
    config: str | Path | Mapping[str, Any] | None,
    strategy: StrategyChoice | None,
    given: Iterable[Given],
    handlers: Handlers,
) -> Resolved:
    """Resolve the run: the script's file, then the launch configuration, then values in code.

    Raises:
        ConfigError: a wrong key or value, or a conflict between code and command line.
    """
    layers: list[Layer] = []
    if isinstance(config, Mapping):
        origin = ValueOrigin("file", "Accelerator(config={...})")
        layers = [Layer(config, {str(key): origin for key in config})]
    elif config is not None:
        layers = [read_file(config)]
    path = launched_config()
    if path:
        layers.append(read_file(path))
        with suppress(OSError):  # a container may see the file alone
            reader_mark(Path(path)).touch()
    entries = [
        (key, value, ValueOrigin("code", f"Accelerator({name}={value!r})"))
        for key, name, value in given
        if value is not None
    ]
    if strategy is not None:
        entries += _strategy_entries(strategy, "Accelerator")
    layers.append(Layer.of(entries))
    resolved = resolve(*layers)
    if handlers.ddp is None:
        return resolved
    origin = ValueOrigin("code", "DistributedDataParallelKwargs")
    options, _ = handlers.ddp.options_of(resolved.strategy_config)
    layers.append(Layer.of([(f"strategy.{k}", value, origin) for k, value in options.items()]))
    return resolve(*layers)


def resolve_strategy(choice: StrategyChoice, base: Resolved) -> Resolved:
    """Resolve another strategy for one model of the same run.

    Raises:
        ConfigError: an unknown strategy or option.
    """
    values = {key: value for key, value in base.to_dict().items() if key != "strategy"}
    layer = Layer(values, {key: ValueOrigin("file", "the run") for key in values})
    chosen = Layer.of(_strategy_entries(choice, "prepare"))
    return resolve(layer, chosen)


def joined_world(config: Resolved, backend: str | None) -> World:
    """Return the world of the ranks that run a configuration, with its islands. Collective.

    The digest of the configuration travels with the hosts' names, and the text where it differs.

    Raises:
        PreflightError: the ranks cannot find each other.
        RankMismatchError: the configurations differ, or the sizes of the declared islands.
        ConfigError: the islands cannot be read, or do not fit the ranks.
    """
    rows, launch = config.rows(), config.run.launch
    shown = [f"{key} = {value}" for key, value, _ in rows if not key.startswith(HOSTS_OWN)]
    world = World.discover(
        cpu=launch.device == "cpu",
        backend=backend,
        timeout=timedelta(seconds=launch.timeout_s),
        start_timeout=timedelta(seconds=launch.start_s),
        note=hashlib.sha256("\n".join(shown).encode(errors="surrogateescape")).hexdigest(),
    )
    if len(set(world.notes)) > 1:
        agree(world, "the configuration", shown)
    return agreed_islands(world, config.run.links.hardware)


def agree(world: World, subject: str, lines: Sequence[str]) -> None:
    """Raise on every rank when the ranks' lines differ, before that becomes a hang. Collective.

    Args:
        world: all ranks.
        subject: names the thing in the message, for example "the model GPT".
        lines: the facts that this rank holds, one a line.

    Raises:
        RankMismatchError: names the first line that differs, with both versions.
    """
    texts = differing(lines) if world.size > 1 else []
    if texts:
        raise RankMismatchError(f"ranks disagree on {subject}: {_first_difference(texts)}")


def _strategy_entries(choice: StrategyChoice, caller: str) -> list[tuple[str, Any, ValueOrigin]]:
    options = {"name": choice} if isinstance(choice, str) else dict(choice)
    if not options.get("name"):
        raise ConfigError(
            f"{caller}(strategy={choice!r}): expected a name or a mapping with a name such as "
            "{'name': NAME, 'option': value}"
        )
    origin = ValueOrigin("code", f"{caller}(strategy={choice!r})")
    return [(f"strategy.{key}", value, origin) for key, value in options.items()]


def _first_difference(texts: Sequence[Sequence[str]]) -> str:
    reference = texts[0]
    other = next(rank for rank, text in enumerate(texts) if text != reference)
    for mine, theirs in zip_longest(reference, texts[other], fillvalue="nothing"):
        if mine != theirs:
            return (
                f"rank 0 has '{mine}', rank {other} has '{theirs}'; build the same on every rank "
                "(same code, same seed, same configuration)"
            )
    return "no single line differs"


def check_unchanged(name: str, value: object, current: object, argument: str) -> None:
    """Let a script set an attribute to the value it has.

    Raises:
        UsageError: it is another value, which only an argument of the Accelerator may choose.
    """
    if value != current:
        raise UsageError(
            f"expected {name} to stay {current}, found {value}; pass {argument} to the Accelerator"
        )
