"""A profile of two ranks is one trace on one clock: collectives of both, units, stages, costs."""

import gzip
import json
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch import nn

from drivetrain import Accelerator, ProfileKwargs
from drivetrain.communication import broadcast_object_list
from drivetrain.runtime.ranges import BACKWARD, COLLECTIVE, FORWARD
from stacks import Lossy, Residual

STRATEGIES = [
    "zero3",
    {"name": "megatron", "tp": 2},
    {"name": "megatron", "pp": 2, "micro_batches": 2},
]


def start(strategy):
    accelerator = Accelerator(strategy=strategy, cpu=True)
    torch.manual_seed(0)
    ends = {"first": nn.Embedding(16, 8), "last": nn.Linear(8, 16)}
    model = Lossy([Residual(8) for _ in range(4)], **ends)
    model.example_inputs = (torch.zeros(2, 4, dtype=torch.long),)
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def steps(accelerator, model, optimizer, count=2):
    for _ in range(count):
        accelerator.backward(model(torch.arange(16).view(4, 4))["loss"])
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_both_ranks_are_in_one_trace_on_one_clock(strategy, tmp_path):
    folder = Path(broadcast_object_list([str(tmp_path)])[0])
    accelerator, model, optimizer = start(strategy)
    steps(accelerator, model, optimizer, 1)
    accelerator.get_state_dict(model)  # what the step has sent is there: it is in no trace
    with accelerator.profile(ProfileKwargs(output_trace_dir=folder)):
        steps(accelerator, model, optimizer)
        accelerator.get_state_dict(model)  # and what these send is in both
    if accelerator.is_main_process:
        merged = json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))
        assert_rows(merged)
        assert_collectives(merged, strategy)
        assert_units(merged, strategy)
        assert_nested(merged)
        assert "ms/step" in (folder / "costs.txt").read_text()
        assert len(json.loads((folder / "costs.json").read_text())["rows"]) == 10
        left = {path.name for path in folder.iterdir()}
        traces = {"profile_0.json", "profile_1.json", "trace.json.gz"}
        assert left == traces | {"costs.txt", "costs.json"}
    accelerator.wait_for_everyone()


def ranges(merged, prefix):
    """Return (name, process) -> intervals."""
    found = defaultdict(list)
    for event in merged["traceEvents"]:
        if event["ph"] == "X" and event["name"].startswith(prefix):
            span = (event["ts"], event["ts"] + event["dur"])
            found[event["name"].removeprefix(prefix), event["pid"]].append(span)
    return found


def processes(merged):
    named = [e for e in merged["traceEvents"] if e["ph"] == "M" and e["name"] == "process_name"]
    return {event["pid"]: event["args"]["name"] for event in named}


def assert_rows(merged):
    first, second = processes(merged).values()
    assert first.startswith("rank 0 of 2")
    assert second.startswith("rank 1 of 2")
    threads = [e for e in merged["traceEvents"] if e["name"] == "thread_name"]
    names = [event["args"]["name"] for event in threads]
    assert names.count("program") == names.count("units in backward") == 2
    assert any(name.startswith("drivetrain-ring-") for name in names)


def assert_collectives(merged, strategy):
    """Each collective has the same name on both ranks, and happens on both at the same time."""
    accuracy = merged["drivetrain"]["clock_accuracy_us"]
    assert 0 < accuracy < 20_000
    found = ranges(merged, COLLECTIVE)
    one, other = processes(merged)
    names = {name for name, _ in found}
    assert names
    assert [each for each in names if not {(each, one), (each, other)} <= found.keys()] == []
    words = " ".join(names)
    axis = "dp" if isinstance(strategy, str) else next(k for k in ("tp", "pp") if k in strategy)
    assert f" on {axis}" in words
    if strategy == "zero3":
        assert "all_gather" in words
        assert "reduce_scatter" in words
    for name in names:
        broadcast = name.startswith("broadcast")  # its source goes on by itself
        for (start, end), (begin, stop) in zip(found[name, one], found[name, other], strict=True):
            assert broadcast or max(start, begin) <= min(end, stop) + 2 * accuracy, name


def assert_units(merged, strategy):
    forward, backward = ranges(merged, FORWARD), ranges(merged, BACKWARD)
    for index, process in enumerate(processes(merged)):
        here = {name for name, pid in forward if pid == process}
        there = {name for name, pid in backward if pid == process}
        if "pp" in strategy:
            mine = {0: {"blocks.0", "blocks.1"}, 1: {"blocks.2", "blocks.3"}}[index]
            assert here == mine
            assert there
            assert there <= mine
            actions = {name for name, pid in ranges(merged, "stage ") if pid == process}
            assert f"{index}: forward 0" in actions
            assert f"{index}: backward 1" in actions
        else:
            assert here == there == {"first", "last", *(f"blocks.{i}" for i in range(4))}
    assert all(len(spans) >= 2 for spans in backward.values())


def assert_nested(merged):
    """No range or operation of a row reaches over the end of another one."""
    rows = defaultdict(list)
    for event in merged["traceEvents"]:
        if event["ph"] == "X":
            span = (event["ts"], -event["dur"], event["name"])
            rows[event["pid"], event["tid"]].append(span)
    for spans in rows.values():
        around = []
        for begin, minus, name in sorted(spans):
            while around and around[-1][0] <= begin + 0.002:
                around.pop()
            assert not around or begin - minus <= around[-1][0] + 0.01, (around[-1], name)
            around.append((begin - minus, name))


def test_files_are_those_of_this_profile_and_none_without_a_folder(tmp_path, monkeypatch):
    (tmp_path / ".costs_0.json").write_text("{}")  # of a killed one
    accelerator, model, optimizer = start("ddp")
    with accelerator.profile(ProfileKwargs(output_trace_dir=tmp_path)):
        assert not list(tmp_path.iterdir())
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with accelerator.profile() as profiler:
        steps(accelerator, model, optimizer)
    assert f"{FORWARD}blocks.0" in {row.key for row in profiler.key_averages()}
    assert not list((tmp_path / "empty").iterdir())
