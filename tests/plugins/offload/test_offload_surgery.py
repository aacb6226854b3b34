"""What a script changes in whole parameters reaches the masters that a store keeps."""

import pytest
import torch
from torch import nn
from torch.optim import SGD

from drivetrain import Accelerator

CHANGED = 8.0
RATE = 2.0**-10
"""So small that bf16 has no room for what a step does to ``CHANGED``."""


class Training:
    def __init__(self, name, precision, **offload):
        strategy = {"name": name, **({"offload": offload} if offload else {})}
        options = {}
        if precision == "bf16":
            options = {"mixed_precision": "bf16", "config": {"dtypes": {"param": "bf16"}}}
        if name == "zero3":
            strategy["keep_below"] = 100
        self.accelerator = Accelerator(strategy=strategy, cpu=True, **options)
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

    def change(self):
        with self.accelerator.gathered(self.model):
            if self.accelerator.is_main_process:
                nn.init.constant_(self.model[2].weight, CHANGED)

    def masters(self):
        """Return what this rank would save of the weights."""
        strategy = self.accelerator.strategy_of(self.model)
        found = {
            (shard.name, str(shard.part)): shard.tensor.clone()
            for shard in strategy.shards()
            if not shard.state
        }
        self.accelerator.free_memory()
        return found


def trained(name, precision, **offload):
    training = Training(name, precision, **offload)
    training.steps(2)
    training.change()
    training.steps(2)
    return training.masters()


@pytest.mark.parametrize(
    ("name", "precision"), [("zero2", "bf16"), ("zero3", "fp32"), ("fsdp", "bf16")]
)
@pytest.mark.ranks(2)
def test_changes_reach_masters(name, precision, tmp_path):
    expected = trained(name, precision)
    disk = {"optimizer": "nvme", "path": str(tmp_path)}
    for offload in [disk] if name == "zero2" else [disk, {**disk, "params": "nvme"}]:
        found = trained(name, precision, **offload)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(found[key], value), key


@pytest.mark.parametrize(
    ("name", "precision"), [("zero2", "bf16"), ("zero3", "fp32"), ("fsdp", "bf16")]
)
@pytest.mark.ranks(2)
def test_changes_come_on_top_of_late_updates(name, precision):
    """What was not changed is as if nothing had been: no late update is lost or undone."""
    changed = Training(name, precision, optimizer="cpu", delayed=True)
    left = Training(name, precision, optimizer="cpu", delayed=True)
    changed.steps(3)
    left.steps(3)
    changed.change()
    found, expected = changed.masters(), left.masters()
    for key, value in expected.items():
        same = torch.full_like(value, CHANGED) if key[0] == "2.weight" else value
        assert torch.equal(found[key], same), key
    changed = Training(name, precision, optimizer="cpu", delayed=True)
    changed.steps(3)
    changed.change()
    changed.steps(2)
    weight = [value for key, value in changed.masters().items() if key[0] == "2.weight"]
    assert all((value - CHANGED).abs().max() < 0.5 for value in weight)
