"""A rank that is killed: every survivor gets an error, and does not wait for the timeout."""

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
    communicator = connect(axis, Traffic(), torch.device("cpu"), timedelta(seconds=3600))
    communicator.barrier()
    if rank == VICTIM:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        communicator.all_reduce(torch.zeros(1_000_000), label="the test").wait()
        outcome = "no error"
    except CollectiveError as error:
        outcome = str(error)
    Path(folder, f"rank{rank}").write_text(outcome, encoding="utf-8")
    communicator.close()
    os._exit(0)  # the process group has lost a member and cannot be destroyed in order


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [2, 4])
def test_survivors_know_before_the_timeout(ranks: int, tmp_path: Path):
    def code(rank: int) -> int:
        words = (__file__, str(rank), str(ranks), str(tmp_path))
        return run_python(*words, folder=tmp_path).returncode

    with ThreadPoolExecutor(ranks) as threads:
        codes = list(threads.map(code, range(ranks)))
    assert codes == [-signal.SIGKILL] + [0] * (ranks - 1)
    for rank in range(1, ranks):
        outcome = (tmp_path / f"rank{rank}").read_text("utf-8")
        assert "all_reduce #2 (the test) on axis 'dp'" in outcome


if __name__ == "__main__":
    survive(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
