"""The folder of a run's figures: one folder for each start of the script, one file for each rank.

::

    PROJECT/run/
        20261123-120028-417300/     a start: the time, in microseconds
            run.json                configuration with origins, environment, model, promised bytes
            rank-0.jsonl            a line for each step
            rank-1.jsonl
        20261123-130501-000211/     started again: after a failure, or by hand
        report.html                 made of all these

A rank's file is appended to, never rewritten. Its first line says which rank wrote it; events, such
as a resumed checkpoint, stand between the records. A file that ends in the middle of a line, as
after a kill, is read up to there.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from drivetrain.errors import ConfigError
from drivetrain.telemetry.figures import StepFigures, merged

FINE_LINES = 1000
"""Lines with one step each; after as many lines, each further line stands for twice as many steps.

So a million steps are eleven thousand lines. Short steps late in a long run are seen as means."""

COARSEST_S = 60.0
"""A line covers no more time than this, however many steps it may stand for."""

LAST_LINE_BYTES = 2000
"""The last line of a file is shorter than this."""

FLUSH_S = 2.0
"""Lines reach the file at least this often, while steps are taken: others may follow the run."""


class Journal:
    """Writes the records of one rank.

    Args:
        path: the file; made, with its folder, when the first line is written.
        header: facts about the rank.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.path = path
        self._header = header
        self._file: TextIO | None = None
        self._lines = 0
        self._stride = 1
        self._begun: StepFigures | None = None
        self._unwritten: list[StepFigures] = []  # lines are made many at a time, which is cheaper
        self._flushed_at = time.monotonic()

    def add(self, figures: StepFigures) -> None:
        """Note a step.

        Raises:
            OSError: the file cannot be written.
        """
        self._begun = figures if self._begun is None else merged(self._begun, figures)
        if self._begun.steps >= self._stride or self._begun.seconds >= COARSEST_S:
            self._end_line()
        if time.monotonic() - self._flushed_at >= FLUSH_S:
            self.flush()

    def note(self, event: str, **facts: Any) -> None:
        """Note an event, after the steps before it.

        Raises:
            OSError: the file cannot be written.
        """
        self._end_line()
        self._write_lines()
        self._write(json.dumps({"event": event, "time": time.time(), **facts}))
        self.flush()

    def flush(self) -> None:
        """Let readers see the lines so far.

        Raises:
            OSError: the file cannot be written.
        """
        self._flushed_at = time.monotonic()
        self._write_lines()
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Write the steps left over, and close the file."""
        self._end_line()
        self._write_lines()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _end_line(self) -> None:
        if self._begun is None:
            return
        self._unwritten.append(self._begun)
        self._begun = None
        self._lines += 1
        if self._lines % FINE_LINES == 0:
            self._stride *= 2

    def _write_lines(self) -> None:
        lines, self._unwritten = self._unwritten, []
        for figures in lines:
            self._write(figures.to_json())

    def _write(self, line: str) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a", encoding="utf-8")
            self._file.write(json.dumps(self._header) + "\n")
        self._file.write(line + "\n")


@dataclass(frozen=True, slots=True)
class RankJournal:
    """The contents of one rank's file.

    Attributes:
        header: facts about the rank; empty where the file has no first line.
        records: in the order of writing.
        events: each with the number of records before it.
        torn: lines that are no JSON, as the last one of a killed process.
    """

    header: Mapping[str, Any] = field(default_factory=dict)
    records: tuple[StepFigures, ...] = ()
    events: tuple[tuple[int, Mapping[str, Any]], ...] = ()
    torn: int = 0


def has_ended(path: Path) -> bool:
    """Whether a rank has written its last line."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LAST_LINE_BYTES))
            last = file.read().splitlines()[-1:]
    except OSError:
        return False
    return any(b'"event": "ended"' in line or b'"event": "failed"' in line for line in last)


def read_journal(path: Path) -> RankJournal:
    """Read a rank's file, as far as it is whole; a run may be writing it.

    Raises:
        OSError: the file cannot be read.
    """
    header: Mapping[str, Any] = {}
    records: list[StepFigures] = []
    events: list[tuple[int, Mapping[str, Any]]] = []
    torn = 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            values = json.loads(line)
            if "rank" in values:
                header = values
            elif "event" in values:
                events.append((len(records), values))
            else:
                records.append(StepFigures.from_json(line))
        except (ValueError, TypeError, ConfigError):
            torn += 1
    return RankJournal(header, tuple(records), tuple(events), torn)


# --- the folder ---


RUN = "run"
"""The folder in the project's folder."""

FACTS, REPORT = "run.json", "report.html"


def new_start() -> str:
    """Return the name of a start: later starts have later names."""
    return datetime.now(UTC).strftime("%Y%m%d-%H%M%S-%f")


@dataclass(frozen=True, slots=True)
class StartFolder:
    """The files of one start of a script.

    Attributes:
        path: the folder.
    """

    path: Path

    def journal(self, rank: int) -> Path:
        """Return the file of a rank."""
        return self.path / f"rank-{rank}.jsonl"

    def write_facts(self, facts: Mapping[str, Any]) -> None:
        """Write the facts of the run, complete or not at all.

        Raises:
            OSError: the file cannot be written.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        draft = self.path / f".{FACTS}"
        draft.write_text(json.dumps(facts, indent=1, default=str) + "\n", encoding="utf-8")
        draft.replace(self.path / FACTS)

    def facts(self) -> dict[str, Any]:
        """Return the facts of the run; empty where the file is missing or torn."""
        try:
            found = json.loads((self.path / FACTS).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def journals(self) -> dict[int, RankJournal]:
        """Return the journal of each rank as written so far, by rank."""
        found = {}
        for path in self.path.glob("rank-*.jsonl"):
            number = path.stem.removeprefix("rank-")
            if number.isdecimal():
                found[int(number)] = read_journal(path)
        return dict(sorted(found.items()))


def starts_of(folder: str | Path) -> list[StartFolder]:
    """Return the starts of a run, the earliest first.

    Args:
        folder: of the project, of its run, or of one start.

    Raises:
        ConfigError: there is no such folder, or no run was recorded in it.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ConfigError(f"expected the folder of a run, found none at {path}; check the path")
    for place in (path / RUN, path):
        found = sorted(each for each in place.glob("*-*-*/") if _is_start(each))
        if found:
            return [StartFolder(each) for each in found]
    if _is_start(path):
        return [StartFolder(path)]
    raise ConfigError(
        f"expected the records of a run in {path}, or in {path / RUN}, found none; records are "
        "written where the Accelerator has a project_dir and trains at least one step"
    )


def _is_start(path: Path) -> bool:
    return path.is_dir() and ((path / FACTS).is_file() or any(path.glob("rank-*.jsonl")))
