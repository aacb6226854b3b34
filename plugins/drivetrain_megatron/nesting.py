"""The data-parallel strategy inside of a cell, found by name."""

from typing import Any

from drivetrain.errors import ConfigError
from drivetrain.registry import strategies
from drivetrain.strategy import Strategy
from drivetrain_megatron.config import MegatronConfig


def data_parallel(config: MegatronConfig) -> tuple[type[Strategy[Any]], Any]:
    """Return the class of the data-parallel strategy and its options.

    Raises:
        ConfigError: it is not installed, or is none: it lays ranks out on other axes than ``dp``.
    """
    registry = strategies()
    name = config.data_parallel.name or registry.default()
    kind: type[Strategy[Any]] = registry.load(name)
    given = config.data_parallel.options
    options = kind.Config() if given is None else given
    axes = set(kind.axes(options, 1))
    if axes != {"dp"}:
        raise ConfigError(
            f"strategy.data_parallel: expected a strategy over the axis dp alone, found {name!r} "
            f"over {', '.join(sorted(axes))}; name one that replicates or shards a whole model"
        )
    return kind, options
