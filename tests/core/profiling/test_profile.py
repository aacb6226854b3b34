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
from drivetrain.ranges import BACKWARD, COLLECTIVE, FORWARD, is_profiled

STRATEGIES = [
    "ddp",
    "zero3",
    {"name": "megatron", "tp": 2},
    {"name": "megatron", "pp": 2, "micro_batches": 2},
]


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.head = nn.Linear(width, 16)
        self.example_inputs = (torch.zeros(2, 4, dtype=torch.long),) * 2

    def forward(self, x, y):
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return {"loss": nn.functional.cross_entropy(self.head(h).flatten(0, 1), y.flatten())}


def start(strategy):
    accelerator = Accelerator(strategy=strategy, cpu=True)
    torch.manual_seed(0)
    model = Net()
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def steps(accelerator, model, optimizer, count=2):
    losses = []
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        batch = torch.randint(16, (4, 4), generator=generator)
        loss = model(batch, batch)["loss"]
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def shared_folder(tmp_path):
    (name,) = broadcast_object_list([str(tmp_path)])
    return Path(name)


def read(path):
    with gzip.open(path, "rt") as file:
        return json.load(file)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_both_ranks_are_in_one_trace_on_one_clock(strategy, tmp_path):
    folder = shared_folder(tmp_path)
    accelerator, model, optimizer = start(strategy)
    steps(accelerator, model, optimizer, 1)
    with accelerator.profile(ProfileKwargs(output_trace_dir=folder)):
        steps(accelerator, model, optimizer)
    if accelerator.is_main_process:
        merged = read(folder / "trace.json.gz")
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
    accelerator.free_memory()


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
    assert all((name, one) in found and (name, other) in found for name in names)
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
            assert here == there == {"embed", "head", *(f"blocks.{i}" for i in range(4))}
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


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_profile_changes_neither_losses_nor_bytes_and_goes_without_a_trace(strategy, tmp_path):
    accelerator, model, optimizer = start(strategy)
    expected = steps(accelerator, model, optimizer, 4)
    sent = accelerator.traffic.sent()
    accelerator.free_memory()
    again, model, optimizer = start(strategy)
    hooks = len(model.blocks[0]._forward_hooks)
    with again.profile(ProfileKwargs(output_trace_dir=shared_folder(tmp_path))):
        assert is_profiled()
        assert steps(again, model, optimizer, 4) == expected
    assert again.traffic.sent() == sent
    assert not is_profiled()
    assert len(model.blocks[0]._forward_hooks) == hooks
    again.free_memory()


def test_files_that_a_killed_profile_left_are_none_of_the_next(tmp_path):
    (tmp_path / ".costs_0.json").write_text("{}")
    accelerator, *_ = start("ddp")
    with accelerator.profile(ProfileKwargs(output_trace_dir=tmp_path)):
        assert not list(tmp_path.iterdir())
    accelerator.free_memory()


def test_without_a_folder_no_file_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    accelerator, model, optimizer = start("ddp")
    with accelerator.profile() as profiler:
        steps(accelerator, model, optimizer)
    assert f"{FORWARD}blocks.0" in {row.key for row in profiler.key_averages()}
    assert not list(tmp_path.iterdir())
    accelerator.free_memory()
