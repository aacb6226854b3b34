"""What a script changes in whole parameters reaches the masters that a store keeps."""

import pytest
import torch
from torch import nn
from torch.optim import SGD

from drivetrain.errors import UsageError
from zero_stages import MASTERS, start

pytestmark = pytest.mark.ranks(2)

CHANGED = 8.0
RATE = 2.0**-10
"""So small that bf16 has no room for what a step does to ``CHANGED``."""


class Training:
    def __init__(self, name, precision, **offload):
        strategy = {"name": name, **({"offload": offload} if offload else {})}
        if name == "zero3":
            strategy["keep_below"] = 100
        self.accelerator = start(strategy, **(MASTERS if precision == "bf16" else {}))
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16), nn.Linear(16, 16))
        optimizer = SGD(model.parameters(), lr=RATE, fused=False)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def steps(self, count):
        for _ in range(count):
            x = torch.linspace(-1, 1, 16 * 4).view(4, 16)
            self.accelerator.backward(self.model(x).float().square().mean())
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def change(self):
        with self.accelerator.gathered(self.model):
            if self.accelerator.is_main_process:
                nn.init.constant_(self.model[2].weight, CHANGED)
        return self

    def write_unseen(self):
        for parameter in self.model.parameters():
            parameter.data.copy_(parameter.data.flip(0))
        return self

    def masters(self):
        """Return what this rank would save of the weights."""
        shards = self.accelerator.strategy_of(self.model).state.shards()
        return {(s.name, str(s.part)): s.tensor.clone() for s in shards if not s.state}


@pytest.mark.parametrize(
    ("name", "precision"), [("zero2", "bf16"), ("zero3", "fp32"), ("fsdp", "bf16")]
)
def test_changes_reach_masters(name, precision, tmp_path):
    """They come on top of late updates: what was not changed is as if nothing had been."""
    disk = {"optimizer": "nvme", "path": str(tmp_path)}
    ways = [{}, disk] if name == "zero2" else [{}, disk, {**disk, "params": "nvme"}]
    expected, *others = (
        Training(name, precision, **way).steps(2).change().steps(2).masters() for way in ways
    )
    for found in others:
        torch.testing.assert_close(found, expected, rtol=0, atol=0)

    late = {"optimizer": "cpu", "delayed": True}
    found = Training(name, precision, **late).steps(3).change().masters()
    left = Training(name, precision, **late).steps(3).masters()
    for key, value in left.items():
        same = torch.full_like(value, CHANGED) if key[0] == "2.weight" else value
        assert torch.equal(found[key], same), key
    found = Training(name, precision, **late).steps(3).change().steps(2).masters()
    weight = [value for key, value in found.items() if key[0] == "2.weight"]
    assert all((value - CHANGED).abs().max() < 0.5 for value in weight)


def test_writes_that_leave_no_trace_reach_masters_or_are_refused(tmp_path):
    disk = {"optimizer": "nvme", "path": str(tmp_path)}
    for steps in (0, 2):  # what is saved before the next step has them, too
        expected, found = (
            Training("zero2", "bf16", **way).steps(2).write_unseen().steps(steps).masters()
            for way in ({}, disk)
        )
        torch.testing.assert_close(found, expected, rtol=0, atol=0)

    late = {"optimizer": "cpu", "delayed": True}
    training = Training("zero2", "bf16", **late).steps(2).write_unseen()
    with pytest.raises(UsageError, match="held back"):
        training.steps(1)
