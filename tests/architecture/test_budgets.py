"""The size budgets: a file holds one idea, of whatever length that idea needs, within reason."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path
    for folder in ("src", "plugins", "launch", "examples")
    for path in (ROOT / folder).rglob("*.py")
)
FILE_LINES, CLASS_LINES, FUNCTION_LINES = 1000, 500, 60
FACADE = ROOT / "src" / "drivetrain" / "accelerator.py"
"""Holds every public verb: of its docstrings and signatures, a manual, no line counts as code."""


def test_files_keep_the_budgets():
    assert SOURCES
    offenders = [offence for path in SOURCES for offence in offences(path)]
    assert not offenders, "\n".join(offenders)


def offences(path: Path) -> Iterator[str]:
    """Yield what is wrong with a file, after its path."""
    place = path.relative_to(ROOT).as_posix()
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    texts = dict(enumerate(text.splitlines(), 1))
    counted = set(texts)
    if path == FACADE:
        counted = {line for line in texts if texts[line].strip()} - manual(tree)
    if (lines := len(counted)) > FILE_LINES:
        yield f"{place} has {lines} lines"
    docstring = ast.get_docstring(tree)
    if not docstring:
        yield f"{place} does not open with a sentence that says what it holds"
    elif docstring.splitlines()[0].rstrip()[-1] not in ".:":
        yield f"{place}: the first line is not a sentence"
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            span = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            lines = sum(line in counted for line in span)
            if path != FACADE:
                lines -= len((ast.get_docstring(node) or "").splitlines())
            if lines > (CLASS_LINES if isinstance(node, ast.ClassDef) else FUNCTION_LINES):
                yield f"{place}: {node.name} has {lines} lines of code"


def manual(tree: ast.Module) -> set[int]:
    """Return the lines of the docstrings and of the methods' signatures."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef | ast.FunctionDef):
            continue
        first, *_ = node.body
        if ast.get_docstring(node):
            lines |= set(range(first.lineno, (first.end_lineno or 0) + 1))
        if isinstance(node, ast.FunctionDef):
            start = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            lines |= set(range(start, first.lineno))
    return lines
