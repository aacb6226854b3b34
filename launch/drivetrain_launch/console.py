"""What the launcher shows: lines, and tables for people; a console that is gone ends no run.

Tables are drawn by rich on a terminal, and aligned plain text anywhere else.
"""

import errno
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from itertools import groupby, zip_longest
from typing import IO

GONE = (errno.EPIPE, errno.EIO)
"""Errors of a console for good: its reader, such as head, or its terminal is gone."""

WIDTH = 100
"""Columns of a table where no terminal has a width of its own."""

MOST_NAMED = 8
"""Names of one list in a line."""

_BREAK = re.compile(r"(?<=[^ \d] )(?=\S)|(?<=,)(?=[a-z])")
"""Where a line of a cell may end: not between a number and its unit."""


def show(text: str, console: IO[str]) -> None:
    """Write a line. Where it cannot be written, it is lost, and the run goes on."""
    try:
        console.write(f"{text}\n")
        console.flush()
    except OSError as error:
        if error.errno in GONE:  # later text of the process is thrown away
            with open(os.devnull, "wb") as nothing:  # noqa: PTH123 - no file of ours
                os.dup2(nothing.fileno(), console.fileno())


def say(text: str) -> None:
    """Write a line to the error stream."""
    show(text, sys.stderr)


def show_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, folds: bool = False
) -> None:
    """Print a table to standard output, as wide as the terminal.

    Args:
        title: above the table.
        columns: their heads.
        rows: the cells of each.
        folds: where there is no terminal, be as wide as WIDTH; else a row is one line, for grep.
    """
    drawn = sys.stdout.isatty()
    between = (3 if drawn else 2) * len(columns) + drawn
    width = shutil.get_terminal_size((WIDTH, 0)).columns if drawn or folds else sys.maxsize
    head, *body = _folded((columns, *rows), width - between)
    if drawn:
        _draw(title, head, body)
        return
    widths = [max(len(line) for row in (head, *body) for line in row[i]) for i in range(len(head))]
    print(title)
    for row in (head, *body):
        for line in zip_longest(*row, fillvalue=""):
            cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            print(("  " + "  ".join(cells)).rstrip())
    print()


def _folded(rows: Sequence[Sequence[str]], room: int) -> list[list[list[str]]]:
    """Return the lines of each cell: the widest columns are narrowed, but no word is cut."""
    words = [[_BREAK.split(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    least = [
        max(len(word.rstrip()) for cell in column for word in cell)
        for column in zip(*words, strict=True)
    ]
    while sum(widths) > room and (wider := [i for i, w in enumerate(widths) if w > least[i]]):
        widths[max(wider, key=lambda i: widths[i])] -= 1
    return [[_lines(cell, width) for cell, width in zip(row, widths, strict=True)] for row in words]


def _lines(words: Sequence[str], width: int) -> list[str]:
    lines = [""]
    for word in words:
        if lines[-1] and len(lines[-1] + word.rstrip()) > width:
            lines.append("")
        lines[-1] += word
    return [line.rstrip() for line in lines]


def _draw(
    title: str, head: Sequence[Sequence[str]], rows: Sequence[Sequence[Sequence[str]]]
) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left")
    for column in head:
        table.add_column("\n".join(column), overflow="fold")
    for row in rows:
        table.add_row(*(Text("\n".join(cell)) for cell in row))
    Console().print(table)


def listed(names: Sequence[object]) -> str:
    """Return names with commas; of many the first ones, and how many more there are."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(map(str, names[:MOST_NAMED])) + more


def runs(numbers: Iterable[int]) -> list[list[int]]:
    """Return numbers in ascending order, those that follow each other in one list."""
    places = groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])
    return [[number for _, number in run] for _, run in places]


def yaml_text(value: object) -> str:
    """Return a plain value as YAML writes it."""
    return value if isinstance(value, str) and value else json.dumps(value)
