"""Gradients under ZeRO: windows, weights, clipping, the loss scale, and what users do in between.

The conformance suite covers, for every strategy: windows of equal weight with a partial last one,
two backwards before a step, ``loss.backward()`` by the user, gradients cleared to zeros, gradients
changed through ``gradients()``, the 2- and inf-norm over tied, odd and frozen parameters, skipped
fp16 steps on all ranks, bf16 sums in fp32. Here is what depends on how ZeRO divides and sends, and
the same with units that are really sharded.
"""

import copy
import math
from collections import Counter

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from drivetrain import Accelerator, GradScalerKwargs
from drivetrain.errors import UsageError
from drivetrain.testing.conformance.low_twins import LowTwins, autocast_loss, in_fp32
from drivetrain.testing.conformance.twins import Twins, adamw, everyone, momentum, weights
from drivetrain.testing.models import CASES, OUT, WIDTH, numbers

SMALL = {"bucket_mib": 0.001}  # several units even in small models
SHARDED = {"name": "zero3", "keep_below": 0}
STAGES = {
    "zero1": {"name": "zero1", **SMALL},
    "zero2": {"name": "zero2", **SMALL},
    "zero3": {"name": "zero3", **SMALL},
    "sharded": SHARDED,
}
LOCAL = {
    "zero2-local": {"name": "zero2", "accumulate": "local", **SMALL},
    "sharded-local": {**SHARDED, "accumulate": "local"},
}


def each(strategies):
    return pytest.mark.parametrize("strategy", list(strategies.values()), ids=list(strategies))


def start(strategy, **options):
    return Accelerator(strategy=strategy, cpu=True, **options)


def calls(accelerator, operation):
    entry = accelerator.traffic.entries().get(("dp", operation))
    return entry.calls if entry else 0


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


@each(STAGES | LOCAL)
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


@each({"zero1": STAGES["zero1"], "sharded": SHARDED} | LOCAL)
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


@each(STAGES | LOCAL)
@pytest.mark.ranks(2)
def test_low_gradients_are_added_up_in_fp32(strategy):
    """A gradient of 1 and 63 of 1/512: a sum in bf16 would lose each of them and stay at 1."""
    accelerator = start(
        strategy,
        mixed_precision="bf16",
        gradient_accumulation_steps=64,
        config={"dtypes": {"param": "bf16"}},
    )
    built = nn.Linear(8, 4, bias=False)
    nn.init.zeros_(built.weight)
    model, optimizer = accelerator.prepare(built, SGD(built.parameters(), lr=1.0))
    for i in range(64):
        with accelerator.accumulate(model):
            factor = 64.0 if i == 0 else 64.0 / 512
            accelerator.backward(model(torch.ones(1, 8)).sum() * factor)
            optimizer.step()
            optimizer.zero_grad()
    moved = weights(accelerator, model)["weight"]
    assert moved.dtype is torch.bfloat16
    torch.testing.assert_close(-moved.float(), torch.full((4, 8), 1 + 63 / 512), rtol=4e-3, atol=0)
    accelerator.free_memory()


@each(STAGES | LOCAL)
@pytest.mark.ranks(2)
def test_gradients_of_bf16_weights_without_masters(strategy):
    """Clearing to zeros and clipping between backwards reach the sums that the next one adds to."""
    accelerator = start(strategy)
    torch.manual_seed(1)
    built = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).bfloat16()
    twin = copy.deepcopy(built)
    # A rate of one and weights of bf16: the step shows the gradient, rounded.
    model, optimizer = accelerator.prepare(built, SGD(built.parameters(), lr=1.0))
    twin_optimizer = SGD(twin.parameters(), lr=1.0)
    inputs = torch.randn(6, 8).bfloat16()
    for limit in (None, 0.01):
        for passes in (1, 2):
            for _ in range(passes):
                accelerator.backward(model(inputs).float().square().mean())
                twin(inputs).float().square().mean().backward()
                if limit is not None:
                    accelerator.clip_grad_norm_(model.parameters(), limit)
                    nn.utils.clip_grad_norm_(twin.parameters(), limit)
            optimizer.step()
            twin_optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            twin_optimizer.zero_grad(set_to_none=False)
            for name, ours in weights(accelerator, model).items():
                torch.testing.assert_close(ours, twin.get_parameter(name), rtol=2e-2, atol=2e-2)
    accelerator.free_memory()


@each(STAGES)
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
    biases = [p for name, p in one.model.named_parameters() if name.endswith("bias")]
    expected = nn.utils.clip_grad_norm_([one.twin.body.bias], 0.01)
    found = accelerator.clip_grad_norm_(biases, 0.01)
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


class Overflowing:
    """AdamW in fp16 over two layers; one of them can get an infinite gradient on one rank."""

    def __init__(self, strategy, window):
        scaling = GradScalerKwargs(init_scale=1024.0, growth_interval=2, hysteresis=2)
        self.accelerator = start(
            strategy,
            mixed_precision="fp16",
            gradient_accumulation_steps=window,
            kwargs_handlers=[scaling],
        )
        torch.manual_seed(3)
        built = nn.Sequential(nn.Linear(WIDTH, 8), nn.Linear(8, OUT))
        optimizer = SGD(built.parameters(), lr=0.1, momentum=0.9)
        self.window = window
        self.model, self.optimizer = self.accelerator.prepare(built, optimizer)

    def train(self, step, *, infinite_at=None):
        rank = self.accelerator.process_index
        for i in range(self.window):
            with self.accelerator.accumulate(self.model):
                inputs = numbers(step * self.window + i, rank).inputs.float()
                factor = math.inf if infinite_at == (i, rank) else 1.0
                self.accelerator.backward(self.model(inputs).square().mean() * factor)
                self.optimizer.step()
                self.optimizer.zero_grad()
        return self.accelerator.scaler.get_scale(), self.accelerator.optimizer_step_was_skipped

    def state(self):
        kept = [v.clone() for s in self.optimizer.state.values() for v in s.values()]
        return [*weights(self.accelerator, self.model).values(), *kept]


@each(STAGES | LOCAL)
@pytest.mark.ranks(2)
def test_overflow_early_in_a_window_on_one_rank(strategy):
    """The window is skipped on all ranks once; the scale shrinks by hysteresis and grows again."""
    loop = Overflowing(strategy, window=3)
    assert loop.train(0) == (1024.0, False)
    before = loop.state()
    assert loop.train(1, infinite_at=(0, 1)) == (1024.0, True)  # the first of two in a row
    assert loop.train(2, infinite_at=(1, 0)) == (512.0, True)
    for one, other in zip(before, loop.state(), strict=True):
        assert torch.equal(one, other), "a skipped step changed something"
    assert loop.train(3) == (512.0, False)
    assert loop.train(4) == (1024.0, False)  # grown after two good steps
    moved = loop.state()
    assert loop.train(5) == (1024.0, False)
    # The growth step used the scale that its gradients were made with: weights move on, finite.
    for one, other in zip(moved, loop.state(), strict=True):
        assert other.isfinite().all()
        assert not torch.equal(one, other)
    loop.accelerator.free_memory()


@each(STAGES)
@pytest.mark.ranks(2)
def test_growth_of_the_scale_does_not_change_the_step(strategy):
    """Losses under a scale that grows each step are those of a scale that never does."""
    results = []
    for interval in (1, 1000):
        case = in_fp32(CASES["mlp"])
        accelerator = start(
            strategy,
            mixed_precision="fp16",
            kwargs_handlers=[GradScalerKwargs(init_scale=64.0, growth_interval=interval)],
        )
        twins = LowTwins(accelerator, case, autocast_loss(case, torch.float16))
        for step in range(3):
            twins.train(step, [1.0])
        assert accelerator.scaler.get_scale() == (512.0 if interval == 1 else 64.0)
        results.append(weights(accelerator, twins.model))
        accelerator.free_memory()
    for name, tensor in results[0].items():
        torch.testing.assert_close(tensor, results[1][name], rtol=1e-3, atol=1e-4)


@each(STAGES)
@pytest.mark.ranks(2)
def test_hooks_on_parameters(strategy):
    """Hooks of before and after ``prepare`` see this rank's whole gradient, once, and change it."""
    accelerator = start(strategy)
    case = CASES["tied"]
    built = case.build()
    seen = Counter()

    def halve(name):
        def hook(gradient):
            seen[name, tuple(gradient.shape)] += 1
            return gradient * 0.5

        return hook

    early = built.body.weight.register_hook(halve("early"))
    model, optimizer = accelerator.prepare(built, momentum(built))
    late = built.embedding.weight.register_hook(halve("late"))
    twin = case.build()
    twin_optimizer = momentum(twin)
    for step in range(2):
        accelerator.backward(case.loss(model, case.batch(step, accelerator.process_index)))
        for rank in range(2):
            (case.loss(twin, case.batch(step, rank)) / 2).backward()
        for parameter in (twin.body.weight, twin.embedding.weight):
            parameter.grad.mul_(0.5)
        optimizer.step()
        twin_optimizer.step()
        optimizer.zero_grad()
        twin_optimizer.zero_grad()
    ours = weights(accelerator, model)
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(ours[name], parameter.detach(), rtol=1e-10, atol=1e-10)
    assert seen == {("early", (13, 13)): 2, ("late", (11, 13)): 2}
    early.remove()
    late.remove()
    accelerator.free_memory()


@each(STAGES)
@pytest.mark.ranks(2)
def test_whole_gradients_after_backward(strategy):
    """A parameter's ``grad`` is None once it was sent; one set by hand is refused, not ignored."""
    accelerator = start(strategy)
    twins = Twins(accelerator, CASES["mlp"], lambda model: AdamW(model.parameters(), lr=0.1))
    twins.backward(0)
    assert all(parameter.grad is None for parameter in twins.model.parameters())
    twins.step()
    twins.backward(1)
    weight = twins.model.get_parameter("2.weight")
    weight.grad = torch.ones_like(twins.twin.get_parameter("2.weight"))
    with pytest.raises(UsageError, match=r"2\.weight.*gradients\("):
        twins.optimizer.step()
    weight.grad = None
    twins.step()
    twins.check()
    accelerator.free_memory()
