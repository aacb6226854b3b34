"""Turns the constructor's arguments and the launch configuration into one resolved run."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from drivetrain import registry
from drivetrain.config import Layer, Origin, Resolved, read_file, resolve
from drivetrain.config.document import put
from drivetrain.errors import ConfigError, UsageError
from drivetrain.facade.options import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    Handlers,
)
from drivetrain.runtime.world import launched_config

StrategyChoice: TypeAlias = str | Mapping[str, Any]
"""A strategy by name, or its name and options: ``{"name": "ddp", "bucket_mib": 50}``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arguments:
    """What a script may say in code about the configuration; None means it did not say."""

    strategy: StrategyChoice | None = None
    config: str | Path | Mapping[str, Any] | None = None
    mixed_precision: str | None = None
    gradient_accumulation_steps: int | None = None
    cpu: bool | None = None
    split_batches: bool | None = None
    step_scheduler_with: str | None = None
    dataloader: DataLoaderConfiguration | None = None
    accumulation: GradientAccumulationPlugin | None = None


def settle(arguments: Arguments, handlers: Handlers) -> Resolved:
    """Resolve the run: the script's file, then the launch configuration, then the arguments.

    Raises:
        ConfigError: a wrong key or value, or a conflict between code and command line.
        UsageError: two arguments that say the same thing.
    """
    layers = [_file_layer(arguments.config)]
    path = launched_config()
    if path:
        layers.append(read_file(path))
    layers.append(_code_layer(arguments, handlers))
    return resolve(*layers, find_config=registry.strategies().find_config)


def settle_strategy(choice: StrategyChoice, base: Resolved) -> Resolved:
    """Resolve another strategy for one model of the same run.

    Raises:
        ConfigError: an unknown strategy or option.
    """
    values = {key: value for key, value in base.to_dict().items() if key != "strategy"}
    layer = Layer(values, {key: Origin("file", "the run") for key in values})
    chosen: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    _put_strategy(chosen, origins, choice, "prepare")
    return resolve(layer, Layer(chosen, origins), find_config=registry.strategies().find_config)


def _file_layer(config: str | Path | Mapping[str, Any] | None) -> Layer:
    if config is None:
        return Layer()
    if isinstance(config, Mapping):
        return Layer(config, {key: Origin("file", "Accelerator(config={...})") for key in config})
    return read_file(config)


def _code_layer(arguments: Arguments, handlers: Handlers) -> Layer:
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    for key, name, value in _given(arguments, handlers):
        if value is not None:
            put(values, key, value)
            origins[key] = Origin("code", f"Accelerator({name}={value!r})")
    if arguments.strategy is not None:
        _put_strategy(values, origins, arguments.strategy, "Accelerator")
    if handlers.ddp is not None:
        for key, value in handlers.ddp.strategy_options().items():
            put(values, f"strategy.{key}", value)
            origins[f"strategy.{key}"] = Origin("code", "DistributedDataParallelKwargs")
    return Layer(values, origins)


def _given(arguments: Arguments, handlers: Handlers) -> list[tuple[str, str, Any]]:
    """Return (key of the configuration, name in the script, value) of every argument."""
    plugin, steps = arguments.accumulation, arguments.gradient_accumulation_steps
    if plugin is not None and plugin.num_steps is not None and steps not in (None, 1):
        raise UsageError(
            f"expected gradient_accumulation_steps or a GradientAccumulationPlugin, found both: "
            f"{steps} and {plugin.num_steps}; give the number once"
        )
    if plugin is not None and plugin.num_steps is not None:
        steps = plugin.num_steps
    data = arguments.dataloader or DataLoaderConfiguration()
    split = data.split_batches if data.split_batches is not None else arguments.split_batches
    timeout = handlers.process_group.timeout
    return [
        ("precision", "mixed_precision", arguments.mixed_precision),
        ("accumulation", "gradient_accumulation_steps", steps),
        ("launch.device", "cpu", "cpu" if arguments.cpu else None),
        ("launch.timeout_s", "timeout", timeout.total_seconds() if timeout else None),
        ("step_scheduler_with", "step_scheduler_with", arguments.step_scheduler_with),
        ("data.split_batches", "split_batches", split),
        ("data.dispatch_batches", "dispatch_batches", data.dispatch_batches),
        ("data.even_batches", "even_batches", data.even_batches),
        ("data.use_seedable_sampler", "use_seedable_sampler", data.use_seedable_sampler),
        ("data.data_seed", "data_seed", data.data_seed),
        ("data.non_blocking", "non_blocking", data.non_blocking),
    ]


def _put_strategy(
    values: dict[str, Any], origins: dict[str, Origin], choice: StrategyChoice, caller: str
) -> None:
    options = {"name": choice} if isinstance(choice, str) else dict(choice)
    if not options.get("name"):
        raise ConfigError(
            f"{caller}(strategy={choice!r}): expected a name or a mapping with a name such as "
            "{'name': NAME, 'option': value}"
        )
    for key, value in options.items():
        put(values, f"strategy.{key}", value)
        origins[f"strategy.{key}"] = Origin("code", f"{caller}(strategy={choice!r})")
