"""What prepare() says of a step's size, and the end of a run of a schedule that was too long."""

import functools

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator
from drivetrain.facade.preparation import describe_step

STEPS = 4


def linear(step, *, num_training_steps):
    return max(0.0, 1 - step / num_training_steps)


def of_transformers(optimizer, steps):
    return LambdaLR(optimizer, functools.partial(linear, num_training_steps=steps))


def of_torch(optimizer, steps):
    return OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)


def run(monkeypatch, schedule, length, *, steps=STEPS, **options):
    """Train, and return the lines that were announced, and the warnings of the end."""
    said, warned = [], []
    logger = "drivetrain.facade.preparation.logger."
    monkeypatch.setattr(logger + "announce", said.append)
    monkeypatch.setattr(logger + "warning", warned.append)
    accelerator = Accelerator(cpu=True, **options)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.ones(24, 2)), batch_size=3)
    given = (model, optimizer, loader, schedule(optimizer, length))
    model, optimizer, loader, scheduler = accelerator.prepare(*given)
    for _, (x,) in zip(range(steps), loader, strict=False):
        accelerator.backward(model(x).sum())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    accelerator.end_training()
    return [line for line in said if "samples per step" in line], warned


@pytest.mark.ranks(2)
def test_a_schedule_of_so_many_times_the_steps_as_ranks_is_said(monkeypatch):
    for schedule in (of_transformers, of_torch):
        said, warned = run(monkeypatch, schedule, 2 * STEPS)
        assert said == [
            "ddp, fp32, 3 parameters, "
            "2 ranks x batch 3 x accumulation 1 = 6 samples per step, 4 steps per epoch; "
            "the learning-rate schedule has 8 steps, 2 epochs of this loader"
        ]
        assert len(warned) == 1
        assert "has 8 steps, and the run took 4: 1 of 2" in warned[0]
        assert "step_scheduler_with=samples" in warned[0]
    samples = {"step_scheduler_with": "samples"}
    said, warned = run(monkeypatch, of_transformers, 2 * STEPS, config=samples)
    assert said[0].endswith("the learning-rate schedule has 4 steps, 1 epochs of this loader")
    assert warned == []
    assert run(monkeypatch, of_transformers, STEPS)[1] == []


def test_the_short_last_step_of_an_epoch_counts():
    class Loader:
        total_batch_size = 6
        length = 7

        def __len__(self):
            return self.length

    expected = "2 ranks x batch 3 x accumulation 2 = 12 samples per step, 4 steps per epoch"
    assert describe_step(Loader(), 2, 2, []) == expected
    assert describe_step(Loader(), 2, 7, []).endswith("42 samples per step, 1 step per epoch")
    Loader.length = 0
    assert "0 steps per epoch: expected a batch for each rank" in describe_step(Loader(), 2, 2, [])
