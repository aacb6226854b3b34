"""The size budgets: a file holds one idea, and is short enough to be read."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path
    for folder in ("src", "plugins", "launch", "examples")
    for path in (ROOT / folder).rglob("*.py")
)
FILE_LINES, CLASS_LINES, FUNCTION_LINES = 400, 250, 60


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_file_keeps_the_budgets(path: Path):
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert len(text.splitlines()) <= FILE_LINES
    docstring = ast.get_docstring(tree)
    assert docstring, "a file opens with a sentence that says what it holds"
    assert docstring.splitlines()[0].rstrip()[-1] in ".:", "the first line is a sentence"
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            budget = CLASS_LINES if isinstance(node, ast.ClassDef) else FUNCTION_LINES
            inner_docstring = ast.get_docstring(node) or ""
            lines -= len(inner_docstring.splitlines())
            assert lines <= budget, f"{node.name} has {lines} lines of code"
