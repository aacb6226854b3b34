"""Map-style loaders over 1 to 4 simulated ranks: who gets what, in every small case."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler

from drivetrain import Accelerator, communication
from drivetrain.errors import UsageError
from read_samples import Stream


@pytest.fixture
def simulate(read_all, counting):
    def run(n, bs, size, split, even, drop_last, *, shuffle=True):
        def make():
            options = {"shuffle": shuffle and n > 0, "drop_last": drop_last}
            return DataLoader(counting(n), batch_size=bs, **options)

        return read_all(make, size, split_batches=split, even_batches=even)

    return run


def test_every_sample_once_and_the_length_in_all_small_cases(simulate, gathered):
    sizes = (0, 1, 2, 5, 7, 8, 13), (1, 3, 4), (1, 2, 3, 4)
    for case in itertools.product(*sizes, *[(False, True)] * 3):
        n, bs, size, split, even, drop_last = case
        if split and bs % size:
            continue
        batches, loaders = simulate(*case)
        assert [len(loader) for loader in loaders] == [len(rank) for rank in batches], case
        (remainder,) = {loader.remainder for loader in loaders}
        per_rank = bs // size if split else bs
        step = per_rank * size
        kept = n // step * step if drop_last else n
        samples = gathered(batches, remainder)
        assert (len(samples), len(set(samples))) == (kept, kept), case
        assert set(samples) <= set(range(n)), case
        if drop_last or (even and size > 1):
            assert len({len(rank) for rank in batches}) == 1, case
            assert all(len(batch) == per_rank for rank in batches for batch in rank), case


def test_who_gets_which_batch(simulate):
    for case, expected, remainder in (
        ((8, 2, 2, False, True, False), [[[0, 1], [4, 5]], [[2, 3], [6, 7]]], -1),
        ((8, 4, 2, True, True, False), [[[0, 1], [4, 5]], [[2, 3], [6, 7]]], -1),
        # The tail goes back to the first samples.
        ((5, 2, 2, False, True, False), [[[0, 1], [4, 0]], [[2, 3], [1, 2]]], 1),
        ((2, 2, 3, False, True, False), [[[0, 1]], [[0, 1]], [[0, 1]]], 2),
        ((7, 2, 2, False, False, False), [[[0, 1], [4, 5]], [[2, 3], [6]]], -1),
        # One rank is never filled up.
        ((5, 2, 1, False, True, False), [[[0, 1], [2, 3], [4]]], -1),
    ):
        batches, loaders = simulate(*case, shuffle=False)
        assert batches == expected
        assert [loader.remainder for loader in loaders] == [remainder] * len(loaders)
        _, bs, size, split, *_ = case
        assert {loader.total_batch_size for loader in loaders} == {bs if split else bs * size}


def test_even_batches_can_be_switched_for_a_while(prepare, counting):
    for data in (counting(5), Stream(5)):
        loader = prepare(DataLoader(data, batch_size=2), 1, 2)
        for even, fills, last in ((False, True, []), (True, True, [[1, 2]]), (True, False, [[1]])):
            loader.even_batches, loader.fills_batches = even, fills
            assert [batch.tolist() for batch in loader] == [[2, 3], *last]
            assert loader.fills_batches is fills


def test_epochs_are_shuffled_differently_and_reproducibly(prepare, counting):
    def epochs(seed, **config):
        loader = prepare(DataLoader(counting(20), batch_size=4, shuffle=True), seed=seed, **config)
        return [torch.cat(list(loader)).tolist() for _ in range(3)]

    before = torch.get_rng_state()
    first = epochs(0)
    assert torch.equal(torch.get_rng_state(), before)
    assert first == epochs(0)
    assert first[0] != first[1] != first[2] != first[0]
    assert epochs(1, data_seed=5) == epochs(5) != first


def test_unset_seed_follows_the_loaders_generator_or_torchs(prepare, counting):
    def order(torchs, generator=None):
        torch.manual_seed(torchs)
        own = None if generator is None else torch.Generator().manual_seed(generator)
        state = torch.get_rng_state()
        data = DataLoader(counting(20), shuffle=True, generator=own)
        loader = prepare(data, seed=None)
        assert torch.equal(torch.get_rng_state(), state), "the script's random numbers stay"
        torch.manual_seed(9)  # too late: the loader has its seed
        return [int(batch) for batch in loader]

    assert order(1) == order(1) != order(2)
    assert order(1, generator=4) == order(2, generator=4) != order(2, generator=5)


@pytest.mark.ranks(2)
def test_ranks_that_seed_differently_share_an_order():
    torch.manual_seed(dist.get_rank())
    loader = Accelerator(cpu=True).prepare(DataLoader(range(8), batch_size=1, shuffle=True))
    batches = communication.gather(torch.cat(list(loader)))
    assert sorted(batches.tolist()) == list(range(8))
    torch.manual_seed(0)
    first = Accelerator(cpu=True).prepare(DataLoader(range(8), batch_size=1, shuffle=True))
    assert communication.gather(torch.cat(list(first))).tolist() == batches.tolist()


def test_user_generator_decides_without_seedable_sampler(prepare, counting):
    def orders(seed, *, of_sampler=False):
        generator = torch.Generator()
        generator.manual_seed(seed)
        data = DataLoader(counting(20), batch_size=5, shuffle=True, generator=generator)
        if of_sampler:
            data = DataLoader(counting(20), batch_sampler=data.batch_sampler)
        loader = prepare(data, use_seedable_sampler=False)
        return [torch.cat(list(loader)).tolist() for _ in range(2)]

    assert orders(1) == orders(1)
    assert orders(1, of_sampler=True) == orders(1, of_sampler=True)
    assert orders(1) != orders(2)
    assert orders(1)[0] != orders(1)[1]


class EvenFirst(Sampler):
    """Even numbers first, in a random order that follows a global or its own generator."""

    def __init__(self, n, generator=None):
        self.n, self.generator, self.epochs = n, generator, []

    def __len__(self):
        return self.n

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __iter__(self):
        order = torch.randperm(self.n, generator=self.generator).tolist()
        return iter(sorted(order, key=lambda i: i % 2))


def test_custom_sampler_is_kept_seeded_and_told_the_epoch(prepare, counting):
    for own in (False, True):
        generators = [torch.Generator().manual_seed(rank) if own else None for rank in range(2)]
        before = [each and each.get_state() for each in generators]
        samplers = [EvenFirst(12, each) for each in generators]
        epochs = []
        for rank, sampler in enumerate(samplers):
            torch.manual_seed(rank)  # the ranks' own state must not matter
            loader = prepare(DataLoader(counting(12), batch_size=3, sampler=sampler), rank, 2)
            assert loader.sampler is sampler
            epochs.append([torch.cat(list(loader)).tolist() for _ in range(2)])
        for first, second in zip(*epochs, strict=True):
            assert sorted(first + second) == list(range(12))
        assert epochs[0][0] != epochs[0][1]
        assert samplers[0].epochs == [0, 1]
        for generator, state in zip(generators, before, strict=True):
            assert not own or torch.equal(generator.get_state(), state)


def test_sampling_a_part_of_the_data(prepare, counting):
    data = counting(20)
    loader = prepare(DataLoader(data, sampler=RandomSampler(data, num_samples=5)))
    epochs = [torch.cat(list(loader)).tolist() for _ in range(2)]
    assert [len(set(epoch)) for epoch in epochs] == [5, 5]
    assert max(epochs[0]) >= 5, "not the first five"
    assert set(epochs[0]) != set(epochs[1])


class Buckets(list):
    """A batch sampler of the user: fixed batches in a fixed order."""


def test_custom_batches_are_given_in_turn_and_filled_where_they_can(read_all, counting):
    def read(batches, batch_size=None, drop_last=False, **options):
        sampler = Buckets(batches)
        sampler.drop_last = drop_last
        if batch_size is not None:
            sampler.batch_size = batch_size
        found, loaders = read_all(
            lambda: DataLoader(counting(6), batch_sampler=sampler), 2, **options
        )
        assert loaders[0].batch_sampler is sampler
        return found, loaders

    filled = [[[5, 1], [2, 5]], [[0, 3], [1, 0]]]
    found, loaders = read([[5, 1], [0, 3], [2]], 2)
    assert found == filled
    assert (loaders[0].remainder, len(loaders[0]), loaders[0].total_batch_size) == (1, 2, 4)
    found, loaders = read([[5, 1, 0, 3], [2]], 4, split_batches=True)
    assert (found, loaders[0].remainder) == (filled, 1)
    found, _ = read([[5, 1, 0, 3], [2]], 4, split_batches=True, even_batches=False)
    assert found == [[[5, 1], [2]], [[0, 3]]]
    found, loaders = read([[5], [0, 3, 1], [2, 4]], even_batches=False)
    assert found == [[[5], [2, 4]], [[0, 3, 1]]]
    assert [len(loader) for loader in loaders] == [2, 1]
    for even in (True, False):
        found, loaders = read([[5, 1], [0, 3], [2, 4]], 2, drop_last=True, even_batches=even)
        assert (found, loaders[0].remainder) == ([[[5, 1]], [[0, 3]]], -1)
    found, loaders = read([[5], [0, 3, 1], [2, 4]])
    assert (found, loaders[0].remainder) == ([[[5], [2, 4]], [[0, 3, 1], [5]]], 2)
    assert [len(loader) for loader in loaders] == [2, 2]
    found, loaders = read([[5, 1, 0, 3], [2]], 4, split_batches=True, even_batches=False)
    assert [len(loader) for loader in loaders] == [2, 1], "the last batch is too short for rank 1"
    with pytest.raises(UsageError, match="split_batches=False"):
        read([[5], [0, 3, 1], [2, 4]], split_batches=True)
    with pytest.raises(UsageError, match="found 1 in batch 1 of 3"):
        read([[5, 1], [0], [2, 4]], 2)


def test_batch_size_none_gives_items_in_turn(prepare, counting):
    parts = [list(prepare(DataLoader(counting(5), batch_size=None), rank, 2)) for rank in range(2)]
    assert parts == [[0, 2, 4], [1, 3, 0]]

    class Rows(counting):
        def __getitem__(self, indices):
            return torch.tensor(indices) * 10

    sampler = BatchSampler(range(6), 2, False)  # as a sampler it keeps lists of indices
    loader = prepare(DataLoader(Rows(6), sampler=sampler, batch_size=None), 0, 2)
    assert [batch.tolist() for batch in loader] == [[0, 10], [40, 50]]


def test_loaders_that_would_be_read_wrongly_are_refused(prepare, counting):
    class Doubling(DataLoader):
        def __iter__(self):
            return (2 * batch for batch in super().__iter__())

    data = counting(6)
    twice = DistributedSampler(data, num_replicas=2, rank=0)
    for loader, message in (
        (Doubling(data), "own __iter__"),
        (DataLoader(data, sampler=twice), "twice"),
        (DataLoader(data, num_workers=1, in_order=False), "in_order"),
        (DataLoader(data, sampler=itertools.count()), "sampler with a length"),
    ):
        with pytest.raises(UsageError, match=message):
            prepare(loader, 0, 2)
    for batch_size, message in (
        (3, "divides over 2 ranks with split_batches, found 3"),
        (None, "batch_size=None"),
    ):
        with pytest.raises(UsageError, match=message):
            prepare(DataLoader(data, batch_size=batch_size), 0, 2, split_batches=True)
