"""Processes that train with state on a disk and end badly: no file, no room and no process is left.

And a disk of its own for a training: what a checkpoint on it may and may not do.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid

import psutil
import pytest

MIB = 2**20
MARK = "OFFLOAD_TEST_MARK"

TRAINING = """
import os, sys, time
from pathlib import Path
import torch
from torch import nn
from torch.optim import AdamW
from drivetrain import Accelerator

disk, state, last = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(3)
model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(4)))
offload = {"optimizer": "nvme", "params": "nvme", "path": disk}
accelerator = Accelerator(strategy={"name": "fsdp", "unit_from": 1000, "offload": offload}, cpu=True)
model, optimizer = accelerator.prepare(model, AdamW(model.parameters(), lr=1e-2))
rank, first = accelerator.process_index, 0
if (state / "step-2").exists():
    accelerator.load_state(str(state / "step-2"))
    first = 2
for step in range(first, last):
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(10 * step + rank))
    loss = model(x).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    print(f"rank {rank} step {step} {loss.item()!r}", flush=True)
    if step == 1 and not (state / "step-2").exists():
        accelerator.save_state(str(state / "step-2"))
    if step == 4:
        Path(f"pid-{rank}").write_text(str(os.getpid()))
    FAULT
accelerator.end_training()
"""


class Run:
    """A folder in which trainings are launched; what they leave behind is looked for."""

    def __init__(self, folder, disk):
        self.folder, self.disk = folder, disk
        self.mark = uuid.uuid4().hex
        self.room = free(disk)
        (folder / "tmp").mkdir()

    def start(self, last, *, fault="pass", state="state"):
        (self.folder / "train.py").write_text(TRAINING.replace("FAULT", fault))
        command = (
            *(sys.executable, "-m", "drivetrain_launch", "launch", "--nproc-per-node", "2"),
            *("--strategy", "fsdp", "train.py", str(self.disk), state, str(last)),
        )
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("DRIVETRAIN_", "GLOO_"))}
        own = {"OMP_NUM_THREADS": "1", "TMPDIR": str(self.folder / "tmp"), MARK: self.mark}
        return subprocess.Popen(
            command, cwd=self.folder, env=kept | own, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def begun(self, process):
        """Return the ranks' process ids when all of them are in the middle of training."""
        files = [self.folder / f"pid-{rank}" for rank in range(2)]
        end = time.monotonic() + 60
        while not all(file.exists() and file.read_text() for file in files):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end
            time.sleep(0.05)
        assert free(self.disk) < self.room  # the room is taken now
        return [int(file.read_text()) for file in files]

    def alive(self):
        return [process for process in psutil.process_iter() if self._is_mine(process)]

    def _is_mine(self, process):
        try:
            zombie = process.status() == psutil.STATUS_ZOMBIE
            return not zombie and process.environ().get(MARK) == self.mark
        except psutil.Error:
            return False

    def check_nothing_left(self):
        end = time.monotonic() + 15
        while self.alive() and time.monotonic() < end:
            time.sleep(0.1)
        assert self.alive() == []
        assert [path.name for path in self.disk.iterdir()] in ([], ["lost+found"])
        assert free(self.disk) >= self.room


def free(place):
    return shutil.disk_usage(place).free


@pytest.fixture
def run(tmp_path, small_disk):
    one = Run(tmp_path, small_disk)
    yield one
    for process in one.alive():
        process.kill()


def losses(text):
    found = re.findall(r"rank (\d) step (\d+) ([\d.e-]+)", text)
    return {(int(rank), int(step)): value for rank, step, value in found}


def ended(process, seconds=30):
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


@pytest.mark.parametrize(
    ("whom", "number", "code"),
    [
        ("launcher", signal.SIGTERM, 143),
        ("launcher", signal.SIGINT, 130),
        ("rank", signal.SIGTERM, None),
        ("launcher", signal.SIGKILL, -9),
    ],
    ids=str,
)
def test_nothing_is_left_after_a_signal(run, whom, number, code):
    process = run.start(10**6)
    pids = run.begun(process)
    os.kill(process.pid if whom == "launcher" else pids[1], number)
    found, _, err = ended(process)
    assert found == code if code is not None else found != 0, err
    run.check_nothing_left()


def test_a_killed_rank_and_a_resume_bit_by_bit(run):
    whole = run.start(8, state="whole")
    code, out, err = ended(whole, 60)
    assert code == 0, err
    expected = losses(out)
    for file in run.folder.glob("pid-*"):
        file.unlink()
    process = run.start(10**6)
    os.kill(run.begun(process)[1], signal.SIGKILL)
    code, _, err = ended(process)
    assert code == 6, err
    assert "SIGKILL" in err
    run.check_nothing_left()
    code, out, err = ended(run.start(8), 60)
    assert code == 0, err
    assert losses(out) == {key: value for key, value in expected.items() if key[1] >= 2}
    run.check_nothing_left()


BROKEN = """
    if rank == 1 and step == 4:
        def broken(*arguments):
            raise OSError(5, os.strerror(5))
        os.CALL = broken
"""


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_a_disk_that_fails_ends_the_run(run, call):
    process = run.start(10**6, fault=BROKEN.strip().replace("CALL", call))
    code, _, err = ended(process, 60)
    assert code == 7, err
    first = re.search(r"^rank (\d) failed first", err, re.MULTILINE)
    assert first, err
    assert first[1] == "1", err
    assert f"StorageError: {run.disk}" in err
    assert "EIO" in err
    run.check_nothing_left()


def test_a_rank_that_ends_first_sends_its_last_step(run):
    """Another rank may still need what it steps in the background."""
    tail = "    if step == last - 1 and rank == 0:\n        time.sleep(1.0)\n        model(x)"
    process = run.start(4, fault=tail.strip())
    code, _, err = ended(process, 60)
    assert code == 0, err
