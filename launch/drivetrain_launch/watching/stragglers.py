"""Stragglers of an attempt: the times of all ranks, read from their files, and compared."""

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from drivetrain.telemetry.work import RankTimes, Straggler, read_work, stragglers

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


# --- compares the times of all ranks of an attempt, and names each straggler once ---


class StragglerWatch:
    """Names ranks and hosts that are slower than the others in two comparisons in a row.

    One slow window may have a cause that passes: a page cache fills, another job ends. A rank that
    is slow in two windows in a row needs a look.

    Args:
        margin: how much longer than the others' a rank's work must take.
        say: shows a line.
    """

    def __init__(self, margin: float, say: Callable[[str], None]) -> None:
        self._margin, self._say = margin, say
        self._begin(0)

    def _begin(self, attempt: int) -> None:
        self._attempt = attempt
        self._works: dict[int, RankTimes] = {}
        self._before: set[tuple[int, ...]] = set()
        self._named: set[int] = set()

    def hear(self, message: Mapping[str, Any]) -> None:
        """Take the message of a launcher: plain values of ``works``, ``size`` and ``attempt``."""
        works = (RankTimes(**values) for values in message["works"])
        self.take(works, message["size"], message["attempt"])

    def take(self, works: Iterable[RankTimes], size: int, attempt: int = 0) -> None:
        """Add the newest times of some ranks; name each straggler that is to be named now.

        Ranks are compared as soon as there are new times of all of them. A new attempt begins anew.

        Args:
            works: the times.
            size: number of all ranks.
            attempt: number of the attempt.
        """
        if attempt != self._attempt:
            self._begin(attempt)
        for work in works:
            self._works[work.rank] = work
        if len(self._works) < size:
            return
        found = stragglers(self._works.values(), self._margin)
        self._works = {}
        due = [each for each in found if self._is_due(each)]
        self._before = {each.ranks for each in found}
        for each in due:
            self._named.update(each.ranks)
            self._say(str(each))

    def _is_due(self, straggler: Straggler) -> bool:
        return straggler.ranks in self._before and not self._named.issuperset(straggler.ranks)
