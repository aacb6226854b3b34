"""Compares the times of all ranks of an attempt, and names each straggler once."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from drivetrain.telemetry.work import RankTimes, Straggler, stragglers


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
        works = map(RankTimes.from_json, message["works"])
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
