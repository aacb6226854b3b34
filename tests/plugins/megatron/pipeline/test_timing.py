"""What real runs of pipelines leave: Chrome traces of each step; and advice on hosts."""

import itertools
import json

import pytest
import torch
from torch import nn

from drivetrain import Accelerator
from drivetrain.errors import ConfigError
from drivetrain.runtime.mesh import Axis, Mesh
from drivetrain_megatron.pipeline.runner import StageWorker
from drivetrain_megatron.state import advice
from stacks import Lossy, Stack

MICRO_BATCHES = 3


def prepared(folder, kind=Lossy, accumulation=1, **options):
    accelerator = Accelerator(
        strategy={"name": "megatron", "pp": 2, "trace_dir": str(folder), **options},
        gradient_accumulation_steps=accumulation,
        cpu=True,
    )
    model = kind(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4))
    model.example_inputs = torch.ones(2, 8)
    return accelerator, accelerator.prepare(model)


def train(accelerator, model, steps=2, accumulation=1):
    for _ in range(steps * accumulation):
        with accelerator.accumulate(model):
            output = model(torch.ones(6, 8))
            loss = output["loss"] if isinstance(output, dict) else output.square().mean()
            accelerator.backward(loss)
    accelerator.wait_for_everyone()


def events_of(path):
    events = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event["ph"] == "X"]


@pytest.mark.parametrize(
    ("schedule", "chunks", "kinds", "kept"),
    [
        ("1f1b", 1, "FB", (2, 1)),
        ("gpipe", 1, "FB", (3, 3)),
        ("zb-h1", 1, "FIW", (2, 2)),
        ("interleaved", 2, "FB", (4, 4)),
    ],
)
@pytest.mark.complete
@pytest.mark.ranks(2)
def test_a_trace_of_each_step(monkeypatch, tmp_path, schedule, chunks, kinds, kept):
    """Every action of every rank once, ranks below each other, none overlapping on its rank.

    A stage keeps no more micro-batches than its schedule promises.
    """
    found, forward = [], StageWorker.forward

    def counted(worker, micro_batch, inputs):
        result = forward(worker, micro_batch, inputs)
        found.append(len(worker._kept))
        return result

    monkeypatch.setattr(StageWorker, "forward", counted)
    options = {"schedule": schedule, "chunks": chunks, "micro_batches": MICRO_BATCHES}
    accelerator, model = prepared(tmp_path / "traces", **options)
    train(accelerator, model)
    assert max(found) <= kept[accelerator.process_index]
    workers = accelerator.strategy_of(model).pipeline.stages.workers.values()
    assert not any(worker._kept for worker in workers)
    files = sorted((tmp_path / "traces").iterdir())
    assert [f.name for f in files] == [f"pipeline-dp0-tp0-step0000{i}.json" for i in (1, 2)]
    for path in files:
        events = events_of(path)
        assert len(events) == 2 * chunks * MICRO_BATCHES * len(kinds)
        assert {event["name"][0] for event in events} == set(kinds)
        for rank in range(2):
            mine = sorted((e for e in events if e["tid"] == rank), key=lambda e: e["ts"])
            assert {e["args"]["stage"] % 2 for e in mine} == {rank}
            for before, after in itertools.pairwise(mine):
                assert before["ts"] + before["dur"] <= after["ts"] + 1


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.ranks(2)
def test_steps_whose_loss_is_made_outside(tmp_path, accumulation):
    accelerator, model = prepared(tmp_path / "traces", Stack, accumulation)
    train(accelerator, model, accumulation=accumulation)
    counts = [len(events_of(path)) for path in (tmp_path / "traces").iterdir()]
    assert counts == [2 * 2 * max(accumulation, 2)] * 2
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="trace_dir"):
        prepared(tmp_path / "file" / "x")


def test_advice_on_hosts():
    def over(*hosts):
        ranks = tuple(range(len(hosts)))
        return Mesh({"tp": Axis(name="tp", size=len(hosts), rank=0, ranks=ranks, hosts=hosts)})

    assert not advice(over("a", "a"))
    found = advice(over("a", "a", "b", "b"))
    assert "2 hosts (2 on a, 2 on b)" in found
    assert "tp" in found
