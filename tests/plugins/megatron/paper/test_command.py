"""``drivetrain schedule``: what it prints and writes, and how it refuses wrong input."""

import json
import subprocess
import sys

import pytest

from drivetrain.errors import ConfigError
from drivetrain_launch.cli import run
from drivetrain_megatron.pipeline.schedules import SCHEDULES

SIZES = ("--pp", "4", "--micro-batches", "8")


@pytest.fixture
def schedule(tmp_path, monkeypatch, capsys):
    """Run the command in a folder of its own; returns code, output and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def call(*arguments):
        code = run(["schedule", *arguments])
        return code, *capsys.readouterr()

    return call


def facts(out):
    return dict(line.split(maxsplit=1) for line in out.splitlines()[-4:])


IN_ORDER, KEPT = "(m+p-1)(F+B) = 33", "4, 4, 4, 4 micro-batches"
TIMES = "--forward 1.5 --backward 4 --travel 0.5"
NUMBERS = [
    ("", "33", IN_ORDER, "27.3%", "4, 3, 2, 1 micro-batches"),
    ("--schedule GPipe", "33", IN_ORDER, "27.3%", "8, 8, 8, 8 micro-batches"),
    (
        "--schedule interleaved --chunks 2",
        "28.5",
        "(m+(p-1)/v)(F+B) = 28.5",
        "15.8%",
        "11, 9, 7, 5 micro-batches of one chunk, 1/2 of a rank's layers",
    ),
    ("--schedule zb-h1", "27", "(3m+p-1)F = 27", "11.1%", KEPT),
    ("--schedule zb-h1 --weight 0.5", "30", "none for these numbers", "20.0%", KEPT),
    (
        f"--schedule gpipe {TIMES}",
        "63.5",
        "(m+p-1)(F+B) = 60.5 without travel",
        "30.7%",
        "8, 8, 8, 8 micro-batches",
    ),
]


def test_numbers_of_a_schedule(schedule):
    for arguments, makespan, formula, idle, kept in NUMBERS:
        code, out, err = schedule(*SIZES, *arguments.split())
        assert (code, err) == (0, "")
        assert facts(out) == {"makespan": makespan, "formula": formula, "idle": idle, "kept": kept}


def test_all_compares_every_schedule(schedule):
    code, out, _ = schedule(*SIZES, "--schedule", "all", "--chunks", "4")
    assert code == 0
    rows = {line.split()[0]: line.split(maxsplit=5)[1:] for line in out.splitlines()[1:]}
    assert list(rows) == list(SCHEDULES)
    assert rows["gpipe"][:4] == ["1", "33", "27.3%", "8"]
    assert rows["1f1b"][:4] == ["1", "33", "27.3%", "4"]
    assert rows["interleaved"][:4] == ["4", "26.25", "8.6%", "4.75"]
    assert rows["interleaved"][4].split() == ["(m+(p-1)/v)(F+B)", "=", "26.25"]
    assert rows["zb-h1"][:4] == ["1", "27", "11.1%", "4"]
    # Interleaved has two chunks where none are asked for.
    default, two, one = (
        schedule(*SIZES, "--schedule", "interleaved", *chunks)
        for chunks in ([], ["--chunks", "2"], ["--chunks", "1"])
    )
    assert default == two != one
    assert facts(one[1])["makespan"] == "33"


def test_it_writes_picture_and_trace(schedule, tmp_path):
    code, out, _ = schedule(*SIZES, "--output", "a.svg", "--trace", "a.json")
    assert code == 0
    assert out.splitlines()[-2:] == ["wrote a.svg", "wrote a.json"]
    assert "1f1b: 4 ranks, 8 micro-batches" in (tmp_path / "a.svg").read_text()
    spans = [e for e in json.loads((tmp_path / "a.json").read_text())["traceEvents"] if "ts" in e]
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(33e6)
    assert schedule(*SIZES, "--output", "a.png")[0] == 0
    assert (tmp_path / "a.png").stat().st_size > 1000


WRONG = [
    (["--pp", "4"], "Missing option '--micro-batches'"),
    (["--pp", "0", "--micro-batches", "8"], "found 0 ranks, 8 micro-batches"),
    (["--pp", "4000", "--micro-batches", "4000"], "at most 1,000,000 forwards, found 4000"),
    ([*SIZES, "--schedule", "2f2b"], "'2f2b' is not one of 'gpipe', '1f1b', 'interleaved'"),
    ([*SIZES, "--chunks", "2"], "one chunk per rank for the schedule '1f1b', found 2"),
    ([*SIZES, "--schedule", "interleaved", "--chunks", "0"], "and 0 chunks"),
    ([*SIZES, "--forward", "0"], "--forward: expected a number above 0, found 0"),
    ([*SIZES, "--backward", "inf"], "--backward: expected a number above 0, found inf"),
    ([*SIZES, "--weight", "2"], "--weight: expected a part of --backward, above 0 and below 2"),
    ([*SIZES, "--travel", "-1"], "--travel: expected 0 or more, found -1"),
    ([*SIZES, "--output", "a.pdf"], "ends with .png or .svg, found 'a.pdf'"),
    ([*SIZES, "--output", "no/a.png"], "cannot write 'no/a.png': No such file or directory"),
    ([*SIZES, "--trace", "no/a.json"], "cannot write 'no/a.json': No such file or directory"),
    ([*SIZES, "--trace", "."], "cannot write '.': Is a directory"),
    ([*SIZES, "--schedule", "all", "--output", "a.png"], "--schedule all prints a table"),
]


def test_wrong_input_exits_with_2_and_says_why(schedule, tmp_path):
    for arguments, text in WRONG:
        code, _, err = schedule(*arguments)
        assert code == ConfigError.exit_code
        assert text in " ".join(err.split())
        assert "Traceback" not in err
        assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_chart_is_shown_and_the_package_is_named(schedule, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = schedule(*SIZES, "--output", "a.png")
    assert code == ConfigError.exit_code
    assert "pip install matplotlib" in err
    assert facts(out)["makespan"] == "33"


PROGRAM = """
import sys
from drivetrain_launch.cli import run
schedule = ["schedule", "--pp", "4", "--micro-batches", "8"]
assert run(schedule) == 0
assert not {"torch", "matplotlib"} & set(sys.modules)
import matplotlib
before = matplotlib.rcParams.copy()
for name in ("a.png", "a.svg"):
    assert run([*schedule, "--output", name]) == 0
assert not {"torch", "matplotlib.pyplot"} & set(sys.modules)
assert matplotlib.rcParams.copy() == before
"""


def test_it_needs_neither_torch_nor_a_display_and_leaves_no_state(tmp_path):
    command = [sys.executable, "-W", "error", "-c", PROGRAM]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (0, "")
    assert "makespan  33" in done.stdout
    assert len(list(tmp_path.iterdir())) == 2
