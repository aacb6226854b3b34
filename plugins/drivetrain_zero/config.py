"""The knobs of ZeRO, and what follows from them: where a stage differs from the one before it."""

from dataclasses import dataclass
from typing import Literal

from drivetrain.config.option import option
from drivetrain.cost import TensorSpec
from drivetrain.errors import ConfigError
from drivetrain.parts.buckets import MIB
from drivetrain.parts.units.gathering import Until
from drivetrain.parts.units.layout import Cut
from drivetrain.runtime.mesh import Axis, Mesh
from drivetrain_zero.layout import Sizes


@dataclass(frozen=True, kw_only=True, slots=True)
class Zero1Config:
    """Options of the strategy ``zero1``."""

    bucket_mib: float = option(
        25.0, help="MiB of gradients that are reduced together", minimum=0.001, maximum=4096
    )
    partition: Literal["flat", "parameter"] = option(
        "flat",
        help="flat cuts every bucket into equal ranges; parameter gives whole parameters to one "
        "rank each, for optimizers that need whole matrices",
    )
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

    @property
    def cut(self) -> Cut:
        """What ranks own of parameters."""
        return "whole" if self.partition == "parameter" else "flat"

    @property
    def sizes(self) -> Sizes:
        """How large units are."""
        return Sizes(int(self.bucket_mib * MIB), self.cut)

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Zero2Config(Zero1Config):
    """Options of the strategy ``zero2``."""

    accumulate: Literal["reduce", "local"] = option(
        "reduce",
        help="reduce sends the gradients of every micro-batch and keeps 1/N; local keeps whole "
        "gradients during an accumulation window and sends them once",
    )
    buffers_in_flight: int = option(
        3, help="gradient buckets that may be filled or on their way at once", minimum=2
    )

    @property
    def lent_buffers(self) -> int:
        """How many gradient buffers are lent; 0 keeps whole gradients during a window."""
        return 0 if self.accumulate == "local" else self.buffers_in_flight

    @property
    def reduces_each(self) -> bool:
        """Whether every micro-batch's gradients are reduced."""
        return self.accumulate == "reduce"


@dataclass(frozen=True, kw_only=True, slots=True)
class Zero3Config(Zero2Config):
    """Options of the strategy ``zero3``."""

    keep_below: int = option(
        100_000,
        help="parameters with fewer elements stay whole on every rank, as in stage 2: fewer and "
        "larger messages",
        minimum=0,
    )
    own_unit_from: int = option(
        1_000_000,
        help="elements from which a layer outside of the repeated blocks, such as an embedding, is "
        "gathered and freed by itself",
        minimum=1,
    )
    reshard_after_forward: bool | int = option(
        True,
        help="whether a unit is freed between its forward and its backward; a number of ranks "
        "keeps it until backward, divided over groups of that many neighbors",
    )
    prefetch: int = option(
        1, help="units that are gathered ahead of the one that computes", minimum=0, maximum=8
    )

    @property
    def sizes(self) -> Sizes:
        """How large units are: blocks and large layers."""
        return Sizes(
            int(self.bucket_mib * MIB),
            self.cut,
            shard_from=self.keep_below,
            own_unit_from=self.own_unit_from,
        )

    @property
    def ahead(self) -> int:
        """How many units are gathered ahead of the one that computes."""
        return self.prefetch

    @property
    def most_live(self) -> int | None:
        """How many units may be whole at once: what is gathered ahead is the only bound."""
        return None

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
                f"found {size}; true keeps each rank's range only, false the whole unit"
            )
        near = mesh.neighbors("dp", size)
        return None if near.size == mesh["dp"].size else near

    def places(self, spec: TensorSpec) -> bool:
        """Return True: frozen parameters are divided as well."""
        return True
