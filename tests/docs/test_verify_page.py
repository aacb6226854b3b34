"""The page about ``drivetrain verify`` shows the command's options and its output as it comes."""

import re
from pathlib import Path

import click
import pytest

from drivetrain_launch.cli import group
from drivetrain_launch.commands.verify import DIFFERENT, INCOMPARABLE
from forked_programs import run_python

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "verify.md").read_text()
SIZE = re.compile(r"\d\.\de[+-]\d\d")


def row(line: str) -> list[str]:
    """Return the words of a line of the report, without sizes and the number of unequal ones."""
    words = SIZE.sub("", line).split()
    return words[:-1] if words[-1].isdigit() else words


@pytest.mark.exhaustive
def test_sample_is_what_it_says():
    command, _, after = TEXT.partition("$ drivetrain ")[2].partition("\n")
    words = ("-m", "drivetrain_launch", "verify", "--cpu", *command.split()[1:])
    done = run_python(*words, folder=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = after.partition("```")[0].splitlines()
    found = done.stdout.splitlines()
    assert len(found) == len(shown)
    assert (found[0], found[-1]) == (shown[0], shown[-1])
    assert list(map(row, filter(None, found[1:-1]))) == list(map(row, filter(None, shown[1:-1])))


def test_table_of_options_equals_the_command():
    table = TEXT.partition("| option of verify |")[2].partition("\n\n")[0]
    shown = set(re.findall(r"`(--?[\w-]+)", table))
    command = group.get_command(click.Context(group), "verify")
    offered = {p.opts[0] for p in command.params if isinstance(p, click.Option)}
    assert shown == offered


def test_table_of_exit_codes_has_those_of_the_command():
    table = TEXT.partition("| code of verify |")[2].partition("\n\n")[0]
    codes = set(map(int, re.findall(r"^\| (\d+) ", table, re.MULTILINE)))
    assert codes == {0, DIFFERENT, 2, 5, INCOMPARABLE}
