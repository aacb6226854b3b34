"""Slow links under a divided model: its data-parallel axis approximates, and checkpoints go on."""

import os

import pytest
import torch
from torch.nn import functional as F

from drivetrain import Accelerator
from huggingface_models import VOCABULARY, gpt2, logits_of, token_batch

LAST = 3


def started(inner, method):
    torch.manual_seed(3)
    module = gpt2(2)
    strategy = {"name": "megatron", "tp": 2, "data_parallel": {"name": inner}}
    config = {"strategy": strategy, "links": {"far": {"gradients": method}}}
    accelerator = Accelerator(cpu=True, config=config)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return accelerator, *accelerator.prepare(module, optimizer)


def step(accelerator, model, optimizer, index):
    part = accelerator.process_index // 2  # tensor-parallel ranks get the same rows
    ids = token_batch(index, rows=4)[2 * part : 2 * part + 2]
    optimizer.zero_grad()
    logits = logits_of(model(ids)).view(-1, VOCABULARY)
    accelerator.backward(F.cross_entropy(logits, ids.reshape(-1)))
    optimizer.step()


def weights(accelerator, model):
    return {name: each.clone() for name, each in accelerator.get_state_dict(model).items()}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("inner", ["ddp", "zero2"])
def test_a_data_parallel_axis_over_hosts_is_approximate_and_goes_on(monkeypatch, tmp_path, inner):
    monkeypatch.setenv("GROUP_RANK", str(int(os.environ["RANK"]) // 2))  # two hosts
    found = {}
    for method in ("exact", "int4"):
        accelerator, model, optimizer = started(inner, method)
        for index in range(LAST - 1):
            step(accelerator, model, optimizer, index)
        accelerator.save_state(tmp_path / method)
        step(accelerator, model, optimizer, LAST)
        found[method] = weights(accelerator, model)
        sent = accelerator.traffic.sent()
        assert (("dp.far", "all_to_all") in sent) is (method == "int4")
        accelerator.free_memory()
    apart = max(float((found["int4"][k] - v).abs().max()) for k, v in found["exact"].items())
    assert 1e-6 < apart < 0.05
    accelerator, model, optimizer = started(inner, "int4")
    accelerator.load_state(tmp_path / "int4")
    step(accelerator, model, optimizer, LAST)
    again = weights(accelerator, model)
    assert all(torch.equal(again[name], value) for name, value in found["int4"].items())
    accelerator.free_memory()
