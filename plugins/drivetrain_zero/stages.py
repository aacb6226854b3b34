"""The strategies: what each stage divides among the ranks that the stage before it did not."""

from collections.abc import Hashable, Sequence
from typing import ClassVar, Generic, TypeVar

from drivetrain.cost import ModelSpec
from drivetrain.sharding.accounts import Accounted
from drivetrain.sharding.divided import DividedStrategy
from drivetrain.sharding.layout import UnitLayout
from drivetrain.sharding.strategy import UnitsStrategy
from drivetrain.strategy import Run
from drivetrain_zero.config import Zero1Config, Zero2Config, Zero3Config
from drivetrain_zero.layout import plan

ConfigT = TypeVar("ConfigT", bound=Zero1Config)


class Planned(Accounted[ConfigT], Generic[ConfigT]):
    """A stage's units: buckets, and in stage 3 blocks and large layers."""

    @classmethod
    def plan(
        cls,
        config: ConfigT,
        model: ModelSpec,
        run: Run,
        devices: Sequence[Hashable] | None = None,
    ) -> list[UnitLayout]:
        """Cut what lies in units as the options say."""
        specs = [spec for spec in model.parameters if config.places(spec)]
        return plan(specs, run.precision, config.sizes, run.mesh["dp"].size, devices)


class Zero1(Planned[Zero1Config], UnitsStrategy[Zero1Config]):
    """Optimizer states are divided; parameters and gradients are whole on every rank."""

    summary: ClassVar[str] = "as ddp, but every rank keeps and steps 1/N of the optimizer state"
    Config: ClassVar[type] = Zero1Config


class Zero2(Planned[Zero2Config], UnitsStrategy[Zero2Config]):
    """Gradients are divided too: whole ones exist for the buckets on their way only."""

    summary: ClassVar[str] = "as zero1, and every rank keeps 1/N of the gradients"
    Config: ClassVar[type] = Zero2Config


class Zero3(Planned[Zero3Config], DividedStrategy[Zero3Config]):
    """Parameters are divided too: whole ones exist for the units in use only."""

    summary: ClassVar[str] = "as zero2, and every rank keeps 1/N of the parameters"
    Config: ClassVar[type] = Zero3Config
