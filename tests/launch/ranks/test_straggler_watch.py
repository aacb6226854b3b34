"""The launcher compares the times of ranks: twice slow is named, and named once."""

import json
import re
import time
from dataclasses import asdict

import pytest

from drivetrain.observe.figures import RankTimes
from drivetrain_launch.ranks.watch import StragglerWatch, WorkFiles, work_file
from forked_programs import launch

SCRIPT = """
import sys, time
from pathlib import Path
import torch
from torch import nn
from drivetrain import Accelerator

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 2000
    def __getitem__(self, index):
        if accelerator.process_index == 1:
            time.sleep(0.01)
        return torch.ones(8)

accelerator = Accelerator()
model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(Slow(), batch_size=1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
begin = time.monotonic()
for x in loader:
    accelerator.backward(model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    over = torch.tensor(float(time.monotonic() - begin > 1.6))
    if accelerator.reduce(over) > 0:
        break
accelerator.end_training()
"""


def works(window=1, slow=()):
    return [
        RankTimes(
            rank=rank, host="0@a", window=window, steps=1, seconds=1.0,
            sections={"forward": 0.9 if rank in slow else 0.3},
        )
        for rank in range(3)
    ]  # fmt: skip


def test_twice_in_a_row_is_named_and_once():
    said = []
    watch = StragglerWatch(0.3, said.append)
    for slow in (1, 2, 1):
        watch.take(works(slow=[slow]), 3)
    assert said == []
    watch.take(works(slow=[1]), 3)
    (line,) = said
    assert line.startswith("rank 1 on host a is slower than the others: 900 ms of work in a step")
    watch.take(works(slow=[1]), 3)
    assert said == [line]
    for _ in range(2):  # another attempt: its ranks may be elsewhere
        watch.take(works(slow=[1]), 3, attempt=1)
    assert said == [line, line]


def test_ranks_are_compared_when_all_have_told_new_times():
    said = []
    watch = StragglerWatch(0.3, said.append)
    watch.take(works(slow=[1]), 3)
    for _ in range(3):
        watch.take(works(slow=[1])[:2], 3)
        assert said == []
    watch.hear({"works": [asdict(works(slow=[1])[2])], "size": 3, "attempt": 0})
    assert len(said) == 1


def test_files_are_read_now_and_then_and_each_window_once(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    files = WorkFiles(tmp_path, [0, 1], 8.0)
    path = work_file(tmp_path, 1)
    path.write_text(json.dumps(asdict(works()[1])))
    assert files.read() == []
    now[0] += 2.0
    assert [work.rank for work in files.read()] == [1]
    now[0] += 2.0
    assert files.read() == []
    path.write_text(json.dumps(asdict(works(window=2)[1])))
    assert files.read() == []
    now[0] += 2.0
    assert [work.window for work in files.read()] == [2]
    assert WorkFiles(tmp_path, [1], 0).read() == []


@pytest.mark.exhaustive
@pytest.mark.alone  # it compares the times of ranks
def test_a_launch_names_the_slow_rank_once(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ("--cpu", "--nproc-per-node", "2", "--set", "launch.straggler_every_s=0.4")
    done = launch(*options, "train.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    said = re.findall(r"^rank (\d) on host \S+ is slower.*most of .* in (\w+),", done.stderr, re.M)
    assert said == [("1", "data")], done.stderr
