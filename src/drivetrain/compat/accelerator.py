"""The Accelerator with Accelerate's arguments: plugin objects, enums, its schedules.

Accelerate's plugin objects and enums, and the strategy that plugin objects choose.

A plugin object says the same as a section of Accelerate's configuration file, so the importer of
these files translates both.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh

from drivetrain.accelerator import Accelerator
from drivetrain.compat.names import TABLE, Resettable, registered
from drivetrain.config import Layer, ValueOrigin
from drivetrain.config.document import Importer, Translation
from drivetrain.errors import UsageError
from drivetrain.facade.settings import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    StrategyChoice,
)
from drivetrain.log import get_logger
from drivetrain.registry import formats
from drivetrain.runtime.world import variables

# --- accelerate's plugin objects and enums, and the strategy that plugin objects choose ---

PrecisionType = StrEnum("PrecisionType", ["NO", "FP8", "FP16", "BF16"], module=__name__)
"""Precisions of a run."""

RNGType = StrEnum("RNGType", ["TORCH", "CUDA", "XPU", "GENERATOR"], module=__name__)
"""Random number generators that follow rank 0."""


class LoggerType(StrEnum):
    """Names of experiment trackers."""

    ALL = "all"
    AIM = "aim"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    COMETML = "comet_ml"
    MLFLOW = "mlflow"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"


class DynamoBackend(StrEnum):
    """The best-known backends of ``torch.compile``."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    CUDAGRAPHS = "CUDAGRAPHS"


class Plugin:
    """The given settings of a plugin object; all others are None. ``names.toml`` describes each.

    Attributes:
        order: names of positional arguments.
        kind: ``distributed_type`` of a configuration file that says the same.
        section: of the settings in this file.
        prefix: of their names there.
        renamed: names in the file that differ by more than the prefix.
        needless: settings without effect on results.
        refused: settings that change results unless they are off, and the way to have the same
            here.
    """

    order: ClassVar[Sequence[str]] = ()
    kind: ClassVar[str] = ""
    section: ClassVar[str] = ""
    prefix: ClassVar[str] = ""
    renamed: ClassVar[Mapping[str, str]] = {}
    needless: ClassVar[Sequence[str]] = ()
    refused: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls) -> None:
        for name, value in TABLE["plugins"].get(cls.__name__, {}).items():
            setattr(cls, name, value)

    def __init__(self, *args: Any, **settings: Any) -> None:
        if len(args) > len(self.order):
            raise TypeError(
                f"{type(self).__name__} takes {len(self.order)} positional arguments, found "
                f"{len(args)}"
            )
        vars(self).update(zip(self.order, args, strict=False), **settings)

    def __getattr__(self, name: str) -> None:
        # Only called for settings that were not given.
        if name.startswith("_"):
            raise AttributeError(name)

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({settings})"

    def as_file(self) -> dict[str, Any]:
        """Return the values of a configuration file of Accelerate that says the same.

        Raises:
            UsageError: a setting has no counterpart, and changes what a run computes.
        """
        section = {}
        for name, value in self.settings().items():
            idle = value is None or (name in self.refused and not value)
            if idle or name in self.needless:
                continue
            if name in self.refused:
                raise UsageError(
                    f"expected no {name} in {type(self).__name__}, found {value!r}; "
                    f"{self.refused[name]}"
                )
            # An enum is its name there, an object about offload its answer.
            word = value.name if isinstance(value, Enum) else value
            section[self.renamed.get(name, f"{self.prefix}{name}")] = getattr(
                word, "offload_params", word
            )
        kind = {"distributed_type": self.kind} if self.kind else {}
        return {**kind, self.section: section}

    def settings(self) -> dict[str, Any]:
        """Return the settings in words of a file, as far as they are none already."""
        return dict(vars(self))


class DeepSpeedPlugin(Plugin):
    """ZeRO, chosen by stage or by a DeepSpeed configuration."""

    USUAL_STAGE: ClassVar[int] = 2
    """The stage of a plugin that names none."""

    def settings(self) -> dict[str, Any]:
        """Return the settings, with the stage that Accelerate takes."""
        given = dict(vars(self))
        if given.get("hf_ds_config") is None and given.get("zero_stage") is None:
            given["zero_stage"] = self.USUAL_STAGE
        return given

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """The given configuration; scripts look for an optimizer or a scheduler in it."""
        given = vars(self).get("hf_ds_config")
        return given if isinstance(given, dict) else {}

    def is_zero3_init_enabled(self) -> bool:
        """Whether models are divided while they are made: never; see ``building()``."""
        return False

    def zero3_init_context_manager(self, enable: bool = False) -> Any:
        """Return a context without effect: models are divided by ``prepare()``."""
        return nullcontext()


class FullyShardedDataParallelPlugin(Plugin):
    """Parameters divided over ranks."""

    def settings(self) -> dict[str, Any]:
        """Return the settings, with the classes or the size of a policy that is a function."""
        given = dict(vars(self))
        policy = given.get("auto_wrap_policy")
        if callable(policy):
            options = getattr(policy, "keywords", {})
            given.pop("auto_wrap_policy")
            if "transformer_layer_cls" in options:
                names = (each.__name__ for each in options["transformer_layer_cls"])
                given["transformer_cls_names_to_wrap"] = ",".join(sorted(names))
            elif "min_num_params" in options:
                given["auto_wrap_policy"] = "SIZE_BASED_WRAP"
                given["min_num_params"] = options["min_num_params"]
        return given


class MegatronLMPlugin(Plugin):
    """Tensor and pipeline parallelism."""


class TorchTensorParallelPlugin(Plugin):
    """Tensor parallelism."""


class ParallelismConfig(Plugin):
    """Sizes of the axes.

    A size that is not given comes from the environment variables of Accelerate's launcher, or is 1.
    """

    AXES: ClassVar[tuple[str, ...]] = ("dp_replicate", "dp_shard", "cp", "sp", "tp")
    """From the ranks that are farthest from each other to the nearest."""

    PRODUCTS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "data_parallel_size": ("dp_replicate", "dp_shard"),
        "non_data_parallel_size": ("tp", "cp", "sp"),
        "total_size": AXES,
    }
    """Properties that are the number of ranks along axes."""

    DIMS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "dp_dim_names": ("dp_replicate", "dp_shard"),
        "non_dp_dim_names": ("tp", "cp", "sp"),
        "dp_shard_cp_dim_names": ("dp_shard", "cp"),
        "dp_cp_dim_names": ("dp_replicate", "dp_shard", "cp"),
        "active_mesh_dims": ("dp_replicate", "dp_shard", "tp", "cp", "sp"),
    }
    """Properties that are those of some axes with more than one rank."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        launched = variables("PARALLELISM_CONFIG_")
        for key in (f"{axis}_size" for axis in self.AXES):
            if vars(self).get(key) is None:
                vars(self)[key] = int(launched.get(key.upper(), "1"))
            if (size := vars(self)[key]) < 1:
                raise UsageError(
                    f"expected a {key} of at least 1 in ParallelismConfig, found {size}; leave it "
                    "out where one rank is along the axis"
                )

    def settings(self) -> dict[str, Any]:
        """Return the settings without axes of one rank that are refused with more."""
        return {k: v for k, v in vars(self).items() if k not in self.refused or v != 1}

    def __getattr__(self, name: str) -> Any:
        if name in self.PRODUCTS:
            return self._product(*self.PRODUCTS[name])
        if name in self.DIMS:
            return self._enabled(*self.DIMS[name])
        axis = name.removesuffix("_enabled")
        return bool(self._enabled(axis)) if name != axis else super().__getattr__(name)

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The axis of replicas, if there are any, and the joint axis that divides parameters."""
        return [*self._enabled("dp_replicate"), "dp_shard_cp"]

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """Return torch's mesh of these axes, with joint axes; None if all have one rank.

        It is for the script's own use: the strategy makes its groups itself.
        """
        names = tuple(self._enabled(*self.AXES))
        if not names:
            return None
        shape = tuple(self._product(name) for name in names)
        mesh = device_mesh.init_device_mesh(device_type, shape, mesh_dim_names=names)
        for name in ("dp", "dp_shard_cp", "dp_cp"):
            if axes := self._enabled(*self.DIMS[f"{name}_dim_names"]):
                mesh[axes]._flatten(name)  # type: ignore[index]  # torch takes any sequence
        return mesh

    def _enabled(self, *axes: str) -> list[str]:
        return [axis for axis in axes if axis in self.AXES and self._product(axis) > 1]

    def _product(self, *axes: str) -> int:
        return math.prod(vars(self)[f"{axis}_size"] for axis in axes)


class TorchDynamoPlugin(Plugin):
    """How models are compiled."""


def translated(plugins: Sequence[Plugin]) -> Translation:
    """Return the strategy and further settings of plugin objects, as their file is imported.

    Raises:
        UsageError: a setting has no counterpart, or two plugins choose different engines.
        ConfigError: a setting is unknown, or contradicts another one.
    """
    kinds = {plugin.kind for plugin in plugins if plugin.kind}
    if len(kinds) > 1:
        raise UsageError(f"expected a plugin object of one engine, found {sorted(kinds)}; keep one")
    values: dict[str, Any] = {}
    for plugin in plugins:
        values |= plugin.as_file()
    program = "accelerate"
    config = values.get("deepspeed_config", {}).get("deepspeed_config_file")
    if isinstance(config, Mapping):
        program, values = "deepspeed", dict(config)
    origin = ValueOrigin("code", ", ".join(map(repr, plugins)))
    importer: Importer = formats().load(program)()
    return importer.translate(Layer(values, dict.fromkeys(values, origin)), Path.cwd())


# --- the Accelerator with Accelerate's arguments ---

logger = get_logger(__name__)

SCHEDULE = {"step_scheduler_with": "samples"}
"""Accelerate steps a schedule once per rank and step; ``--set step_scheduler_with`` wins."""


class ScriptAccelerator(Resettable, Accelerator):
    """The Accelerator for scripts that import ``accelerate``: its arguments in its order.

    Plugin objects choose the strategy, as ``strategy=`` does. Schedules are stepped once for each
    data-parallel rank, since such scripts multiply by ``num_processes``. A window of accumulation
    that the loader ends early is divided by ``gradient_accumulation_steps``.

    Args:
        deepspeed_plugin: or several by name, of which the first one counts.
        fsdp_plugin: chooses how parameters are divided.
        torch_tp_plugin: over how many ranks layers are divided.
        megatron_lm_plugin: chooses tensor and pipeline parallelism.
        dynamo_backend: compiles models with this backend of ``torch.compile``.
        dynamo_plugin: the same with all options.
        deepspeed_plugins: the newer name of ``deepspeed_plugin``.
        parallelism_config: sizes of the axes.

    Raises:
        UsageError: a plugin object has a setting without counterpart, or stands beside a strategy.
        ConfigError: its settings are unknown, or contradict each other or the command line.
    """

    _lacking: ClassVar[Mapping[str, str]] = {}

    def __init__(  # noqa: PLR0913, PLR0917 - the arguments of Accelerate
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool | None = None,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        torch_tp_plugin: TorchTensorParallelPlugin | None = None,
        megatron_lm_plugin: MegatronLMPlugin | None = None,
        rng_types: Sequence[str] | None = None,
        log_with: Any = None,
        project_dir: str | Path | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: list[Any] | None = None,
        dynamo_backend: str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None = None,
        parallelism_config: ParallelismConfig | None = None,
        *,
        strategy: StrategyChoice | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
    ) -> None:
        self._deepspeed: DeepSpeedPlugin | None = _first(deepspeed_plugin or deepspeed_plugins)
        self._fsdp = fsdp_plugin
        self.parallelism_config = parallelism_config
        self.dataloader_config = dataloader_config or DataLoaderConfiguration()
        self._compilation = dynamo_plugin or TorchDynamoPlugin(dynamo_backend)
        engines = (self._deepspeed, fsdp_plugin, megatron_lm_plugin, torch_tp_plugin)
        plugins = [plugin for plugin in (*engines, parallelism_config) if plugin is not None]
        found = _chosen_by(plugins, strategy, config)
        chosen = dict(found.values)
        strategy = chosen.pop("strategy", strategy)
        accumulation = _accumulation(gradient_accumulation_steps, chosen)
        chosen |= _blocks_of(self._compilation, config)
        if not isinstance(config, str | Path):
            config = {**SCHEDULE, **chosen, **(config or {})}
        super().__init__(
            strategy=strategy,
            config=config,
            device_placement=device_placement,
            split_batches=split_batches,
            mixed_precision=None if mixed_precision is None else str(mixed_precision),
            gradient_accumulation_steps=accumulation,
            cpu=cpu,
            dataloader_config=dataloader_config,
            rng_types=rng_types,
            log_with=registered(log_with),
            project_dir=project_dir,
            project_config=project_config,
            gradient_accumulation_plugin=gradient_accumulation_plugin,
            step_scheduler_with_optimizer=step_scheduler_with_optimizer,
            kwargs_handlers=kwargs_handlers,
        )
        _announce_ignored(found)
        self.gradient_state.divides_by_length = False

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:  # type: ignore[override]
        """The plugin object that the script passed, if any."""
        return self._deepspeed

    @property
    def fsdp_plugin(self) -> FullyShardedDataParallelPlugin | None:  # type: ignore[override]
        """The plugin object that the script passed, if any."""
        return self._fsdp

    @property
    def multi_device(self) -> bool:
        """Whether there are several processes."""
        return self.num_processes > 1

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
        *,
        strategy: StrategyChoice | None = None,
    ) -> nn.Module:
        """Prepare one model, compiled if the script asked for it."""
        return super().prepare_model(
            _compiled(model, self._compilation),
            device_placement,
            evaluation_mode,
            strategy=strategy,
        )

    def prepare(
        self,
        *args: Any,
        device_placement: Sequence[bool] | None = None,
        strategy: StrategyChoice | None = None,
    ) -> Any:
        """Prepare any objects; models are compiled if the script asked for it."""
        compiled = (
            _compiled(item, self._compilation) if isinstance(item, nn.Module) else item
            for item in args
        )
        return super().prepare(*compiled, device_placement=device_placement, strategy=strategy)

    def save_state(
        self,
        output_dir: str | Path | None = None,
        safe_serialization: bool = True,
        *,
        overwrite: bool | None = None,
        wait: bool = True,
    ) -> str:
        """Save the run; a checkpoint of the same name is replaced, unless ``overwrite=False``.

        ``safe_serialization=False`` writes safetensors as well, and says so.
        """
        replaced = output_dir is not None if overwrite is None else overwrite
        _announce_format(safe_serialization)
        return super().save_state(output_dir, overwrite=replaced, wait=wait)

    def load_state(
        self,
        input_dir: str | Path | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        *,
        map_location: Any = None,
        verify: str = "full",
    ) -> str:
        """Continue from a checkpoint.

        Args:
            input_dir: the directory; None means the last automatically named one.
            load_kwargs: without effect, since no pickle is read.
            map_location: without effect: tensors are read to where the model lies.
            verify: ``full`` checks the checksum of every file first, ``size`` its size only.
        """
        return super().load_state(input_dir, verify=verify)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | Path,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
        *,
        only_trainable: bool = False,
    ) -> None:
        """Write a model's weights; ``safe_serialization=False`` writes safetensors, and says so."""
        _announce_format(safe_serialization)
        super().save_model(model, save_directory, max_shard_size, only_trainable=only_trainable)


def _accumulation(given: int | None, chosen: dict[str, Any]) -> int | None:
    """Take micro-batches per step out of the plugins' settings; without any, the argument's."""
    of_plugin: int | None = chosen.pop("accumulation", None)
    if of_plugin is not None and given not in (None, 1, of_plugin):
        logger.announce(
            f"gradient_accumulation_steps={given} and {of_plugin} of the plugin object differ: "
            f"{of_plugin} is taken, as Accelerate does"
        )
    return given if of_plugin is None else of_plugin


def _announce_ignored(found: Translation) -> None:
    """Name the settings of plugin objects and of the environment that have no effect."""
    for remark in found.remarks:
        logger.announce(f"plugin objects: {remark}")
    ignored = ", ".join(f"ACCELERATE_{name}" for name in sorted(variables("ACCELERATE_")))
    if ignored:
        logger.announce(
            f"{ignored} in the environment: no effect on drivetrain; set such values in the launch "
            "configuration, or with --set key=value"
        )


def _announce_format(safe_serialization: bool) -> None:
    if not safe_serialization:
        logger.announce(
            "safe_serialization=False has no effect: files are safetensors, not pickles"
        )


def _chosen_by(plugins: Sequence[Plugin], strategy: Any, config: Any) -> Translation:
    """Return the settings of plugin objects, which stand alone."""
    if plugins and (strategy is not None or isinstance(config, str | Path)):
        raise UsageError(
            "expected plugin objects or a strategy and configuration of drivetrain, found "
            f"{plugins} beside strategy={strategy!r} and config={config!r}; keep one"
        )
    return translated(plugins) if plugins else Translation(values={})


def _first(plugins: Any) -> Any:
    """Return the plugin, or of several by name the first, which is active in Accelerate."""
    return next(iter(plugins.values()), None) if isinstance(plugins, Mapping) else plugins


def _blocks_of(plugin: TorchDynamoPlugin, config: Any) -> dict[str, str]:
    """Return the option ``compile``, if a plugin wants the repeated blocks compiled."""
    backend = str(plugin.backend or "no").lower()
    if not plugin.use_regional_compilation or plugin.disable or backend == "no":
        return {}
    if backend != "inductor" or plugin.mode not in (None, "default") or plugin.options:
        raise UsageError(
            "expected backend='inductor' without mode and options for use_regional_compilation, "
            f"found {plugin!r}; leave them out, or compile the blocks in the script"
        )
    if isinstance(config, str | Path):
        raise UsageError(
            f"expected use_regional_compilation=False beside the file {config}, found True; write "
            "compile: blocks into the file"
        )
    return {"compile": "blocks"}


def _compiled(model: nn.Module, plugin: TorchDynamoPlugin) -> nn.Module:
    backend = str(plugin.backend or "no").lower()
    found = plugin.disable or plugin.use_regional_compilation or isinstance(model, OptimizedModule)
    if backend == "no" or found:
        return model
    compiled: nn.Module = torch.compile(  # type: ignore[assignment]
        model,
        backend=backend,
        mode=plugin.mode,
        fullgraph=bool(plugin.fullgraph),
        dynamic=plugin.dynamic,
        options=plugin.options,
    )
    return compiled
