"""Charts, pictures and traces of pipelines show every action where it was, and nothing else."""

import io
import json
import re
import subprocess
import sys

import pytest
from rich.console import Console

from drivetrain.errors import ConfigError
from drivetrain.simulator.transformer import GptShape
from drivetrain_launch.cli import run
from drivetrain_megatron.pipeline.command import Gantt, save_picture, simulate
from drivetrain_megatron.pipeline.schedules import (
    SCHEDULES,
    Action,
    ActionKind,
    Span,
    Timeline,
    make_schedule,
    save_trace,
    to_trace,
)
from drivetrain_megatron.step import cut_into_stages, divided
from drivetrain_megatron.strategy import Megatron

MEASURED = Timeline(
    (
        (
            Span(Action(ActionKind.FORWARD, 0, 0), 5.0, 5.013),
            Span(Action(ActionKind.FORWARD, 0, 12), 5.02, 5.1),
        ),
        (Span(Action(ActionKind.INPUT, 1, 0), 5.013, 5.0131),),
        (),
    )
)
"""As a run that was cut off leaves it: uneven, incomplete, one rank without any action."""


def timeline(name="1f1b", p=4, m=8, v=1):
    return simulate(make_schedule(name, p, m, v))


def draw(shown, *, width=80, color=None, **options):
    console = Console(
        file=io.StringIO(), width=width, color_system=color, force_terminal=color is not None,
        legacy_windows=False, **options,
    )  # fmt: skip
    console.print(*Gantt(shown, console).lines(), sep="\n")
    return console.file.getvalue()


def test_without_color_cells_begin_with_their_letter_and_dots_are_idle():
    lines = draw(timeline(p=2, m=2)).splitlines()
    assert lines[0].split() == ["rank", "idle", "kept"]
    # 9 units in 68 columns: 7 columns each.
    f0, f1 = "F0-----", "F1-----"
    b0, b1 = "B0------------", "B1------------"
    idle = "." * 7
    assert lines[1] == f"0 {f0}{f1}{idle}{idle}{b0}{idle}{b1}  33%    2"
    assert lines[2] == f"1 {idle}{f0}{b0}{f1}{b1}{idle}{idle}  33%    1"
    assert lines[3].split() == ["0", "9"]
    assert len(lines[3]) == 2 + 9 * 7
    assert lines[4] == "F forward  B backward  . idle"
    assert len(lines) == 5


def test_colors_tell_the_kinds_and_chunks_apart():
    text = draw(timeline("interleaved", v=2), color="truecolor")
    backgrounds = set(re.findall(r"48;2;\d+;\d+;\d+", text))
    assert len(backgrounds) == 4
    assert "lighter: every second chunk" in text
    assert "0123" in re.sub(r"\x1b\[[\d;]*m", "", text)
    plain = draw(timeline(), color="truecolor")
    assert len(set(re.findall(r"48;2;\d+;\d+;\d+", plain))) == 2
    assert "lighter" not in plain


def test_narrow_terminals_get_the_facts_below_and_hear_what_is_hidden():
    text = " ".join(draw(timeline(), width=24).split())
    assert "idle 27.3%; ranks keep 4, 3, 2, 1 micro-batches" in text
    assert re.search(r"\d+ of 64 actions are narrower than a column", text)
    assert "narrower" not in draw(timeline())


def test_svg_shows_every_action_in_its_color_and_is_reproducible(tmp_path):
    save_picture(timeline("zb-h1"), tmp_path / "a.svg")
    save_picture(timeline("zb-h1"), tmp_path / "b.svg")
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text()
    for color in ("#0072b2", "#9c4f7f", "#00795a"):
        # One per rank and micro-batch, and one in the legend.
        assert len(re.findall(f"fill: {color}", text)) == 4 * 8 + 1
    assert re.findall(r">idle 11.1%, keeps 4<", text) == [">idle 11.1%, keeps 4<"] * 4
    assert len(re.findall(r">7</text>", text)) == 3 * 4


def test_trace_has_one_row_per_rank_and_microseconds(tmp_path):
    save_trace(MEASURED, tmp_path / "trace.json", name="step 3")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace == to_trace(MEASURED, name="step 3")
    events = trace["traceEvents"]
    assert [e["args"] for e in events if e["name"] == "process_name"] == [{"name": "step 3"}]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {0: "rank 0", 1: "rank 1", 2: "rank 2"}
    spans = [e for e in events if e["ph"] == "X"]
    found = [(e["tid"], e["name"], e["cat"], round(e["ts"], 3), round(e["dur"], 3)) for e in spans]
    assert found == [
        (0, "F0", "forward", 0.0, 13_000.0),
        (0, "F12", "forward", 20_000.0, 80_000.0),
        (1, "I0", "input", 13_000.0, 100.0),
    ]
    assert spans[2]["args"] == {"stage": 1, "micro_batch": 0}
    assert {e["pid"] for e in events} == {0}


# --- ``drivetrain schedule``: what it prints and writes, and how it refuses wrong input ---


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
    (["--pp", "4"], "missing option '--micro-batches'"),
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


# --- cell on paper: what its ranks and its stages get of a model, and the divisions to try ---


SHAPE = GptShape(layers=6, hidden=64, heads=8, seq=16, vocab=128)


def test_stages_in_the_middle_have_the_blocks_left_over():
    units = SHAPE.units(1, "none", fused=True)
    counts = [len(stage) for stage in cut_into_stages(units, 4)]
    assert counts == [1 + 1, 2, 2, 1 + 1]  # embedding and head lie on the first and the last one


def test_inputs_of_recomputed_blocks_are_divided_with_the_tokens_alone():
    block = SHAPE.units(1, "full", fused=True)[1]
    assert block.kept > 0
    assert divided(block, 4, by_tokens=False).kept == block.kept
    assert divided(block, 4, by_tokens=True).kept == block.kept / 4


def test_divisions_to_try_stay_inside_of_hosts_and_divide_the_model():
    found = list(Megatron.planning().layouts(blocks=12, heads=8, ranks=16, per_host=4))
    assert {each["tp"] for each in found} == {1, 2, 4}
    assert {each["schedule"] for each in found} == {"1f1b", "interleaved"}
    for each in found:
        assert 16 % (each["tp"] * each["pp"]) == 12 % (each["pp"] * each["chunks"]) == 0
