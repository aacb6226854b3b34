"""Clocks, traces and costs by themselves: skewed clocks, torn files, too large ones."""

import gzip
import json
import time

import pytest
import torch

from drivetrain.errors import UsageError
from drivetrain.observe import trace
from drivetrain.runtime.world import World

SKEW_NS = 5 * 10**9


@pytest.mark.ranks(2)
def test_a_clock_that_is_ahead_is_found_within_the_stated_bound():
    world = World.discover(cpu=True)
    skew = SKEW_NS if world.rank == 1 else 0
    found = trace.compare_clocks(world, lambda: time.time_ns() + skew)
    assert 0 < found.accuracy_ns < 10**9
    assert abs(found.ahead_ns - skew) <= found.accuracy_ns
    assert abs(found.begun_ns - time.time_ns()) < 10**9  # rank 0's clock


def test_a_clock_lies_anywhere_between_its_bounds():
    both = [(-3, 8), (5, 8), (-9, -4)]
    found = [trace.bounds(torch.tensor(low), torch.tensor(high)) for low, high in both]
    assert found == [(0, 8), (6, 2), (-7, 3)]


def operation(name, start, duration, tid=7, category="cpu_op", **more):
    return {"ph": "X", "cat": category, "name": name, "pid": 9, "tid": tid, "ts": start,
            "dur": duration, **more}  # fmt: skip


def write_trace(path, made, base_ns=0):
    path.write_text(json.dumps({"baseTimeNanoseconds": base_ns, "traceEvents": made}, indent=2))
    return path


def place(rank=0, **facts):
    given = {"ahead_ns": 0, "begun_ns": 0, "accuracy_ns": 0, **facts}
    return trace.RankPlace(rank=rank, name=f"rank {rank}", **given)


def test_events_are_read_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "_CHUNK", 7)
    made = [operation(f"op {i} \u00e9", i, 1, args={"list": [1, {"two": "]"}]}) for i in range(5)]
    reader = trace.TraceReader(write_trace(tmp_path / "t.json", made, 12))
    assert reader.facts == {"baseTimeNanoseconds": 12}
    assert list(reader) == made


@pytest.mark.parametrize("cut", [5, 60, -40])
def test_a_torn_trace_is_named(tmp_path, cut):
    path = write_trace(tmp_path / "t.json", [operation("a", 0, 1), operation("b", 1, 1)])
    path.write_text(path.read_text()[:cut])
    with pytest.raises(UsageError, match=r"expected a whole trace .* found .*t\.json"):
        list(trace.TraceReader(path))


def test_times_move_to_the_clock_of_rank_0(tmp_path):
    source = write_trace(tmp_path / "t.json", [operation("a", 250.0, 10.0)], base_ns=5_000_000)
    trace.write_part(source, tmp_path / "p", place(1, ahead_ns=3000, begun_ns=5_100_000), ranks=2)
    trace.join_parts([tmp_path / "p"], tmp_path / "m.gz", {"ranks": [1]})
    merged = json.loads(gzip.decompress((tmp_path / "m.gz").read_bytes()))
    (found,) = [event for event in merged["traceEvents"] if event["name"] == "a"]
    assert found["ts"] == 5000 + 250 - 3 - 5100
    assert merged["drivetrain"] == {"ranks": [1]}


def test_a_trace_too_large_for_viewers_loses_its_shortest_operations(tmp_path):
    made = [operation(f"op{i}", 1000.0 * i, 2.0 ** (i % 8)) for i in range(400)]
    made.append(operation("collective: x", 0, 0.5, category="user_annotation"))
    source = write_trace(tmp_path / "t.json", made)
    shortest = trace.write_part(source, tmp_path / "p", place(), ranks=2, most=40_000)
    text = gzip.decompress((tmp_path / "p").read_bytes())
    kept = [json.loads(line.rstrip(b",")) for line in text.splitlines()]
    durations = [event["dur"] for event in kept if event.get("cat") == "cpu_op"]
    assert len(text) <= 20_000
    assert 1 < shortest <= 128
    assert min(durations) >= shortest
    assert len(durations) == sum(event["dur"] >= shortest for event in made[:-1])
    assert any(event["name"] == "collective: x" for event in kept)


def test_costs_are_own_times_waits_and_the_rest():
    tally = trace.CostTally(program=7, steps=2)
    for event in [
        operation("step 0", 0, 10_000, category="user_annotation"),
        operation("aten::linear", 1000, 4000),
        operation("aten::t", 1500, 500),
        operation("aten::addmm", 2000, 3000),
        operation("wait for all_reduce #4 (x) on dp", 6000, 2000, category="user_annotation"),
        operation("step 1", 10_000, 10_000, category="user_annotation"),
        operation("aten::addmm", 11_000, 1000),
        operation("collective: all_reduce #4 (x) on dp", 500, 7000, 8, "user_annotation"),
        operation("aten::add", 600, 10, 8),
    ]:
        tally.add(event)
    rows = {row.name: row for row in trace.largest([tally.costs()])}
    assert rows["aten::linear"].ms == pytest.approx(0.25)  # per step
    assert rows["aten::t"].ms == pytest.approx(0.25)
    assert rows["aten::addmm"].ms == pytest.approx(2.0)
    assert (rows["aten::addmm"].calls, rows["aten::t"].calls) == (1, 0.5)
    assert rows["wait for all_reduce (x) on dp"].kind == "wait"
    assert rows["wait for all_reduce (x) on dp"].share == pytest.approx(0.1)
    assert rows["all_reduce (x) on dp"].kind == "background"
    assert rows["Python, and what no operation tells"].ms == pytest.approx(10 - 0.5 - 2 - 1)
    assert "aten::add" not in rows
