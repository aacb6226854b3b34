"""The options that strategies over units have in common, and what follows from them."""

from dataclasses import dataclass
from typing import Literal

from drivetrain.config.option import option, section
from drivetrain.cost import TensorSpec
from drivetrain.errors import ConfigError
from drivetrain.runtime.mesh import Axis, Mesh
from drivetrain.sharding.gathering import Until
from drivetrain.sharding.offload_options import OffloadOptions


@dataclass(frozen=True, kw_only=True)
class UnitsOptions:
    """Options of every strategy over units."""

    buffers: Literal["broadcast", "none"] = option(
        "broadcast",
        help="whether rank 0's buffers (BatchNorm statistics) replace the others' before a "
        "training forward",
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
        """Refuse a store for what is never put away.

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
    def divides_parameters(self) -> bool:
        """Whether a rank keeps its share of the parameters between their uses."""
        return False

    @property
    def lent_buffers(self) -> int:
        """How many gradient buffers are lent; 0 keeps whole gradients."""
        return 0

    @property
    def reduces_each(self) -> bool:
        """Whether every micro-batch's gradients are reduced."""
        return False

    def places(self, spec: TensorSpec) -> bool:
        """Return whether a parameter lies in a unit; what never moves needs none."""
        return spec.trainable


@dataclass(frozen=True, kw_only=True)
class GradientOptions(UnitsOptions):
    """Options where gradients are divided."""

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
    """Options where parameters are divided, too."""

    reshard_after_forward: bool | int = option(
        True,
        help="whether a unit is freed between its forward and its backward; a number of ranks "
        "keeps it until backward, divided over groups of that many neighbors",
    )

    @property
    def divides_parameters(self) -> bool:
        """Whether a rank keeps its share of the parameters between their uses."""
        return True

    @property
    def until(self) -> Until:
        """When a unit is freed that a training forward has gathered."""
        return "forward" if self.reshard_after_forward else "backward"

    def near(self, mesh: Mesh) -> Axis | None:
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

    def places(self, spec: TensorSpec) -> bool:
        """Return True: frozen parameters are divided as well."""
        return True
