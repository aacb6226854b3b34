"""What real runs of pipelines leave: Chrome traces of each step; and advice on hosts."""

import itertools
import json

import pytest
import torch
from torch import nn

from drivetrain import Accelerator
from drivetrain.errors import ConfigError
from drivetrain.runtime.mesh import Axis, Mesh
from drivetrain_megatron.cell import advice

MICRO_BATCHES = 3


class Model(nn.Module):
    def __init__(self, own_loss=True):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4))
        self.own_loss = own_loss
        self.dummy_inputs = {"x": torch.ones(2, 8)}

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.square().mean()} if self.own_loss else x


def train(accelerator, model, steps=2, accumulation=1):
    for _ in range(steps):
        for _ in range(accumulation):
            with accelerator.accumulate(model):
                output = model(torch.ones(6, 8))
                loss = output["loss"] if isinstance(output, dict) else output.square().mean()
                accelerator.backward(loss)


def events_of(path):
    events = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event["ph"] == "X"]


@pytest.mark.parametrize(
    ("schedule", "chunks", "kinds"),
    [("1f1b", 1, "FB"), ("gpipe", 1, "FB"), ("zb-h1", 1, "FIW"), ("interleaved", 2, "FB")],
)
@pytest.mark.ranks(2)
def test_a_trace_of_each_step(tmp_path, schedule, chunks, kinds):
    """Every action of every rank once, ranks below each other, none overlapping on its rank."""
    options = {"schedule": schedule, "chunks": chunks, "micro_batches": MICRO_BATCHES}
    accelerator = Accelerator(
        strategy={"name": "megatron", "pp": 2, "trace_dir": str(tmp_path / "traces"), **options},
        cpu=True,
    )
    model = accelerator.prepare(Model())
    train(accelerator, model)
    accelerator.wait_for_everyone()
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
    accelerator.wait_for_everyone()
    accelerator.free_memory()


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.ranks(2)
def test_steps_whose_loss_is_made_outside(tmp_path, accumulation):
    accelerator = Accelerator(
        strategy={"name": "megatron", "pp": 2, "trace_dir": str(tmp_path)},
        gradient_accumulation_steps=accumulation,
        cpu=True,
    )
    model = accelerator.prepare(Model(own_loss=False))
    train(accelerator, model, accumulation=accumulation)
    accelerator.wait_for_everyone()
    counts = [len(events_of(path)) for path in sorted(tmp_path.iterdir())]
    assert counts == [2 * 2 * max(accumulation, 2)] * 2
    accelerator.wait_for_everyone()
    accelerator.free_memory()


@pytest.mark.ranks(2)
def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    accelerator = Accelerator(
        strategy={"name": "megatron", "pp": 2, "trace_dir": str(tmp_path / "file" / "x")}, cpu=True
    )
    with pytest.raises(ConfigError, match="trace_dir"):
        accelerator.prepare(Model())


def axis(hosts):
    return Axis(name="tp", size=len(hosts), rank=0, ranks=tuple(range(len(hosts))), hosts=hosts)


def test_advice_on_hosts():
    assert not advice(Mesh({"tp": axis(("a", "a"))}))
    found = advice(Mesh({"tp": axis(("a", "a", "b", "b"))}))
    assert "2 hosts (2 on a, 2 on b)" in found
    assert "tp" in found
