"""A rank that takes more memory than its control group has: the system kills that rank alone."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from waits import wait_until

pytestmark = pytest.mark.exhaustive

GROUPS = Path("/sys/fs/cgroup/memory")
ROOM = 400 << 20


@pytest.fixture
def group(request):
    """A control group of version 1, with 400 MiB or as much as the test says."""
    room = getattr(request, "param", ROOM)
    path = GROUPS / f"drivetrain-test-{os.getpid()}"
    try:
        path.mkdir()
        (path / "memory.limit_in_bytes").write_text(str(room))
    except OSError as error:
        pytest.skip(f"no control group of memory can be made here: {error}")
    yield path
    wait_until(lambda: not (path / "cgroup.procs").read_text(), "empty")
    path.rmdir()


def test_a_rank_that_is_killed_for_lack_of_memory_is_named(trainings, group, took):
    enter = f"rank == 1 and Path({str(group / 'cgroup.procs')!r}).write_text(str(os.getpid()))"
    note = "open('fault', 'w').write(str(time.time()))"
    grow = f"rank == 1 and step == 5 and ({note}, [torch.ones(4 << 20) for _ in range(200)])"
    done = trainings.run(faults={"start": enter, "step": grow})
    seconds = time.time() - float((trainings.folder / "fault").read_text())
    assert done.returncode == 6, done.stderr
    took("F31", "with the time in which the memory fills: all have ended", seconds)
    assert "rank 1 failed first" in done.stderr
    assert "killed by SIGKILL; the system kills a process like this when it is out of memory" in (
        done.stderr
    )
    assert "stopped with it: rank 0" in done.stderr
    assert trainings.checkpoints() == ["checkpoint_0"]


PIECES = """
import sys, torch
from torch import nn
from drivetrain import Accelerator

class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        x = x * self.scale
        for _ in range(10):
            x = torch.sigmoid(x)
        return x

torch.manual_seed(0)
STRATEGY
accelerator = Accelerator(cpu=True, strategy=strategy, config={"micro_batch": sys.argv[1]})
model = nn.Sequential(Deep(), Deep())
model.example_inputs = torch.randn(4, 8)
model = accelerator.prepare(model)
for length in (1 << 17, 1 << 17, 1 << 18):
    pieces = 0
    for piece in accelerator.micro_batches(torch.randn(24, length)):
        accelerator.backward(model(piece).mean())
        pieces += 1
    accelerator.print(pieces)
"""

PIPELINE = {"name": "megatron", "pp": 2, "micro_batches": 4, "cut": "1,1"}


@pytest.mark.parametrize(
    ("group", "strategy"),
    [(ROOM, None), (1100 << 20, PIPELINE)],
    ids=["one process", "stages"],
    indirect=["group"],
)
def test_pieces_fit_where_a_batch_would_be_killed(group, strategy, tmp_path):
    """A batch keeps 250 MiB, a later one 500: more than the group leaves beside the program.

    Of two stages each keeps half.
    """
    script = tmp_path / "pieces.py"
    script.write_text(PIECES.replace("STRATEGY", f"strategy = {strategy!r}"))
    start = [sys.executable]
    if strategy is not None:
        start += ["-m", "drivetrain_launch", "launch", "--cpu", "--nproc-per-node", "2"]

    def run(option: str) -> "subprocess.CompletedProcess[str]":
        def enter() -> None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

        command = [*start, str(script), option]
        return subprocess.run(
            command, capture_output=True, text=True, check=False, preexec_fn=enter
        )

    assert run("whole").returncode == (-signal.SIGKILL if strategy is None else 6)
    done = run("auto")
    assert done.returncode == 0, done.stderr
    first, second, longer = map(int, done.stdout.split())
    assert 1 < second <= first
    assert second < longer <= 24


AGAIN = """
import copy, resource, sys, psutil, torch
from torch import nn
from drivetrain import Accelerator, gather_object

class Square(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x):
        many = (x[:, None, None] * self.scale).expand(-1, len(x), 1 << 16)
        return many.contiguous().sigmoid().mean((1, 2))

model = Square()
alone = copy.deepcopy(model)
accelerator = Accelerator(cpu=True, strategy=sys.argv[1], config={"micro_batch": "auto"})
model = accelerator.prepare(model)
rank, size = accelerator.process_index, accelerator.num_processes
batches = [torch.linspace(0, 1, 24, dtype=torch.float64) + each for each in range(size)]

def train(rows):
    accelerator.backward(model(rows).mean())
    return len(rows)

accelerator.each_piece(train, batches[rank][:4])
model.scale.grad = None
if rank:
    room = psutil.Process().memory_info().vms + (500 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (room, resource.RLIM_INFINITY))
rows = accelerator.each_piece(train, batches[rank])
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
torch.cat([torch.sigmoid(batch * alone.scale) for batch in batches]).mean().backward()
torch.testing.assert_close(model.scale.grad.clone(), alone.scale.grad, rtol=1e-12, atol=0)
accelerator.print(gather_object([rows]))
"""


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_a_rank_whose_allocator_fails_computes_the_piece_again(strategy, tmp_path):
    """Its model keeps the square of the rows, which a line through smaller pieces misses."""
    script = tmp_path / "again.py"
    script.write_text(AGAIN)
    start = [sys.executable, "-m", "drivetrain_launch", "launch", "--cpu", "--nproc-per-node", "2"]
    command = [*start, str(script), strategy]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == "[[24], [12, 12]]"
    assert "[r1] micro_batch: auto: memory ran out in 24 rows" in done.stderr
