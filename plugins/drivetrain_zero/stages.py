"""The strategies: what each stage divides among the ranks that the stage before it did not."""

from collections.abc import Hashable, Sequence
from typing import ClassVar

from drivetrain.cost import ModelSpec
from drivetrain.parts.units.divided import DividedStrategy
from drivetrain.parts.units.layout import UnitLayout
from drivetrain.parts.units.strategy import UnitsStrategy
from drivetrain.strategy import Run
from drivetrain_zero.config import Zero1Config, Zero2Config, Zero3Config
from drivetrain_zero.layout import plan


class Zero1(UnitsStrategy[Zero1Config]):
    """Optimizer states are divided; parameters and gradients are whole on every rank."""

    summary: ClassVar[str] = "as ddp, but every rank keeps and steps 1/N of the optimizer state"
    Config: ClassVar[type] = Zero1Config

    @classmethod
    def plan(
        cls,
        config: Zero1Config,
        model: ModelSpec,
        run: Run,
        devices: Sequence[Hashable] | None = None,
    ) -> list[UnitLayout]:
        """Cut what is trained into buckets."""
        return units_of(config, model, run, devices)


class Zero2(UnitsStrategy[Zero2Config]):
    """Gradients are divided too: whole ones exist for the buckets on their way only."""

    summary: ClassVar[str] = "as zero1, and every rank keeps 1/N of the gradients"
    Config: ClassVar[type] = Zero2Config

    @classmethod
    def plan(
        cls,
        config: Zero2Config,
        model: ModelSpec,
        run: Run,
        devices: Sequence[Hashable] | None = None,
    ) -> list[UnitLayout]:
        """Cut what is trained into buckets."""
        return units_of(config, model, run, devices)


class Zero3(DividedStrategy[Zero3Config]):
    """Parameters are divided too: whole ones exist for the units in use only."""

    summary: ClassVar[str] = "as zero2, and every rank keeps 1/N of the parameters"
    Config: ClassVar[type] = Zero3Config

    @classmethod
    def plan(
        cls,
        config: Zero3Config,
        model: ModelSpec,
        run: Run,
        devices: Sequence[Hashable] | None = None,
    ) -> list[UnitLayout]:
        """Cut the model into blocks and large layers, and small parameters into buckets."""
        return units_of(config, model, run, devices)


def units_of(
    config: Zero1Config, model: ModelSpec, run: Run, devices: Sequence[Hashable] | None
) -> list[UnitLayout]:
    """Return the units of what a stage places in units."""
    specs = [spec for spec in model.parameters if config.places(spec)]
    return plan(specs, run.precision, config.sizes, run.mesh["dp"].size, devices)
