"""Charts, pictures and traces of pipelines show every action where it was, and nothing else."""

import io
import json
import re

import pytest
from rich.console import Console

from drivetrain.errors import ConfigError
from drivetrain_megatron.paper.command import Gantt, save_picture
from drivetrain_megatron.paper.simulate import simulate
from drivetrain_megatron.pipeline.schedules import (
    Action,
    ActionKind,
    Span,
    Timeline,
    make_schedule,
    save_trace,
    to_trace,
)

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
    console.print(Gantt(shown, unit="s"))
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
    assert lines[3].split() == ["0", "9", "s"]
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


def test_a_picture_in_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot write .*No such file or directory"):
        save_picture(timeline(), tmp_path / "no" / "a.png")
    with pytest.raises(ConfigError, match=r"cannot write .*No such file or directory"):
        save_trace(timeline(), tmp_path / "no" / "a.json")


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
