"""Real pipelines take the time that their formulas promise, and keep as few micro-batches.

Layers sleep instead of computing, so that four ranks fit on any machine.
"""

import time

import pytest
import torch
from torch import nn

from drivetrain import Accelerator
from drivetrain.communication import gather_object
from drivetrain_megatron.pipeline.worker import StageWorker
from drivetrain_megatron.tensor.weight_grad import WeightHalf

pytestmark = [pytest.mark.alone, pytest.mark.exhaustive]

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


class Layer(nn.Module):
    """Sleeps in forward and backward; shares are of one unit."""

    def __init__(self, forward, backward):
        super().__init__()
        self.seconds = forward * UNIT_S, backward * UNIT_S
        self.linear = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return Sleep.apply(self.linear(x), *self.seconds)


class Model(nn.Module):
    def __init__(self, layers, forward, backward):
        super().__init__()
        self.layers = nn.ModuleList(Layer(forward, backward) for _ in range(layers))

    @property
    def dummy_inputs(self):
        return (torch.zeros(MICRO_BATCHES, 4),)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.square().mean()}


def run(monkeypatch, schedule, promised, *, chunks=1, halves=False):
    """Check the seconds of a step; return the most micro-batches that were kept, and the rank."""
    kept = []
    forward = StageWorker.forward

    def counted(worker, micro_batch, inputs):
        result = forward(worker, micro_batch, inputs)
        kept.append(len(worker._kept))
        return result

    monkeypatch.setattr(StageWorker, "forward", counted)
    if halves:
        compute = WeightHalf.compute

        def slow(half):
            time.sleep(UNIT_S)
            return compute(half)

        monkeypatch.setattr(WeightHalf, "compute", slow)
    model = Model(RANKS * chunks, 1 / chunks, (1 if halves else 2) / chunks)
    options = {"pp": RANKS, "micro_batches": MICRO_BATCHES, "schedule": schedule, "chunks": chunks}
    accelerator = Accelerator(strategy={"name": "megatron", "cut": "uniform", **options}, cpu=True)
    model = accelerator.prepare(model)
    step(accelerator, model)  # learns shapes
    took = []
    while len(took) < ATTEMPTS and not (took and min(took) <= 1.05 * promised):
        kept.clear()
        took.append(step(accelerator, model))
    assert min(took) == pytest.approx(promised, rel=0.05)
    rank = accelerator.mesh["pp"].rank
    pipeline = accelerator.strategy_of(model)._pipeline
    assert all(not worker._kept for worker in pipeline.stages.workers.values())
    accelerator.free_memory()
    return max(kept), rank


def step(accelerator, model):
    """Return the seconds of a step on the slowest rank."""
    x = torch.randn(MICRO_BATCHES, 4)
    accelerator.wait_for_everyone()
    started = time.perf_counter()
    loss = model(x)["loss"]
    accelerator.backward(loss)
    accelerator.wait_for_everyone()
    return max(gather_object([time.perf_counter() - started]))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.ranks(RANKS)
def test_whole_backwards(monkeypatch, schedule):
    promised = (MICRO_BATCHES + RANKS - 1) * 3 * UNIT_S
    kept, rank = run(monkeypatch, schedule, promised)
    assert kept <= (MICRO_BATCHES if schedule == "gpipe" else min(MICRO_BATCHES, RANKS - rank))


@pytest.mark.ranks(RANKS)
def test_interleaved(monkeypatch):
    promised = (MICRO_BATCHES * 3 + (RANKS - 1) * 3 / 2) * UNIT_S
    run(monkeypatch, "interleaved", promised, chunks=2)


@pytest.mark.ranks(RANKS)
def test_zero_bubble(monkeypatch):
    promised = (3 * MICRO_BATCHES + RANKS - 1) * UNIT_S
    kept, _ = run(monkeypatch, "zb-h1", promised, halves=True)
    assert kept <= RANKS
