"""The strategy ``offload``: a data-parallel strategy with its stores chosen (ZeRO-Offload, 2021).

Paper: Ren et al., "ZeRO-Offload", USENIX ATC 2021, section 4.2: ZeRO-2 on several devices, whose
shards of optimizer state lie in host memory.
"""

from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from typing_extensions import override

from drivetrain.config.option import NestedStrategy, nested_strategy, option, options_of
from drivetrain.errors import ConfigError
from drivetrain.parallel.options import OffloadOptions
from drivetrain.registry import strategies
from drivetrain.strategy import Strategy, find_strategy

SECTION = "offload"
"""The section of strategies that can keep state in stores."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadConfig(OffloadOptions):
    """Options of the strategy ``offload``."""

    optimizer: str = option(
        "cpu",
        help="store that keeps optimizer state and master weights, and steps them: cpu, nvme, or "
        "another installed one",
        question="Which store keeps optimizer state: cpu, or nvme?",
    )
    path: str = option(
        "",
        help="directory on a local disk, for stores that keep files",
        question="Which directory, for a store that keeps files? (none for cpu)",
    )
    data_parallel: NestedStrategy = nested_strategy(
        "zero2",
        help="the strategy that divides the model over ranks, by name, with its options; one with "
        "a section offload",
    )

    @property
    def options(self) -> OffloadOptions:
        """The section ``offload`` of the strategy beneath."""
        return OffloadOptions(
            **{field.name: getattr(self, field.name) for field in fields(OffloadOptions)}
        )


class Offload(Strategy[OffloadConfig], ABC):
    """Stands for a data-parallel strategy whose state lies in stores, on any number of ranks.

    ``{name: offload, optimizer: cpu}`` is ``{name: zero2, offload: {optimizer: cpu}}``.
    """

    summary: ClassVar[str] = "optimizer state in host memory or on a disk, also on one device"
    Config: ClassVar[type] = OffloadConfig

    @override
    @classmethod
    def variants(cls, world_size: int) -> Sequence[Mapping[str, Any]]:
        """Return the form with the optimizer's state in host memory."""
        return ({"optimizer": "cpu"},)

    @override
    @classmethod
    def stands_for(cls, config: OffloadConfig) -> tuple[type[Strategy[Any]], Any]:
        """Return the data-parallel strategy, and its options with the section ``offload`` set.

        Raises:
            ConfigError: no store is named, or the strategy has no such section, or the section has
                options already.
        """
        registry, chosen = strategies(), config.data_parallel
        name = chosen.name or registry.default()
        own = registry.load(name).Config
        if not config.optimizer:
            raise ConfigError(
                "strategy.optimizer: expected a store with the strategy offload, found none; name "
                f"one, such as cpu, or take the strategy {name} itself"
            )
        if not any(knob.type is OffloadOptions for knob in options_of(own) if knob.name == SECTION):
            raise ConfigError(
                f"strategy.data_parallel: expected a strategy with a section {SECTION}, found "
                f"{name!r}, which keeps nothing in stores; take for example zero2, or fsdp, which "
                "divides parameters, too"
            )
        options = own() if chosen.options is None else chosen.options
        if getattr(options, SECTION) != OffloadOptions():
            raise ConfigError(
                f"strategy.data_parallel.{SECTION}: expected nothing, found options; the strategy "
                "offload sets them: write them beside data_parallel"
            )
        return find_strategy(name, replace(options, **{SECTION: config.options}))
