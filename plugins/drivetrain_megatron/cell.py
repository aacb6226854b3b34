"""A cell: the ranks that share one replica, with a data-parallel strategy inside.

``DataParallelCell`` hands everything that ``Megatron`` does not do itself to that strategy;
``ParameterFacts`` says how the ranks of a cell hold a parameter.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from drivetrain.errors import ConfigError
from drivetrain.runtime.mesh import Mesh
from drivetrain.strategy import Run, Strategy, find_strategy
from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.tensor.partition import Partition


def data_parallel(config: MegatronConfig) -> tuple[type[Strategy[Any]], Any]:
    """Return the class of the data-parallel strategy and its options.

    Raises:
        ConfigError: it is not installed, or is none: it lays ranks out on other axes than ``dp``.
    """
    name = config.data_parallel.name
    kind, options = find_strategy(name, config.data_parallel.options)
    axes = set(kind.axes(options, 1))
    if axes != {"dp"}:
        raise ConfigError(
            f"strategy.data_parallel: expected a strategy over the axis dp alone, found {name!r} "
            f"over {', '.join(sorted(axes))}; name one that replicates or shards a whole model"
        )
    return kind, options


def advice(mesh: Mesh) -> str:
    """Return why the order of axes makes tensor-parallel ranks wait for a network; else "".

    Tensor parallelism waits for its neighbors several times in each block, pipelines once per
    stage, data parallelism once per step: the first belongs inside of a host (Narayanan et al.
    2021, section 3.2, takeaway 1).
    """
    line = mesh["tp"]
    if not line.spans_hosts:
        return ""
    hosts = {host: line.hosts.count(host) for host in line.hosts}
    where = ", ".join(f"{count} on {host}" for host, count in hosts.items())
    return (
        f"tensor-parallel ranks lie on {len(hosts)} hosts ({where}): every block waits for the "
        "network between them; put tp first in order, and set tp to at most the ranks of a host"
    )


class DataParallelCell(Strategy[MegatronConfig]):
    """The methods of a cell that its data-parallel strategy carries out."""

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
        """Return the counters of the data-parallel strategy."""
        return self._inner.progress()

    def resume(self, progress: Mapping[str, int]) -> None:
        """Go on counting where a saved run was."""
        self._inner.resume(progress)

    def names(self) -> Mapping[int, str]:
        """Return the names of the tensors that optimizers hold, by ``id``."""
        return self._inner.names()

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's own module."""
        return self._inner.unwrap(model)


@dataclass(frozen=True, slots=True)
class ParameterFacts:
    """How a parameter lies on the tensor-parallel axis.

    Attributes:
        shape: the global shape, as the user's model has it.
        partition: which part each rank of the axis holds; None if all hold the whole.
        partial: whether each rank's gradient is a part of a sum over the axis.
    """

    shape: tuple[int, ...]
    partition: Partition | None = None
    partial: bool = False

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of the part that one rank of the axis holds."""
        if self.partition is None:
            return self.shape
        sizes = list(self.shape)
        sizes[self.partition.dim] = self.partition.local_size(rank)
        return tuple(sizes)

    def saves(self, rank: int) -> bool:
        """Whether this rank saves its part: the first holder on the axis does."""
        first = 0 if self.partition is None else self.partition.first_holder(rank)
        return rank == first
