"""Optimizer state off a GPU: the same training as with all of it there, and the memory is free."""

import pytest
import torch
from torch import nn

from drivetrain import Accelerator

WIDTH, LAYERS = 512, 6
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
WAYS = {
    "cpu": {"optimizer": "cpu"},
    "cpu params": {"optimizer": "cpu", "params": "cpu"},
    "disk": {"optimizer": "nvme", "params": "nvme"},
    "late": {"optimizer": "cpu", "delayed": True},
}


def train(offload, *, steps=4, low=False):
    """Return losses, and the bytes on the GPU between steps."""
    options = {"mixed_precision": "bf16", "config": {"dtypes": {"param": "bf16"}}} if low else {}
    strategy = {"name": "zero3", "keep_below": 0, "offload": offload}
    before = torch.cuda.memory_allocated()
    accelerator = Accelerator(strategy=strategy, **options)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    losses = []
    for seed in range(steps):
        inputs = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))
        inputs = inputs.to(accelerator.device)
        loss = (model(inputs.bfloat16() if low else inputs).float() - inputs).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before
    accelerator.free_memory()
    return losses, held


@pytest.mark.parametrize("low", [False, True], ids=["fp32", "masters"])
@pytest.mark.parametrize("name", [name for name in WAYS if name != "late"])
def test_losses_are_those_with_everything_on_the_gpu(name, low, tmp_path):
    """Kernels of the GPU and of the processor round in their own ways."""
    offload = {**WAYS[name], **({"path": str(tmp_path)} if name == "disk" else {})}
    expected, whole = train({}, low=low)
    found, held = train(offload, low=low)
    assert found == pytest.approx(expected, rel=2e-2 if low else 1e-4)
    assert held < whole - 2 * 4 * LAYERS * WIDTH * WIDTH  # the moments are gone


def test_late_updates_learn():
    losses, _ = train(WAYS["late"], steps=30)
    assert losses[-1] < losses[0] - 0.005
