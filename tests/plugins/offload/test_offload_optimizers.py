"""Offloaded steps of several optimizers, and of parts of the parameters or of the state."""

import time

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from drivetrain import Accelerator
from drivetrain.errors import UsageError
from drivetrain_offload.strategy import InStoreShard
from drivetrain_offload.tiles import Tiler
from offloaded_trainings import STRATEGIES, Free, Training, loss_of, offloads
from zero_stages import MASTERS

pytestmark = pytest.mark.ranks(2)

LATE = {"optimizer": "cpu", "delayed": True}


def started(name, offload=None):
    section = {} if offload is None else {"offload": offload}
    accelerator = Accelerator(strategy={**STRATEGIES[name], **section}, cpu=True)
    torch.manual_seed(5)
    return accelerator, Free()


def slowly(monkeypatch, owner, name, seconds):
    real = getattr(owner, name)

    def call(*args):
        time.sleep(seconds)
        result = real(*args)
        time.sleep(seconds)
        return result

    monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize("name", ["zero3", "fsdp"])
@pytest.mark.ranks(1)
def test_two_optimizers_step_one_unit_at_once(name, tmp_path, monkeypatch):
    """The second is made after ``prepare``, and steps seldom: gradients add up in between."""

    def run(offload):
        accelerator, model = started(name, offload)
        parameters = list(model.parameters())
        one, two = AdamW(parameters[::2], lr=1e-2), AdamW(parameters[1::2], lr=1e-2)
        model, one = accelerator.prepare(model, one)
        two = accelerator.prepare(two)
        for seed in range(4):
            accelerator.backward(loss_of(model, seed))
            steps = (one, two) if seed % 3 else (one,)
            for optimizer in steps:
                optimizer.step()
            for optimizer in steps:
                optimizer.zero_grad()
        if offload is not None:
            with pytest.raises(UsageError, match="one optimizer for each offloaded parameter"):
                accelerator.prepare(SGD(model.parameters(), lr=0.1))
        return accelerator.get_state_dict(model)

    expected = run(None)
    slowly(monkeypatch, InStoreShard, "_fetch", 0.002)
    for offload in offloads(name, str(tmp_path)):
        torch.testing.assert_close(run(offload), expected, rtol=0, atol=0)


def test_late_updates_of_two_optimizers_that_leave_one_parameter_out():
    """Each takes over its own; ranks go on with equal parameters, one step late."""
    accelerator, model = started("zero1", LATE)
    start = model.first.weight.detach().clone()
    one, two = SGD([model.first.weight], lr=0.1), SGD(model.blocks.parameters(), lr=1)
    model, one, two = accelerator.prepare(model, one, two)
    for seed in range(3):
        accelerator.backward(loss_of(model, 10 * seed + accelerator.process_index))
        for optimizer in (one, two):
            groups = optimizer.optimizer.param_groups
            held = [each for group in groups for each in group["params"]]
            assert all(each.grad is not None for each in held)
            optimizer.step()
        for optimizer in (one, two):
            optimizer.zero_grad()
        words = model.first.weight.detach()
        assert torch.equal(words, start) is (seed == 0)
        everyone = accelerator.gather(words.reshape(1, -1))
        assert torch.equal(everyone[0], everyone[1])


def test_dtensors_right_after_a_step(monkeypatch):
    def run(**offload):
        training = Training({**STRATEGIES["fsdp"], **offload}).steps(1)
        shards = training.accelerator.strategy_of(training.model).state.dtensors()
        return {key: value.to_local().clone() for key, value in shards.items()}

    expected = run()
    slowly(monkeypatch, Tiler, "update_all", 0.05)
    torch.testing.assert_close(run(offload={"optimizer": "cpu"}), expected, rtol=0, atol=0)


@pytest.mark.ranks(1)
def test_ratio_counts_what_is_trained():
    accelerator, model = started("zero3", {"optimizer": "cpu", "ratio": 0.4})
    model.blocks[1:].requires_grad_(False)
    model, optimizer = accelerator.prepare(model, AdamW(model.blocks[0].parameters()))
    accelerator.backward(loss_of(model, 0))
    optimizer.step()
    own = sum(bool(state) for state in optimizer.optimizer.state.values())
    assert 0 < own < len(optimizer.state_dict()["state"])


# --- what a script changes in whole parameters reaches the masters that a store keeps ---


CHANGED = 8.0
RATE = 2.0**-10
"""So small that bf16 has no room for what a step does to ``CHANGED``."""


class Edited(Training):
    def change(self):
        with self.accelerator.gathered(self.model):
            if self.accelerator.is_main_process:
                nn.init.constant_(self.model.blocks[1].up.weight, CHANGED)
        return self

    def write_unseen(self):
        for parameter in self.model.parameters():
            parameter.data.copy_(parameter.data.flatten().flip(0).view_as(parameter))
        return self

    def masters(self):
        """Return what this rank would save of the weights."""
        shards = self.accelerator.strategy_of(self.model).state.shards()
        return {(s.name, str(s.part)): s.tensor.clone() for s in shards if not s.state}


def sgd(model):
    return SGD(model.parameters(), lr=RATE, fused=False)


def edited(name, precision, **offload):
    strategy = {**STRATEGIES[name], **({"offload": offload} if offload else {})}
    return Edited(strategy, make=sgd, model=Free, **(MASTERS if precision == "bf16" else {}))


@pytest.mark.parametrize(
    ("name", "precision"), [("zero2", "bf16"), ("zero3", "fp32"), ("fsdp", "bf16")]
)
def test_changes_reach_masters(name, precision, tmp_path):
    """They come on top of late updates: what was not changed is as if nothing had been."""
    disk = {"optimizer": "nvme", "path": str(tmp_path)}
    ways = [{}, disk] if name == "zero2" else [{}, disk, {**disk, "params": "nvme"}]
    expected, *others = (
        edited(name, precision, **way).steps(2).change().steps(2).masters() for way in ways
    )
    for found in others:
        torch.testing.assert_close(found, expected, rtol=0, atol=0)

    late = {"optimizer": "cpu", "delayed": True}
    found = edited(name, precision, **late).steps(3).change().masters()
    left = edited(name, precision, **late).steps(3).masters()
    for key, value in left.items():
        same = torch.full_like(value, CHANGED) if key[0] == "blocks.1.up.weight" else value
        assert torch.equal(found[key], same), key
    found = edited(name, precision, **late).steps(3).change().steps(2).masters()
    weight = [value for key, value in found.items() if key[0] == "blocks.1.up.weight"]
    assert all((value - CHANGED).abs().max() < 0.5 for value in weight)


def test_writes_that_leave_no_trace_reach_masters_or_are_refused(tmp_path):
    disk = {"optimizer": "nvme", "path": str(tmp_path)}
    for steps in (0, 2):  # what is saved before the next step has them, too
        expected, found = (
            edited("zero2", "bf16", **way).steps(2).write_unseen().steps(steps).masters()
            for way in ({}, disk)
        )
        torch.testing.assert_close(found, expected, rtol=0, atol=0)

    late = {"optimizer": "cpu", "delayed": True}
    training = edited("zero2", "bf16", **late).steps(2).write_unseen()
    with pytest.raises(UsageError, match="held back"):
        training.steps(1)
