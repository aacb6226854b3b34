"""Tables for people: drawn by rich on a terminal, aligned plain text anywhere else."""

import json
import sys
from collections.abc import Sequence


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
