"""Units that come and go under FSDP: how many live at once, tied across units, kept for a step.

An embedding tied to the head is needed at both ends of forward and of backward: it must not stay in
between. What lives is sampled whenever a module begins or ends and whenever a gradient comes.
"""

import functools

import pytest
import torch

from drivetrain.testing.conformance.suite import Twins, adamw
from drivetrain.testing.models import Case, cross_entropy, tokens
from stacks import Gpt
from zero_stages import assert_freed, evaluate, start, train_window, units_of

pytestmark = pytest.mark.ranks(2)


def gpt(**options):
    factory = functools.partial(Gpt, 4, **options)
    return Case(name="gpt", factory=factory, batch=tokens, loss=cross_entropy)


def fsdp(*, config=None, window=1, **options):
    strategy = {"name": "fsdp", "unit_from": 50, **options}
    return start(strategy, config=config or {}, gradient_accumulation_steps=window)


class Samples:
    """Which units live, sampled at every module and gradient."""

    def __init__(self, twins):
        self.units = units_of(twins)
        self.live = []
        for module in twins.model.modules():
            module.register_forward_pre_hook(self.take)
            module.register_forward_hook(self.take)
        for parameter in twins.model.parameters():
            parameter.register_hook(self.take)

    def take(self, *_):
        self.live.append([unit.layout.nbytes for unit in self.units if unit.live_bytes])

    def check(self, most):
        assert max(map(len, self.live)) <= most
        largest = sorted((unit.layout.nbytes for unit in self.units), reverse=True)
        assert max(map(sum, self.live)) <= sum(largest[:most])


def table_between_blocks(model):
    """Return the bytes of the tied table whenever the second block's forward ends."""
    found = []

    def look(*_):
        found.append(model.embedding.weight.untyped_storage().nbytes())

    model.blocks[1].register_forward_hook(look)
    return found


@pytest.mark.parametrize("recompute", ["none", "checkpoint", "full"])
def test_live_units(recompute):
    """Never more than asked for; the tied unit is away while the blocks compute."""
    config = {"recompute": {"mode": "full"}} if recompute == "full" else {}
    small = {"units": "size", "unit_from": 140}
    for options, live in (({}, 1), (small, 1), ({}, 2), (small, 3)):
        # A block of two units that is recomputed needs both of them for its backward.
        most = max(live, 2) if options and recompute != "none" else live
        accelerator = fsdp(config=config, live_units=live, **options)
        twins = Twins(accelerator, gpt(recompute=recompute == "checkpoint"), adamw)
        samples = Samples(twins)
        between = table_between_blocks(twins.model)
        calls = []
        twins.model.blocks[1].down.register_forward_pre_hook(lambda *x, c=calls: c.append(x))
        for step in range(3):
            twins.loss(step)  # a forward that goes nowhere
            twins.backward(step)
            assert_freed(twins)
            twins.step()
            evaluate(twins, step)
            assert_freed(twins)
            samples.check(most)
        assert len(calls) == 3 * (3 if recompute == "none" else 4), "not recomputed"
        assert not any(between), "the tied table stays while blocks compute"
        assert twins.model.head.weight is twins.model.embedding.weight
        twins.check()


@pytest.mark.ranks(3)
def test_other_paths_than_last_time():
    """Units spared for backward, or gathered ahead in vain, do not add up when the order turns."""
    for live in (1, 3):
        accelerator = fsdp(live_units=live)
        twins = Twins(accelerator, gpt(), adamw)
        samples = Samples(twins)
        orders = ((0, 1, 2, 3), (3, 2, 1, 0), (2, 3, 0, 1), (1, 0), (0, 1, 2, 3), (3, 3, 0))
        blocks = [[*model.blocks] for model in (twins.model, twins.twin)]
        for step, order in enumerate(orders):
            for model, own in zip((twins.model, twins.twin), blocks, strict=True):
                model.forward = functools.partial(forward_in, model, [own[i] for i in order])
            twins.backward(step)
            samples.check(live)
            assert_freed(twins)
            twins.step()
        twins.check()


def forward_in(model, blocks, inputs):
    x = model.embedding(inputs).mean(1)
    for block in blocks:
        x = block(x)
    return model.head(x)


# --- kept during a step ---


def test_kept_for_a_window():
    """``sharding: grad`` gathers once per optimizer step, and evaluation may come at any time."""
    for live in (1, 3):
        accelerator = fsdp(window=3, sharding="grad", live_units=live)
        twins = Twins(accelerator, gpt())
        gathers = labels_of_gathers(twins)
        for step in range(3):
            gathers.clear()
            train_window(twins, step, 3)
            assert sorted(gathers) == sorted({*gathers}), "gathered more than once a step"
            assert len(gathers) == len(units_of(twins))
            gathers.clear()
            evaluate(twins, step)
            assert gathers == ["embedding", *(f"blocks.{i}" for i in range(4)), "embedding"]
            assert_freed(twins)
        twins.check()


def test_kept_until_somebody_steps():
    """A window that is thrown away, changed values, and a step by another optimizer's hand."""
    accelerator = fsdp(sharding="grad")
    twins = Twins(accelerator, gpt())
    gathers = labels_of_gathers(twins)
    twins.backward(0)
    gathers.clear()
    evaluate(twins, 0)
    assert not gathers, "values are kept until the step"
    for optimizer in (twins.optimizer, twins.twin_optimizer):
        optimizer.zero_grad()
    with accelerator.gathered(twins.model), torch.no_grad():  # while values are kept
        for model in (twins.model, twins.twin):
            model.blocks[0].up.weight.mul_(0.5)
    evaluate(twins, 1)
    twins.backward(1)
    twins.step()
    assert_freed(twins)
    twins.check()


def labels_of_gathers(twins):
    communicator = twins.accelerator.strategy_of(twins.model).ranks.sharing
    given, labels = communicator.gather_parts, []

    def gather(parts, *, label="", first=None):
        labels.append(label.removeprefix("parameters of "))
        return given(parts, label=label, first=first)

    communicator.gather_parts = gather
    return labels
