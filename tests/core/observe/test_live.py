"""The live view: one bar with the run's figures on a terminal, plain lines elsewhere."""

import io
import os
import sys
from itertools import islice

import pexpect
import pytest
import torch
from rich.console import Console

from drivetrain import Accelerator
from drivetrain import log as bars
from drivetrain.observe.figures import StepFigures
from drivetrain.observe.recorder import LiveFigures

SCRIPT = """
import sys, torch
from drivetrain import Accelerator
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader([torch.ones(2)] * 24, batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in accelerator.progress(range(2), desc="epochs"):
    for step, rows in enumerate(accelerator.progress(loader, desc=f"epoch {epoch}")):
        accelerator.backward(model(rows).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            accelerator.print("printed", epoch)
        if epoch == 1 and step == 4:
            FAULT
print("after", accelerator.process_index, flush=True)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", ["break", "raise RuntimeError('on purpose')"])
def test_two_ranks_draw_one_bar_on_a_terminal(tmp_path, fault):
    (tmp_path / "train.py").write_text(SCRIPT.replace("FAULT", fault))
    command = ["-m", "drivetrain_launch", "launch", "--cpu", "--nproc-per-node", "2", "train.py"]
    wide = {**os.environ, "COLUMNS": "150"}
    options = {"cwd": tmp_path, "encoding": "utf-8", "env": wide, "timeout": 300}
    child = pexpect.spawn(sys.executable, command, **options)
    child.expect(pexpect.EOF)
    shown = child.before
    child.close()
    assert (child.exitstatus == 0) == (fault == "break")
    # 6/6: of each rank's 6 batches in the first epoch.
    for words in ("printed 0", "printed 1", "6/6", "samples/s, memory", "loss="):
        assert words in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l"), "the cursor is back"
    assert ("after 0" if fault == "break" else "on purpose") in shown


def run(iterable_of, accumulation=1, **options):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = torch.utils.data.DataLoader([torch.ones(2)] * 16, batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for rows in accelerator.progress(iterable_of(loader), desc="epoch 0", **options):
        with accelerator.accumulate(model):
            accelerator.backward(model(rows).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return accelerator


def test_a_job_log_gets_a_line_every_so_many_steps(monkeypatch, capsys):
    console = Console(file=io.StringIO(), force_terminal=False)
    monkeypatch.setattr(bars, "_console", lambda: console)

    def shown():
        lines = capsys.readouterr().err.splitlines()
        lines = [line for line in lines if line.startswith("epoch 0")]
        return lines, [line.split(",")[0] for line in lines]

    run(lambda loader: loader, every=3, accumulation=2)
    lines, counts = shown()
    assert counts == [f"epoch 0: {n}/8" for n in (3, 6, 8)]
    assert all("loss=" in line and "samples/s" in line and "memory" in line for line in lines[1:])
    accelerator = run(lambda loader: islice(loader, 4), every=2)
    assert shown()[1] == ["epoch 0: 2", "epoch 0: 4"], "without a length"
    # An evaluation does not show the figures of the training.
    for _ in accelerator.progress([1, 2], desc="evaluation"):
        pass
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("evaluation: 2/2")
    assert "loss" not in line


def test_rates_are_those_of_all_replicas():
    live = LiveFigures(4)
    shown = live.since_now()
    assert shown() == ""
    record = {"loss": 2.0, "seconds": 0.5, "samples": 8, "memory": {"resident": 3 * 2**29}}
    live.add(StepFigures(step=1, **record))
    assert shown() == "loss=2 (rank 0), 64 samples/s, memory 1.5 GiB"
    live.add(StepFigures(step=2, **{**record, "tokens": 1000, "memory": {"device": 2**30}}))
    assert shown() == "loss=2 (rank 0), 4,000 tokens/s, device 1 GiB"
    live.add(StepFigures(step=3))
    assert "loss" not in shown()
