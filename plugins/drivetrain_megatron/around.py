"""A strategy around a data-parallel one: what it does not do itself, the one inside does."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from drivetrain.strategy import Run, Strategy
from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.nesting import data_parallel


class Around(Strategy[MegatronConfig]):
    """What a cell's ranks leave to the data-parallel strategy of the configuration."""

    def __init__(self, config: MegatronConfig, run: Run) -> None:
        super().__init__(config, run)
        kind, options = data_parallel(config)
        self._inner: Strategy[Any] = kind(options, run)

    @property
    def _is_one_rank(self) -> bool:
        """Whether a cell has one rank, so that the strategy inside does everything."""
        return self.config.tp * self.config.pp == 1

    def gradients(self, only: Collection[nn.Parameter] | None = None) -> Iterator[Tensor]:
        """Yield the pieces of gradient that this rank's optimizers read."""
        return self._inner.gradients(only)

    def scale_gradients(self, factor: float) -> None:
        """Multiply all gradients at hand."""
        self._inner.scale_gradients(factor)

    def stand_in(self, *, synchronize: bool) -> None:
        """Take part in one step of the other data-parallel ranks; a cell of several cannot."""
        if not self._is_one_rank:
            super().stand_in(synchronize=synchronize)
        self._inner.stand_in(synchronize=synchronize)

    def catch_up(self, source: int) -> None:
        """Take over the training state of one rank."""
        self._inner.catch_up(source)

    def progress(self) -> Mapping[str, int]:
        """Return what the strategy counts."""
        return self._inner.progress()

    def resume(self, progress: Mapping[str, int]) -> None:
        """Go on counting where a saved run was."""
        self._inner.resume(progress)

    def names(self) -> Mapping[int, str]:
        """Return names of what optimizers hold, by identity."""
        return self._inner.names()

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's own module."""
        return self._inner.unwrap(model)
