"""The time of a rank's own work, over a window of steps, in a file that its launcher reads.

The launcher compares the ranks of a run; ranks themselves exchange nothing for it.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drivetrain.telemetry.figures import StepFigures


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

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "RankTimes":
        """Return the work of plain values.

        Raises:
            TypeError: the values are those of something else.
        """
        return cls(**values)


class WorkFile:
    """Sums up the records of a rank, and writes the sum when a window is over.

    Args:
        path: the file, which is replaced as a whole.
        every_s: length of a window in seconds.
        header: the facts of the rank: ``rank``, ``host`` and ``peers``.
    """

    def __init__(self, path: Path, every_s: float, header: Mapping[str, Any]) -> None:
        self._path = path
        self._every_s = every_s
        self._facts = {name: header[name] for name in ("rank", "host", "peers")}
        self._first = True
        self._window = 1
        self._begin()

    def take(self, figures: StepFigures) -> None:
        """Add a record; the first one is left out: its step makes buffers and compiles kernels.

        Raises:
            OSError: the file cannot be written.
        """
        if self._first:
            self._first = False
            return
        self._steps += figures.steps
        self._seconds += figures.seconds
        for name, seconds in figures.sections.items():
            self._sections[name] = self._sections.get(name, 0.0) + seconds
        self._waiting += sum(figures.waiting.values())
        if self._seconds >= self._every_s:
            self._write()
            self._window += 1
            self._begin()

    def _begin(self) -> None:
        self._steps, self._seconds, self._waiting = 0, 0.0, 0.0
        self._sections: dict[str, float] = {}

    def _write(self) -> None:
        work = RankTimes(
            **self._facts,
            window=self._window,
            steps=self._steps,
            seconds=self._seconds,
            sections=self._sections,
            waiting=self._waiting,
        )
        draft = self._path.with_suffix(".draft")
        draft.write_text(json.dumps(work.to_json()), encoding="utf-8")
        draft.replace(self._path)


def read_work(path: Path) -> RankTimes | None:
    """Return the newest work in a rank's file; None before the first window is over."""
    try:
        return RankTimes.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
