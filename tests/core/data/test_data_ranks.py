"""Loaders on real ranks: dispatch from rank 0, one order on all, cells that share a batch."""

import itertools
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Sampler

from drivetrain.config import DataConfig
from drivetrain.data import Delivery, prepare_data_loader
from drivetrain.errors import CollectiveError, RankMismatchError
from drivetrain.runtime.mesh import Mesh
from drivetrain.runtime.world import World
from read_samples import CountingDataset, Stream

pytestmark = pytest.mark.ranks(2)


def prepare(loader, sizes=None, rng_types=(), **config):
    world = World.discover(cpu=True)
    axis = Mesh.build(sizes or {"dp": world.size}, world)["dp"]
    given = {"config": DataConfig(**config), "seed": 0, "delivery": Delivery(rng_types=rng_types)}
    return prepare_data_loader(loader, axis=axis, world=world, **given)


def everybody(value):
    held = [None] * dist.get_world_size()
    dist.all_gather_object(held, value)
    return held


def lists(loader):
    return [batch.tolist() for batch in loader]


def flat(of_ranks):
    return [sample for batches in of_ranks for batch in batches for sample in batch]


def test_dispatch_gives_what_each_rank_would_read():
    truths = (True, False)
    cases = itertools.product((Stream, CountingDataset), (0, 2, 3, 5, 8), truths, truths)
    for case in cases:
        kind, n, even, drop_last = case
        data = DataLoader(kind(n), batch_size=2, drop_last=drop_last)
        sent = prepare(data, dispatch_batches=True, even_batches=even)
        own = prepare(data, dispatch_batches=False, even_batches=even)
        assert lists(sent) == lists(own), case
        assert sent.remainder == own.remainder, case
        assert sent.epoch == own.epoch == 1


def test_only_rank_0_reads_and_streams_are_dispatched_unless_told():
    data = Stream(8)
    loader = prepare(DataLoader(data, batch_size=2))
    assert lists(loader) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]][dist.get_rank()]
    assert everybody(data.read) == [8, 8], "all compare first samples, once"
    data.read = 0
    loader.set_epoch(0)
    ends = []
    for _ in loader:
        ends.append(loader.end_of_dataloader)
        assert loader.state_dict()["position"] == [4, 0][len(ends) - 1]
    assert ends == [False, True]
    assert everybody(data.read) == [8, 0]


class Row(NamedTuple):
    x: torch.Tensor
    tag: str


def test_dispatched_batches_keep_their_shape_and_objects():
    rows = [
        {
            "row": Row(torch.full((3,), i, dtype=torch.bfloat16), f"tag {i}"),
            "mask": torch.tensor(i % 2 == 0),
            "nested": [(torch.empty(0), i), None],
            "strided": torch.arange(6)[::2],
        }
        for i in range(4)
    ]

    def collate(samples):
        return {**samples[0], "rows": [each["row"] for each in samples], "ragged": len(samples)}

    (batch,) = prepare(DataLoader(rows, batch_size=2, collate_fn=collate), dispatch_batches=True)
    first = 2 * dist.get_rank()
    assert [row.tag for row in batch["rows"]] == [f"tag {first}", f"tag {first + 1}"]
    assert isinstance(batch["row"], Row)
    assert batch["row"].x.dtype == torch.bfloat16
    assert batch["rows"][1].x.tolist() == [first + 1] * 3
    assert batch["mask"].shape == ()
    assert batch["mask"].item() is True
    assert batch["nested"][0][0].shape == (0,)
    assert batch["nested"][0][1] == first
    assert batch["strided"].tolist() == [0, 2, 4]
    assert (batch["nested"][1], batch["ragged"]) == (None, 2)


def test_dispatch_resumes_from_rank_0s_state_and_leaves_by_break():
    def make():
        user = DataLoader(CountingDataset(20), batch_size=2, shuffle=True)
        return prepare(user, dispatch_batches=True)

    loader = make()
    batches = iter(loader)
    next(batches)
    state = everybody(loader.state_dict())[0]
    rest = [batch.tolist() for batch in batches]
    resumed = make()
    resumed.load_state_dict(state)
    assert lists(resumed) == rest
    for _ in resumed:
        break
    assert resumed.epoch == loader.epoch + 1 == 2
    list(loader)
    assert lists(resumed) == lists(loader)


def test_user_generators_that_differ_still_give_one_order():
    torch.manual_seed(dist.get_rank())
    for dispatch in (False, True):
        user = DataLoader(CountingDataset(12), batch_size=2, shuffle=True)
        loader = prepare(user, use_seedable_sampler=False, dispatch_batches=dispatch)
        orders = [flat(everybody(lists(loader))) for _ in range(2)]
        assert sorted(orders[0]) == sorted(orders[1]) == list(range(12))
        assert orders[0] != orders[1]


@pytest.mark.ranks(4)
def test_ranks_of_a_cell_get_the_same_batch():
    for dispatch in (False, True):
        user = DataLoader(CountingDataset(8), batch_size=2, shuffle=True)
        loader = prepare(user, {"tp": 2, "dp": 2}, dispatch_batches=dispatch)
        batches = everybody(lists(loader))
        assert batches[0] == batches[1] != batches[2] == batches[3]
        assert sorted(flat([batches[0], batches[2]])) == list(range(8))


def test_what_one_rank_alone_meets_ends_every_rank():
    class Failing(Stream):
        def __iter__(self):
            yield from range(3)
            raise OSError("the disk is gone")

    class ByRank(Sampler):
        def __len__(self):
            return 4

        def __iter__(self):
            return iter([(i + dist.get_rank()) % 4 for i in range(4)])

    main = dist.get_rank() == 0
    with pytest.raises((OSError, CollectiveError), match="the disk is gone") as caught:
        list(prepare(DataLoader(Failing(9), batch_size=1)))
    assert caught.type is (OSError if main else CollectiveError)
    no_pickle = DataLoader(Stream(4), batch_size=1, collate_fn=lambda s: lambda: s)
    with pytest.raises(Exception, match="pickle") as caught:
        list(prepare(no_pickle))
    assert isinstance(caught.value, CollectiveError) != main
    with pytest.raises(RankMismatchError, match=r"rank 0: .*rank 1: "):
        list(prepare(DataLoader(CountingDataset(4), sampler=ByRank())))
