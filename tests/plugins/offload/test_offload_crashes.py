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

import pytest

from faulty_trainings import FaultyTrainings
from waits import PATIENCE_S

pytestmark = pytest.mark.exhaustive

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
strategy = {"name": "fsdp", "unit_from": 1000, "offload": offload}
accelerator = Accelerator(strategy=strategy, cpu=True)
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


class Run(FaultyTrainings):
    """A folder in which trainings are launched; what they leave behind is looked for."""

    def __init__(self, folder, disk):
        super().__init__(folder)
        self.disk, self.room = disk, free(disk)

    def start(self, last, *, fault="pass", state="state"):
        (self.folder / "train.py").write_text(TRAINING.replace("FAULT", fault))
        command = (
            *(sys.executable, "-m", "drivetrain_launch", "launch", "--nproc-per-node", "2"),
            *("--strategy", "fsdp", "train.py", str(self.disk), state, str(last)),
        )
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("DRIVETRAIN_", "GLOO_"))}
        own = {"OMP_NUM_THREADS": "1", "TMPDIR": str(self.temporary)}
        return subprocess.Popen(
            command, cwd=self.folder, env=kept | own, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def begun(self, process):
        """Return the ranks' process ids when all of them are in the middle of training."""
        files = [self.folder / f"pid-{rank}" for rank in range(2)]
        end = time.monotonic() + PATIENCE_S
        while not all(file.exists() and file.read_text() for file in files):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end
            time.sleep(0.05)
        assert free(self.disk) < self.room  # the room is taken now
        return [int(file.read_text()) for file in files]

    def check_nothing_left(self):
        end = time.monotonic() + PATIENCE_S  # the kernel frees blocks a moment after the process
        while (self.processes() or free(self.disk) < self.room) and time.monotonic() < end:
            time.sleep(0.1)
        assert self.processes() == []
        assert [path.name for path in self.disk.iterdir()] in ([], ["lost+found"])
        assert free(self.disk) >= self.room


def free(place):
    return shutil.disk_usage(place).free


@pytest.fixture
def run(tmp_path, small_disk):
    one = Run(tmp_path, small_disk)
    yield one
    for process in one.processes():
        process.kill()


def ended(process, code):
    """Return the losses by (rank, step), and what was said, of a run that ends with a code."""
    out, err = process.communicate()
    assert process.returncode == code, err
    found = re.findall(r"rank (\d) step (\d+) ([\d.e-]+)", out)
    return {(int(rank), int(step)): value for rank, step, value in found}, err


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)], ids=str
)
def test_nothing_is_left_after_a_signal_to_the_launcher(run, number, code):
    process = run.start(10**6)
    run.begun(process)
    os.kill(process.pid, number)
    ended(process, code)
    run.check_nothing_left()


def test_a_killed_rank_and_a_resume_bit_by_bit(run):
    process = run.start(10**6)
    os.kill(run.begun(process)[1], signal.SIGKILL)  # in step 4 at the earliest
    before, err = ended(process, 6)
    assert "SIGKILL" in err
    run.check_nothing_left()
    resumed, _ = ended(run.start(5), 0)
    assert resumed.keys() == {(0, step) for step in (2, 3, 4)}
    assert resumed == {key: before[key] for key in resumed}
    run.check_nothing_left()


FULL = """
    if step == 2 and rank == 0:
        with open(disk + "/other", "wb") as other:
            room = os.statvfs(disk)
            other.write(bytes(room.f_bavail * room.f_frsize - 2**18))
    if step == 2:
        accelerator.wait_for_everyone()
        try:
            accelerator.save_state(disk + "/state/step-3")
        except Exception as error:
            Path(f"error-{rank}").write_text(f"{type(error).__name__}: {error}")
"""


def test_a_disk_that_gets_full_stops_saves_alone(run):
    """The room of the run itself is its own; an earlier checkpoint on that disk stays whole."""
    state = run.disk / "state"
    found, _ = ended(run.start(6, fault=FULL.strip(), state=str(state)), 0)
    for rank in range(2):
        text = (run.folder / f"error-{rank}").read_text()
        assert re.search(r"CheckpointError: .*No space left on device", text), text
    assert len(found) == 6
    assert [path.name for path in state.iterdir()] == ["step-2"]
    (run.disk / "other").unlink()
    resumed, _ = ended(run.start(6, state=str(state)), 0)
    assert resumed == {key: value for key, value in found.items() if key[1] >= 2}
    shutil.rmtree(state)
    run.check_nothing_left()
