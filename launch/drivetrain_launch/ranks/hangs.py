"""The watch over the ranks of an attempt; a hang that ends the run is a failure."""

import time
from dataclasses import replace
from pathlib import Path

from drivetrain.errors import CollectiveError
from drivetrain_launch.console import say
from drivetrain_launch.ranks.failure import Ending, Failure
from drivetrain_launch.watching.diagnosis import Hang
from drivetrain_launch.watching.watch import HangWatch, Hosts


def board_of(private: Path, rank: int) -> Path:
    """Return the file in which a rank shows where it is."""
    return private / f"rank-{rank}.board"


def watch_over(
    pids: dict[int, int],
    private: Path,
    *,
    hosts: Hosts | None,
    stops: bool,
    folder: Path | None,
) -> HangWatch:
    """Return the watch over the ranks of this host in one attempt.

    Args:
        pids: process ids of the ranks here, by global rank.
        private: folder of their boards.
        hosts: the other launchers; None on one host.
        stops: whether a hang ends the run.
        folder: for the file about a hang, or None.
    """
    boards = {rank: board_of(private, rank) for rank in pids}
    return HangWatch(pids, boards, hosts=hosts, stops=stops, folder=folder, say=say)


def blamed(ending: Ending, hang: Hang | None) -> Ending:
    """Return the ending with a hang as its failure, if a hang ended the run."""
    if hang is None:
        return ending
    rank = (hang.culprits or hang.waiting)[0]
    view = hang.views[rank]
    failure = Failure(
        rank=rank,
        host=view.host,
        pid=view.pid,
        code=CollectiveError.exit_code,
        time=time.time() - hang.waited_s,
        summary=hang.sentence(),
    )
    stopped = tuple(each for each in ending.stopped if each != rank)
    return replace(ending, failures=(failure, *ending.failures), stopped=stopped)
