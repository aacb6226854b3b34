"""The table of faults in the documentation, and the file of measured seconds behind its column."""

import tomllib
from collections.abc import Mapping
from pathlib import Path

HEAD = "| when | then | measured | not yet |\n"
MATRIX = Path(__file__).parents[1] / "faults/matrix.toml"

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


def shown(seconds: Mapping[str, float]) -> str:
    """Return the cell of a row: seconds alone are those until all have ended."""
    texts = (f"{until} after {value:g} s" for until, value in seconds.items())
    return "; ".join(text.removeprefix("all have ended after ") for text in texts)


def matrix() -> dict[str, dict[str, object]]:
    """Return the rows of the map of faults."""
    return tomllib.loads(MATRIX.read_text(encoding="utf-8"))


def cells(page: str) -> list[list[str]]:
    """Return the cells of the page's table."""
    table = page.split(HEAD, 1)[1].split("\n\n", 1)[0].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def filled(page: str, column: Mapping[str, str]) -> str:
    """Return the page with the cells of the column of measured times."""
    before, rest = page.split(HEAD, 1)
    table, after = rest.split("\n\n", 1)
    rule = table.splitlines()[0]
    rows = [
        f"| {when} | {then} | {column.get(name, '')} | {missing} |"
        for name, (when, then, _, missing) in zip(matrix(), cells(page), strict=True)
    ]
    return f"{before}{HEAD}" + "\n".join([rule, *rows]) + f"\n\n{after}"
