"""Reads an iterable dataset: the stream is cut into global batches, each rank keeps its part.

Streams are cut before collation and in the reading process. So with workers, too, only the last
global batch of an epoch can be short, and no sample is repeated before it.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import DataLoader

from drivetrain import communication
from drivetrain.data.division import OrderDivision, SampleDivision, filled
from drivetrain.data.order import forward_epoch
from drivetrain.data.rows import RowCount, count_rows
from drivetrain.data.samples import without_trace
from drivetrain.data.steps import GlobalStep, OrderIdentity, RankBatch, Start, reader_of
from drivetrain.errors import CheckpointError, UsageError
from drivetrain.nested import recursively_apply
from drivetrain.runtime import rng


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
        ranks: as the attribute.
        part: the dataset of this rank alone, which is not divided again; None divides the loader's
            own. Parts may differ in length. Without ``even`` ranks may then have different numbers
            of batches; with it ranks exchange lengths in each step. A position is valid for the
            same number of ranks only.
        begun: as the attribute.

    Attributes:
        division: how a global batch is divided.
        ranks: which ranks to read for.
        begun: the samples of the next pass, of which some are read already.
        is_dispatched: False: every rank reads for itself.
    """

    is_dispatched = False

    division: OrderDivision

    def __init__(
        self,
        loader: DataLoader[Any],
        division: OrderDivision,
        *,
        ranks: Sequence[int],
        part: Any = None,
        begun: Iterator[Any] | None = None,
    ) -> None:
        self.division = division
        self._user = loader
        self._shards = 1 if part is None else division.size
        self.ranks = ranks if part is None else (0,)
        self._dataset: Any = loader.dataset if part is None else part
        self._generator = torch.Generator()
        # Without workers one sample at a time, so that the dataset is never ahead of its state.
        self._chunk = loader.batch_size if loader.num_workers else None
        self._reader = self._make_reader(self._dataset)
        has_state = all(
            callable(getattr(self._dataset, name, None))
            for name in ("state_dict", "load_state_dict")
        )
        self._keeps_state = has_state and not loader.num_workers and part is None
        self.begun = begun

    def _make_reader(self, dataset: Any, **changes: Any) -> DataLoader[Any]:
        return reader_of(
            self._user,
            dataset,
            self._generator,
            batch_size=self._chunk,
            collate_fn=_as_read,
            pin_memory=False,
            **changes,
        )

    def __len__(self) -> int:
        return len(self._user.dataset)  # type: ignore[arg-type]  # raises TypeError if unsized

    def batches(self, rank: int, seed: int, epoch: int) -> int:
        """Return the batches of a rank in a full epoch; TypeError without a length."""
        if self._shards > 1 and self._dataset is self._user.dataset:  # its length is of the part
            return self._cut().steps(len(self), 0)
        return self.division.steps(len(self), rank)

    def first(self, start: Start, count: int) -> list[Any]:
        """Return the first samples of the epoch, with which the next pass then begins.

        There are fewer where the stream ends, or fails: the failure is the next pass's.
        """
        before = self._dataset.state_dict() if self._keeps_state else None
        if self.begun is None:
            self._prepare(start, self._dataset)
        stream = self._samples(self._reader) if self.begun is None else self.begun
        found: list[Any] = []
        try:
            found += islice(stream, count)
        except Exception as error:
            stream = _failing(error)
        if self._keeps_state:
            self._dataset.load_state_dict(before)
        else:
            self.begun = chain(found, stream)
        return found

    def again(self, seed: int, count: int) -> list[Any]:
        """Return the first samples once more, while every generator is seeded."""
        self._generator.manual_seed(seed)
        with rng.fork(seed), without_trace(self._dataset):
            return list(islice(self._samples(self._reader), count))

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
        dataset = _beside(self._dataset) if start.aside else self._dataset
        head, stream = self._open(start, division.stride, dataset)
        samples, state = self._take(stream, division, dataset)
        sizes = self._sizes(samples, division)
        position = start.position
        counts = {rank: RowCount() for rank in self.ranks}
        while any(sizes):
            if len(head) < division.stride:
                head = [*head, *samples][: division.stride]
            if not position and len(sizes) > 1 and not all(sizes):
                raise _no_samples(sizes)
            following, following_state = self._take(stream, division, dataset)
            following_sizes = self._sizes(following, division)
            rest = following or [None] * any(following_sizes)  # other ranks go on with their parts
            position += self._consumed(samples, division)
            yield GlobalStep(
                shares=tuple(
                    self._share(division, rank, (samples, rest, head), counts[rank])
                    for rank in self.ranks
                ),
                start=Start(
                    epoch=start.epoch,
                    seed=start.seed,
                    position=position,
                    identity=identity,
                    dataset_state=state,
                ),
                remainder=-1 if any(following_sizes) else self._remainder(samples, sizes, division),
                final=not any(following_sizes),
            )
            samples, state, sizes = following, following_state, following_sizes

    def _sizes(self, samples: Sequence[Any], division: SampleDivision) -> list[int]:
        """Return how many samples the step has, of each rank where ranks read parts."""
        if self._shards == 1 or not division.even:
            return [len(samples)]
        sizes: list[int] = communication.gather(torch.tensor([len(samples)], device="cpu")).tolist()
        short = division.drop_last and min(sizes) < division.stride
        return [0] if short else sizes

    def _consumed(self, samples: Sequence[Any], division: SampleDivision) -> int:
        """Return the positions of a step; ranks that have no samples left count those of others."""
        if self._shards > 1 and division.even:
            return division.stride * self._shards
        return len(samples) * self._shards

    def _cut(self) -> SampleDivision:
        """Return how the stream that is read here is divided: a part is not."""
        division = self.division
        if not isinstance(division, SampleDivision):
            raise UsageError(
                f"expected a stream divided by samples, found {type(division).__name__}; an "
                "IterableDataset has no batch sampler"
            )
        return division if self._shards == 1 else replace(division, size=1)

    def _open(self, start: Start, stride: int, dataset: Any) -> tuple[list[Any], Iterator[Any]]:
        """Return the samples that fill up the last batch, and the stream at the position."""
        begun, self.begun = self.begun, None
        reader = self._reader
        if start.aside:
            reader = self._make_reader(dataset, persistent_workers=False)
        if begun is None:
            self._prepare(start, dataset)
        if self._keeps_state and start.dataset_state is not None:
            dataset.load_state_dict(start.dataset_state)
            return [], self._samples(reader)
        stream = self._samples(reader) if begun is None else begun
        consumed = start.position // self._shards
        head = list(islice(stream, min(consumed, stride)))
        for _ in islice(stream, consumed - len(head)):
            pass
        return head, stream

    def _prepare(self, start: Start, dataset: Any) -> None:
        """Tell a dataset its epoch, and seed its generator and the workers."""
        if not start.aside:
            forward_epoch(dataset, start.epoch)
        own = getattr(dataset, "generator", None)
        if isinstance(own, torch.Generator):
            own.manual_seed(start.seed)  # ranks that read the same stream must see one order
        self._generator.manual_seed(start.seed)

    def _samples(self, reader: DataLoader[Any]) -> Iterator[Any]:
        for item in reader:
            if self._chunk is not None:
                yield from item
            else:
                yield item

    def _take(
        self, stream: Iterator[Any], division: SampleDivision, dataset: Any
    ) -> tuple[list[Any], Any]:
        """Read a global batch, and the dataset's state right after it."""
        samples = list(islice(stream, division.stride))
        if division.drop_last and len(samples) < division.stride:
            samples = []
        state = dataset.state_dict() if self._keeps_state and samples else None
        return samples, state

    def _share(
        self,
        division: SampleDivision,
        rank: int,
        read: tuple[list[Any], list[Any], list[Any]],
        count: RowCount,
    ) -> RankBatch | None:
        """Return a rank's batch.

        Args:
            division: of what is read here.
            rank: index in the division.
            read: the samples of this step and of the rest, and what fills up the last step.
            count: of the rank's rows.
        """
        samples, rest, head = read
        whole = filled(samples, head, division.stride) if division.even else samples
        mine = division.share(whole, 0, rank) if division.has(whole, 0, rank) else []
        if not mine:
            return None
        batch = self._collate(mine)

        def again(real: int) -> Any:
            with rng.fork(0), without_trace(self._user.collate_fn):
                return self._collate(mine[:real])

        rows = None
        if division.even:
            rows = count.of(batch, len(mine), division.real(samples, 0, rank), again)
        if self._user.pin_memory and torch.accelerator.is_available():
            batch = recursively_apply(torch.Tensor.pin_memory, batch)
        return RankBatch(batch, not division.has(rest, 0, rank), rows)

    def _collate(self, samples: list[Any]) -> Any:
        return self._user.collate_fn(samples if self._user.batch_size is not None else samples[0])

    def _remainder(self, samples: list[Any], sizes: Sequence[int], division: SampleDivision) -> int:
        full = division.stride * len(sizes)
        if not division.even or sum(sizes) == full:
            return -1
        if self._user.batch_size is not None or self._shards > 1:
            return sum(sizes)
        return sum(count_rows(self._user.collate_fn(sample)) for sample in samples)


def _failing(error: Exception) -> Iterator[Any]:
    raise error
    yield


def _beside(dataset: Any) -> Any:
    """Return a dataset for a pass beside another one, which must notice nothing."""
    other = copy.copy(dataset)
    if isinstance(own := getattr(dataset, "generator", None), torch.Generator):
        other.generator = own.clone_state()
    return other


def _no_samples(sizes: Sequence[int]) -> UsageError:
    return UsageError(
        f"expected a part of the stream on every rank to fill its batches from, found {sizes} "
        "samples in the first batches of the ranks; divide it into more parts, or set "
        "even_batches=False"
    )
