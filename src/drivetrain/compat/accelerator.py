"""The Accelerator with Accelerate's arguments: positional ones, plugin objects, its schedules."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule

from drivetrain.accelerator import Accelerator
from drivetrain.compat.names import Resettable, registered
from drivetrain.compat.plugins import (
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    MegatronLMPlugin,
    ParallelismConfig,
    Plugin,
    TorchDynamoPlugin,
    TorchTensorParallelPlugin,
    translated,
)
from drivetrain.config.document import Translation
from drivetrain.errors import UsageError
from drivetrain.facade.settings import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    StrategyChoice,
)
from drivetrain.log import get_logger
from drivetrain.runtime.world import variables

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
        del load_kwargs, map_location
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


def _compiled(model: nn.Module, plugin: TorchDynamoPlugin) -> nn.Module:
    backend = str(plugin.backend or "no").lower()
    if backend == "no" or plugin.disable or isinstance(model, OptimizedModule):
        return model
    if plugin.use_regional_compilation:
        raise UsageError(
            "expected use_regional_compilation=False, found True; compile the model's blocks in "
            "the script, with torch.compile"
        )
    compiled: nn.Module = torch.compile(  # type: ignore[assignment]
        model,
        backend=backend,
        mode=plugin.mode,
        fullgraph=bool(plugin.fullgraph),
        dynamic=plugin.dynamic,
        options=plugin.options,
    )
    return compiled
