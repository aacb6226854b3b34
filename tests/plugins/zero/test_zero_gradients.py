"""Gradients under ZeRO: windows, weights, clipping, and what users do in between.

The conformance suite covers windows of equal weight, two backwards before a step, gradients changed
through ``gradients()``, the 2- and inf-norm, skipped fp16 steps. Here is what depends on how ZeRO
divides and sends.
"""

import math
from collections import Counter

import pytest
import torch
from torch import nn
from torch.optim import SGD

from drivetrain.testing.conformance.twins import Twins, adamw, everyone
from drivetrain.testing.models import CASES
from zero_stages import calls, each, start


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
@pytest.mark.ranks(3)
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
    accelerator.free_memory()


@each("sharded local", "zero1", "local")
@pytest.mark.ranks(2)
def test_micro_batches_that_end_without_a_step(strategy):
    """What was added up by hand, and cleared by hand, is gone: by the model or by its optimizer."""
    accelerator = start(strategy)
    twins = Twins(accelerator, CASES["mlp"], adamw)
    first = SGD(twins.twin.parameters(), lr=0.1)
    for step, clear in enumerate(("model", "optimizer", "zeros", "keep")):
        with accelerator.no_sync(twins.model):
            accelerator.backward(twins.loss(10 + step))
        twins.backward_twin(10 + step)
        if clear == "model":
            twins.model.zero_grad()
            twins.twin.zero_grad()
        elif clear != "keep":
            twins.optimizer.zero_grad(set_to_none=clear == "optimizer")
            first.zero_grad(set_to_none=clear == "optimizer")
        twins.backward(step)
        twins.step()
        twins.check()
    accelerator.free_memory()


@each("sharded", "zero1")
@pytest.mark.ranks(3)
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
    accelerator.free_memory()


@each("sharded", "zero1")
@pytest.mark.ranks(2)
def test_hooks_on_parameters(strategy):
    """Hooks of before and after ``prepare`` see the averaged gradient, once, and change it.

    A tensor that is assigned to ``grad`` is stepped with.
    """
    accelerator = start(strategy)
    seen = Counter()

    def halve(name):
        def hook(gradient):
            seen[name, tuple(gradient.shape)] += 1
            return gradient * 0.5

        return hook

    def hooked(model):
        early.append(model.body.weight.register_hook(halve("early")))
        return model

    early = []
    twins = Twins(accelerator, CASES["tied"], wrap=hooked)
    late = twins.model.embedding.weight.register_hook(halve("late"))
    for step in range(2):
        twins.backward(step)
        for parameter in (twins.twin.body.weight, twins.twin.embedding.weight):
            parameter.grad.mul_(0.5)
        twins.step()
    twins.check()
    assert seen == {("early", (13, 13)): 2, ("late", (11, 13)): 2}
    early[0].remove()
    late.remove()
    twins.backward(2)
    for model in (twins.model, twins.twin):
        model.body.weight.grad = torch.ones_like(twins.twin.body.weight)
    twins.step()
    twins.check()
    accelerator.free_memory()
