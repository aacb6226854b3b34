"""A scheduler signals a rank with the workers of its loader: the run saves, and says so."""

TRAIN = """
import os, signal, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from drivetrain import Accelerator, ProjectConfiguration

class Slow(TensorDataset):
    def __getitem__(self, index):
        time.sleep(0.01)
        return super().__getitem__(index)

def main():
    project = ProjectConfiguration(project_dir="run", automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    model = nn.Linear(2, 1)
    loader = DataLoader(Slow(torch.ones(2000, 2)), batch_size=2, num_workers=2, prefetch_factor=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for step, (rows,) in enumerate(loader):
        accelerator.backward(model(rows).mean())
        optimizer.step()
        optimizer.zero_grad()
        if step == 3 and accelerator.process_index == 1:
            os.killpg(os.getpgrp(), signal.SIGTERM)
    raise SystemExit("the whole dataset was read")

main()
"""


def test_workers_outlive_the_notice_and_the_run_saves(sandbox):
    done = sandbox.run("launch", "--cpu", "--nproc-per-node", "2", sandbox.script(TRAIN))
    assert done.returncode == 75, done.stderr
    assert "exit code 75 asks to be started again" in done.stderr
    for word in ("Traceback", "made no Accelerator"):
        assert word not in done.stderr
    saved = sandbox.folder / "run" / "checkpoints"
    assert [path.name for path in saved.iterdir()] == ["checkpoint_0"]
    assert (saved / "checkpoint_0" / "manifest.json").exists()
    assert sandbox.alive() == []
