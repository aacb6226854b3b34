"""On a GPU the loop gives what it gives on the CPU; on several, NCCL carries the gradients."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
needs_gpu = pytest.mark.skipif(GPUS == 0, reason="needs a GPU")
needs_two = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")


def losses(accelerator):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    data = torch.linspace(-1, 1, 64 * 8, dtype=torch.float64).view(64, 8)
    loader = DataLoader(TensorDataset(data), batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    found = []
    for (x,) in loader:
        assert x.device == accelerator.device
        loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.gpu
@needs_gpu
def test_one_gpu_equals_the_cpu():
    assert losses(Accelerator()) == pytest.approx(losses(Accelerator(cpu=True)), rel=1e-9)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_learns(precision):
    found = losses(Accelerator(mixed_precision=precision))
    assert found[-1] < found[0]


@pytest.mark.gpu
@needs_gpu
def test_resume_is_exact(tmp_path):
    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(2, 2))
    accelerator.save_state(tmp_path / "one")
    drawn = torch.rand(3, device=accelerator.device)
    with torch.no_grad():
        model.weight.zero_()
    accelerator.load_state(tmp_path / "one")
    assert torch.equal(torch.rand(3, device=accelerator.device), drawn)
    assert model.weight.abs().sum() > 0


@pytest.mark.gpu
@needs_two
def test_two_gpus():
    command = [sys.executable, "-m", "drivetrain_launch", "test", "--nproc-per-node", "2"]
    assert subprocess.run(command, check=False, timeout=200).returncode == 0
