"""The page on operations agrees with the code: exit codes, and the environment's variables."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from drivetrain import errors
from drivetrain.runtime.notices import PREEMPTED
from drivetrain_launch.cli import INTERRUPTED
from drivetrain_launch.commands.verify import INCOMPARABLE
from drivetrain_launch.ranks.failure import CANNOT_HEAL, KILLED, NO_PROGRESS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
SOURCES = [path for name in ("src", "launch", "plugins") for path in (ROOT / name).rglob("*.py")]
RUNNING = [path for path in SOURCES if not {"testing", "compat", "hosts"} & set(path.parent.parts)]
"""Sources that run in every run; schedulers' variables stand on the page on clusters."""


def rows(header: str) -> list[list[str]]:
    """Return the cells of the table under a header line."""
    table = PAGE.split(f"| {header} |\n", 1)[1].split("\n\n", 1)[0].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def variables() -> set[str]:
    """Return the variables that the page names."""
    tables = rows("variable | read by | meaning") + rows("variable | meaning")
    return {name for row in tables for name in re.findall(r"`(\w+)`", row[0])}


def test_exit_codes_are_those_of_the_code():
    codes = [int(row[0]) for row in rows("code | meaning | start again?")]
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    raised = {kind.exit_code for kind in kinds if issubclass(kind, errors.DrivetrainError)}
    assert set(codes) == raised | {
        0,
        1,
        KILLED,
        INCOMPARABLE,
        PREEMPTED,
        NO_PROGRESS,
        INTERRUPTED,
        143,
    }
    assert codes == sorted(codes)
    said = re.search(r"any failure but ([\d, and]+), which would only come again", PAGE)
    assert {int(code) for code in re.findall(r"\d+", said[1])} == CANNOT_HEAL


def test_exit_codes_are_those_of_the_page_on_the_command():
    command = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\| (\d+) \|", command.split("| code | meaning |")[1], re.MULTILINE)
    assert [row[0] for row in rows("code | meaning | start again?")] == shown


def test_our_own_variables_are_all_on_the_page():
    ours = {
        node.value
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"DRIVETRAIN_[A-Z_]*[A-Z]", node.value)
    }
    assert ours == {name for name in variables() if name.startswith("DRIVETRAIN_")}


def read_in(path: Path) -> Iterator[str]:
    """Yield the variables that a file reads, or sets where they are not set."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    known = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func)
            if called in {"os.environ.get", "_integer", "variables.setdefault"}:
                first = node.args[0]
                name = (
                    first.value
                    if isinstance(first, ast.Constant)
                    else known.get(str(getattr(first, "id", "")))
                )
                if isinstance(name, str):
                    yield name


def test_variables_that_are_read_are_on_the_page():
    found = {name for path in RUNNING for name in read_in(path)}
    assert {"RANK", "TORCHELASTIC_ERROR_FILE", "OMP_NUM_THREADS", "XDG_CONFIG_HOME"} <= found
    assert found - variables() == set()
