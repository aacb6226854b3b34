"""Units that come and go under FSDP: how many live at once, tied across units, kept for a step.

An embedding tied to the head is needed at both ends of forward and of backward: it must not stay in
between. What lives is sampled whenever a module begins or ends and whenever a gradient comes.
"""

import functools
import itertools

import pytest
import torch

from drivetrain import Accelerator
from drivetrain.testing.conformance.twins import Twins, adamw
from drivetrain.testing.models import Case, cross_entropy, tokens
from towers import Gpt

CHOICES = {"auto": {"unit_from": 50}, "size": {"units": "size", "unit_from": 140}}


def gpt(**options):
    factory = functools.partial(Gpt, 4, **options)
    return Case(name="gpt", factory=factory, batch=tokens, loss=cross_entropy)


def start(config=None, window=1, **options):
    return Accelerator(
        strategy={"name": "fsdp", **options},
        cpu=True,
        config=config or {},
        gradient_accumulation_steps=window,
    )


def units_of(twins):
    return twins.accelerator.strategy_of(twins.model).placement.units


def assert_freed(twins):
    whole = [unit.label for unit in units_of(twins) if unit.live_bytes]
    assert not whole, f"still whole: {whole}"


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
        self.live.append(tuple(unit for unit in self.units if unit.live_bytes))

    @property
    def most(self):
        return max(map(len, self.live))

    @property
    def most_bytes(self):
        return max(
            sum(unit.live_bytes and unit.layout.nbytes for unit in live) for live in self.live
        )


def table_between_blocks(model):
    """Return the bytes of the tied table whenever the second block's forward ends."""
    found = []

    def look(*_):
        found.append(model.embedding.weight.untyped_storage().nbytes())

    model.blocks[1].register_forward_hook(look)
    return found


@pytest.mark.parametrize("recompute", ["none", "checkpoint", "full"])
@pytest.mark.ranks(2)
def test_live_units(recompute):
    """Never more than asked for; the tied unit is away while the blocks compute."""
    config = {"recompute": {"mode": "full"}} if recompute == "full" else {}
    for (how, options), live in itertools.product(CHOICES.items(), (1, 2, 3)):
        # A block of two units that is recomputed needs both of them for its backward.
        most = max(live, 2) if how == "size" and recompute != "none" else live
        accelerator = start(config, live_units=live, **options)
        twins = Twins(accelerator, gpt(recompute=recompute == "checkpoint"), adamw)
        samples = Samples(twins)
        between = table_between_blocks(twins.model)
        for step in range(3):
            samples.live.clear()
            twins.loss(step)  # a forward that goes nowhere
            twins.backward(step)
            assert samples.most <= most, f"{how}: {samples.most} units live, not {most}"
            largest = sorted((unit.layout.nbytes for unit in samples.units), reverse=True)
            assert samples.most_bytes <= sum(largest[:most])
            assert_freed(twins)
            twins.step()
            twins.model.eval()
            with torch.no_grad():
                twins.loss(step)
            twins.model.train()
            assert_freed(twins)
            assert samples.most <= most
        assert not any(between), "the tied table stays while blocks compute"
        assert twins.model.head.weight is twins.model.embedding.weight
        twins.check()
        accelerator.free_memory()


@pytest.mark.ranks(3)
def test_other_paths_than_last_time():
    """Units spared for backward, or gathered ahead in vain, do not add up when the order turns."""
    for live in (1, 2, 3):
        accelerator = start(live_units=live, unit_from=50)
        twins = Twins(accelerator, gpt(), adamw)
        samples = Samples(twins)
        orders = ((0, 1, 2, 3), (3, 2, 1, 0), (2, 3, 0, 1), (1, 0), (0, 1, 2, 3), (3, 3, 0))
        blocks = [[*model.blocks] for model in (twins.model, twins.twin)]
        for step, order in enumerate(orders):
            for model, own in zip((twins.model, twins.twin), blocks, strict=True):
                model.forward = functools.partial(forward_in, model, [own[i] for i in order])
            twins.backward(step)
            assert samples.most <= live, f"{samples.most} units live, not {live}"
            assert_freed(twins)
            twins.step()
        twins.check()
        accelerator.free_memory()


def forward_in(model, blocks, inputs):
    x = model.embedding(inputs).mean(1)
    for block in blocks:
        x = block(x)
    return model.head(x)


# --- kept during a step ---


@pytest.mark.ranks(2)
def test_kept_for_a_window():
    """``sharding: grad`` gathers once per optimizer step, and evaluation may come at any time."""
    for live in (1, 3):
        accelerator = start(window=3, sharding="grad", live_units=live, unit_from=50)
        twins = Twins(accelerator, gpt())
        gathers = count_gathers(twins)
        for step in range(3):
            gathers.clear()
            for micro in range(3):
                with accelerator.accumulate(twins.model):
                    twins.backward(3 * step + micro)
                    evaluate(twins, micro)
                    twins.optimizer.step()
                    twins.optimizer.zero_grad()
            assert sorted(gathers) == sorted({*gathers}), "gathered more than once a step"
            assert len(gathers) == len(units_of(twins))
            assert_freed(twins)
            for parameter in twins.twin.parameters():
                parameter.grad /= 3
            twins.twin_optimizer.step()
            twins.twin_optimizer.zero_grad()
            gathers.clear()
            evaluate(twins, step)
            assert gathers == ["embedding", *(f"blocks.{i}" for i in range(4)), "embedding"]
            assert_freed(twins)
        twins.check()
        accelerator.free_memory()


@pytest.mark.ranks(2)
def test_kept_until_somebody_steps():
    """A window that is thrown away, changed values, and a step by another optimizer's hand."""
    accelerator = start(sharding="grad", unit_from=50)
    twins = Twins(accelerator, gpt())
    twins.backward(0)
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
    accelerator.free_memory()


def count_gathers(twins):
    communicator = twins.accelerator.strategy_of(twins.model).ranks.sharing
    given, labels = communicator.gather_parts, []

    def gather(parts, *, label="", first=None):
        labels.append(label.removeprefix("parameters of "))
        return given(parts, label=label, first=first)

    communicator.gather_parts = gather
    return labels


def evaluate(twins, step):
    """Compare the losses of both without gradients."""
    twins.model.eval()
    with torch.no_grad():
        twins.loss(step)
    twins.model.train()
