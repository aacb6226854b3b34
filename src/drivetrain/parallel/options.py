"""The options of strategies over units, and what mechanisms ask them. No torch."""

from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, TypeVar

from drivetrain.config.outline import ReplicasOutline
from drivetrain.config.schema import mapping, option, section
from drivetrain.errors import ConfigError
from drivetrain.registry import stores

if TYPE_CHECKING:
    from drivetrain.cost import TensorSpec
    from drivetrain.parallel.layout import CutStyle
    from drivetrain.runtime.mesh import Axis, Mesh
    from drivetrain.runtime.world import World

Until: TypeAlias = Literal["forward", "backward", "step"]
"""When a unit is freed that a training forward has gathered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadOptions:
    """The section ``offload``: which state lies in stores between its uses, and in which stores."""

    optimizer: str = option(
        "",
        help="store that keeps optimizer state and master weights, and steps them: cpu, nvme, or "
        "another installed one; empty leaves them on the device",
    )
    params: str = option(
        "",
        help="store that keeps this rank's share of the parameters between their uses, where they "
        "are divided; needs a store for optimizer, too",
    )
    path: str = option("", help="directory on a local disk, for stores that keep files")
    ratio: float = option(
        1.0,
        help="share of the parameters whose optimizer state is offloaded; those that forward "
        "needs first stay",
        minimum=0.0,
        maximum=1.0,
    )
    delayed: bool = option(
        False,
        help="whether parameters change one step late, so that an update may take as long as a "
        "whole step; another trajectory than without",
    )
    in_backward: bool = option(
        False,
        help="whether updates begin in backward, unit by unit; gradients are then not clipped or "
        "changed after it, and no step is left out",
    )
    store_options: dict[str, int | float | bool | str] = mapping(
        help="options of the stores, such as request_mib of nvme; the same for all of them"
    )

    def check(self) -> None:
        """Refuse options that contradict each other.

        Raises:
            ConfigError: says which ones.
        """
        if self.params and not self.optimizer:
            raise ConfigError(
                f"expected offload.optimizer with offload.params: {self.params}, found none: an "
                "optimizer on the device needs the parameters there; name a store for both"
            )
        if self.params and self.ratio < 1:
            raise ConfigError(
                f"expected offload.ratio: 1 with offload.params: {self.params}, found "
                f"{self.ratio:g}: what lies in a store is stepped there; leave one of them out"
            )
        idle = [
            f"{knob}: {getattr(self, knob)}"
            for knob in ("path", "ratio", "delayed", "in_backward", "store_options")
            if getattr(self, knob) != _DEFAULTS[knob]
        ]
        if idle and not self.optimizer:
            raise ConfigError(
                f"expected a store in offload.optimizer with {', '.join(idle)}, found none; name "
                "one, such as cpu, or leave these out"
            )
        if self.delayed and self.in_backward:
            raise ConfigError(
                "expected offload.delayed or offload.in_backward, found both: an update that may "
                "take a whole step has no need to begin early; leave one of them out"
            )
        if self.optimizer:
            self._check_stores()

    def _check_stores(self) -> None:
        """Refuse options that no named store has, and a store of files without a directory.

        Raises:
            UnknownPluginError: no store of this name is installed.
            ConfigError: says which options.
        """
        given = {**self.store_options, **({"path": self.path} if self.path else {})}
        known = {
            name: store_knobs(stores().outline(name))
            for name in sorted({self.optimizer, self.params} - {""})
        }
        unknown = [key for key in given if not any(key in knobs for knobs in known.values())]
        if unknown and known:
            described = "; ".join(
                f"{name} has {', '.join(sorted(knobs)) or 'none'}" for name, knobs in known.items()
            )
            raise ConfigError(f"expected options of the stores, found {unknown}: {described}")
        on_disk = [name for name, knobs in known.items() if "path" in knobs]
        if on_disk and not given.get("path"):
            raise ConfigError(
                f"expected offload.path with the store {on_disk[0]}, found none; name a directory "
                "on a disk, such as path: /mnt/nvme"
            )


def store_knobs(kind: Any) -> set[str]:
    """Return the names of a store's options: the fields of its ``Config``."""
    config = getattr(kind, "Config", None)
    return {field.name for field in fields(config)} if is_dataclass(config) else set()


_DEFAULTS: dict[str, Any] = {
    field.name: getattr(OffloadOptions(), field.name) for field in fields(OffloadOptions)
}


@dataclass(frozen=True, kw_only=True)
class UnitsOptions:
    """The options of every strategy over units.

    Attributes:
        divides_parameters: whether a rank keeps its share of the parameters between their uses.
    """

    divides_parameters: ClassVar[bool] = False
    buffers: Literal["broadcast", "none"] = option(
        "broadcast",
        help="whether rank 0's buffers (BatchNorm statistics) replace the others' after a backward",
    )
    fused: bool = option(
        True,
        help="whether torch's fused kernel steps Adam, AdamW, Adagrad and SGD optimizers that "
        "leave the choice open",
    )
    offload: OffloadOptions = section(
        OffloadOptions, help="what lies in stores between its uses, in host memory or on a disk"
    )

    def __post_init__(self) -> None:
        """Refuse a store of parameters where parameters stay whole.

        Raises:
            ConfigError: parameters shall lie in a store, and they are not divided.
        """
        if self.offload.params and not self.divides_parameters:
            raise ConfigError(
                "expected a strategy that divides parameters, with an option "
                f"reshard_after_forward, for offload.params: {self.offload.params}, found one that "
                "keeps them whole on every rank; take such a strategy, or leave offload.params out"
            )

    @property
    def cut(self) -> "CutStyle":
        """How parameters are divided among ranks."""
        return "flat"

    @property
    def channels(self) -> frozenset[str]:
        """The tensors that may cross hosts: gradients, and values or updates of parameters."""
        values = self.divides_parameters and not self.keeps_secondary
        return frozenset({"gradients", "parameters" if values else "updates"})

    @property
    def lent_buffers(self) -> int:
        """How many gradient buffers are lent; 0 keeps whole gradients."""
        return 0

    @property
    def reduces_each(self) -> bool:
        """Whether every micro-batch's gradients are reduced."""
        return False

    @property
    def ahead(self) -> int:
        """How many units are gathered ahead: none, where none is freed."""
        return 0

    @property
    def max_live(self) -> int | None:
        """How many units may be whole or on their way at once."""
        return None

    @property
    def until(self) -> Until:
        """When a unit is freed that a training forward has gathered."""
        return "step"

    def near(self, mesh: "Mesh") -> "Axis | None":
        """Return None: nothing is freed, so no neighbors keep it together."""
        return None

    @property
    def keeps_secondary(self) -> bool:
        """Whether the ranks of each host are to keep all values together for good."""
        return False

    def secondary_ranks(self, mesh: "Mesh", world: "World") -> int:
        """Return how many ranks of a host keep all values together for good; 0: none do.

        Raises:
            ConfigError: hosts hold different numbers of ranks, or not in a row.
        """
        if not (self.keeps_secondary and mesh["dp"].spans_hosts):
            return 0
        return mesh.per_host("dp", world)

    def places(self, spec: "TensorSpec") -> bool:
        """Return whether a parameter lies in a unit; one that never moves is divided at most."""
        return spec.trainable or self.divides_parameters


@dataclass(frozen=True, kw_only=True)
class GradientOptions(UnitsOptions):
    """The options of strategies that divide gradients."""

    accumulate: Literal["reduce", "local"] = option(
        "reduce",
        help="reduce sends the gradients of every micro-batch and keeps this rank's share; local "
        "keeps whole gradients during an accumulation window and sends them once",
    )
    buffers_in_flight: int = option(
        3, help="units whose gradients may be filled or on their way at once", minimum=2
    )

    @property
    def lent_buffers(self) -> int:
        """How many gradient buffers are lent; 0 keeps whole gradients during a window."""
        return 0 if self.accumulate == "local" else self.buffers_in_flight

    @property
    def reduces_each(self) -> bool:
        """Whether every micro-batch's gradients are reduced."""
        return self.accumulate == "reduce"


@dataclass(frozen=True, kw_only=True)
class ParameterOptions(GradientOptions):
    """The options of strategies that divide parameters, too."""

    divides_parameters: ClassVar[bool] = True
    reshard_after_forward: bool | int = option(
        True,
        help="whether a unit is freed between its forward and its backward; a number of ranks "
        "keeps it until backward, divided over groups of that many neighbors",
    )
    secondary: Literal["none", "host"] = option(
        "none",
        help="host keeps all values a second time on each host, divided over its ranks: units are "
        "gathered inside of hosts, and updates cross hosts once, after the step",
    )

    def __post_init__(self) -> None:
        """Refuse options that contradict each other.

        Raises:
            ConfigError: says which ones.
        """
        super().__post_init__()
        if not self.keeps_secondary:
            return
        group, store = self.reshard_after_forward, self.offload.optimizer
        if not isinstance(group, bool):
            raise ConfigError(
                "expected reshard_after_forward: true or false with secondary: host, found "
                f"{group}: the ranks of a host keep units together for good; leave one of them out"
            )
        if store:
            raise ConfigError(
                f"expected no store with secondary: host, found offload.optimizer: {store}: "
                "secondary shards take memory of the device; leave one of them out"
            )

    @property
    def keeps_secondary(self) -> bool:
        """Whether the ranks of each host are to keep all values together for good."""
        return self.secondary == "host"

    @property
    def until(self) -> Until:
        """When a unit is freed that a training forward has gathered."""
        return "forward" if self.reshard_after_forward else "backward"

    def near(self, mesh: "Mesh") -> "Axis | None":
        """Return the neighbors that keep units together until backward; None: there are none.

        Raises:
            ConfigError: the ranks cannot be cut into groups of that many.
        """
        size = self.reshard_after_forward
        if isinstance(size, bool):
            return None
        if size <= 1:
            raise ConfigError(
                "expected true, false or a number of ranks from 2 on in reshard_after_forward, "
                f"found {size}; true keeps this rank's share only, false the whole unit"
            )
        near = mesh.neighbors("dp", size)
        return None if near.size == mesh["dp"].size else near


UnitsT = TypeVar("UnitsT", bound=UnitsOptions)


class UnitsOutline(ReplicasOutline[UnitsT]):
    """The outline of a strategy over units."""

    @classmethod
    def channels(cls, config: UnitsT) -> frozenset[str]:
        """Return gradients, and values of parameters where these are divided, or updates."""
        return config.channels
