"""What strategies whose parameters are divided have in common: units come and go with their use."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.collectives import Communicator, connect
from drivetrain.cost import ModelSpec
from drivetrain.runtime.mesh import Axis, Mesh
from drivetrain.sharding.accounts import UnitsConfig
from drivetrain.sharding.binding import Bound
from drivetrain.sharding.estimate import Regather
from drivetrain.sharding.gathering import Gatherer, Until
from drivetrain.sharding.layout import UnitLayout
from drivetrain.sharding.ranks import Ranks
from drivetrain.sharding.strategy import UnitsStrategy
from drivetrain.sharding.unit import Unit
from drivetrain.sharding.uses import gathers_again
from drivetrain.shards import Reader
from drivetrain.strategy import Prepared, Run


class DividedConfig(UnitsConfig, Protocol):
    """What strategies with divided parameters read from their options."""

    @property
    def ahead(self) -> int:
        """How many units are gathered ahead of the one that computes."""

    @property
    def most_live(self) -> int | None:
        """How many units may be whole or on their way at once; None: what ``ahead`` gives."""

    @property
    def until(self) -> Until:
        """When a unit is freed that a training forward has gathered."""

    def near(self, mesh: Mesh) -> Axis | None:
        """Return the neighbors that keep units together until backward; None: there are none."""


ConfigT = TypeVar("ConfigT", bound=DividedConfig)


class DividedStrategy(UnitsStrategy[ConfigT], Generic[ConfigT]):
    """Parameters are divided, too: whole ones exist for the units in use only."""

    def __init__(self, config: ConfigT, run: Run) -> None:
        near = config.near(run.mesh)
        super().__init__(config, run)
        self._neighbors = None if near is None else self._connect_neighbors(near.size)
        self._gatherer = self._make_gatherer(nn.Identity())  # of nothing, until prepare

    def _connect(self) -> Ranks:
        return self._ranks_over(self.run.mesh["dp"], self.run.mesh["dp"])

    def _ranks_over(self, everyone: Axis, sharing: Axis, replicas: Axis | None = None) -> Ranks:
        """Return ranks with connections over these axes; gathers and gradients have their own."""
        all_ranks = self._communicator(everyone)
        ranks = Ranks(
            all_ranks,
            all_ranks if sharing is everyone else self._communicator(sharing),
            self._communicator(sharing),
            None if replicas is None else self._communicator(replicas),
        )
        return ranks.hold_together()

    def _communicator(self, axis: Axis) -> Communicator:
        world = self.run.world
        return connect(axis, self.run.traffic, world.device, world.timeout, checked=True)

    @property
    def forward_is_collective(self) -> bool:
        """Whether a forward gathers units."""
        divided = any(not unit.resident for unit in self._placement.units)
        return divided and self._ranks.sharing.size > 1

    def prepare(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> Prepared:
        """Lay the model out in units, free them, and gather each when it is needed."""
        prepared = super().prepare(model, optimizers)
        self._gatherer = self._make_gatherer(model)
        return prepared

    def _make_gatherer(self, model: nn.Module) -> Gatherer:
        return Gatherer(
            model,
            [unit for unit in self._placement.units if not unit.resident],
            ahead=self.config.ahead,
            until=self.config.until,
            neighbors=self._neighbors,
            most_live=self.config.most_live,
        )

    def _connect_neighbors(self, size: int) -> Communicator:
        """Start the groups that keep units together between forward and backward."""
        return self._communicator(self.run.mesh.start_neighbors("dp", size, self.run.world))

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run backward; no forward is under way here, only ones that an interrupt cut short."""
        self._gatherer.leave_forward()
        super().backward(loss, **options)

    def running(self) -> AbstractContextManager[None]:
        """Gather what a forward needs, though nothing calls the model."""
        return self._gatherer.running()

    def load(self, reader: Reader) -> None:
        """Load this rank's shares; units are gathered from them when they are needed."""
        self._gatherer.step_taken()
        super().load(reader)

    def close(self) -> None:
        """Take everything off; divided parameters stay divided, unless this is the only rank."""
        self._gatherer.close()
        super().close()
        if self._neighbors is not None:
            self._neighbors.close()

    @classmethod
    def _gathers(cls, config: ConfigT, run: Run) -> int:
        return 1 if config.until == "step" else run.accumulation

    @classmethod
    def _regather(
        cls, config: ConfigT, units: Sequence[UnitLayout], model: ModelSpec, run: Run
    ) -> Regather | None:
        if config.until != "forward":
            return None
        over = config.near(run.mesh) or cls.lines(config, run).sharing
        # Backward begins with as many as it holds then: the last one and those gathered ahead.
        return Regather(over, gathers_again(units, model.module, 1 + config.ahead))

    def _after_round(self) -> None:
        self._gatherer.release_all()

    def after_step(self, bound: Bound) -> None:
        """Free what was gathered: its values are no longer the right ones."""
        self._gatherer.step_taken()
        super().after_step(bound)

    def _take_over_late(self) -> None:
        self._gatherer.step_taken()
        super()._take_over_late()

    @contextmanager
    def _holding(self, units: Sequence[Unit]) -> Iterator[None]:
        sharded = [unit for unit in units if not unit.resident]
        resident = super()._holding([unit for unit in units if unit.resident])
        with resident, self._gatherer.holding(sharded):
            yield
