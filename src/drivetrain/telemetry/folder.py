"""The folder of a run's figures: one folder for each start of the script, one file for each rank.

::

    PROJECT/run/
        20261123-120028-417300/     a start: the time, in microseconds
            run.json                configuration with origins, environment, model, promised bytes
            rank-0.jsonl            a line for each step, see drivetrain.telemetry.journal
            rank-1.jsonl
        20261123-130501-000211/     started again: after a failure, or by hand
        report.html                 made of all these
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from drivetrain.errors import ConfigError
from drivetrain.telemetry.journal import RankJournal, read_journal

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
