"""A folder for launched trainings, in which nothing may be left, and the times of the matrix.

``pytest tests/faults --times`` writes the seconds that tests measure into ``times.toml`` and into
the table of ``docs/faults.md``. They are worth something on a machine that does nothing else.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fault_page import filled, read_times, shown, written_times
from faulty_trainings import FaultyTrainings

FOLDER = Path(__file__).parent
TIMES, PAGE = FOLDER / "times.toml", FOLDER.parents[1] / "docs/faults.md"
MEASURED = pytest.StashKey[dict[str, dict[str, float]]]()


def pytest_addoption(parser):
    parser.addoption(
        "--times",
        action="store_true",
        help="write the measured seconds of each fault into times.toml and docs/faults.md",
    )


def pytest_configure(config):
    config.stash[MEASURED] = {}


def pytest_sessionfinish(session, exitstatus):
    found = session.config.stash[MEASURED]
    if not session.config.getoption("--times", False) or exitstatus or not found:
        return  # seconds of a run with failures are no figures
    times = read_times(TIMES)
    for row, seconds in found.items():
        times[row] = {**times.get(row, {}), **seconds}
    TIMES.write_text(written_times(times), encoding="utf-8")
    column = {row: shown(seconds) for row, seconds in times.items()}
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), column), encoding="utf-8")


@pytest.fixture
def took(request: pytest.FixtureRequest) -> Callable[[str, str, float], None]:
    """Note how many seconds something took: the fault's row, the end of the time, the seconds."""
    measured = request.config.stash[MEASURED]

    def note(row: str, until: str, seconds: float) -> None:
        slowest = max(seconds, measured.get(row, {}).get(until, 0.0))
        measured.setdefault(row, {})[until] = round(slowest, 1)

    return note


@pytest.fixture
def trainings(tmp_path: Path) -> Iterator[FaultyTrainings]:
    """Launch trainings here; afterwards no process and no temporary file of theirs may be left."""
    found = FaultyTrainings(tmp_path)
    yield found
    assert found.left() == []
