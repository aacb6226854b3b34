"""Saving and loading of replicated state, and what rank 0 broadcasts."""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from drivetrain.errors import CheckpointError, ConfigError
from drivetrain.runtime.mesh import Mesh
from drivetrain.runtime.precision import Precision
from drivetrain.runtime.world import World
from drivetrain.shards import Part, Shard
from drivetrain.strategy import Run
from drivetrain.traffic import Traffic
from drivetrain_ddp import Ddp, DdpConfig


class Saved:
    """A checkpoint of one rank in memory."""

    def __init__(self, shards: Iterator[Shard]) -> None:
        self.tensors = {(shard.name, shard.state): shard.tensor.clone() for shard in shards}

    partial = False

    def keys(self) -> Iterator[tuple[str, str]]:
        return iter(self.tensors)

    def shape(self, name: str, state: str = "") -> tuple[int, ...]:
        return tuple(self.tensors[name, state].shape)

    def read(self, name: str, state: str = "", part: Part | None = None) -> Tensor:
        assert part is None
        return self.tensors[name, state]

    def scalars(self, name: str, optimizer: int) -> Mapping[str, Any]:
        return {}


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


def start(config: DdpConfig, model: nn.Module, *optimizers: Optimizer) -> Ddp:
    world = World.discover(cpu=True)
    run = Run(
        world=world,
        mesh=Mesh.build(Ddp.axes(config, world.size), world),
        precision=Precision.of("no"),
        accumulation=1,
        traffic=Traffic(),
    )
    strategy = Ddp(config, run)
    strategy.prepare(model, optimizers)
    return strategy


def make(seed: int) -> tuple[Model, Optimizer, Optimizer]:
    torch.manual_seed(seed)
    model = Model()
    return model, Adam([model.words.weight], lr=0.01), SGD(model.norm.parameters(), 0.1, 0.9)


@pytest.mark.ranks(1)
def test_what_does_not_fit_is_named_and_nothing_changes():
    model, *optimizers = make(seed=1)
    strategy = start(DdpConfig(), model, *optimizers)
    loss = model(torch.arange(6)).square().mean()
    strategy.backward(loss)
    for optimizer in optimizers:
        optimizer.step()
    saved = Saved(strategy.shards())
    before = deepcopy(model.state_dict())
    for key, value, message in [
        (("frozen", ""), torch.ones(5), "frozen"),
        (("extra", ""), torch.ones(5), "extra"),
        (("words.weight", "7.exp_avg"), torch.ones(5), "7.exp_avg"),
    ]:
        wrong = deepcopy(saved)
        wrong.tensors[key] = value
        wrong.tensors["words.weight", ""] = torch.zeros(20, 8)
        with pytest.raises(CheckpointError, match=message):
            strategy.load(wrong)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    strategy.close()


@pytest.mark.parametrize("policy", ["broadcast", "none"])
@pytest.mark.ranks(2)
def test_buffers_follow_rank_zero_after_a_backward(policy: str):
    model, *optimizers = make(seed=1)
    strategy = start(DdpConfig(buffers=policy), model, *optimizers)
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
    strategy = start(DdpConfig(), model, *optimizers)
    assert list(model.state_dict()) == keys
    assert model.words.weight is first
    assert model.head.weight is first
    assert strategy.unwrap(model) is model
    expected = make(seed=0)[0].state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name])
    strategy.close()
    assert not model._forward_pre_hooks


def test_master_copies_are_refused():
    precision = Precision(name="bf16", param=torch.bfloat16, master=torch.float32)
    with pytest.raises(ConfigError, match="master"):
        Ddp.check_options(DdpConfig(), precision)
