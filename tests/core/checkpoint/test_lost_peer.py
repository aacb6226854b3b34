"""A rank that dies in the middle of a save: the others know that it is lost, and say no more."""

import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from drivetrain.checkpoint import saving
from drivetrain.checkpoint.encoding import Contents
from drivetrain.errors import DrivetrainError
from drivetrain.runtime.parts import Part
from drivetrain.runtime.world import World
from drivetrain.shards import Shard
from forked_programs import run_python

VICTIM = 1


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def save(rank: int, point: str, folder: Path) -> None:
    """Save as one of two ranks, of which the victim dies at a point of the save."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=60)
    method = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=2, timeout=timeout)
    if rank == VICTIM:
        owner, name = {"files": (saving.RankWriter, "write"), "report": (saving, "collect")}[point]
        setattr(owner, name, lambda *given: killed())
    shard = Shard("w", "", torch.ones(4), (8,), Part((4 * rank,), (4,)))
    contents = Contents(models=[[shard]])
    try:
        saving.save_checkpoint(folder / "ck", contents, world=World.discover(cpu=True))
        outcome = "0 saved"
    except DrivetrainError as error:
        outcome = f"{error.exit_code} {error}"
    (folder / f"rank{rank}").write_text(outcome, encoding="utf-8")
    os._exit(0)  # the process group has lost a member and cannot be destroyed in order


@pytest.mark.exhaustive
@pytest.mark.parametrize("point", ["files", "report"])
def test_the_survivor_ends_with_the_code_of_a_lost_rank(tmp_path: Path, point: str):
    def code(rank: int) -> int:
        words = (__file__, str(rank), point, str(tmp_path))
        return run_python(*words, folder=tmp_path).returncode

    with ThreadPoolExecutor(2) as threads:
        codes = list(threads.map(code, range(2)))
    assert codes == [0, -signal.SIGKILL]
    outcome = (tmp_path / "rank0").read_text("utf-8")
    assert outcome.startswith("5 "), outcome  # a CollectiveError: another start may go on
    assert "rank 1" in outcome
    assert [path.name for path in tmp_path.iterdir() if "ck" in path.name] == []


if __name__ == "__main__":
    save(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
