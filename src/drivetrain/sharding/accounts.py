"""What strategies over units promise: the plan of units, and the bytes that follow from it."""

from abc import abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from drivetrain.cost import Cost, ModelSpec, TensorSpec
from drivetrain.sharding.estimate import Estimate, Lines, Regather
from drivetrain.sharding.layout import Cut, UnitLayout
from drivetrain.sharding.offload_options import OffloadOptions
from drivetrain.sharding.tier_bytes import Plan
from drivetrain.sharding.tiers import held_by_kind
from drivetrain.strategy import Run, Strategy


class UnitsConfig(Protocol):
    """What strategies over units read from their options."""

    @property
    def fused(self) -> bool:
        """Whether torch's fused kernel steps optimizers that leave the choice open."""

    @property
    def offload(self) -> OffloadOptions:
        """What lies in stores."""

    @property
    def buffers(self) -> str:
        """``broadcast`` sends rank 0's buffers around before a training forward; or ``none``."""

    @property
    def cut(self) -> Cut:
        """What ranks own of parameters."""

    @property
    def lent_buffers(self) -> int:
        """How many gradient buffers are lent; 0 keeps whole gradients."""

    @property
    def reduces_each(self) -> bool:
        """Whether every micro-batch's gradients are reduced."""

    def places(self, spec: TensorSpec) -> bool:
        """Return whether a parameter lies in a unit; what never moves needs none."""


ConfigT = TypeVar("ConfigT", bound=UnitsConfig)


class Accounted(Strategy[ConfigT], Generic[ConfigT]):
    """A strategy over the mesh axis ``dp`` that cuts a model into units."""

    @classmethod
    def axes(cls, config: ConfigT, world_size: int) -> Mapping[str, int]:
        """Return one axis, ``dp``, over all ranks."""
        return {"dp": world_size}

    @classmethod
    @abstractmethod
    def plan(
        cls,
        config: ConfigT,
        model: ModelSpec,
        run: Run,
        devices: Sequence[Hashable] | None = None,
    ) -> list[UnitLayout]:
        """Cut parameters into units, in the order in which backward usually reaches them.

        Args:
            config: the options.
            model: its parameters; those that lie in no unit, too.
            run: its mesh and dtypes.
            devices: the device of each parameter; only equal ones share a unit.
        """

    @classmethod
    def lines(cls, config: ConfigT, run: Run) -> Lines:
        """Return the ranks that the cost is about."""
        return Lines(run.mesh["dp"], run.mesh["dp"])

    @classmethod
    def _gathers(cls, config: ConfigT, run: Run) -> int:
        """Return how often per step units are gathered for a forward, if they were freed."""
        return run.accumulation

    @classmethod
    def _regather(
        cls, config: ConfigT, units: Sequence[UnitLayout], model: ModelSpec, run: Run
    ) -> Regather | None:
        """Return how units come back for backward, if they were freed after forward."""
        return None

    @classmethod
    def estimate(cls, config: ConfigT, layouts: Sequence[UnitLayout], run: Run) -> Estimate:
        """Return what adds up a plan of units."""
        return Estimate(layouts, run.precision, cls.lines(config, run))

    @classmethod
    def cost(cls, config: ConfigT, model: ModelSpec, run: Run) -> Cost:
        """Return what ``drivetrain.sharding.estimate`` works out."""
        units = cls.plan(config, model, run)
        estimate = cls.estimate(config, units, run)
        sent = estimate.sent(
            reductions=run.accumulation if config.reduces_each else 1,
            gathers=cls._gathers(config, run),
            buffers=model.buffers if config.buffers == "broadcast" else (),
            regather=cls._regather(config, units, model, run),
        )
        if config.offload.optimizer:
            lent = config.lent_buffers * estimate.lent_bytes() if config.lent_buffers else 0
            states = {spec.name: model.states for spec in model.parameters}
            plan = Plan(
                model=model,
                units=units,
                precision=run.precision,
                rank=cls.lines(config, run).sharing.rank,
                states=states,
                lent=lent,
            )
            return Cost(held=held_by_kind(plan, config.offload, run.world), sent=sent)
        return Cost(held=estimate.held(model, lent_buffers=config.lent_buffers), sent=sent)
