"""Real pipelines take the time that their formulas promise.

Layers sleep instead of computing, so that four ranks fit on any machine.
"""

import time

import pytest
import torch
from torch import nn

from drivetrain import Accelerator
from drivetrain.communication import gather_object
from drivetrain_megatron.tensor.linear import WeightHalf
from stacks import Lossy, Parts

UNIT_S = 0.1
"""What a forward takes; a backward takes two, or one for each half."""

RANKS, MICRO_BATCHES = 4, 8

ATTEMPTS = 6
"""Others on the machine make a step longer, never shorter: the shortest of so many counts."""


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds, backward_seconds):
        ctx.seconds = backward_seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient.clone(), None, None


def layer(forward, backward):
    """Return what sleeps in forward and backward; shares are of one unit."""
    seconds = forward * UNIT_S, backward * UNIT_S
    linear = nn.Linear(4, 4, bias=False)
    return Parts(lambda m, x: Sleep.apply(m.linear(x), *seconds), linear=linear)


WHOLE = (MICRO_BATCHES + RANKS - 1) * 3


@pytest.mark.alone
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("schedule", "chunks", "units"),
    [
        ("gpipe", 1, WHOLE),
        ("1f1b", 1, WHOLE),
        ("interleaved", 2, MICRO_BATCHES * 3 + (RANKS - 1) * 3 / 2),
        ("zb-h1", 1, 3 * MICRO_BATCHES + RANKS - 1),
    ],
)
@pytest.mark.ranks(RANKS)
def test_a_step_takes_the_promised_time(monkeypatch, schedule, chunks, units):
    halves = schedule == "zb-h1"
    if halves:
        compute = WeightHalf.compute

        def slow(half):
            time.sleep(UNIT_S)
            return compute(half)

        monkeypatch.setattr(WeightHalf, "compute", slow)
    shares = 1 / chunks, (1 if halves else 2) / chunks
    model = Lossy(layer(*shares) for _ in range(RANKS * chunks))
    model.example_inputs = torch.zeros(MICRO_BATCHES, 4)
    options = {"pp": RANKS, "micro_batches": MICRO_BATCHES, "schedule": schedule, "chunks": chunks}
    accelerator = Accelerator(strategy={"name": "megatron", "cut": "uniform", **options}, cpu=True)
    model = accelerator.prepare(model)

    def step():
        """Return the seconds of a step on the slowest rank."""
        x = torch.randn(MICRO_BATCHES, 4)
        accelerator.wait_for_everyone()
        started = time.perf_counter()
        accelerator.backward(model(x)["loss"])
        accelerator.wait_for_everyone()
        return max(gather_object([time.perf_counter() - started]))

    step()  # learns shapes
    promised, took = units * UNIT_S, []
    while len(took) < ATTEMPTS and not (took and min(took) <= 1.05 * promised):
        took.append(step())
    assert min(took) == pytest.approx(promised, rel=0.05)
