"""Slow links under a divided model: its data-parallel axis approximates, and checkpoints go on."""

import os

import pytest
import torch

from cases import case
from drivetrain import Accelerator
from stacks import Residual, Stack


def started(inner, method):
    torch.manual_seed(3)
    module = Stack([Residual(96), Residual(96)], first=torch.nn.Linear(8, 96))
    strategy = {"name": "megatron", "tp": 2, "data_parallel": {"name": inner}}
    config = {"strategy": strategy, "links": {"far": {"gradients": method}}}
    accelerator = Accelerator(cpu=True, config=config)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return accelerator, *accelerator.prepare(module, optimizer)


def step(accelerator, model, optimizer, index):
    part = accelerator.process_index // 2  # tensor-parallel ranks get the same rows
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * index + part))
    optimizer.zero_grad()
    accelerator.backward(model(x).square().mean())
    optimizer.step()


def weights(accelerator, model):
    return {name: each.clone() for name, each in accelerator.get_state_dict(model).items()}


@pytest.mark.ranks(4)
def test_a_data_parallel_axis_over_hosts_is_approximate_and_goes_on(monkeypatch, tmp_path):
    monkeypatch.setenv("GROUP_RANK", str(int(os.environ["RANK"]) // 2))  # two hosts
    for inner in ("ddp", "zero2"):
        with case(inner):
            check(inner, tmp_path / inner)


def check(inner, folder):
    found = {}
    for method in ("exact", "int4"):
        accelerator, model, optimizer = started(inner, method)
        for index in range(2):
            step(accelerator, model, optimizer, index)
        accelerator.save_state(folder / method)
        step(accelerator, model, optimizer, 3)
        found[method] = weights(accelerator, model)
        sent = accelerator.traffic.sent()
        assert (("dp.far", "all_to_all") in sent) is (method == "int4")
        accelerator.free_memory()
    apart = max(float((found["int4"][k] - v).abs().max()) for k, v in found["exact"].items())
    assert 1e-6 < apart < 0.05
    accelerator, model, optimizer = started(inner, "int4")
    accelerator.load_state(folder / "int4")
    step(accelerator, model, optimizer, 3)
    again = weights(accelerator, model)
    assert all(torch.equal(again[name], value) for name, value in found["int4"].items())
    accelerator.free_memory()
