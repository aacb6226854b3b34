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
from pathlib import Path

import psutil
import pytest

from waits import PATIENCE_S

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
model = nn.Sequential(*(nn.Sequential(LAYER) for _ in range(4)))
strategy = STRATEGY
strategy["offload"]["path"] = disk
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
END
"""
FSDP = {"name": "fsdp", "unit_from": 1000, "offload": {"optimizer": "nvme", "params": "nvme"}}
ZERO = {"name": "zero2", "offload": {"optimizer": "nvme"}}
LAYER = "nn.Linear(256, 256), nn.Tanh()"
END = "accelerator.end_training()"


class Run:
    """A folder in which trainings are launched; what they leave behind is looked for."""

    def __init__(self, folder, disk):
        self.folder, self.disk = folder, disk
        self.mark = uuid.uuid4().hex
        self.room = free(disk)
        (folder / "tmp").mkdir()

    def start(self, last, *, strategy=FSDP, fault="pass", state="state", end=END, layer=LAYER):
        text = TRAINING.replace("LAYER", layer)
        text = text.replace("FAULT", fault).replace("STRATEGY", repr(strategy))
        (self.folder / "train.py").write_text(text.replace("END", end))
        command = (
            *(sys.executable, "-m", "drivetrain_launch", "launch", "--nproc-per-node", "2"),
            *("--strategy", strategy["name"], "train.py", str(self.disk), state, str(last)),
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
        end = time.monotonic() + PATIENCE_S
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
        end = time.monotonic() + PATIENCE_S  # the kernel frees blocks a moment after the process
        while (self.alive() or free(self.disk) < self.room) and time.monotonic() < end:
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


def ended(process):
    out, err = process.communicate()
    return process.returncode, out, err


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("whom", "number", "code"),
    [
        pytest.param("launcher", signal.SIGTERM, 143, marks=pytest.mark.exhaustive),
        pytest.param("launcher", signal.SIGINT, 130, marks=pytest.mark.exhaustive),
        pytest.param("rank", signal.SIGTERM, None, marks=pytest.mark.exhaustive),
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


@pytest.mark.exhaustive
def test_a_killed_rank_and_a_resume_bit_by_bit(run):
    process = run.start(10**6)
    os.kill(run.begun(process)[1], signal.SIGKILL)  # in step 4 at the earliest
    code, out, err = ended(process)
    assert code == 6, err
    assert "SIGKILL" in err
    run.check_nothing_left()
    before = losses(out)
    code, out, err = ended(run.start(5), 60)
    assert code == 0, err
    resumed = losses(out)
    assert resumed.keys() == {(0, step) for step in (2, 3, 4)}
    assert resumed == {key: before[key] for key in resumed}
    run.check_nothing_left()


BROKEN = """
    if rank == 1 and step == 4:
        def broken(*arguments):
            raise OSError(5, os.strerror(5))
        os.CALL = broken
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_a_disk_that_fails_ends_the_run(run, call):
    process = run.start(10**6, fault=BROKEN.strip().replace("CALL", call))
    code, _, err = ended(process)
    assert code == 7, err
    first = re.search(r"^rank (\d) failed first", err, re.MULTILINE)
    assert first, err
    assert first[1] == "1", err
    assert f"StorageError: {run.disk}" in err
    assert "EIO" in err
    run.check_nothing_left()


SLOW = """
    if rank == 1 and step == 2:
        real = os.preadv
        os.preadv = lambda *arguments: (time.sleep(0.2), real(*arguments))[1]
"""


@pytest.mark.exhaustive
def test_a_rank_that_ends_first_sends_its_last_step(run):
    """Its process ends with the script; another rank still needs what it steps meanwhile."""
    end = "if rank == 0:\n    time.sleep(1.0)\n    model.eval()\n    print(model(x).sum().item())"
    code, _, err = ended(run.start(4, strategy=ZERO, fault=SLOW.strip(), end=end), 60)
    assert code == 0, err
    run.check_nothing_left()


# --- a disk that is full ---


@pytest.mark.exhaustive
def test_too_little_room_is_an_error_before_the_first_step(run):
    wide = "nn.Linear(1024, 1024), nn.Linear(1024, 256), nn.Tanh()"
    process = run.start(4, layer=f"nn.Linear(256, 1024), {wide}")
    code, out, err = ended(process)
    assert code == 3, err
    assert not losses(out)
    wanted = rf"PreflightError: the disk of {run.disk}: expected at least [\d.]+ MiB .*2 ranks.*, "
    assert re.search(wanted + r"found [\d.]+ MiB; make room there", err), err
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


@pytest.mark.exhaustive
def test_a_disk_that_gets_full_stops_saves_alone(run):
    """The room of the run itself is its own; an earlier checkpoint on that disk stays whole."""
    state = run.disk / "state"
    code, out, err = ended(run.start(6, fault=FULL.strip(), state=str(state)), 180)
    assert code == 0, err
    for rank in range(2):
        text = (run.folder / f"error-{rank}").read_text()
        assert re.search(r"CheckpointError: .*No space left on device", text), text
    assert len(losses(out)) == 6
    assert [path.name for path in state.iterdir()] == ["step-2"]
    (run.disk / "other").unlink()
    code, resumed, err = ended(run.start(6, state=str(state)), 180)
    assert code == 0, err
    assert losses(resumed) == {key: value for key, value in losses(out).items() if key[1] >= 2}
    shutil.rmtree(state)
    run.check_nothing_left()


# --- memory that checkpoints take ---


MEMORY = """
import sys, threading
from pathlib import Path
import torch
from torch import nn
from torch.optim import AdamW
from drivetrain import Accelerator
from drivetrain.checkpoint import saving

saving.FRESH_BYTES = 8 * 2**20


def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def growth(work):
    before = most = resident()
    over = threading.Event()

    def watch():
        nonlocal most
        while not over.wait(0.001):
            most = max(most, resident())

    thread = threading.Thread(target=watch)
    thread.start()
    work()
    over.set()
    thread.join()
    print("growth", most - before)


model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(6)))
offload = {"optimizer": "nvme", "params": "nvme", "path": sys.argv[1]}
strategy = {"name": "fsdp", "unit_from": 1000, "offload": offload}
accelerator = Accelerator(strategy=strategy, cpu=True)
model, optimizer = accelerator.prepare(model, AdamW(model.parameters(), lr=1e-2))
for _ in range(2):
    accelerator.backward(model(torch.ones(1, 1024)).sum())
    optimizer.step()
    optimizer.zero_grad()
optimizer.state_dict()
growth(lambda: accelerator.save_state("one"))
growth(lambda: (accelerator.save_state("two", wait=False), accelerator.wait_for_checkpoint()))
growth(lambda: accelerator.load_state("two"))
accelerator.end_training()
"""


@pytest.mark.exhaustive
def test_states_pass_memory_one_by_one(tmp_path):
    """Masters and states take 72 MiB on the disk, a tensor 4 MiB; 8 MiB of a kind go in a file."""
    if not Path("/proc/self/status").exists():
        pytest.skip("needs /proc to tell how much memory is taken")
    threshold = {"MALLOC_MMAP_THRESHOLD_": "1000000"}  # what is freed goes back to the system
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)], cwd=tmp_path, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | threshold, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    grown = [int(line.split()[1]) / MIB for line in done.stdout.splitlines()]
    assert len(grown) == 3
    assert max(grown) < 40, grown
