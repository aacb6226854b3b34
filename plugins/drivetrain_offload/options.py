"""The options of the strategy ``offload`` and of its stores, and what it stands for. No torch."""

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from drivetrain.config.outline import ReplicasOutline
from drivetrain.config.schema import NestedStrategy, nested_strategy, option, options_of
from drivetrain.errors import ConfigError
from drivetrain.hardware.sizes import MIB
from drivetrain.parallel.options import OffloadOptions
from drivetrain.registry import strategies

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


class OffloadOutline(ReplicasOutline[OffloadConfig]):
    """The outline of ``offload``."""

    summary: ClassVar[str] = "optimizer state in host memory or on a disk, also on one device"
    Config: ClassVar[type] = OffloadConfig

    @classmethod
    def stands_for(cls, config: OffloadConfig) -> tuple[str, Any]:
        """Return the data-parallel strategy, and its options with the section ``offload`` set.

        Raises:
            ConfigError: no store is named, or the strategy has no such section, or the section has
                options already.
        """
        registry, chosen = strategies(), config.data_parallel
        name = chosen.name or registry.default()
        own = registry.outline(name).Config
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
        return name, replace(options, **{SECTION: config.options})


# --- the stores ---

ALIGNMENT = 4096
"""Bytes; direct I/O takes addresses, offsets and lengths that are multiples, on common disks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostConfig:
    """Options of the store ``cpu``."""

    page_locked: bool = option(
        True,
        help="whether memory is page-locked where there is an accelerator, so that copies do not "
        "wait",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class NvmeConfig:
    """Options of the store ``nvme``."""

    path: str = option("", help="directory on a local disk where each rank's file lies")
    request_mib: float = option(
        4.0,
        help="MiB of one request to the disk; drivetrain disk-bench suggests a value",
        minimum=ALIGNMENT / MIB,
        maximum=1024,
    )
    threads: int = option(
        8,
        help="requests in flight, of reads and of writes each; drivetrain disk-bench suggests a "
        "value",
        minimum=1,
        maximum=256,
    )
    staging_mib: float = option(
        256.0, help="MiB of host memory for tensors that are on their way to the disk", minimum=1
    )
    release_memory: bool = option(
        True,
        help="whether the process gives freed memory back to the system at once, which takes some "
        "time; otherwise it may keep several times what it uses",
    )
    verify: bool = option(
        False,
        help="whether each block that is read must have the sum of the block that was written; "
        "needs host memory for 1 of 512 bytes of the file",
    )

    def __post_init__(self) -> None:
        """Check numbers that come from Python and not from a file.

        Raises:
            ConfigError: a number is out of its range, or a request is no whole number of blocks.
        """
        if not ALIGNMENT / MIB <= self.request_mib <= 1024 or self.request_bytes % ALIGNMENT:
            raise ConfigError(
                f"request_mib: expected a multiple of {ALIGNMENT} bytes up to 1024 MiB, found "
                f"{self.request_mib:g} MiB; 1, 4 and 16 are common"
            )
        if not 1 <= self.threads <= 256:
            raise ConfigError(f"threads: expected 1 to 256, found {self.threads}")
        if self.staging_mib < 1:
            raise ConfigError(f"staging_mib: expected 1 or more, found {self.staging_mib:g}")

    @property
    def request_bytes(self) -> int:
        """Bytes of one request."""
        return int(self.request_mib * MIB)


class HostOutline:
    """What configurations need of the store ``cpu``."""

    Config = HostConfig


class NvmeOutline:
    """What configurations need of the store ``nvme``."""

    Config = NvmeConfig
