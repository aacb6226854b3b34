"""Recompute through the facade: by configuration or in code, under a strategy, once."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

from drivetrain import Accelerator
from drivetrain.errors import UsageError
from drivetrain.runtime.mesh import Mesh

WIDTH, ROWS = 24, 40


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.3)

    def forward(self, x, *, bias=None):
        self.calls += 1
        return x + self.drop(self.down(torch.tanh(self.up(x)))) + bias


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(7, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 7, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens)
        bias = torch.ones(WIDTH)
        for block in self.blocks:
            x = block(x, bias=bias)
        return self.head(x)


def build():
    torch.manual_seed(0)
    return Net()


@pytest.mark.ranks(1)
def test_in_code_before_or_after_prepare_and_never_twice():
    accelerator = Accelerator(cpu=True, config={"recompute": {"mode": "full"}})
    model = accelerator.recompute(build(), mode="selective", blocks=["blocks.[02]"])
    assert accelerator.prepare(model) is model
    assert accelerator.prepare(model) is model

    def calls_of_one_step():
        for block in model.blocks:
            block.calls = 0
        accelerator.backward(model(torch.zeros(1, 3, dtype=torch.long)).sum())
        return [block.calls for block in model.blocks]

    assert calls_of_one_step() == [2, 1, 2]
    accelerator.recompute(model, mode="full", blocks="blocks.1, blocks.2")
    assert calls_of_one_step() == [1, 2, 2]
    accelerator.recompute(model, mode="none")
    assert calls_of_one_step() == [1, 1, 1]
    other = accelerator.recompute(build(), mode="none")
    model = accelerator.prepare(other)
    assert calls_of_one_step() == [1, 1, 1]
    accelerator.end_training()


@pytest.mark.ranks(1)
def test_a_copy_has_its_own_parameters():
    accelerator = Accelerator(
        cpu=True, mixed_precision="bf16", config={"recompute": {"mode": "full"}}
    )
    model = accelerator.prepare(build())
    twin = copy.deepcopy(accelerator.unwrap_model(model))
    twin(torch.zeros(1, 3, dtype=torch.long)).sum().backward()
    assert model.head.weight.grad is None
    assert twin.head.weight.grad is not None
    assert accelerator.unwrap_model(model, keep_fp32_wrapper=False) is model
    assert [block.calls for block in twin.blocks] == [2, 2, 2]
    accelerator.end_training()


@pytest.mark.ranks(2)
def test_inputs_are_split_over_an_axis_of_replicas():
    accelerator = Accelerator(cpu=True)
    mesh = Mesh.build({"tp": 2, "dp": 1}, accelerator.world)
    accelerator.run = dataclasses.replace(accelerator.run, mesh=mesh)
    model = accelerator.recompute(build(), partition="tp")
    torch.manual_seed(0)
    tokens = torch.randint(7, (20, ROWS))
    before = accelerator.traffic.sent().get(("tp", "all_gather"), 0)
    model(tokens).square().mean().backward()
    sent = accelerator.traffic.sent()["tp", "all_gather"] - before
    assert sent == 3 * 20 * ROWS * WIDTH * 4 / 2
    gradients = [p.grad.clone() for p in model.parameters()]
    again = build()
    torch.manual_seed(0)
    tokens = torch.randint(7, (20, ROWS))
    again(tokens).square().mean().backward()
    for mine, theirs in zip(gradients, [p.grad for p in again.parameters()], strict=True):
        assert torch.equal(mine, theirs)
    accelerator.end_training()


@pytest.mark.ranks(1)
def test_wrong_use():
    accelerator = Accelerator(cpu=True)
    model = build()
    with pytest.raises(UsageError, match="mode to be one of none, full, selective, found 'some'"):
        accelerator.recompute(model, mode="some")
    with pytest.raises(UsageError, match="keep to be one of device, cpu, found 'disk'"):
        accelerator.recompute(model, keep="disk")
    with pytest.raises(UsageError, match="found 'dp'; the mesh has no axis but dp"):
        accelerator.recompute(model, partition="dp")
    with pytest.raises(UsageError, match="found 'tp'"):
        accelerator.recompute(model, partition="tp")
    with pytest.raises(UsageError, match="'layers'"):
        accelerator.recompute(model, blocks=["layers"])
    with pytest.raises(UsageError, match="compiled Net"):
        accelerator.recompute(torch.compile(model, backend="eager"))
    assert all("forward" not in block.__dict__ for block in model.blocks)
    accelerator.end_training()
    configured = Accelerator(cpu=True, config={"recompute": {"mode": "full"}})
    with pytest.raises(UsageError, match="mode='none'"):
        configured.prepare(nn.Linear(2, 2))
    configured.end_training()
