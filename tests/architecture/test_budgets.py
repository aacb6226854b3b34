"""The size budgets: a file holds one idea, and is short enough to be read."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path
    for folder in ("src", "plugins", "launch", "examples")
    for path in (ROOT / folder).rglob("*.py")
)
FILE_LINES, CLASS_LINES, FUNCTION_LINES = 400, 250, 60


def test_files_keep_the_budgets():
    assert SOURCES
    offenders = [offence for path in SOURCES for offence in offences(path)]
    assert not offenders, "\n".join(offenders)


def offences(path: Path) -> Iterator[str]:
    """Yield what is wrong with a file, after its path."""
    place = path.relative_to(ROOT).as_posix()
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    if (lines := len(text.splitlines())) > FILE_LINES:
        yield f"{place} has {lines} lines"
    docstring = ast.get_docstring(tree)
    if not docstring:
        yield f"{place} does not open with a sentence that says what it holds"
    elif docstring.splitlines()[0].rstrip()[-1] not in ".:":
        yield f"{place}: the first line is not a sentence"
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            lines -= len((ast.get_docstring(node) or "").splitlines())
            if lines > (CLASS_LINES if isinstance(node, ast.ClassDef) else FUNCTION_LINES):
                yield f"{place}: {node.name} has {lines} lines of code"
