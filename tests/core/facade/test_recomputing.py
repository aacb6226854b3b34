"""Recompute through the facade: by configuration or in code, under a strategy, once."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

from drivetrain import Accelerator
from drivetrain.errors import UsageError
from drivetrain.runtime.mesh import Mesh
from stacks import Residual, Stack

pytestmark = pytest.mark.ranks(1)

WIDTH, ROWS = 24, 40


class Block(Residual):
    """Counts its calls, draws, and takes a further argument."""

    calls = 0

    def forward(self, x, *, bias=None):
        self.calls += 1
        return nn.functional.dropout(super().forward(x), 0.3) + (1.0 if bias is None else bias)


def build():
    torch.manual_seed(0)
    ends = {"first": nn.Embedding(7, WIDTH), "last": nn.Linear(WIDTH, 7, bias=False)}
    return Stack([Block(WIDTH) for _ in range(3)], **ends, tied=True)


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


def test_what_was_refused_is_attached_once_it_is_mended():
    accelerator = Accelerator(cpu=True, config={"recompute": {"mode": "full"}})
    model = build()
    model.blocks[1].compile(backend="eager")
    with pytest.raises(UsageError, match="compile"):
        accelerator.prepare(model)
    model.blocks[1] = Block(WIDTH)
    model = accelerator.prepare(model)
    accelerator.backward(model(torch.zeros(1, 3, dtype=torch.long)).sum())
    assert [block.calls for block in model.blocks] == [2, 2, 2]
    accelerator.end_training()


def test_a_copy_has_its_own_parameters():
    full = {"recompute": {"mode": "full"}}
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", config=full)
    model = accelerator.prepare(build())
    twin = copy.deepcopy(accelerator.unwrap_model(model))
    twin(torch.zeros(1, 3, dtype=torch.long)).sum().backward()
    assert model.last.weight.grad is None
    assert twin.last.weight.grad is not None
    assert accelerator.unwrap_model(model, keep_fp32_wrapper=False) is model
    assert [block.calls for block in twin.blocks] == [2, 2, 2]


@pytest.mark.ranks(2)
def test_inputs_are_split_over_an_axis_of_replicas():
    accelerator = Accelerator(cpu=True)
    mesh = Mesh.build({"tp": 2, "dp": 1}, accelerator.world)
    accelerator._state.run = dataclasses.replace(accelerator.run, mesh=mesh)
    model = accelerator.recompute(build(), partition="tp")
    torch.manual_seed(0)
    tokens = torch.randint(7, (20, ROWS))
    before = accelerator.traffic.sent().get(("tp", "all_gather"), 0)
    model(tokens, bias=torch.ones(WIDTH)).square().mean().backward()
    sent = accelerator.traffic.sent()["tp", "all_gather"] - before
    assert sent == 3 * 20 * ROWS * WIDTH * 4 / 2
    gradients = [p.grad.clone() for p in model.parameters()]
    again = build()
    torch.manual_seed(0)
    tokens = torch.randint(7, (20, ROWS))
    again(tokens).square().mean().backward()
    torch.testing.assert_close([*gradients], [p.grad for p in again.parameters()], rtol=0, atol=0)


def test_wrong_use():
    accelerator = Accelerator(cpu=True)
    model = build()
    for options, message in (
        ({"mode": "some"}, "mode to be one of none, full, selective, found 'some'"),
        ({"keep": "disk"}, "keep to be one of device, cpu, found 'disk'"),
        ({"partition": "dp"}, "found 'dp'; the mesh has no axis but dp"),
        ({"partition": "tp"}, "found 'tp'"),
        ({"blocks": ["layers"]}, "'layers'"),
    ):
        with pytest.raises(UsageError, match=message):
            accelerator.recompute(model, **options)
    with pytest.raises(UsageError, match="compiled Stack"):
        accelerator.recompute(torch.compile(model, backend="eager"))
    assert all("forward" not in block.__dict__ for block in model.blocks)
    configured = Accelerator(cpu=True, config={"recompute": {"mode": "full"}})
    with pytest.raises(UsageError, match="mode='none'"):
        configured.prepare(nn.Linear(2, 2))
