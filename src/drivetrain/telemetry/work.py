"""The time of a rank's own work, in a file that its launcher reads, and who is slower by it.

The launcher compares the ranks of a run; ranks themselves exchange nothing for it.
"""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median_low
from typing import Any

from drivetrain.telemetry.figures import StepFigures, StepSums


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTimes:
    """The time of one rank over some optimizer steps.

    Attributes:
        rank: its number.
        host: the name of its host.
        peers: ranks with the same words here do the same work: those of one pipeline stage.
        window: its number, from 1.
        steps: how many optimizer steps it took.
        seconds: wall time of these steps.
        sections: seconds by section, without waiting; see ``figures.SECTIONS``.
        waiting: seconds that the rank stood still for collectives.
    """

    rank: int
    host: str
    peers: str = ""
    window: int = 1
    steps: int
    seconds: float
    sections: Mapping[str, float]
    waiting: float = 0.0

    @classmethod
    def of(
        cls, rank: int, header: Mapping[str, Any], figures: StepFigures, window: int = 1
    ) -> "RankTimes":
        """Return the time that a record, or a sum of records, tells.

        Args:
            rank: its number.
            header: facts of the rank: ``host`` and ``peers``.
            figures: of the steps.
            window: its number.
        """
        return cls(
            rank=rank,
            host=str(header.get("host", "")),
            peers=str(header.get("peers", "")),
            window=window,
            steps=figures.steps,
            seconds=figures.seconds,
            sections=figures.sections,
            waiting=sum(figures.waiting.values()),
        )


class WorkFile:
    """Sums up the records of a rank, and writes the sum when a window is over.

    Args:
        path: the file, which is replaced as a whole.
        every_s: length of a window in seconds.
        header: the facts of the rank: ``rank``, ``host`` and ``peers``.
    """

    def __init__(self, path: Path, every_s: float, header: Mapping[str, Any]) -> None:
        self._path, self._header = path, header
        self._windows = itertools.count(1)
        self._sums = StepSums(lambda each: each.seconds >= every_s, self._write, skip=1)

    def take(self, figures: StepFigures) -> None:
        """Add a record; the first one is left out.

        Raises:
            OSError: the file cannot be written.
        """
        self._sums.add(figures)

    def _write(self, figures: StepFigures) -> None:
        header = self._header
        work = RankTimes.of(header["rank"], header, figures, next(self._windows))
        draft = self._path.with_suffix(".draft")
        draft.write_text(json.dumps(asdict(work)), encoding="utf-8")
        draft.replace(self._path)


def read_work(path: Path) -> RankTimes | None:
    """Return the newest work in a rank's file; None before the first window is over."""
    try:
        return RankTimes(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


# --- ranks and hosts that are slower than the others by their own work, not by their waiting ---

# All ranks take a step together, so each step is as slow as the slowest rank, and the wall time
# says nothing about who that is. The time without waiting does, section by section, as in NVIDIA's
# Resiliency Extension and in MegaScale (Jiang et al., NSDI 2024).


OWN = ("data", "forward", "backward", "optimizer")
"""Sections of a rank's own work. In ``other`` scripts wait for each other, unseen; evaluation and
checkpoints are not part of each step."""

LEAST_SHARE = 0.05
"""Of the time of a step: whoever costs the others less than this is no straggler."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Straggler:
    """A rank, or all ranks of one host, with more work in a step than the others.

    Attributes:
        ranks: their numbers, ascending.
        host: the name of their host.
        is_host: whether these are all ranks of the host.
        seconds: of own work in a step; of several ranks, the smallest.
        usual_s: that of the others, as a median.
        section: the section with most of the difference.
        section_s: seconds in that section in a step.
        usual_section_s: that of the others, as a median.
    """

    ranks: tuple[int, ...]
    host: str
    is_host: bool
    seconds: float
    usual_s: float
    section: str
    section_s: float
    usual_section_s: float

    def __str__(self) -> str:
        host = self.host.rpartition("@")[2]
        listed = f"rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}"
        who = f"host {host} ({listed})" if self.is_host else f"{listed} on host {host}"
        return (
            f"{who} is slower than the others: {_ms(self.seconds)} of work in a step against "
            f"{_ms(self.usual_s)}; most of the difference is in {self.section}, "
            f"{_ms(self.section_s)} against {_ms(self.usual_section_s)}"
        )

    @property
    def ratio(self) -> float:
        """How many times as long as that of the others its work takes."""
        return self.seconds / self.usual_s if self.usual_s else float("inf")


def stragglers(works: Iterable[RankTimes], margin: float) -> list[Straggler]:
    """Return who is slower than the others, by more than a margin.

    A rank is compared with the median of all other ranks that do the same work.

    Args:
        works: of each rank, over the same while.
        margin: 0.3 for work that takes 30 % longer.
    """
    groups: dict[str, list[RankTimes]] = {}
    hosts: dict[str, set[int]] = {}
    for work in works:
        if work.steps:
            groups.setdefault(work.peers, []).append(work)
            hosts.setdefault(work.host, set()).add(work.rank)
    found = [each for group in groups.values() for each in _in_group(group, margin)]
    found.sort(key=lambda each: each.ranks)
    together: list[Straggler] = []
    for host in dict.fromkeys(each.host for each in found):
        own = [each for each in found if each.host == host]
        whole = {rank for each in own for rank in each.ranks} == hosts[host]
        if whole and len(own) > 1 and len(hosts) > 1:
            together.append(_as_host(own))
        else:
            together += own
    return together


def _in_group(group: Sequence[RankTimes], margin: float) -> list[Straggler]:
    times = {work.rank: _seconds_in_step(work) for work in group}
    return [
        straggler
        for work in group
        if len(group) > 1 and (straggler := _compared(work, times, margin)) is not None
    ]


def _compared(
    work: RankTimes, times: Mapping[int, Mapping[str, float]], margin: float
) -> Straggler | None:
    own = times[work.rank]
    others = [found for rank, found in times.items() if rank != work.rank]
    usual_s = median_low([sum(other.values()) for other in others])
    seconds = sum(own.values())
    excess, step_s = seconds - usual_s, work.seconds / work.steps
    if seconds <= (1 + margin) * usual_s or excess < LEAST_SHARE * step_s:
        return None
    usual = {name: median_low([other[name] for other in others]) for name in OWN}
    section = max(OWN, key=lambda name: own[name] - usual[name])
    return Straggler(
        ranks=(work.rank,),
        host=work.host,
        is_host=False,
        seconds=seconds,
        usual_s=usual_s,
        section=section,
        section_s=own[section],
        usual_section_s=usual[section],
    )


def _as_host(own: Sequence[Straggler]) -> Straggler:
    """Return one straggler for all ranks of a host, with the numbers of the least slow one."""
    least = min(own, key=lambda each: each.seconds)
    ranks = tuple(rank for each in own for rank in each.ranks)
    return replace(least, ranks=ranks, is_host=True)


def _seconds_in_step(work: RankTimes) -> dict[str, float]:
    return {name: work.sections.get(name, 0.0) / work.steps for name in OWN}


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
