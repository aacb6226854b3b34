"""gather_for_metrics: each row of an evaluation once, whatever batches are made of."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from drivetrain import Accelerator
from drivetrain.errors import RankMismatchError, UsageError

pytestmark = pytest.mark.ranks(2)


class Items(Dataset):
    """Items of several rows."""

    def __init__(self, n, rows=1):
        self.n, self.rows = n, rows

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return torch.arange(i * self.rows, (i + 1) * self.rows)


def repeated(samples):
    return torch.cat([each.repeat(int(each) % 3) for each in samples])


@pytest.mark.ranks(3)
def test_rows_of_any_number_are_there_once():
    accelerator = Accelerator(cpu=True)

    def rows(user, make=lambda batch: batch * 1):
        loader = accelerator.prepare(user)
        return sorted(int(x) for b in loader for x in accelerator.gather_for_metrics(make(b)))

    for n in (1, 4, 5, 7):
        assert rows(DataLoader(Items(n, 3), batch_size=None)) == list(range(3 * n))
        for size in (2, 3):
            found = rows(DataLoader(Items(n), batch_size=size, collate_fn=repeated))
            assert found == sorted(i for i in range(n) for _ in range(i % 3)), (n, size)
        twice = DataLoader(torch.arange(n), batch_size=2)
        assert rows(twice, lambda x: x.repeat_interleave(3)) == sorted([*range(n)] * 3)
        assert rows(twice, lambda x: [str(int(each)) for each in x]) == list(range(n))
    batches = [[0], [1, 2, 3], [4, 5]]
    assert rows(DataLoader(torch.arange(6), batch_sampler=batches)) == list(range(6))


def test_dicts_and_scalars_are_cut_with_their_batch():
    accelerator = Accelerator(cpu=True)
    rows = [{"x": i, "word": str(i)} for i in range(5)]
    loader = accelerator.prepare(DataLoader(rows, batch_size=2))
    seen, means = [], []
    for batch in loader:
        dicts = accelerator.gather_for_metrics({"x": batch["x"] * 1, "word": batch["word"]})
        seen += [(int(x), word) for d in dicts for x, word in zip(d["x"], d["word"], strict=True)]
        means += accelerator.gather_for_metrics(batch["x"].double().mean()).tolist()
    assert seen == [(i, str(i)) for i in range(5)]
    assert means == [0.5, 2.5, 2.0], "rank 1 has no mean of the last step: it only repeats"
    with pytest.raises(RankMismatchError, match="structure, shapes"):
        accelerator.gather_for_metrics(torch.zeros(2, 1 + dist.get_rank()))


def test_pieces_of_a_batch_are_cut_with_it():
    """Of one row, too; the last batch of rank 1 repeats one sample or all of them."""
    for option in (1, 2):
        accelerator = Accelerator(cpu=True, config={"micro_batch": option})
        pieces, gather = accelerator.micro_batches, accelerator.gather_for_metrics
        for n in (7, 9, 10):
            loader = accelerator.prepare(DataLoader(torch.arange(n), batch_size=3))
            found = [gather(part * 10).tolist() for batch in loader for part in pieces(batch)]
            assert sorted(itertools.chain(*found)) == list(range(0, 10 * n, 10)), (option, n)
            found = [
                gather([str(int(each)) for each in part])
                for batch in loader
                for part in pieces(batch.repeat_interleave(2))
            ]
            assert sorted(itertools.chain(*found)) == sorted([*map(str, range(n))] * 2), (option, n)
        with pytest.raises(UsageError, match="pieces of the batch at hand, which has 3 rows"):
            for batch in loader:
                for part in pieces(torch.cat([batch, batch[:1]])):
                    gather(part * 10)


def test_two_loaders_and_a_loop_that_is_over():
    accelerator = Accelerator(cpu=True)
    gather = accelerator.gather_for_metrics
    short, long = accelerator.prepare(*(DataLoader(torch.arange(n), batch_size=2) for n in (5, 8)))
    pairs = [(gather(a).tolist(), gather(b).tolist()) for a, b in zip(short, long, strict=True)]
    assert [x for a, _ in pairs for x in a] == list(range(5))
    assert [x for _, b in pairs for x in b] == list(range(8))

    batches = list(short)
    assert torch.cat([gather(batch) for batch in batches]).tolist() == list(range(5))
    assert sorted(gather(torch.cat(batches) * 10).tolist()) == [0, 10, 20, 30, 40]
    with pytest.raises(UsageError, match="inside of the loop"):
        gather(batches[0] * 10)
    assert gather(torch.tensor(1.0)).tolist() == [1, 1]
    del batches
    seen = []
    for batch in short:
        seen.append(batch * 1)
        if short.end_of_dataloader:
            break
    assert gather(seen[-1]).tolist() == [4], "it stays at hand"


def test_rows_that_cannot_be_told_are_refused_on_all_ranks():
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(torch.arange(7), batch_size=2))
    with pytest.raises(UsageError, match="as many rows as the batch at hand has, 2"):
        for batch in loader:
            accelerator.gather_for_metrics(batch.repeat(2)[:3])
    assert loader.remainder == 3, "the last batch of rank 1 alone repeats a sample"


def expected_of(rows, epochs):
    """Train in plain torch with windows of three batches."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        batches = rows.split(4)
        for first in range(0, len(batches), 3):
            window = batches[first : first + 3]
            for batch in window:
                (model(batch).square().mean() / len(window)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.weight


def stays_open(evaluate, other):
    batches = iter(other)
    return lambda: evaluate(next(batches))


def goes_round(evaluate, other):
    batches = itertools.chain.from_iterable(itertools.cycle([other]))
    return lambda: evaluate(next(batches))


def fails(evaluate, other):
    held = []

    def once():
        try:
            for batch in other:
                evaluate(batch)
                raise ValueError
        except ValueError as error:
            held.append(error)

    return once


def whole(evaluate, other):
    return lambda: [evaluate(batch) for batch in other]


def test_other_passes_do_not_hide_the_end_of_a_window():
    rows = torch.arange(40.0).view(40, 1) / 40
    ways = ((stays_open, 400), (goes_round, 12), (fails, 12), (whole, 12))
    for (between, size), before in itertools.product(ways, (True, False)):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
        torch.manual_seed(0)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loaders = (DataLoader(each, batch_size=2) for each in (rows, torch.ones(size, 1)))
        model, optimizer, train, other = accelerator.prepare(model, optimizer, *loaders)
        look = between(torch.no_grad()(model), other)
        for _ in range(2):
            for batch in train:
                if before:
                    look()
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
                if not before:
                    look()
        assert optimizer.steps == 8, (between, before)
        torch.testing.assert_close(model.weight, expected_of(rows, 2))
        accelerator.free_memory()


def test_a_look_of_rank_0_alone_changes_nothing():
    accelerator = Accelerator(cpu=True)
    main = accelerator.is_main_process
    user = DataLoader(torch.arange(24.0), batch_size=2, shuffle=True)
    loader, alone = accelerator.prepare(user, user)
    model = accelerator.prepare(nn.Linear(1, 1))
    held = []
    for _ in range(3):
        if main:
            next(iter(loader))
        orders = []
        for batch, other in zip(loader, alone, strict=True):
            if main:
                held.append(iter(loader))
                assert len(next(held[-1])) == len(next(iter(loader))) == 2
            accelerator.backward(model(batch[:, None]).sum())
            assert loader.state_dict() == alone.state_dict()
            orders += [accelerator.gather_for_metrics(each).tolist() for each in (batch, other)]
        assert orders[::2] == orders[1::2]
        assert sorted(x for each in orders[::2] for x in each) == list(range(24))
        if main:
            next(iter(loader))
        assert loader.state_dict() == alone.state_dict()
    assert loader.epoch == 3
    held.clear()


def test_draws_by_next_iter_are_of_one_order_after_the_other():
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(torch.arange(24.0), batch_size=2, shuffle=True))
    model = accelerator.prepare(nn.Linear(1, 1))
    draws = []
    for _ in range(4):
        batch = next(iter(loader))
        accelerator.backward(model(batch[:, None]).sum())
        draws.append(tuple(accelerator.gather(batch).tolist()))
    draws += [tuple(accelerator.gather_for_metrics(next(iter(loader))).tolist()) for _ in "1234"]
    assert len(set(draws)) == 8
    assert loader.epoch == 8
    batch = next(iter(loader))
    loader.set_epoch(8)
    accelerator.backward(model(batch[:, None]).sum())
    assert loader.epoch == 8, "it was chosen after the batch"
