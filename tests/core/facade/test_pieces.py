"""Pieces of a batch: the step of the whole batch, as large as fits, and what cannot be cut."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator, GradScalerKwargs
from drivetrain.errors import UsageError
from drivetrain.facade import pieces
from drivetrain.facade.pieces import Measured
from drivetrain.testing.models import WIDTH
from stacks import Tower

MIB = 2**20


def batch(step, rank, rows):
    generator = torch.Generator().manual_seed(10 * step + rank)
    inputs = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
    counted = torch.rand(rows, generator=generator) > 0.3
    return {"inputs": inputs, "counted": counted}


def rows_of(step, rank):
    return 5 + 3 * step + 2 * rank


def squares(model, part):
    return model(part["inputs"]).square().mean(-1)


class Alone:
    """A twin in this process alone, and the Accelerator's model, with steps of both."""

    def __init__(self, accelerator, *loaders):
        self.model, self.accelerator = Tower(), accelerator
        model = copy.deepcopy(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.prepared = accelerator.prepare(model, optimizer, *loaders)

    def step(self, loss):
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def check(self):
        found = self.accelerator.get_state_dict(self.prepared[0])
        torch.testing.assert_close(found, self.model.state_dict(), rtol=1e-12, atol=1e-12)
        self.accelerator.free_memory()


@pytest.mark.parametrize(
    ("strategy", "option", "tokens"),
    [
        ("zero3", "auto", False),
        ("ddp", 2, True),
        ("fsdp", 3, False),
        ("ddp", "auto", False),
        ("zero2", 4, True),
    ],
)
@pytest.mark.ranks(2)
def test_a_step_is_that_of_the_whole_batches_of_all_ranks(strategy, option, tokens):
    """Ranks have other numbers of rows, later batches more, and the mean may be of some rows."""
    accelerator = Accelerator(strategy=strategy, cpu=True, config={"micro_batch": option})
    alone = Alone(accelerator)
    model, optimizer = alone.prepared
    axis = accelerator.mesh["dp"]
    for step in range(4):
        count = 0
        for part in accelerator.micro_batches(batch(step, axis.rank, rows_of(step, axis.rank))):
            count += 1
            losses = squares(model, part)
            if tokens:
                weight = int(part["counted"].sum())
                loss = (losses * part["counted"]).sum() / max(weight, 1)
                accelerator.backward(loss, weight=weight)
            else:
                accelerator.backward(losses.mean())
        optimizer.step()
        optimizer.zero_grad()
        if option != "auto":
            assert count == -(-rows_of(step, 1) // option)  # of the rank with more rows
        whole = [batch(step, rank, rows_of(step, rank)) for rank in range(axis.size)]
        together = {key: torch.cat([each[key] for each in whole]) for key in whole[0]}
        losses = squares(alone.model, together)
        alone.step((losses[together["counted"]] if tokens else losses).mean())
    alone.check()


@pytest.mark.parametrize("around", [False, True], ids=["pieces", "accumulate"])
@pytest.mark.ranks(2)
def test_pieces_are_one_micro_batch_of_a_window_that_the_loader_may_end(around):
    """Also where ``accumulate()`` is around them."""
    rows = torch.randn(12, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    options = {"gradient_accumulation_steps": 2, "config": {"micro_batch": 1}}
    accelerator = Accelerator(strategy="zero2", cpu=True, **options)
    alone = Alone(accelerator, DataLoader(TensorDataset(rows), batch_size=2))
    model, optimizer, loader = alone.prepared
    synced = []
    for (inputs,) in loader:  # three batches: a window of two, and one of one
        with accelerator.accumulate(model) if around else nullcontext():
            for part in accelerator.micro_batches(inputs):
                accelerator.backward(model(part).square().mean())
                synced.append(accelerator.sync_gradients)
            optimizer.step()
            optimizer.zero_grad()
    assert synced == [False, False, False, True, False, True]
    for used in (rows[:8], rows[8:]):
        alone.step(alone.model(used).square().mean())
    alone.check()


def test_a_batch_that_is_left_before_its_last_piece_is_an_error():
    accelerator = Accelerator(strategy="ddp", cpu=True, config={"micro_batch": 1})
    model = Tower()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    rows = torch.randn(3, WIDTH, dtype=torch.float64)
    for taken, refused in ((3, False), (2, True)):
        for number, part in enumerate(accelerator.micro_batches(rows), 1):
            accelerator.backward(model(part).square().mean())
            if number == taken:
                break
        with pytest.raises(UsageError, match="left before") if refused else nullcontext():
            optimizer.step()
    with pytest.raises(UsageError, match="left before"):
        next(accelerator.micro_batches(rows))
    accelerator.free_memory()


def test_predictions_are_lines_through_what_was_measured():
    measured = Measured()
    assert measured.rows_that_fit(8, 10, 100) == 1
    measured.add(1, 10, 50)
    assert measured.need(2, 10) == 100  # one piece alone: all of it may grow
    assert measured.rows_that_fit(8, 10, 150) == 3
    measured.add(3, 10, 70)
    assert measured.need(6, 10) == 100
    assert measured.need(2, 10) == 60
    assert measured.rows_that_fit(8, 10, 100) == 6
    assert measured.need(3, 20) == 200  # twice as long: the square, until it is known
    assert measured.rows_that_fit(8, 20, 100) == 1
    measured.add(3, 20, 160)  # steeper than it was
    assert measured.need(7, 10) == 190
    measured.add(6, 10, 90)
    assert measured.need(6, 10) == 160


def test_auto_takes_what_the_room_allows_and_says_so(monkeypatch, capsys, caplog):
    """Activations of a row are 2 MiB here; the room is for about four rows of the first length."""
    monkeypatch.setattr(pieces, "_room", lambda device, ranks: 12 * MIB)
    taken = {}
    monkeypatch.setattr(pieces, "_held", lambda device: 0)
    monkeypatch.setattr(pieces, "_peak", lambda device: taken["elements"] * MIB // 4)
    accelerator = Accelerator(cpu=True, config={"micro_batch": "auto"})
    model = accelerator.prepare(nn.Linear(1, 1))

    def counts(rows, length):
        found = []
        for part in accelerator.micro_batches(torch.ones(rows, length)):
            taken["elements"] = part.numel()
            accelerator.backward(model(part.mean(1, keepdim=True)).mean())
            found.append(len(part))
        return found

    assert counts(9, 8) == [1, 4, 4]  # 10.8 MiB for 2 each: at most 5 rows
    assert counts(10, 8) == [5, 5]
    assert counts(8, 16) == [1] * 8  # rows of another length are not known yet
    assert counts(8, 16) == [2, 2, 2, 2]
    assert "micro_batch: auto: at most 5 of 8 rows at once" in capsys.readouterr().err
    counts(2, 80)
    assert "a row of 80 elements is predicted to need 100 MiB" in caplog.text


def test_a_skipped_step_changes_the_loss_scale_at_once():
    scaler = GradScalerKwargs(init_scale=8.0, min_scale=1.0)
    for option in ("whole", 2):
        options = {"kwargs_handlers": [scaler], "config": {"micro_batch": option}}
        accelerator = Accelerator(cpu=True, mixed_precision="fp16", **options)
        model = nn.Linear(2, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for wrong in (1.0, float("inf")):
            for part in accelerator.micro_batches(torch.ones(4, 2)):
                accelerator.backward(model(part).mean() * wrong)
            optimizer.step()
            optimizer.zero_grad()
        assert accelerator.scaler.get_scale() == 4.0
        accelerator.free_memory()


def test_memory_is_measured():
    accelerator = Accelerator(cpu=True, config={"micro_batch": "auto"})
    model = accelerator.prepare(nn.Linear(4, 1))
    size = 64 * MIB
    for part in accelerator.micro_batches(torch.ones(1, 4)):
        big = torch.ones(size // 4)
        accelerator.backward(model(part).mean() * big[0])
        del big
    (peak,) = accelerator._pieces._measured[1].peaks.values()
    assert 0.95 * size <= peak <= 2 * size


def test_whole_batches_are_one_micro_batch_and_what_cannot_be_cut_is_refused(monkeypatch):
    accelerator = Accelerator(cpu=True)
    words = ["not", "cut"]
    assert list(accelerator.micro_batches(words)) == [words]
    accelerator = Accelerator(cpu=True, config={"micro_batch": 2})
    for wrong, found in (
        (words, "types str"),
        ([torch.ones(4), torch.ones(3)], "types 3, 4"),
        (torch.tensor(1.0), "types Tensor"),
        ({}, "types nothing"),
    ):
        with pytest.raises(UsageError, match=f"counts the samples, found sizes and {found}"):
            next(accelerator.micro_batches(wrong))
    model = accelerator.prepare(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    with pytest.raises(UsageError, match="found BatchNorm1d '1'"):
        next(accelerator.micro_batches(torch.ones(4, 2)))
    model.eval()
    with monkeypatch.context() as patch:
        patch.setattr(nn.Module, "named_modules", None)  # no search in each batch
        assert len(list(accelerator.micro_batches(torch.ones(4, 2)))) == 2
    accelerator.free_memory()


@pytest.mark.ranks(2)
def test_a_batch_that_one_rank_cannot_cut_is_an_error_on_all():
    accelerator = Accelerator(cpu=True, config={"micro_batch": 2})
    rows = [4, 3] if accelerator.process_index else [4, 4]
    with pytest.raises(UsageError, match="found sizes and types 3, 4"):
        next(accelerator.micro_batches([torch.ones(each) for each in rows]))
    refused = pytest.raises(UsageError, match="found join_uneven_inputs")
    with accelerator.join_uneven_inputs([]), refused:
        next(accelerator.micro_batches(torch.ones(4, 2)))
