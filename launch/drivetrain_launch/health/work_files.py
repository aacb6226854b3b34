"""Reads the times of this host's ranks from their files, now and then."""

import time
from collections.abc import Iterable
from pathlib import Path

from drivetrain.telemetry.work import RankTimes, read_work

LOOKS_IN_WINDOW = 4
"""Looks at the files in the time after which ranks write them again."""


def work_file(folder: Path, rank: int) -> Path:
    """Return the file of a rank's times in the private folder of an attempt."""
    return folder / f"rank-{rank}.work.json"


class WorkFiles:
    """The files of this host's ranks in one attempt.

    Args:
        folder: where they lie.
        ranks: the numbers of the ranks.
        every_s: seconds after which ranks write again; 0: they write nothing.
    """

    def __init__(self, folder: Path, ranks: Iterable[int], every_s: float) -> None:
        self._paths = {rank: work_file(folder, rank) for rank in ranks}
        self._pause = every_s / LOOKS_IN_WINDOW
        self._seen: dict[int, int] = {}
        self._next = time.monotonic() + self._pause if every_s else float("inf")

    def read(self) -> list[RankTimes]:
        """Return the times that ranks have written since the last look, now and then."""
        if time.monotonic() < self._next:
            return []
        self._next = time.monotonic() + self._pause
        found = []
        for rank, path in self._paths.items():
            work = read_work(path)
            if work is not None and work.window != self._seen.get(rank):
                self._seen[rank] = work.window
                found.append(work)
        return found
