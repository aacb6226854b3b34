"""What the launcher shows: lines, and tables for people; a console that is gone ends no run.

Tables are drawn by rich on a terminal, and aligned plain text anywhere else.
"""

import errno
import json
import os
import sys
from collections.abc import Sequence
from typing import IO

GONE = (errno.EPIPE, errno.EIO)
"""Errors of a console for good: its reader, such as head, or its terminal is gone."""


def show(text: str, console: IO[str]) -> None:
    """Write a line. Where it cannot be written, it is lost, and the run goes on."""
    try:
        console.write(f"{text}\n")
        console.flush()
    except OSError as error:
        if error.errno in GONE:
            _silence(console)


def say(text: str) -> None:
    """Write a line to the error stream."""
    show(text, sys.stderr)


def _silence(console: IO[str]) -> None:
    """Throw later text of the process away: writing it is no error."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, console.fileno())
    os.close(nothing)


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table to standard output."""
    if sys.stdout.isatty():
        _draw(title, columns, rows)
        return
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
    print(title)
    for row in (columns, *rows):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(("  " + "  ".join(cells)).rstrip())
    print()


def _draw(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)


def yaml_text(value: object) -> str:
    """Return a plain value as YAML writes it."""
    return value if isinstance(value, str) and value else json.dumps(value)
