"""A rank that is killed: every survivor gets an error at once, not after the timeout."""

import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from drivetrain.collectives import connect
from drivetrain.errors import CollectiveError
from drivetrain.runtime.mesh import Axis
from drivetrain.traffic import Traffic
from forked_programs import run_python

VICTIM = 0


def survive(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks
    )
    axis = Axis(
        name="dp",
        size=ranks,
        rank=rank,
        ranks=tuple(range(ranks)),
        hosts=("here",) * ranks,
        group=dist.new_group(list(range(ranks))),
    )
    communicator = connect(axis, Traffic(), torch.device("cpu"), timedelta(seconds=60))
    communicator.barrier()
    if rank == VICTIM:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.perf_counter()
    try:
        communicator.all_reduce(torch.zeros(1_000_000), label="the test").wait()
        outcome = "no error"
    except CollectiveError as error:
        outcome = str(error)
    seconds = time.perf_counter() - start
    Path(folder, f"rank{rank}").write_text(f"{seconds} {outcome}", encoding="utf-8")
    communicator.close()
    os._exit(0)  # the process group has lost a member and cannot be destroyed in order


@pytest.mark.parametrize("ranks", [2, 4])
def test_survivors_know_within_seconds(ranks: int, tmp_path: Path):
    def code(rank: int) -> int:
        words = (__file__, str(rank), str(ranks), str(tmp_path))
        return run_python(*words, folder=tmp_path).returncode

    with ThreadPoolExecutor(ranks) as threads:
        codes = list(threads.map(code, range(ranks)))
    assert codes == [-signal.SIGKILL] + [0] * (ranks - 1)
    for rank in range(1, ranks):
        seconds, _, outcome = (tmp_path / f"rank{rank}").read_text("utf-8").partition(" ")
        assert "all_reduce #2 (the test) on axis 'dp'" in outcome
        assert float(seconds) < 10  # far from the timeout of 60 s, also on a busy machine


if __name__ == "__main__":
    survive(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
