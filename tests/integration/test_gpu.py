"""On a GPU the loop gives what it gives on the CPU; on several, NCCL carries the gradients."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="needs a GPU")]
SCRIPT = Path(__file__).parent / "scripts" / "strategies_on_gpus.py"
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


def test_one_gpu_equals_the_cpu():
    assert losses(Accelerator()) == pytest.approx(losses(Accelerator(cpu=True)), rel=1e-9)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_learns(precision):
    found = losses(Accelerator(mixed_precision=precision))
    assert found[-1] < found[0]


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


@needs_two
def test_two_gpus():
    command = [sys.executable, "-m", "drivetrain_launch", "test", "--nproc-per-node", "2"]
    assert subprocess.run(command, check=False, timeout=200).returncode == 0


def on_two_hosts(*arguments):
    """Return what two ranks print that share a GPU, or with ``--cpu`` the processor.

    NCCL wants a GPU for each rank of a host, so each rank says that it is on a host of its own.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    started = []
    for rank in range(2):
        places = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        meeting = {"GROUP_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        nccl = {"NCCL_HOSTID": f"host-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": 1}
        own = {key: str(value) for key, value in {**places, **meeting, **nccl}.items()}
        command = [sys.executable, str(SCRIPT), *arguments]
        process = subprocess.Popen(command, env=os.environ | own, stdout=subprocess.PIPE, text=True)
        started.append(process)
    try:
        printed = [process.communicate(timeout=150)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0]
    return json.loads(printed[0].splitlines()[-1])


def test_strategies_over_nccl_equal_the_cpu():
    names = ["ddp", "zero2", "zero3", "fsdp", "offload", "tp", "pp", "pp-zb"]
    command = [sys.executable, str(SCRIPT), "plain"]
    alone = subprocess.run(command, capture_output=True, text=True, check=True)
    expected = json.loads(alone.stdout.splitlines()[-1])["plain"]
    found = on_two_hosts(*names)
    assert {name: pytest.approx(expected, rel=1e-11) for name in names} == found


@pytest.mark.parametrize(
    "name", ["int8", "momenta", "updates", "values", "secondary", "local", "local, stores"]
)
def test_methods_between_hosts_equal_those_on_the_cpu(name):
    """Messages are of fp32, so a sum of fp64 that differs in its last bit seldom changes one."""
    expected = on_two_hosts("--cpu", name)[name]
    assert on_two_hosts(name)[name] == pytest.approx(expected, rel=1e-5)
