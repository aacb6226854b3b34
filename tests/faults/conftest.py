"""A folder for launched trainings, in which nothing may be left, and the times of the matrix.

``pytest tests/faults --exhaustive --times`` writes the seconds that tests measure into
``times.toml``, and holds them to the bars of the matrix: they are worth something on a machine that
does nothing else. Without ``--times`` no test depends on how long it takes.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from fault_times import read_times, written_times
from faulty_trainings import FaultyTrainings

FOLDER = Path(__file__).parent
TIMES = FOLDER / "times.toml"
MEASURED = pytest.StashKey[dict[str, dict[str, float]]]()


def pytest_addoption(parser):
    parser.addoption(
        "--times",
        action="store_true",
        help="write the measured seconds of each fault into times.toml",
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


class Note(Protocol):
    """Notes how many seconds something took."""

    def __call__(self, row: str, until: str, seconds: float, bar: float = float("inf")) -> None:
        """Note seconds of a fault's row, from the fault until something; with ``--times`` they must
        be within the bar.
        """


@pytest.fixture
def took(request: pytest.FixtureRequest) -> Note:
    """Note how many seconds something took."""
    measured = request.config.stash[MEASURED]
    is_figure = request.config.getoption("--times", False)

    def note(row: str, until: str, seconds: float, bar: float = float("inf")) -> None:
        assert seconds <= bar or not is_figure, f"{row}: {until} after {seconds:.1f} s, not {bar:g}"
        slowest = max(seconds, measured.get(row, {}).get(until, 0.0))
        measured.setdefault(row, {})[until] = round(slowest, 1)

    return note


@pytest.fixture
def trainings(tmp_path: Path) -> Iterator[FaultyTrainings]:
    """Launch trainings here; afterwards no process and no temporary file of theirs may be left."""
    found = FaultyTrainings(tmp_path)
    yield found
    assert found.left() == []
