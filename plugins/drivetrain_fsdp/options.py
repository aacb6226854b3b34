"""The options of the strategy ``fsdp``, and the units, limits and groups that follow. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from drivetrain.config.outline import FarLinks
from drivetrain.config.schema import Policy, option
from drivetrain.errors import ConfigError
from drivetrain.parallel.options import ParameterOptions, UnitsOutline, Until

if TYPE_CHECKING:
    from drivetrain.parallel.layout import CutStyle
    from drivetrain.runtime.mesh import Mesh
    from drivetrain.runtime.world import World


@dataclass(frozen=True, kw_only=True)
class FsdpConfig(ParameterOptions):
    """Options of the strategy ``fsdp``."""

    sharding: Literal["full", "grad", "hybrid"] = option(
        "full",
        help="full divides parameters, gradients and optimizer state over all ranks; grad keeps "
        "parameters whole from the first forward of a step until the optimizer steps; hybrid "
        "divides inside of groups of neighbors and replicates between them",
        question="How are parameters divided?",
    )
    shard_size: int = option(
        0,
        help="with sharding: hybrid, how many neighboring ranks divide the model; 0: those of one "
        "host",
        minimum=0,
    )
    exchange: Literal["gradients", "momentum"] = option(
        "gradients",
        help="tensors that methods of links.far send between groups of sharding: hybrid: "
        "gradients, or momenta of Adam",
    )
    live_units: int = option(
        2,
        help="units that may be whole or on their way at once: the one that computes and those "
        "that are gathered ahead",
        minimum=1,
        maximum=64,
    )
    units: Literal["auto", "class", "size", "function"] = option(
        "auto",
        help="what is gathered together: auto takes repeated blocks and large layers, class the "
        "modules of unit_classes, size modules from unit_from elements on, function what "
        "unit_function returns",
    )
    unit_classes: str = option(
        "", help="with units: class, names of classes of modules, separated by commas"
    )
    unit_from: int = option(
        1_000_000,
        help="elements from which a layer outside of the repeated blocks (auto), or any module "
        "(size), is a unit",
        minimum=1,
    )
    unit_function: str = option(
        "",
        help="with units: function, a function as package.module:name or __main__:name that "
        "returns modules of the model it is given, each of them a unit",
    )
    buffers_in_flight: int = option(
        2, help="units whose gradients may be filled or on their way at once", minimum=2
    )

    def check(self) -> None:
        """Refuse options that contradict each other.

        Raises:
            ConfigError: says which ones.
        """
        self._check_given_with("shard_size", self.shard_size, "sharding", "hybrid")
        self._check_given_with("unit_classes", self.unit_classes, "units", "class")
        self._check_given_with("unit_function", self.unit_function, "units", "function")
        needed = {"class": "unit_classes", "function": "unit_function"}.get(self.units)
        if needed is not None and not getattr(self, needed):
            raise ConfigError(
                f"expected {needed} with units: {self.units}, found none; set it, or take units: "
                "auto"
            )
        momenta = self.exchange if self.exchange == "momentum" else ""
        self._check_given_with("exchange", momenta, "sharding", "hybrid")
        if momenta and self.offload.optimizer:
            raise ConfigError(
                "expected no store with exchange: momentum, found offload.optimizer: "
                f"{self.offload.optimizer}: its steps know no frozen variances; leave one of them "
                "out"
            )
        held = self.secondary if self.keeps_secondary else ""
        self._check_given_with("secondary", held, "sharding", "full")
        group = self.reshard_after_forward
        if not isinstance(group, bool) and self.sharding != "full":
            raise ConfigError(
                f"expected reshard_after_forward: true or false with sharding: {self.sharding}, "
                f"found {group}: groups of neighbors are for sharding: full"
            )

    @property
    def cut(self) -> "CutStyle":
        """How parameters are divided among ranks: by rows."""
        return "rows"

    @property
    def ahead(self) -> int:
        """How many units are gathered ahead of the computing unit."""
        return self.live_units - 1

    @property
    def max_live(self) -> int | None:
        """How many units may be whole or on their way at once."""
        return self.live_units

    @property
    def until(self) -> Until:
        """When a unit is freed that a training forward has gathered."""
        return "step" if self.sharding == "grad" else super().until

    @property
    def channels(self) -> frozenset[str]:
        """The tensors that may cross hosts: gradients alone, where a group divides parameters."""
        return frozenset({"gradients"}) if self.sharding == "hybrid" else super().channels

    def shard_ranks(self, mesh: "Mesh", world: "World") -> int:
        """Return how many neighbors divide the model; all ranks unless replicas are asked for.

        Raises:
            ConfigError: hosts have unequal numbers of ranks, and no number is given.
        """
        if self.sharding != "hybrid":
            return mesh["dp"].size
        return self.shard_size or mesh.per_host("dp", world)

    def _check_given_with(self, name: str, value: object, other: str, needed: str) -> None:
        found = getattr(self, other)
        if value and found != needed:
            raise ConfigError(
                f"expected {name} only with {other}: {needed}, found {other}: {found} with "
                f"{name}: {value}; set {other}: {needed}, or leave {name} out"
            )


class FsdpOutline(UnitsOutline[FsdpConfig]):
    """The outline of ``fsdp``."""

    summary: ClassVar[str] = "every rank keeps some rows of each parameter, and whole units in use"
    Config: ClassVar[type] = FsdpConfig

    @classmethod
    def axes(cls, config: FsdpConfig, world_size: int) -> Mapping[str, int]:
        """Return one axis, ``dp``, over all ranks: groups of it divide a model, if asked for."""
        config.check()
        return super().axes(config, world_size)

    @classmethod
    def check_links(cls, config: FsdpConfig, links: FarLinks, precision: Policy) -> None:
        """Refuse methods that are of no use for momenta."""
        super().check_links(config, links, precision)
        if config.exchange == "momentum":
            from drivetrain.compression.one_bit_adam import check_momentum  # torch: methods need it

            check_momentum("fsdp", links, precision)
