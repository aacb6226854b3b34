"""The strategies: what each stage divides among the ranks that the stage before it did not."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import ClassVar

from torch import nn
from torch.optim import Optimizer

from drivetrain.parts.buckets import MIB
from drivetrain.strategy import Prepared, Reader, TensorSpec
from drivetrain_zero.binding import Bound
from drivetrain_zero.config import Zero1Config, Zero2Config, Zero3Config
from drivetrain_zero.gathering import Gatherer
from drivetrain_zero.layout import Cut
from drivetrain_zero.unit import FlatUnit
from drivetrain_zero.zero import Zero


class Zero1(Zero[Zero1Config]):
    """Optimizer states are divided; parameters and gradients are whole on every rank."""

    summary: ClassVar[str] = "as ddp, but every rank keeps and steps 1/N of the optimizer state"
    Config: ClassVar[type] = Zero1Config

    @classmethod
    def cut(cls, config: Zero1Config) -> Cut:
        """Cut by size."""
        return Cut(int(config.bucket_mib * MIB), config.partition == "parameter")

    @classmethod
    def lent_buffers(cls, config: Zero1Config) -> int:
        """Keep whole gradients."""
        return 0

    @classmethod
    def reduces_each(cls, config: Zero1Config) -> bool:
        """Add micro-batches up locally."""
        return False


class Zero2(Zero[Zero2Config]):
    """Gradients are divided too: whole ones exist for the buckets on their way only."""

    summary: ClassVar[str] = "as zero1, and every rank keeps 1/N of the gradients"
    Config: ClassVar[type] = Zero2Config

    @classmethod
    def cut(cls, config: Zero2Config) -> Cut:
        """Cut by size."""
        return Cut(int(config.bucket_mib * MIB), config.partition == "parameter")

    @classmethod
    def lent_buffers(cls, config: Zero2Config) -> int:
        """Lend buffers, unless whole gradients are kept during a window."""
        return 0 if config.accumulate == "local" else config.buffers_in_flight

    @classmethod
    def reduces_each(cls, config: Zero2Config) -> bool:
        """Reduce every micro-batch, unless the user prefers to send less."""
        return config.accumulate == "reduce"


class Zero3(Zero[Zero3Config]):
    """Parameters are divided too: whole ones exist for the units in use only."""

    summary: ClassVar[str] = "as zero2, and every rank keeps 1/N of the parameters"
    Config: ClassVar[type] = Zero3Config
    checks_order: ClassVar[bool] = True

    @classmethod
    def cut(cls, config: Zero3Config) -> Cut:
        """Cut into blocks and large layers."""
        return Cut(
            int(config.bucket_mib * MIB),
            config.partition == "parameter",
            shard_from=config.keep_below,
            own_unit_from=config.own_unit_from,
        )

    @classmethod
    def lent_buffers(cls, config: Zero3Config) -> int:
        """Lend buffers, unless whole gradients are kept during a window."""
        return 0 if config.accumulate == "local" else config.buffers_in_flight

    @classmethod
    def reduces_each(cls, config: Zero3Config) -> bool:
        """Reduce every micro-batch, unless the user prefers to send less."""
        return config.accumulate == "reduce"

    @classmethod
    def regathers(cls, config: Zero3Config) -> bool:
        """Free units after their forward, unless the user prefers to send less."""
        return bool(config.reshard_after_forward)

    @classmethod
    def is_placed(cls, spec: TensorSpec) -> bool:
        """Divide frozen parameters as well."""
        return True

    def prepare(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> Prepared:
        """Lay the model out in units, free them, and gather each when it is needed."""
        prepared = super().prepare(model, optimizers)
        self._gatherer = Gatherer(
            model,
            [unit for unit in self._placement.units if not unit.resident],
            ahead=self.config.prefetch,
            reshard_after_forward=bool(self.config.reshard_after_forward),
        )
        return prepared

    def load(self, reader: Reader) -> None:
        """Load this rank's ranges; units are gathered from them when they are needed."""
        self._gatherer.release_all()
        super().load(reader)

    def close(self) -> None:
        """Take everything off; divided parameters stay divided, unless this is the only rank."""
        self._gatherer.close()
        super().close()

    def _after_round(self) -> None:
        self._gatherer.release_all()

    def _after_step(self, bound: Bound) -> None:
        self._gatherer.release_all()
        super()._after_step(bound)

    def _holding(self, units: Sequence[FlatUnit]) -> AbstractContextManager[None]:
        super()._holding([unit for unit in units if unit.resident])
        return self._gatherer.holding([unit for unit in units if not unit.resident])
