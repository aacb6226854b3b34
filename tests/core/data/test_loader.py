"""The prepared loader as a DataLoader: attributes, devices, workers, containers."""

import signal

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain.data import PreparedLoader, SeedableRandomSampler
from drivetrain.data.sources import outlive_notices, reader_of
from drivetrain.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def test_is_a_dataloader_with_the_users_attributes(prepare, counting):
    data = counting(10)
    user = DataLoader(data, batch_size=3, collate_fn=list, shuffle=True)
    loader = prepare(user, 0, 2)
    assert isinstance(loader, DataLoader)
    assert isinstance(loader, PreparedLoader)
    assert prepare(loader) is loader
    assert loader.dataset is data
    assert (loader.batch_size, loader.num_workers, loader.drop_last) == (3, 0, False)
    assert (loader.collate_fn, loader.sampler) == (list, user.sampler)
    assert (loader.total_dataset_length, loader.total_batch_size) == (10, 6)
    assert loader.multiprocessing_context is None
    alone = prepare(DataLoader(data, batch_size=4))
    alone.even_batches = True  # one rank has nobody to be even with
    assert torch.cat(list(alone)).tolist() == list(range(10))
    with pytest.raises(AttributeError, match="no_such"):
        loader.no_such  # noqa: B018
    with pytest.raises(UsageError, match="collate_fn"):
        loader.collate_fn = tuple
    loader.note = "free"
    assert loader.note == "free"


def test_batches_are_moved_to_the_device(prepare):
    pairs = [(torch.ones(2), f"sample {i}") for i in range(4)]
    loader = prepare(DataLoader(pairs, batch_size=2), device=torch.device("meta"))
    x, names = next(iter(loader))
    assert x.device.type == "meta"
    assert list(names) == ["sample 0", "sample 1"]


def test_workers_of_ranks_epochs_and_resumed_epochs_get_different_seeds(prepare, counting):
    class Noisy(counting):
        def __getitem__(self, index):
            return torch.rand(())

    def loader_of(rank):
        return prepare(DataLoader(Noisy(4), batch_size=2, num_workers=1), rank, 2)

    loaders = [loader_of(rank) for rank in (0, 1, 0)]
    first, second, again = ([torch.cat(list(each)).tolist() for _ in range(2)] for each in loaders)
    assert first == again
    assert len({tuple(values) for values in [*first, *second]}) == 4
    resumed = prepare(DataLoader(Noisy(8), batch_size=2, num_workers=1), 0, 2)
    batches = iter(resumed)
    before = next(batches).tolist()
    resumed.load_state_dict(resumed.state_dict())
    assert next(iter(resumed)).tolist() != before


def test_batches_are_read_with_the_users_settings():
    given = {"num_workers": 1, "timeout": 9, "prefetch_factor": 3, "persistent_workers": True}
    given |= {"pin_memory": True, "multiprocessing_context": "spawn", "worker_init_fn": print}
    user = DataLoader(range(4), **given)
    reader = reader_of(user, user.dataset, torch.Generator())
    for name in (*given, "collate_fn"):
        assert getattr(reader, name) == getattr(user, name), name


def test_a_worker_lives_through_one_notice_alone():
    started = []
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        outlive_notices(started.append, 3)
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert started == [3]


class Growing:
    """A batch sampler with one more batch in each epoch."""

    batch_size = 1

    def __init__(self):
        self.epoch = 0

    def __len__(self):
        return self.epoch + 1

    def __iter__(self):
        return iter([[i] for i in range(len(self))])

    def set_epoch(self, epoch):
        self.epoch = epoch


def test_set_epoch_reaches_a_batch_sampler_at_once_but_not_in_the_middle_of_an_epoch(prepare):
    loader = prepare(DataLoader(range(8), batch_sampler=Growing()))
    loader.set_epoch(2)
    assert len(loader) == 3
    for _ in loader:
        loader.set_epoch(5)
        assert len(loader) == 3
    assert len(list(loader)) == 6


def test_seedable_random_sampler():
    sampler = SeedableRandomSampler(range(10), seed=4)
    first = list(sampler)
    assert sorted(first) == list(range(10))
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first
    assert list(sampler) == list(SeedableRandomSampler(range(10), seed=5))
