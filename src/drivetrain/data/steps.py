"""Sources of batches: their messages to the loader, and the plain loader that they read from."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader

from drivetrain.data.division import OrderDivision
from drivetrain.data.rows import Rows
from drivetrain.data.workers import outliving_notices
from drivetrain.runtime.world import is_launched


class OrderIdentity(NamedTuple):
    """The order that a saved position belongs to; the position means nothing in another order.

    Attributes:
        total: positions in the order; None for a stream.
        fingerprint: hash of an order that the user's own sampler made, else None.
        shards: number of shards of a stream that each rank reads by itself.
    """

    total: int | None = None
    fingerprint: int | None = None
    shards: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Where an epoch starts.

    Attributes:
        epoch: index of the epoch.
        seed: of the order.
        position: samples or batches of the order that are consumed already.
        identity: the order that the position was counted in; None for the start of an epoch.
        dataset_state: of the dataset itself at this position; None for a dataset without state.
        aside: whether another pass of the same loader is under way, which must notice nothing; this
            one may be of one rank alone.
    """

    epoch: int
    seed: int
    position: int = 0
    identity: OrderIdentity | None = None
    dataset_state: Any = None
    aside: bool = False


class RankBatch(NamedTuple):
    """A rank's batch of a global step.

    Attributes:
        batch: as the collate function made it.
        last: whether the rank has no more batch in the epoch.
        rows: those that repeat samples; None where no batch of the epoch repeats any.
    """

    batch: Any
    last: bool
    rows: Rows | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GlobalStep:
    """One global step.

    Attributes:
        shares: of the ranks that the source reads for; None for a rank without a batch.
        start: where the next step starts.
        remainder: real samples of the epoch's last step when it holds repetitions, else -1.
        final: no rank gets anything after this step.
    """

    shares: tuple[RankBatch | None, ...]
    start: Start
    remainder: int
    final: bool


class BatchSource(Protocol):
    """Reads the batches of some ranks, step by step.

    Attributes:
        division: how the order is divided.
    """

    division: OrderDivision

    @property
    def is_dispatched(self) -> bool:
        """Whether rank 0 alone reads, and sends to the others."""

    def draw_seed(self, seed: int, epoch: int) -> int:
        """Return the seed of the order of an epoch, the same on every rank."""

    def steps(self, start: Start) -> Iterator[GlobalStep]:
        """Read the rest of an epoch."""

    def __len__(self) -> int:
        """Return the positions of a full epoch."""

    def batches(self, rank: int, seed: int, epoch: int) -> int:
        """Return the batches of a rank in a full epoch."""


def reader_of(
    loader: DataLoader[Any], dataset: Any, generator: torch.Generator, **changes: Any
) -> DataLoader[Any]:
    """Return a plain loader with the settings of the user's, except for the changes.

    Args:
        loader: the user's loader.
        dataset: the loader's dataset, or a shard of the dataset.
        generator: seeds the workers, so that an epoch draws nothing from torch's global state.
        changes: arguments of DataLoader.
    """
    settings: dict[str, Any] = {
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "persistent_workers": loader.persistent_workers,
        "generator": generator,
    }
    if loader.num_workers:
        settings["multiprocessing_context"] = loader.multiprocessing_context
        settings["prefetch_factor"] = loader.prefetch_factor
        if is_launched():
            settings["worker_init_fn"] = outliving_notices(loader.worker_init_fn)
    return DataLoader(dataset, **{**settings, **changes})
