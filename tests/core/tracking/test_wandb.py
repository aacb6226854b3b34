"""Weights & Biases itself, offline: it has the run's figures without a line of the script."""

import re

import pytest
import torch

from drivetrain import Accelerator
from drivetrain.tracking.run_figures import STEPS

pytest.importorskip("wandb")


def test_figures_of_a_run_are_in_the_files_of_wandb(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    accelerator = Accelerator(cpu=True, log_with="wandb")
    options = {"mode": "offline", "dir": str(tmp_path)}
    accelerator.init_trackers("project", {"lr": 0.5}, {"wandb": options})
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    for number in range(2 * STEPS + 3):
        accelerator.backward(model(torch.ones(1, 2)).sum() * 0 + number)
        optimizer.step()
        accelerator.report(accuracy=number)
    accelerator.end_training()
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    written = file.read_bytes()
    # A key, and its value as JSON; the last values stand in the run's summary once more.
    losses = re.findall(rb"run/loss\x82\x01.([\d.]+)", written, re.DOTALL)
    means = {sum(range(start, start + STEPS)) / STEPS for start in (0, STEPS)}
    assert {round(float(each), 6) for each in losses} == means
    assert b"run/step_seconds" in written
    assert b"run/accuracy" in written
