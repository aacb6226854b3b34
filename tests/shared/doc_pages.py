"""README and docs as tests read them: pages, blocks of a language, rows of a table."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *DOCS.rglob("*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: str | Path, *languages: str) -> list[str]:
    """Return the fenced blocks of a page in some languages."""
    found = FENCE.findall((ROOT / page).read_text())
    return [text for language, text in found if language in languages]


def tables(page: str | Path, header: str) -> list[list[list[str]]]:
    """Return the cells of each table under a header line, which may go on."""
    found = re.findall(
        rf"^\| {re.escape(header)}[^\n]*\n\|[-|]+\n((?:\|.*\n)*)",
        (ROOT / page).read_text() + "\n",
        re.MULTILINE,
    )
    assert found, f"{page} has no table {header!r}"
    return [
        [
            [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            for line in text.splitlines()
        ]
        for text in found
    ]


def rows(page: str | Path, header: str) -> list[list[str]]:
    """Return the cells of the only table under a header line, which may go on."""
    (found,) = tables(page, header)
    return found


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
