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


def rows(page: str | Path, header: str) -> list[list[str]]:
    """Return the cells of the only table under a header line, which may go on."""
    (text,) = re.findall(
        rf"^\| {re.escape(header)}[^\n]*\n\|[-|]+\n((?:\|.*\n)*)",
        (ROOT / page).read_text() + "\n",
        re.MULTILINE,
    )
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in text.splitlines()
    ]
