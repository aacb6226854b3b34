"""Iterable datasets over simulated ranks: the stream is cut into global batches."""

import itertools

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from drivetrain.data import skip_first_batches
from drivetrain.errors import CheckpointError, UsageError
from read_samples import Stream

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class SizedStream(Stream):
    def __len__(self):
        return len(self.numbers)


class StatefulStream(SizedStream):
    """Knows its own position."""

    def __init__(self, n):
        super().__init__(n)
        self.position = 0

    def __iter__(self):
        while self.position < len(self.numbers):
            self.position += 1
            self.read += 1
            yield self.position - 1
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def test_equals_the_map_style_loader_in_all_small_cases(read_all, counting):
    for case in itertools.product((0, 1, 3, 7, 8), (2, 4), (1, 2, 4), *[(False, True)] * 3):
        n, bs, size, split, even, drop_last = case
        if split and bs % size:
            continue
        settings = {"split_batches": split, "even_batches": even}

        def make(data, bs=bs, drop_last=drop_last):
            return DataLoader(data, batch_size=bs, drop_last=drop_last)

        stream, loaders = read_all(lambda: make(SizedStream(n)), size, **settings)  # noqa: B023
        mapped, expected = read_all(lambda: make(counting(n)), size, **settings)  # noqa: B023
        assert stream == mapped, case
        assert [len(loader) for loader in loaders] == [len(rank) for rank in mapped], case
        assert [one.remainder for one in loaders] == [one.remainder for one in expected], case


def test_end_of_dataloader(prepare):
    loader = prepare(DataLoader(Stream(5), batch_size=2))
    assert [loader.end_of_dataloader for _ in loader] == [False, False, True]
    uneven = prepare(DataLoader(Stream(5), batch_size=2), 1, 2, even_batches=False)
    assert [uneven.end_of_dataloader for _ in uneven] == [True]


def test_resume_reads_past_what_was_consumed(prepare, read_all, gathered):
    for before, after, workers in ((1, 3, 0), (2, 1, 0), (2, 2, 2)):

        def make(workers=workers):
            return DataLoader(Stream(13), batch_size=2, num_workers=workers)

        savers = [prepare(make(), rank, before) for rank in range(before)]
        running = [iter(saver) for saver in savers]
        done = [x for _ in range(2) for batches in running for x in next(batches).tolist()]
        rest, loaders = read_all(make, after, state=savers[0].state_dict())
        assert sorted([*done, *gathered(rest, loaders[0].remainder)]) == list(range(13))


def test_resume_by_the_datasets_own_state(prepare):
    saver = prepare(DataLoader(StatefulStream(10), batch_size=2))
    batches = iter(saver)
    assert [next(batches).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    state = saver.state_dict()
    data = StatefulStream(10)
    resumed = prepare(DataLoader(data, batch_size=2))
    resumed.load_state_dict(state)
    assert [batch.tolist() for batch in resumed] == [[4, 5], [6, 7], [8, 9]]
    assert data.read == 6
    assert next(iter(resumed)).tolist() == [0, 1]
    skipped = prepare(DataLoader(StatefulStream(10), batch_size=2))
    skipped.load_state_dict(state)
    assert next(iter(skip_first_batches(skipped, 1))).tolist() == [2, 3]


def test_skipping_counts_from_the_start(prepare):
    loader = prepare(DataLoader(Stream(10), batch_size=2), 1, 2)
    skipped = skip_first_batches(loader, 1)
    assert [batch.tolist() for batch in skipped] == [[6, 7], [0, 1]]
    assert loader.remainder == 2
    assert len(list(skipped)) == 3


def test_the_dataset_and_its_generator_are_told_the_epoch(read_all, prepare, gathered):
    class Shuffled(Stream):
        def __init__(self):
            super().__init__(12)
            self.generator = torch.Generator()
            self.generator.seed()

        def __iter__(self):
            return iter(torch.randperm(12, generator=self.generator).tolist())

    batches, _ = read_all(lambda: DataLoader(Shuffled(), batch_size=2), 2)
    assert sorted(gathered(batches)) == list(range(12))
    data = Shuffled()
    loader = prepare(DataLoader(data, batch_size=12))
    loader.set_epoch(4)
    assert data.epochs == [4]
    first, second = (next(iter(loader)).tolist() for _ in range(2))
    assert first != second
    assert data.epochs[1:] == [4, 5]


def test_batch_size_none_takes_each_item_as_a_batch(read_all):
    class Batches(IterableDataset):
        def __iter__(self):
            return iter([torch.tensor([0, 1]), torch.tensor([2, 3, 4]), torch.tensor([5])])

    make = lambda: DataLoader(Batches(), batch_size=None)  # noqa: E731
    batches, loaders = read_all(make, 2)
    assert batches == [[[0, 1], [5]], [[2, 3, 4], [0, 1]]]
    assert loaders[0].remainder == 1
    with pytest.raises(UsageError, match="batch_size=None"):
        read_all(make, 2, split_batches=True)


class ShardableStream(SizedStream):
    n_shards = 4

    def shard(self, num_shards, index):
        self.part = Stream(0)
        self.part.numbers = self.numbers[index::num_shards]
        return self.part


def test_shards_of_the_dataset_are_read_when_ranks_may_be_uneven(prepare):
    data = [ShardableStream(9) for _ in range(2)]
    loaders = [
        prepare(DataLoader(data[rank], batch_size=2), rank, 2, even_batches=False)
        for rank in range(2)
    ]
    batches = [[batch.tolist() for batch in loader] for loader in loaders]
    assert batches == [[[0, 2], [4, 6], [8]], [[1, 3], [5, 7]]]
    assert data[0].part.read == 5
    assert data[0].read == 0
    more = prepare(DataLoader(ShardableStream(9), batch_size=2), 4, 5, even_batches=False)
    assert [batch.tolist() for batch in more] == [[8]], "more ranks than shards"


def test_position_in_shards_holds_for_the_same_ranks_only(prepare):
    def make(rank, size):
        loader = DataLoader(ShardableStream(12), batch_size=2)
        return prepare(loader, rank, size, even_batches=False)

    saver = make(0, 2)
    batches = iter(saver)
    next(batches)
    state = saver.state_dict()
    resumed = make(1, 2)
    resumed.load_state_dict(state)
    assert [batch.tolist() for batch in resumed] == [[5, 7], [9, 11]]
    for size in (1, 3):
        other = make(0, size)
        other.load_state_dict(state)
        with pytest.raises(CheckpointError, match="expected to read 2 shards"):
            next(iter(other))
