"""The parts of README and docs that follow from the code: ``python docs/site/generate.py``.

A part is a table between ``<!-- generated: NAME -->`` and ``<!-- /generated -->``; its head is
written by hand. Where a table explains rows, an explanation on the page stays as it is, and only a
new row gets the help text of the code. Pictures are written, too.

``--check`` writes nothing; it names the files that differ and exits with 1.
"""

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path

import page_numbers
import pictures
from drivetrain import errors, registry
from drivetrain.runtime.board import PREEMPTED
from drivetrain_launch.cli import INTERRUPTED
from drivetrain_launch.ranks.failure import KILLED, NO_PROGRESS
from drivetrain_launch.verification import INCOMPARABLE
from page_numbers import Rows

ROOT = Path(__file__).parents[2]
COMMAND = "python docs/site/generate.py"
PART = re.compile(
    r"(?<=<!-- generated: )(\S+)( -->\n\n)(.*?)(?=\n\n<!-- /generated -->)", re.DOTALL
)
TERMINATED = 143
"""Exit code after SIGTERM, as shells have it: 128 + SIGTERM."""


def main(arguments: Sequence[str]) -> int:
    """Write all files that differ, or with ``--check`` name them; return the exit code."""
    changed = {path: text for path, text in generated(ROOT).items() if path.read_text() != text}
    for path, text in changed.items():
        if "--check" in arguments:
            sys.stdout.write(f"{path.relative_to(ROOT)} differs from the code; run: {COMMAND}\n")
        else:
            path.write_text(text)
    return int(bool(changed) and "--check" in arguments)


def generated(root: Path) -> dict[Path, str]:
    """Return the texts of all pages and pictures as they follow from the code."""
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    drawn = {root / "docs/pictures" / name: text for name, text in pictures.pictures().items()}
    return {page: filled(page.read_text()) for page in pages} | drawn


def filled(text: str) -> str:
    """Return a page with its generated parts as they follow from the code."""
    return PART.sub(lambda part: part[1] + part[2] + _part(part[1], part[3].splitlines()), text)


def _part(name: str, lines: Sequence[str]) -> str:
    old = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]
    rows = (f"| {' | '.join(row)} |" for row in TABLES[name](old))
    return "\n".join([*lines[:2], *(re.sub(r"\|  (?=\|)", "| ", row) for row in rows)])


def _explained(found: Iterable[Sequence[str]], helps: Iterable[str], old: Rows) -> Rows:
    """Return rows from the code with the explanations, and in the order, of the page."""
    explanations = {row[0]: row for row in old}
    order = list(explanations)
    rows = []
    for row, text in zip(found, helps, strict=True):
        told = explanations.get(row[0])
        rows.append([*row, *(told[len(row) :] if told else [_cell(text)])])
    return sorted(rows, key=lambda row: order.index(row[0]) if row[0] in order else len(order))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _names(old: Rows, plugins: registry.Registry) -> Rows:
    """Return the name of each of our plugins of a group, and what the page says of it."""
    names = ours(plugins.group)
    return _explained([[f"`{name}`"] for name in names], map(plugins.summary, names), old)


def ours(group: str) -> list[str]:
    """Return our own names of a group of entry points, whatever else is installed."""
    entries = entry_points(group=group)
    return [entry.name for entry in entries if entry.dist and entry.dist.name == "drivetrain"]


def _codes(old: Rows, *codes: object) -> Rows:
    return _explained([[str(code)] for code in codes], ["" for _ in codes], old)


ENDS = sorted(
    {0, 1, KILLED, INCOMPARABLE, PREEMPTED, NO_PROGRESS, INTERRUPTED, TERMINATED}
    | {
        kind.exit_code
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.DrivetrainError)
    }
)

TABLES: dict[str, Callable[[Rows], Rows]] = {
    "strategies": partial(_names, plugins=registry.strategies()),
    "trackers": partial(_names, plugins=registry.trackers()),
    "exit-codes-of-launch": lambda old: _codes(old, *ENDS, "other"),
    "dtypes": page_numbers.dtypes,
    "bytes-of-fsdp": page_numbers.fsdp_bytes,
    "bytes-with-accelerator": page_numbers.offload_bytes,
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
