"""The ways of a parameter and of a gradient in ``architecture.md``: every function is there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"
MOST_FILES = {"A parameter's way": 7, "A gradient's way": 8}


def way(title: str) -> list[tuple[str, str]]:
    """Return (file, function) of each stop of a way."""
    section = PAGE.read_text(encoding="utf-8").partition(f"## {title}\n")[2].partition("\n## ")[0]
    return re.findall(r"`([\w/]+\.py):(\w+)`", section)


def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("title", MOST_FILES)
def test_every_stop_is_there(title):
    stops = way(title)
    assert len(stops) > MOST_FILES[title]
    for file, function in stops:
        assert (ROOT / file).is_file(), file
        assert function in functions_of(ROOT / file), f"{file} has no function {function}"


@pytest.mark.parametrize("title", MOST_FILES)
def test_a_way_leads_through_few_files(title):
    files = {file for file, _ in way(title)}
    assert len(files) <= MOST_FILES[title], sorted(files)
