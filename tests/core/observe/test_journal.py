"""Records as lines: nothing is lost on the way to a file and back, and long runs stay small."""

import json
import math
from pathlib import Path

import pytest

from drivetrain.errors import ConfigError
from drivetrain.observe import figures
from drivetrain.observe.figures import (
    Journal,
    StartFolder,
    StepFigures,
    has_ended,
    merged,
    read_journal,
    starts_of,
)
from drivetrain.runtime.world import new_start


def step(number, **values):
    return StepFigures(step=number, **({"seconds": 0.5, "loss": float(number)} | values))


def test_lines_hold_whole_records_without_nan():
    whole = step(
        7,
        time=1795436860.5,
        sections={"data": 0.125, "backward": 0.25},
        waiting={"dp": 0.125},
        lr=0.0,  # as at the begin of a warm-up
        grad_norm=math.inf,
        loss_scale=65536.0,
        samples=8,
        tokens=1024,
        skipped=1,
        memory={"resident": 1 << 40},
        sent={"dp/all_reduce": 12345678901},
        own={"accuracy": 0.75},
    )
    assert StepFigures.from_json(whole.to_json()) == whole

    line = step(1, loss=math.nan, own={"worst": -math.inf}).to_json()
    json.loads(line, parse_constant=pytest.fail)
    read = StepFigures.from_json(line)
    assert math.isnan(read.loss)
    assert read.own == {"worst": -math.inf}

    for line in ("", "[]", "3", '{"steps": 2}', '{"step": 1, "loss": "much"}'):
        with pytest.raises(ConfigError, match="expected a record of a step"):
            StepFigures.from_json(line)


def test_records_add_up():
    one = {"samples": 4, "sent": {"dp/all_gather": 3}, "memory": {"resident": 9}, "grad_norm": 1.0}
    other = {"samples": 2, "sent": {"tp/all_reduce": 5}, "memory": {"resident": 7}, "lr": 0.2}
    first = step(2, steps=2, skipped=1, lr=0.1, **one)
    second = step(3, skipped=2, grad_norm=4.0, **other)
    whole = merged(first, second)
    assert (whole.step, whole.steps, whole.samples, whole.seconds) == (3, 3, 6, 1.0)
    assert whole.sent == {"dp/all_gather": 3, "tp/all_reduce": 5}
    assert whole.memory == {"resident": 9}
    assert (whole.lr, whole.skipped, whole.grad_norm) == (0.2, 3, 2.0)
    assert whole.loss == pytest.approx((2 + 2 + 3) / 3)


def test_long_runs_get_coarser_lines_and_lose_no_step(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "FINE_LINES", 4)
    writer = Journal(tmp_path / "run" / "rank-0.jsonl", {"rank": 0})
    for number in range(1, 31):
        writer.add(step(number, samples=2))
    writer.note("ended")
    writer.close()
    assert has_ended(writer.path)
    records = read_journal(writer.path).records
    assert [each.steps for each in records] == [1] * 4 + [2] * 4 + [4] * 4 + [2]
    assert sum(each.samples for each in records) == 60
    assert [each.step for each in records][-2:] == [28, 30]


def test_lines_come_at_once_and_slow_steps_are_never_merged(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "FINE_LINES", 2)
    writer = Journal(tmp_path / "rank-0.jsonl", {"rank": 0})
    for number in range(1, 9):
        writer.add(step(number, seconds=figures.COARSEST_S))
    writer.close()
    assert [each.steps for each in read_journal(writer.path).records] == [1] * 8

    monkeypatch.setattr(figures, "FLUSH_S", 0.0)
    writer = Journal((tmp_path / "1") / "rank-0.jsonl", {"rank": 0})
    writer.add(step(1))
    assert [each.step for each in read_journal(writer.path).records] == [1]
    writer.close()


def test_a_torn_file_is_read_up_to_there(tmp_path):
    path: Path = tmp_path / "rank-3.jsonl"
    writer = Journal(path, {"rank": 3, "host": "a"})
    writer.add(step(1))
    writer.note("resumed", source="saved")
    writer.add(step(2))
    writer.close()
    text = path.read_text(encoding="utf-8")
    path.write_bytes(text[:-20].encode() + b"\xff")
    found = read_journal(path)
    assert found.header == {"rank": 3, "host": "a"}
    assert [each.step for each in found.records] == [1]
    assert [(place, event["event"]) for place, event in found.events] == [(1, "resumed")]
    assert found.torn == 1


def test_starts_are_found_in_their_order(tmp_path):
    names = [new_start(), new_start()]
    for name in reversed(names):
        StartFolder(tmp_path / "run" / name).write_facts({"ranks": 2})
    assert [each.path.name for each in starts_of(tmp_path)] == names
    assert [each.path.name for each in starts_of(tmp_path / "run")] == names
    (one,) = starts_of(tmp_path / "run" / names[0])
    assert one.facts() == {"ranks": 2}
    assert one.journals() == {}

    (tmp_path / "empty").mkdir()
    for name, message in (("none", "found none at"), ("empty", "records of a run")):
        with pytest.raises(ConfigError, match=message):
            starts_of(tmp_path / name)
