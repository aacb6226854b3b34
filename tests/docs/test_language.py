"""README, docs and first sentences of docstrings are read once: no two pronouns to tell apart."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^\s*```.*?^\s*```\s*$", re.DOTALL | re.MULTILINE)
HEADER = re.compile(r"^\|.*\|\n(?=\|[-| :]+\|$)", re.MULTILINE)
KEYS = re.compile(r"^\| key \| default \| meaning \|\n(?:\|.*\n)+", re.MULTILINE)
"""The table of keys, whose meanings are the help texts of the options."""

AROUND = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.|#+) )|(?<=\|)\n")
"""Between paragraphs, list items and rows of a table."""

FOLDERS = ("src", "plugins", "launch", "examples")
"""Their docstrings begin with plain sentences."""

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

PRONOUNS = re.compile(r"\b(what|that|those|one|it)\b", re.IGNORECASE)
FOLLOWED = "of per is that in for with which has and or to on at where by as after before can under"
NUMBER = re.compile(rf"\bone (?!(?:{'|'.join(FOLLOWED.split())})\b)(?=[a-z`0-9])", re.IGNORECASE)
"""The numeral before a noun; every other "one" is a pronoun."""


def sentences(text: str) -> list[str]:
    """Return the sentences of a page, without blocks of code, headers of tables and code."""
    for left_out in (FENCE, KEYS, HEADER):
        text = left_out.sub("\n", text)
    text = re.sub(r"`[^`]*`", "CODE", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    found = []
    for paragraph in AROUND.split(text):
        for cell in paragraph.strip().strip("|").split("|"):
            line = re.sub(r"^([-*]|\d+\.|#+)\s+", "", " ".join(cell.split()))
            found += re.split(r"(?<=[.!?])\s+(?=[A-Z*\"(])", line)
    return found


def riddle(sentence: str) -> bool:
    """Tell whether a sentence has two different pronouns, or takes "what" for a noun."""
    found = {word.lower() for word in PRONOUNS.findall(NUMBER.sub("", sentence))}
    return len(found) > 1 or ("what" in found and not sentence.endswith("?"))


def beginnings(folder: str) -> Iterator[str]:
    """Yield place and first sentence of every docstring of modules, classes and functions."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
                yield f"{path.relative_to(ROOT)}: {sentences(text.replace('``', '`'))[0]}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_sentence_is_a_riddle(page):
    assert [sentence for sentence in sentences(page.read_text()) if riddle(sentence)] == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_begin_with_plain_sentences(folder):
    found = [line for line in beginnings(folder) if riddle(line.partition(": ")[2])]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "sentence",
    [
        "In a store it is one tensor, like the one that would be in memory.",
        "What it names is divided so, or the run ends.",
        "A rank keeps what it owns.",
        "The one is sent before those of the others.",
    ],
)
def test_riddles_are_found(sentence):
    assert riddle(sentence)


@pytest.mark.parametrize(
    "sentence",
    [
        "One message serves all kinds of a unit, and it is never padded.",
        "A unit that is complete starts its reduce-scatter.",
        "What hides the update?",
        "If one rank fails, it names the parameter.",
    ],
)
def test_plain_sentences_pass(sentence):
    assert not riddle(sentence)
