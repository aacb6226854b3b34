"""What a script changes in whole parameters reaches the masters that a store keeps."""

import pytest
import torch
from torch import nn
from torch.optim import SGD

from drivetrain.errors import UsageError
from offloaded_trainings import STRATEGIES, Free, Training
from zero_stages import MASTERS

pytestmark = pytest.mark.ranks(2)

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
