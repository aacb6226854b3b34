"""The strategies: what each stage divides among the ranks that the stage before it did not."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.parts.collectives import Communicator, connect
from drivetrain.shards import Reader
from drivetrain.strategy import Prepared, Run
from drivetrain_zero.binding import Bound
from drivetrain_zero.config import Zero1Config, Zero2Config, Zero3Config
from drivetrain_zero.gathering import Gatherer
from drivetrain_zero.unit import FlatUnit
from drivetrain_zero.zero import Zero


class Zero1(Zero[Zero1Config]):
    """Optimizer states are divided; parameters and gradients are whole on every rank."""

    summary: ClassVar[str] = "as ddp, but every rank keeps and steps 1/N of the optimizer state"
    Config: ClassVar[type] = Zero1Config


class Zero2(Zero[Zero2Config]):
    """Gradients are divided too: whole ones exist for the buckets on their way only."""

    summary: ClassVar[str] = "as zero1, and every rank keeps 1/N of the gradients"
    Config: ClassVar[type] = Zero2Config


class Zero3(Zero[Zero3Config]):
    """Parameters are divided too: whole ones exist for the units in use only."""

    summary: ClassVar[str] = "as zero2, and every rank keeps 1/N of the parameters"
    Config: ClassVar[type] = Zero3Config
    checks_order: ClassVar[bool] = True

    def __init__(self, config: Zero3Config, run: Run) -> None:
        near = config.near(run.mesh)
        super().__init__(config, run)
        self._neighbors = None if near is None else self._connect_neighbors(near.size)
        self._gatherer = self._make_gatherer(nn.Identity())  # of nothing, until prepare

    def prepare(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> Prepared:
        """Lay the model out in units, free them, and gather each when it is needed."""
        prepared = super().prepare(model, optimizers)
        self._gatherer = self._make_gatherer(model)
        return prepared

    def _make_gatherer(self, model: nn.Module) -> Gatherer:
        return Gatherer(
            model,
            [unit for unit in self._placement.units if not unit.resident],
            ahead=self.config.prefetch,
            reshard_after_forward=bool(self.config.reshard_after_forward),
            neighbors=self._neighbors,
        )

    def _connect_neighbors(self, size: int) -> Communicator:
        """Start the groups that keep units together between forward and backward."""
        world, mesh = self.run.world, self.run.mesh
        axis = mesh.start_neighbors("dp", size, world)
        return connect(axis, self.run.traffic, world.device, world.timeout, checked=True)

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run backward; no forward is under way here, only ones that an interrupt cut short."""
        self._gatherer.leave_forward()
        super().backward(loss, **options)

    def load(self, reader: Reader) -> None:
        """Load this rank's ranges; units are gathered from them when they are needed."""
        self._gatherer.release_all()
        super().load(reader)

    def close(self) -> None:
        """Take everything off; divided parameters stay divided, unless this is the only rank."""
        self._gatherer.close()
        super().close()
        if self._neighbors is not None:
            self._neighbors.close()

    def _after_round(self) -> None:
        self._gatherer.release_all()

    def _after_step(self, bound: Bound) -> None:
        self._gatherer.release_all()
        super()._after_step(bound)

    @contextmanager
    def _holding(self, units: Sequence[FlatUnit]) -> Iterator[None]:
        sharded = [unit for unit in units if not unit.resident]
        resident = super()._holding([unit for unit in units if unit.resident])
        with resident, self._gatherer.holding(sharded):
            yield
