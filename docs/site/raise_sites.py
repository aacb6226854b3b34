"""The messages of all errors, read from the places in the code that make them.

A message is the text of the call, with an ellipsis for each value; its class gives the exit code.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from drivetrain import errors

ROOT = Path(__file__).parents[2]
FOLDERS = ("src", "plugins", "launch")
VALUE = "…"
FEWEST_WORDS = 2
"""A text with fewer words of its own only passes another message on."""

SITUATIONS: dict[str, tuple[str, ...]] = {
    "Start": (
        "launch/drivetrain_launch",
        "plugins/drivetrain_migration",
        "src/drivetrain/compat",
        "src/drivetrain/config",
        "src/drivetrain/notebook.py",
        "src/drivetrain/registry.py",
        "src/drivetrain/runtime",
        "src/drivetrain/observe/trackers.py",
        "src/drivetrain/facade/settings.py",
        "src/drivetrain/integrations",
        "src/drivetrain/verify",
        "src/drivetrain/testing",
        "plugins/drivetrain_megatron/simulator",
        "plugins/drivetrain_offload/disk",
    ),
    "Prepare": (
        "plugins",
        "src/drivetrain/strategy.py",
        "src/drivetrain/data/loader.py",
        "src/drivetrain/facade/preparation.py",
        "src/drivetrain/facade/prepared.py",
        "src/drivetrain/model",
        "src/drivetrain/parallel",
    ),
    "Step": (
        "plugins/drivetrain_ddp/strategy.py",
        "plugins/drivetrain_megatron/pipeline",
        "plugins/drivetrain_megatron/tensor",
        "plugins/drivetrain_offload/host.py",
        "plugins/drivetrain_offload/nvme.py",
        "plugins/drivetrain_offload/stepping.py",
        "plugins/drivetrain_offload/tiles.py",
        "src/drivetrain",
        "src/drivetrain/model/guard.py",
        "src/drivetrain/model/recompute.py",
        "src/drivetrain/parallel/gather.py",
        "src/drivetrain/parallel/gradients.py",
        "src/drivetrain/parallel/reduce.py",
    ),
    "Checkpoint": (
        "plugins/drivetrain_megatron/state.py",
        "src/drivetrain/checkpoint",
        "src/drivetrain/facade/checkpoints.py",
        "src/drivetrain/facade/prepared.py",
        "src/drivetrain/saved_state.py",
        "src/drivetrain/shards.py",
        "src/drivetrain/parallel/strategy.py",
    ),
}
"""Where the messages of a situation come from; of several places the longest counts."""


@dataclass(frozen=True, slots=True)
class RaiseSite:
    """A place in the code that makes an error.

    Attributes:
        file: its path in the repository.
        line: of the call.
        error: name of the class.
        code: the exit code of ``drivetrain launch``.
        message: the text, with an ellipsis for each value.
    """

    file: str
    line: int
    error: str
    code: int
    message: str

    @property
    def situation(self) -> str:
        """The part of a run in which the error comes."""
        return max(
            (len(place), title)
            for title, places in SITUATIONS.items()
            for place in places
            if self.file.startswith(place)
        )[1]


@cache
def collect() -> list[RaiseSite]:
    """Return all places in the order of files and lines, each message once per class."""
    trees = {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text())
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
    }
    codes = _codes(trees.values())
    found = {
        (site.error, site.message): site
        for file, tree in reversed(trees.items())
        for site in sorted(_sites(file, tree, codes), key=lambda site: -site.line)
    }
    return list(found.values())[::-1]


def page() -> str:
    """Return the page of all messages, by situation and class."""
    sites = collect()
    lines = [
        "# All error messages",
        "",
        f"The {len(sites)} messages of the errors that drivetrain raises, from the code. "
        f"`{VALUE}` stands for a value. "
        "[Troubleshooting](troubleshooting.md) explains the common ones.",
        "",
    ]
    for situation in SITUATIONS:
        lines += [f"## {situation}", ""]
        here = [site for site in sites if site.situation == situation]
        for error, code in dict.fromkeys((site.error, site.code) for site in here):
            lines += [f"### {error} (exit code {code}) {{ #{situation.lower()}-{error.lower()} }}"]
            lines += ["", "| message | what to do |", "|---|---|"]
            for site in here:
                if site.error == error:
                    message, _, way = site.message.rpartition("; ")
                    lines.append(f"| {_cell(message or way)} | {_cell(way if message else '')} |")
            lines.append("")
    return "\n".join(lines)


def _codes(trees: Iterator[ast.Module]) -> dict[str, int]:
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


def _sites(file: str, tree: ast.Module, codes: dict[str, int]) -> Iterator[RaiseSite]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and (error := _class_of(node.func)) in codes:
            message = _text(node.args[0])
            if len(re.findall("[a-z]+", message)) >= FEWEST_WORDS:
                yield RaiseSite(file, node.lineno, error, codes[error], message)


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


def _cell(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
    return escaped.replace("*", "\\*").replace("_", "\\_").replace("`", "'")
