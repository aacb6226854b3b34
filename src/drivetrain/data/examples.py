"""Small batches of a script's own data, for a look at its model before training.

The first rows of a prepared loader are read as the loader would read them. Nobody notices: the
sampler is not asked, and generators, counters and lists of the dataset are afterwards as they were.
"""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from drivetrain import communication
from drivetrain.data.sources import collated, without_trace
from drivetrain.nested import send_to_device
from drivetrain.runtime import rng
from drivetrain.runtime.world import World

SEED = 20150501
"""Of the numbers that a dataset draws for an example: any would do."""


@dataclass(frozen=True, slots=True)
class ExampleBatch:
    """A few rows of a loader's dataset, collated, on the CPU.

    Attributes:
        origin: where it comes from, for messages.
        batch: as the loader's collate_fn returns it; None if there is a problem.
        problem: why there is no batch; else empty.
    """

    origin: str
    batch: Any = None
    problem: str = ""


@dataclass(eq=False)
class ExampleBatches:
    """The first rows of every prepared loader, the latest loaders first.

    Attributes:
        world: the ranks that need the same batches.
        split: whether ranks divide each batch of a loader.
        loaders: the latest first.
    """

    world: World = field(default_factory=World)
    split: bool = False
    loaders: list[DataLoader[Any]] = field(default_factory=list)

    def add(self, loaders: Sequence[DataLoader[Any]]) -> None:
        """Put loaders in front of the known loaders."""
        new = [one for one in loaders if all(one is not known for known in self.loaders)]
        self.loaders = [*new, *self.loaders]

    def rows(self, replicas: int) -> int:
        """Return the samples of a rank's batch in the latest loader; 0 where it does not say.

        Args:
            replicas: ranks over which loaders are divided.
        """
        for loader in self.loaders:
            size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
            if isinstance(size, int):
                return max(1, size // replicas) if self.split else size
        return 0

    def forget(self) -> None:
        """Let go of all loaders."""
        self.loaders = []

    def read(self) -> Sequence[ExampleBatch]:
        """Return a batch, or a problem, for each loader: rank 0's on every rank. Collective."""
        if self.world.size == 1:
            return [first_rows(loader) for loader in self.loaders]
        sent: list[ExampleBatch] = []
        if self.world.rank == 0:  # others may have rows of their own, or other loaders
            sent = [_able_to_travel(first_rows(loader)) for loader in self.loaders]
        return communication.broadcast_object_list(sent)


def first_rows(loader: DataLoader[Any]) -> ExampleBatch:
    """Return rows 0 and 1 of a loader's dataset, or row 0 if two rows do not go together."""
    dataset = loader.dataset
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        return ExampleBatch(kind, problem="an IterableDataset is not read ahead")
    problem = ""
    for rows in ([0, 1], [0]):
        origin = f"row{'s' * (len(rows) > 1)} {' and '.join(map(str, rows))} of {kind}"
        try:
            with rng.fork(SEED), without_trace(dataset, loader.collate_fn):
                return ExampleBatch(origin, send_to_device(collated(loader, rows), "cpu"))
        except Exception as error:  # whatever the user's code raises
            problem = problem or f"{type(error).__name__}: {error}"
    return ExampleBatch(f"rows 0 and 1 of {kind}", problem=problem)


def _able_to_travel(example: ExampleBatch) -> ExampleBatch:
    """Return a batch, or why other ranks cannot get it: not every object can be pickled."""
    try:
        pickle.dumps(example)
    except Exception as error:
        return ExampleBatch(example.origin, problem=f"{type(error).__name__}: {error}")
    return example
