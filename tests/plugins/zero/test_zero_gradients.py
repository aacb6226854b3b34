"""Gradients under ZeRO: windows, weights, clipping, and what users do in between.

The conformance suite covers windows of equal weight, two backwards before a step, gradients changed
through ``gradients()``, the 2- and inf-norm, skipped fp16 steps. Here is what depends on how ZeRO
divides and sends.
"""

import math

import pytest
import torch
from torch import nn

from drivetrain.testing.conformance.suite import Twins, everyone
from drivetrain.testing.models import CASES
from zero_stages import calls, each, start

pytestmark = pytest.mark.ranks(3)


def reduces_each(strategy):
    return strategy["name"] != "zero1" and strategy.get("accumulate") != "local"


def weighted_step(twins, batches, *, clip=False):
    """Run one window with a weight per micro-batch and rank; the twin divides by all weights."""
    total = sum(weight for _, _, weight in batches)
    for step, rank, weight in batches:
        loss = twins.case.loss(twins.twin, twins.case.batch(step, rank))
        (loss * (weight / total)).backward()
    mine = [(step, weight) for step, rank, weight in batches if rank == twins.axis.rank]
    sent = []
    for step, weight in mine:
        with twins.accelerator.accumulate(twins.model):
            before = calls(twins.accelerator, "reduce_scatter")
            loss = twins.case.loss(twins.model, twins.case.batch(step, twins.axis.rank))
            twins.accelerator.backward(loss, weight=weight)
            sent.append(calls(twins.accelerator, "reduce_scatter") - before)
            if clip:
                twins.accelerator.clip_grad_norm_(twins.model.parameters(), 0.05)
            twins.optimizer.step()
            twins.optimizer.zero_grad()
    if clip:
        nn.utils.clip_grad_norm_(twins.twin.parameters(), 0.05)
    twins.twin_optimizer.step()
    twins.twin_optimizer.zero_grad()
    return sent


@each("sharded", "zero1", "local")
def test_windows_with_unequal_weights(strategy):
    """Tokens of every rank and micro-batch count alike, also zero of them; A reductions or one."""
    accelerator = start(strategy, gradient_accumulation_steps=3)
    for name in ("mlp", "tied"):
        twins = Twins(accelerator, CASES[name])
        for window, clip in ((0, False), (1, True)):
            batches = [
                (3 * window + i, rank, float((5 * i + 2 * rank + window) % 7))
                for i in range(3)
                for rank in range(3)
            ]
            sent = weighted_step(twins, batches, clip=clip)
            units = sent[-1]
            assert units > (1 if name == "mlp" else 0)
            inside = units if reduces_each(strategy) else 0
            assert sent == [inside, inside, units], f"reduce-scatters per micro-batch: {sent}"
            twins.check()


@each("sharded", "zero1")
def test_norms_over_shards(strategy):
    """Every norm is that of the whole model, for groups, subsets, models together, and NaN."""
    accelerator = start(strategy)
    one, two = (Twins(accelerator, CASES[name]) for name in ("tied", "adapted"))
    accelerator.backward(one.loss(0) + two.loss(0))
    both = [*one.model.parameters(), *two.model.parameters()]
    for twins in (one, two):
        twins.backward_twin(0)
    theirs = [*one.twin.parameters(), *two.twin.parameters()]
    for kind in (1.0, 3.0, math.inf):
        expected = nn.utils.get_total_norm([p.grad for p in theirs if p.grad is not None], kind)
        found = accelerator.clip_grad_norm_(both, math.inf, kind)
        torch.testing.assert_close(found.double(), expected, rtol=1e-9, atol=0.0)
    expected = nn.utils.clip_grad_norm_(theirs, 0.02)
    found = accelerator.clip_grad_norm_(both, 0.02)
    torch.testing.assert_close(found.double(), expected, rtol=1e-9, atol=0.0)
    for twins in (one, two):
        twins.step()
        twins.check()
    for kind in (2.0, math.inf):
        factor = math.nan if accelerator.process_index == 1 else 1.0
        accelerator.backward(one.case.loss(one.model, one.case.batch(0, 0)) * factor)
        norm = accelerator.clip_grad_norm_(one.model.parameters(), 1.0, kind)
        found = everyone((norm.isnan().item(), norm.isfinite().item()))
        assert found == [(True, False)] * 3, f"NaN on one rank gave {found} for norm {kind}"
        one.model.zero_grad()
