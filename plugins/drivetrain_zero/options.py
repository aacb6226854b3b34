"""The options of ZeRO, and the sizes and limits that follow from them, stage by stage. No torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from drivetrain.config.schema import option
from drivetrain.hardware.sizes import MIB
from drivetrain.parallel.options import (
    GradientOptions,
    ParameterOptions,
    UnitsOptions,
    UnitsOutline,
)

if TYPE_CHECKING:
    from drivetrain.parallel.layout import CutStyle


@dataclass(frozen=True, kw_only=True)
class Zero1Config(UnitsOptions):
    """Options of the strategy ``zero1``."""

    bucket_mib: float = option(
        25.0, help="MiB of gradients that are reduced together", minimum=0.001, maximum=4096
    )
    partition: Literal["flat", "parameter"] = option(
        "flat",
        help="flat cuts every bucket into equal ranges; parameter gives whole parameters to one "
        "rank each, for optimizers that need whole matrices",
    )

    @property
    def cut(self) -> "CutStyle":
        """How parameters are divided among ranks."""
        return "whole" if self.partition == "parameter" else "flat"

    @property
    def bucket_bytes(self) -> int:
        """Most bytes of whole parameters in one unit, in the dtype of forward."""
        return int(self.bucket_mib * MIB)


@dataclass(frozen=True, kw_only=True)
class Zero2Config(GradientOptions, Zero1Config):
    """Options of the strategy ``zero2``."""


@dataclass(frozen=True, kw_only=True)
class Zero3Config(ParameterOptions, Zero2Config):
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
    prefetch: int = option(
        1, help="units that are gathered ahead of the one that computes", minimum=0, maximum=8
    )

    @property
    def ahead(self) -> int:
        """How many units are gathered ahead of the computing unit."""
        return self.prefetch


class Zero1Outline(UnitsOutline[Zero1Config]):
    """The outline of ``zero1``."""

    summary: ClassVar[str] = "as ddp, but every rank keeps and steps 1/N of the optimizer state"
    Config: ClassVar[type] = Zero1Config


class Zero2Outline(UnitsOutline[Zero2Config]):
    """The outline of ``zero2``."""

    summary: ClassVar[str] = "as zero1, and every rank keeps 1/N of the gradients"
    Config: ClassVar[type] = Zero2Config


class Zero3Outline(UnitsOutline[Zero3Config]):
    """The outline of ``zero3``."""

    summary: ClassVar[str] = "as zero2, and every rank keeps 1/N of the parameters"
    Config: ClassVar[type] = Zero3Config
