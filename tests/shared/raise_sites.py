"""The messages of all errors, read from the places in the code that make them.

A message is the text of the call, with an ellipsis for each value; its class gives the exit code.
"""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from drivetrain import errors

ROOT = Path(__file__).parents[2]
VALUE = "…"


@dataclass(frozen=True, slots=True)
class RaiseSite:
    """A place in the code that makes an error.

    Attributes:
        error: name of the class.
        code: the exit code of ``drivetrain launch``.
        message: the text, with an ellipsis for each value.
    """

    error: str
    code: int
    message: str


@cache
def collect() -> list[RaiseSite]:
    """Return all places."""
    trees = [
        ast.parse(path.read_text())
        for folder in ("src", "plugins", "launch")
        for path in (ROOT / folder).rglob("*.py")
    ]
    codes = _codes(trees)
    return [site for tree in trees for site in _sites(tree, codes)]


def _codes(trees: Iterable[ast.Module]) -> dict[str, int]:
    """Return the exit code by class, for the tree of errors and all classes that derive from it."""
    codes = {
        name: kind.exit_code
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.DrivetrainError)
    }
    classes = [n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
    while new := {
        node.name: codes[base.id]
        for node in classes
        for base in node.bases
        if isinstance(base, ast.Name) and base.id in codes and node.name not in codes
    }:
        codes |= new
    return codes


def _sites(tree: ast.Module, codes: dict[str, int]) -> Iterator[RaiseSite]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and (error := _class_of(node.func)) in codes:
            yield RaiseSite(error, codes[error], _text(node.args[0]))


def _class_of(function: ast.expr) -> str:
    """Return the class of the error that a call makes, or collects for later; else ""."""
    if isinstance(function, ast.Name):
        return function.id
    collects = isinstance(function, ast.Attribute) and function.attr == "append"
    return "ConfigError" if collects and ast.unparse(function.value) == "self.problems" else ""


def _text(node: ast.expr) -> str:
    """Return the text of an expression, as far as it is written there."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return " ".join(node.value.split("\n")) if "\n" in node.value else node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return VALUE
