"""The options of ZeRO, and the sizes and limits that follow from them, stage by stage."""

from dataclasses import dataclass
from typing import Literal

from drivetrain.config.option import option
from drivetrain.parts.buckets import MIB
from drivetrain.sharding.layout import CutStyle
from drivetrain.sharding.options import GradientOptions, ParameterOptions, UnitsOptions
from drivetrain_zero.units import Sizes


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
    def cut(self) -> CutStyle:
        """How parameters are divided among ranks."""
        return "whole" if self.partition == "parameter" else "flat"

    @property
    def sizes(self) -> Sizes:
        """How large units are."""
        return Sizes(int(self.bucket_mib * MIB), self.cut)


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
        """How many units are gathered ahead of the computing unit."""
        return self.prefetch
