"""What steps in the background leave as it is: clipped gradients, other optimizers, late reads."""

import time

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from drivetrain import Accelerator
from drivetrain.errors import UsageError
from drivetrain_offload.steps.tiles import Tiler
from drivetrain_offload.stored import ShardInStore

WIDTH = 24
STRATEGIES = {
    "zero1": {"name": "zero1"},
    "zero3": {"name": "zero3", "keep_below": 0},
    "fsdp": {"name": "fsdp", "unit_from": 10**6},  # one flat tensor
}
EACH = pytest.mark.parametrize("name", list(STRATEGIES))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.extra = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return self.layers(x) * self.extra


def offloads(name, path):
    disk = {"optimizer": "nvme", "path": str(path)}
    return [{"optimizer": "cpu"}, disk if name == "zero1" else {**disk, "params": "nvme"}]


def started(name, offload=None):
    section = {} if offload is None else {"offload": offload}
    accelerator = Accelerator(strategy={**STRATEGIES[name], **section}, cpu=True)
    torch.manual_seed(5)
    return accelerator, Net()


def backward(accelerator, model, seed):
    generator = torch.Generator().manual_seed(10 * seed + accelerator.process_index)
    x = torch.randn(3, WIDTH, generator=generator)
    accelerator.backward(model(x).square().mean())


def close(accelerator, model):
    weights = accelerator.get_state_dict(model)
    accelerator.free_memory()
    return weights


def assert_same(found, expected):
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def slowly(monkeypatch, owner, name, seconds):
    real = getattr(owner, name)

    def call(*args):
        time.sleep(seconds)
        result = real(*args)
        time.sleep(seconds)
        return result

    monkeypatch.setattr(owner, name, call)


@EACH
@pytest.mark.ranks(2)
def test_clipped_gradients_stay_clipped(name, tmp_path):
    """For a second step with them, for who reads them, and for a backward that adds to them."""

    def run(offload):
        accelerator, model = started(name, offload)
        model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
        norms = []
        for seed in range(4):
            backward(accelerator, model, seed)
            accelerator.clip_grad_norm_(model.parameters(), 1e-2)
            optimizer.step()
            if seed < 3:
                optimizer.step()
            strategy = accelerator.strategy_of(model)
            norms.append(sum(float(gradient.norm()) for gradient in strategy.gradients()))
            if seed == 2:
                optimizer.zero_grad()
        return norms, close(accelerator, model)

    norms, weights = run(None)
    for offload in offloads(name, tmp_path):
        found, others = run(offload)
        assert found == pytest.approx(norms, rel=1e-6)
        assert_same(others, weights)


@EACH
@pytest.mark.ranks(1)
def test_two_optimizers_step_one_unit_at_once(name, tmp_path, monkeypatch):
    def run(offload):
        accelerator, model = started(name, offload)
        parameters = list(model.parameters())
        one, two = AdamW(parameters[::2], lr=1e-2), AdamW(parameters[1::2], lr=1e-2)
        model, one, two = accelerator.prepare(model, one, two)
        for seed in range(3):
            backward(accelerator, model, seed)
            one.step()
            two.step()
            one.zero_grad()
            two.zero_grad()
        return close(accelerator, model)

    expected = run(None)
    slowly(monkeypatch, ShardInStore, "_fetch", 0.01)
    for offload in offloads(name, tmp_path):
        assert_same(run(offload), expected)


@EACH
@pytest.mark.ranks(1)
def test_one_optimizer_for_each_parameter(name):
    accelerator, model = started(name, {"optimizer": "cpu"})
    model, _ = accelerator.prepare(model, AdamW(model.parameters()))
    with pytest.raises(UsageError, match="expected one optimizer for each offloaded parameter"):
        accelerator.prepare(SGD(model.parameters(), lr=0.1))
    accelerator.free_memory()


@EACH
@pytest.mark.ranks(1)
def test_late_updates_beside_a_parameter_without_optimizer(name):
    """Nobody clears its gradient, nor takes it; those of the others come all the same."""
    accelerator, model = started(name, {"optimizer": "cpu", "delayed": True})
    given = list(model.layers.parameters())
    model, optimizer = accelerator.prepare(model, SGD(given, lr=0.1))
    for seed in range(4):
        backward(accelerator, model, seed)
        held = [one for group in optimizer.param_groups for one in group["params"]]
        assert len(held) == len(given)
        assert all(one.grad is not None for one in held)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.free_memory()


@EACH
@pytest.mark.ranks(2)
def test_late_updates_of_two_optimizers(name):
    """Each takes over its own; ranks go on with equal parameters, one step late."""
    accelerator, model = started(name, {"optimizer": "cpu", "delayed": True})
    start = model.layers[0].weight.detach().clone()
    one, two = SGD(model.layers[:2].parameters(), lr=0.1), SGD(model.layers[2:].parameters(), lr=1)
    model, one, two = accelerator.prepare(model, one, two)
    for seed in range(3):
        backward(accelerator, model, seed)
        one.step()
        two.step()
        one.zero_grad()
        two.zero_grad()
        whole = model.layers[0].weight.detach() if name == "zero1" else None
        if whole is not None:
            assert torch.equal(whole, start) is (seed == 0)
            everyone = accelerator.gather(whole.reshape(1, -1))
            assert torch.equal(everyone[0], everyone[1])
    accelerator.free_memory()


@pytest.mark.ranks(2)
def test_dtensors_right_after_a_step(monkeypatch):
    def run(offload):
        accelerator, model = started("fsdp", offload)
        model, optimizer = accelerator.prepare(model, AdamW(model.parameters(), lr=1e-2))
        backward(accelerator, model, 0)
        optimizer.step()
        shards = accelerator.strategy_of(model).dtensors()
        found = {key: value.to_local().clone() for key, value in shards.items()}
        accelerator.free_memory()
        return found

    expected = run(None)
    slowly(monkeypatch, Tiler, "update_all", 0.05)
    assert_same(run({"optimizer": "cpu"}), expected)


@pytest.mark.ranks(1)
def test_ratio_counts_what_is_trained():
    accelerator = Accelerator(
        strategy={
            "name": "zero3",
            "keep_below": 0,
            "own_unit_from": 100,
            "offload": {"optimizer": "cpu", "ratio": 0.4},
        },
        cpu=True,
    )
    model = Net()
    model.layers[2:].requires_grad_(False)
    model, optimizer = accelerator.prepare(model, AdamW(model.layers[:2].parameters()))
    backward(accelerator, model, 0)
    optimizer.step()
    own = sum(bool(state) for state in optimizer.state.values())
    whole = len(optimizer.state_dict()["state"])
    assert 0 < own < whole
    accelerator.free_memory()
