"""Reads an iterable dataset: the stream is cut into global batches, each rank keeps its part.

Streams are cut before collation and in the reading process. So with workers, too, only the last
global batch of an epoch can be short, and no sample is repeated before it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader

from drivetrain.data.division import OrderDivision, SampleDivision, filled
from drivetrain.data.order import forward_epoch
from drivetrain.data.steps import GlobalStep, OrderIdentity, RankBatch, Start, reader_of
from drivetrain.errors import CheckpointError, UsageError
from drivetrain.nested import find_batch_size, recursively_apply


def _as_read(samples: Any) -> Any:
    """Collate nothing: samples travel from the workers as the dataset made them."""
    return samples


class IterableSource:
    """Reads the batches of some ranks from a stream.

    A dataset with ``state_dict`` and ``load_state_dict`` that is read without workers returns to a
    position by itself. Any other dataset is read past the consumed samples, so its stream must
    repeat its order: a ``generator`` attribute is seeded by the epoch.

    Args:
        loader: the user's loader.
        division: how a global batch is divided.
        ranks: which ranks to read for.
        sharded: read only this rank's shard of a dataset that knows how to shard itself. Shards may
            differ in length, so ranks may have different numbers of batches, and a position is
            valid for the same number of ranks only.
    """

    division: OrderDivision

    def __init__(
        self,
        loader: DataLoader[Any],
        division: SampleDivision,
        *,
        ranks: Sequence[int],
        sharded: bool = False,
    ) -> None:
        self.division = division
        self._user = loader
        self._shards = division.size if sharded else 1
        self._ranks = (0,) if sharded else ranks
        dataset: Any = loader.dataset
        self._dataset: Any = (
            dataset.shard(num_shards=division.size, index=ranks[0]) if sharded else dataset
        )
        self._generator = torch.Generator()
        # Without workers one sample at a time, so that the dataset is never ahead of its state.
        chunk = loader.batch_size if loader.num_workers else None
        self._chunked = chunk is not None
        self._reader = reader_of(
            loader,
            self._dataset,
            self._generator,
            batch_size=chunk,
            collate_fn=_as_read,
            pin_memory=False,
        )
        has_state = all(
            callable(getattr(self._dataset, name, None))
            for name in ("state_dict", "load_state_dict")
        )
        self._keeps_state = has_state and not loader.num_workers and not sharded

    def __len__(self) -> int:
        return len(self._user.dataset)  # type: ignore[arg-type]  # raises TypeError if unsized

    def draw_seed(self, seed: int, epoch: int) -> int:
        """Return the seed of the workers; the order is the dataset's own affair."""
        return seed + epoch

    def steps(self, start: Start) -> Iterator[GlobalStep]:
        """Read the rest of an epoch, one global batch ahead.

        Raises:
            CheckpointError: the position was saved with another number of shards.
        """
        identity = OrderIdentity(shards=self._shards)
        if start.identity is not None and start.identity.shards != self._shards:
            raise CheckpointError(
                f"expected to read {start.identity.shards} shards, as when the position was saved, "
                f"found {self._shards}; resume with as many ranks and the same even_batches, or "
                f"start the epoch again with set_epoch({start.epoch + 1})"
            )
        division = self._cut()
        head, stream = self._open(start, division.stride)
        samples, state = self._take(stream, division)
        position = start.position
        while samples:
            if len(head) < division.stride:
                head = [*head, *samples][: division.stride]
            following, following_state = self._take(stream, division)
            position += len(samples) * self._shards
            yield GlobalStep(
                shares=tuple(
                    self._share(division, rank, samples, following, head) for rank in self._ranks
                ),
                start=Start(
                    epoch=start.epoch,
                    seed=start.seed,
                    position=position,
                    identity=identity,
                    dataset_state=state,
                ),
                remainder=-1 if following else self._remainder(samples, division),
                final=not following,
            )
            samples, state = following, following_state

    def _cut(self) -> SampleDivision:
        """Return how the stream that is read here is divided: a shard is not."""
        division = self.division
        if not isinstance(division, SampleDivision):
            raise UsageError(
                f"expected a stream divided by samples, found {type(division).__name__}; an "
                "IterableDataset has no batch sampler"
            )
        return division if self._shards == 1 else replace(division, size=1, even=False)

    def _open(self, start: Start, stride: int) -> tuple[list[Any], Iterator[Any]]:
        """Return the samples that fill up the last batch, and the stream at the position."""
        forward_epoch(self._dataset, start.epoch)
        own = getattr(self._dataset, "generator", None)
        if isinstance(own, torch.Generator):
            own.manual_seed(start.seed)  # ranks that read the same stream must see one order
        self._generator.manual_seed(start.seed)
        if self._keeps_state and start.dataset_state is not None:
            self._dataset.load_state_dict(start.dataset_state)
            return [], self._samples()
        stream = self._samples()
        consumed = start.position // self._shards
        head = list(islice(stream, min(consumed, stride)))
        for _ in islice(stream, consumed - len(head)):
            pass
        return head, stream

    def _samples(self) -> Iterator[Any]:
        for item in self._reader:
            if self._chunked:
                yield from item
            else:
                yield item

    def _take(self, stream: Iterator[Any], division: SampleDivision) -> tuple[list[Any], Any]:
        """Read a global batch, and the dataset's state right after it."""
        samples = list(islice(stream, division.stride))
        if division.drop_last and len(samples) < division.stride:
            samples = []
        state = self._dataset.state_dict() if self._keeps_state and samples else None
        return samples, state

    def _share(
        self,
        division: SampleDivision,
        rank: int,
        samples: list[Any],
        following: list[Any],
        head: list[Any],
    ) -> RankBatch | None:
        if division.even:
            samples = filled(samples, head, division.stride)
        mine = division.share(samples, 0, rank) if division.has(samples, 0, rank) else []
        if not mine:
            return None
        batch = self._user.collate_fn(mine if self._user.batch_size is not None else mine[0])
        if self._user.pin_memory and torch.accelerator.is_available():
            batch = recursively_apply(torch.Tensor.pin_memory, batch)
        return RankBatch(batch, last=not division.has(following, 0, rank))

    def _remainder(self, samples: list[Any], division: SampleDivision) -> int:
        if not division.even or len(samples) == division.stride:
            return -1
        if self._user.batch_size is not None:
            return len(samples)
        sizes = [find_batch_size(self._user.collate_fn(sample)) for sample in samples]
        return sum(1 if size is None else size for size in sizes)
