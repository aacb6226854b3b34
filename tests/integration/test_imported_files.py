"""A file of Accelerate and one of DeepSpeed are imported, and the result trains on two ranks."""

import json

import pytest
import torch
from torch import nn

from drivetrain_launch import cli
from forked_programs import run_python

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from drivetrain import Accelerator

accelerator = Accelerator()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
rows = torch.randn(32, 8)
model, optimizer, loader = accelerator.prepare(
    model, optimizer, DataLoader(TensorDataset(rows), batch_size=4)
)
losses = []
for (batch,) in loader:
    with accelerator.accumulate(model):
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(accelerator.reduce(loss.detach(), "mean").item())
strategy = type(accelerator.strategy_of(model)).__name__
accelerator.print(strategy, accelerator.num_processes, *(f"{loss:.4f}" for loss in losses))
"""

ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true
  fsdp_auto_wrap_policy: SIZE_BASED_WRAP
  fsdp_min_num_params: 100
mixed_precision: 'no'
num_machines: 1
num_processes: 2
use_cpu: true
"""

DEEPSPEED = {
    "zero_optimization": {"stage": 2, "overlap_comm": True},
    "gradient_accumulation_steps": 1,
    "train_micro_batch_size_per_gpu": 4,
}


def run(folder, *words):
    done = run_python("-m", "drivetrain_launch", *words, folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses_of_one_process():
    """Return the losses of the script's steps: two ranks take two batches of four rows in each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for rows in torch.randn(32, 8).split(8):
        loss = model(rows).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "text", "more", "strategy"),
    [
        ("accelerate.yaml", ACCELERATE, (), "Fsdp"),
        ("deepspeed.json", json.dumps(DEEPSPEED), ("--cpu", "--nproc-per-node", "2"), "Zero2"),
    ],
)
def test_imported_file_trains_as_one_process_does(
    tmp_path, monkeypatch, capsys, name, text, more, strategy
):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    assert cli.run(["config", "import", name, "--output", "run.yaml"]) == 0
    written = capsys.readouterr().out
    assert written.splitlines()[-1] == "run: drivetrain launch --config run.yaml train.py"
    launched = run(tmp_path, "launch", "--config", "run.yaml", *more, "train.py")
    found, ranks, *losses = launched.split()
    assert (found, ranks) == (strategy, "2")
    assert [float(loss) for loss in losses] == pytest.approx(losses_of_one_process(), abs=1e-4)
