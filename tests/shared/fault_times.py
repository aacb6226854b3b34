"""The file of measured seconds of faults."""

import tomllib
from collections.abc import Mapping
from pathlib import Path

_PREFACE = (
    "# Seconds that the tests of a fault measured; "
    "`pytest tests/faults --exhaustive --times` writes them.\n"
)

Times = dict[str, dict[str, float]]


def read_times(path: Path) -> Times:
    """Return the seconds by row and by what they end with."""
    return tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def written_times(times: Mapping[str, Mapping[str, float]]) -> str:
    """Return the text of the file, in the order of the rows."""
    rows = sorted(times.items(), key=lambda pair: int(pair[0].removeprefix("F")))
    tables = (
        "\n".join([f"[{row}]", *(f'"{until}" = {value}' for until, value in seconds.items()), ""])
        for row, seconds in rows
    )
    return "\n".join([_PREFACE, *tables])
