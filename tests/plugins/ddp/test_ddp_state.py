"""Saving and loading of replicated state, and what rank 0 broadcasts."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from drivetrain.errors import CheckpointError, ConfigError
from drivetrain.runtime.precision import Precision
from drivetrain.runtime.world import World
from drivetrain_ddp.options import DdpConfig
from drivetrain_ddp.strategy import Ddp
from read_tensors import InMemory
from started_ddp import start


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("cache", torch.ones(3), persistent=False)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.words(tokens)))


def make(seed: int) -> tuple[Model, Optimizer, Optimizer]:
    torch.manual_seed(seed)
    model = Model()
    return model, Adam([model.words.weight], lr=0.01), SGD(model.norm.parameters(), 0.1, 0.9)


@pytest.mark.ranks(1)
def test_what_does_not_fit_is_named_and_nothing_changes():
    model, *optimizers = make(seed=1)
    strategy = start(model, DdpConfig(), optimizers)
    loss = model(torch.arange(6)).square().mean()
    strategy.backward(loss)
    for optimizer in optimizers:
        optimizer.step()
    saved = {(s.name, s.state): s.tensor.clone() for s in strategy.shards()}
    before = deepcopy(model.state_dict())
    for key, value, message in [
        (("frozen", ""), torch.ones(5), "frozen"),
        (("extra", ""), torch.ones(5), "extra"),
        (("words.weight", "7.exp_avg"), torch.ones(5), "7.exp_avg"),
    ]:
        wrong = {**saved, ("words.weight", ""): torch.zeros(20, 8), key: value}
        with pytest.raises(CheckpointError, match=message):
            strategy.load(InMemory(wrong))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    strategy.close()


@pytest.mark.parametrize("policy", ["broadcast", "none"])
@pytest.mark.ranks(2)
def test_buffers_follow_rank_zero_after_a_backward(policy: str):
    model, *optimizers = make(seed=1)
    strategy = start(model, DdpConfig(buffers=policy), optimizers)
    world, traffic = strategy.run.world, strategy.run.traffic
    with torch.no_grad():
        model.norm.running_mean.fill_(float(world.rank))
        model.cache.fill_(float(world.rank))
    traffic.clear()
    with torch.no_grad():
        model(torch.arange(4))  # no gradients are wanted: nothing is sent
    model.eval()(torch.arange(4))
    with strategy.accumulating():
        model.train()(torch.arange(4))
        loss = model(torch.arange(4)).sum()
    assert not traffic.entries()
    strategy.backward(loss)
    expected = 0.0 if policy == "broadcast" else float(world.rank)
    assert model.cache[0].item() == expected
    sent = sum(buffer.nbytes for buffer in model.buffers())
    after = {("dp", "broadcast"): sent} if policy == "broadcast" and world.rank == 0 else {}
    found = traffic.sent()
    assert {key: found[key] for key in found if key[1] == "broadcast"} == after
    strategy.close()


@pytest.mark.ranks(2)
def test_prepare_makes_replicas_and_changes_no_object():
    world = World.discover(cpu=True)
    model, *optimizers = make(seed=world.rank)
    keys, first = list(model.state_dict()), model.words.weight
    strategy = start(model, DdpConfig(), optimizers)
    assert list(model.state_dict()) == keys
    assert model.words.weight is first
    assert model.head.weight is first
    assert strategy.unwrap(model) is model
    expected = make(seed=0)[0].state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name])
    strategy.close()
    assert not model._forward_pre_hooks
    precision = Precision(name="bf16", param="bf16", master="fp32")
    with pytest.raises(ConfigError, match="master"):
        Ddp.check_options(DdpConfig(), precision)
