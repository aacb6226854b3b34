"""Streams on ranks: one for all, parts that a dataset makes itself, orders of each rank's own."""

import random
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from drivetrain import Accelerator, DataLoaderConfiguration
from drivetrain.data.streams import fingerprint_of
from drivetrain.errors import CollectiveError, UsageError


class Stream(IterableDataset):
    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples())


def parts(n, first=(), place=None):
    """Return samples of this rank, and of its worker."""
    rank, size = place or (dist.get_rank(), dist.get_world_size())
    if (worker := get_worker_info()) is not None:
        rank, size = rank * worker.num_workers + worker.id, size * worker.num_workers
    return [*first, *range(rank, n, size)]


def shuffled(n, generator):
    order = list(range(n))
    generator.shuffle(order)
    return order


def gathered(samples, epochs=1, value=int, workers=0, drop_last=False, **config):
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config))
    # Forked workers need no name under which this module could be imported.
    how = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    user = DataLoader(Stream(samples), batch_size=2, drop_last=drop_last, **how)
    loader = accelerator.prepare(user)
    found = []
    for _ in range(epochs):
        for batch in loader:
            rows = batch["x"] if isinstance(batch, dict) else batch
            found += map(value, accelerator.gather_for_metrics(rows))
    return sorted(found)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.ranks(3)
def test_a_stream_that_divides_itself_is_not_divided_again():
    whole = list(range(23))
    assert gathered(lambda: parts(23), epochs=2) == sorted(whole * 2)
    assert gathered(lambda: parts(23), dispatch_batches=False) == whole
    assert gathered(lambda: parts(23), drop_last=True) == whole[:18]  # rank 2 has 7 of them
    assert gathered(lambda: parts(400)) == list(range(400))
    size = dist.get_world_size()
    among_workers = partial(parts, 23, place=(dist.get_rank(), size))
    assert gathered(among_workers, workers=2) == whole
    assert gathered(lambda: parts(23, first=[99, 98])) == [*whole, *[98] * size, *[99] * size]
    assert gathered(lambda: [str(i) for i in parts(23)]) == whole
    assert gathered(lambda: [{"x": str(i), "y": torch.zeros(2)} for i in parts(23)]) == whole
    with pytest.raises(UsageError, match="a part of the stream on every rank"):
        gathered(lambda: parts(1))


@pytest.mark.ranks(2)
def test_samples_in_an_order_of_each_rank_are_dealt_out_by_rank_0():
    for n in (7, 500):
        for generator in (random, random.Random(), random.Random(dist.get_rank())):
            found = gathered(lambda n=n, generator=generator: shuffled(n, generator))
            assert found == list(range(n))
    with pytest.raises(UsageError, match="in one order on all ranks"):
        gathered(lambda: shuffled(7, random.Random()), dispatch_batches=False)


@pytest.mark.ranks(2)
def test_what_nobody_can_tell_is_refused_and_decided_by_dispatch_batches():
    first = dist.get_rank() * 1000

    def samples():
        return [first + i for i in shuffled(300, random.Random())]

    with pytest.raises(UsageError, match="set dispatch_batches=True"):
        gathered(samples)
    assert len(gathered(samples, dispatch_batches=True)) == 300
    assert len(gathered(samples, dispatch_batches=False)) == 600


@pytest.mark.ranks(2)
def test_parts_resume_where_they_were():
    accelerator = Accelerator(cpu=True)
    gather = accelerator.gather_for_metrics

    def make():
        return accelerator.prepare(DataLoader(Stream(lambda: parts(23)), batch_size=2))

    loader, resumed = make(), make()
    batches = iter(loader)
    seen = [gather(next(batches)) for _ in range(4)]
    held = [loader.state_dict()]
    dist.broadcast_object_list(held)
    resumed.load_state_dict(held[0])
    assert sorted(torch.cat([*seen, *map(gather, resumed)]).tolist()) == list(range(23))
    assert held[0]["order"]["shards"] == 2


@pytest.mark.ranks(2)
def test_the_samples_that_were_compared_are_read_once_and_a_failure_comes_in_its_place():
    once = iter(range(9))
    assert gathered(lambda: once) == list(range(9))

    def failing():
        yield from range(5)
        raise OSError("gone")

    loader = Accelerator(cpu=True).prepare(DataLoader(Stream(failing), batch_size=1))
    seen = []
    with pytest.raises((OSError, CollectiveError), match="gone"):
        seen.extend(batch.item() for batch in loader)
    assert seen == [dist.get_rank()]


@pytest.mark.ranks(2)
def test_a_look_of_rank_0_alone_at_a_stream_ends_all_ranks():
    loader = Accelerator(cpu=True).prepare(DataLoader(Stream(lambda: range(20)), batch_size=2))
    pairs = [(a.tolist(), b.tolist()) for a, b in zip(loader, loader, strict=True)]
    assert all(one == other for one, other in pairs), "a pass of its own on all ranks"
    with pytest.raises(CollectiveError, match="beside another pass"):
        for _ in loader:
            if dist.get_rank() == 0:
                next(iter(loader))


def test_equal_samples_have_equal_fingerprints():
    def samples(value):
        row = {"x": torch.tensor([value, 2.0]), "word": "a", "rest": (None, [value])}
        return [value, str(value), torch.tensor(value), row, (value,), {value}]

    first, again, other = (list(map(fingerprint_of, samples(v))) for v in (1.0, 1.0, 3.0))
    assert first == again
    assert not set(first) & set(other)
    assert len(set(first)) == len(first)
    zeros = [*map(torch.zeros, ((2, 3), (3, 2), 6)), torch.zeros(6, dtype=torch.int32)]
    assert len(set(map(fingerprint_of, zeros))) == len(zeros)
