"""``strategy: auto``: the choice at prepare, alike on all ranks, pinned, and equal to its pin."""

import re
import sys
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator
from drivetrain.errors import ConfigError
from drivetrain.hardware.description import hardware_text, name_of_device
from drivetrain.planner import auto
from drivetrain.planner.search import Predictor
from said import said

sys.path.append(str(Path(__file__).parents[3] / "examples"))
from train_gpt import GPT, loss_of


def trained(steps=3, **options):
    """Return the accelerator and the weights after some steps of a small GPT."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, **options)
    model = GPT(16, 2, 2, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    words = torch.randint(256, (64, 17), generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(words), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for step, (window,) in enumerate(loader):
        if step == steps:
            break
        accelerator.backward(loss_of(model, window))
        optimizer.step()
        optimizer.zero_grad()
    return accelerator, accelerator.get_state_dict(model)


def strategy_of(accelerator):
    """Return the name of the run's strategy as the accelerator shows it."""
    return re.search(r"strategy='(\w+)'", repr(accelerator))[1]


def hardware(folder, before, after):
    """Return the path of a description of processors with another text at one place."""
    path = folder / "mine.yaml"
    path.write_text(hardware_text("cpu").replace(before, after))
    return str(path)


@pytest.mark.ranks(2)
def test_the_choice_trains_as_its_pin(tmp_path):
    with said("drivetrain", "strategy auto: ") as lines:
        options = {"project_dir": tmp_path / "run", "config": {"report": False}}
        accelerator, chosen = trained(strategy="auto", split_batches=True, **options)
    name = strategy_of(accelerator)
    accelerator.end_training()
    if accelerator.is_main_process:
        (line,) = lines
        assert "ms a step planned" in line
        assert "micro_batch=2" in line  # half of the loader's 4
        assert "cpu (described, unmeasured)" in line
    pin = tmp_path / "run" / "strategy.yaml"
    section = yaml.safe_load(pin.read_text())["strategy"]
    assert section["name"] == name != "auto"
    other, pinned = trained(config=str(pin), split_batches=True)
    other.end_training()
    assert all(torch.equal(chosen[key], pinned[key]) for key in pinned)


def test_a_planned_run_ends_with_prediction_and_measurement_of_a_whole_window(monkeypatch):
    tasks = []
    monkeypatch.setattr(auto, "Predictor", lambda task: tasks.append(task) or Predictor(task))
    with said("drivetrain", " ms a step, measured ") as lines:
        trained(strategy="auto", gradient_accumulation_steps=3)[0].end_training()
    assert [task.batch for task in tasks] == [3 * 4]
    (line,) = lines
    planned, measured = map(float, re.findall(r"([\d.]+) ms", line.replace(",", "")))
    assert planned > 0
    assert measured > 0
    assert ("(-" in line) == (planned < measured)
    assert "`drivetrain hardware measure` writes one" in line


@pytest.mark.ranks(2)
def test_a_small_memory_takes_more_than_replicas(tmp_path):
    """A device that lacks the room for whole states gets a layout that divides them."""
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
    whole = 16 * sum(p.numel() for p in model.parameters())
    path = hardware(tmp_path, "gib: 256", f"gib: {1.2 * whole / 2**30}")
    accelerator = Accelerator(cpu=True, strategy={"name": "auto", "hardware": path})
    loader = DataLoader(TensorDataset(torch.ones(8, 256)), batch_size=2)
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
    assert strategy_of(accelerator) in ("zero2", "zero3", "fsdp")


@pytest.mark.ranks(2)
def test_every_rank_says_why_nothing_is_chosen(tmp_path):
    for given, expected in (
        ("h1000", "did you mean h100"),
        (("gib: 256", "gib: 1e-6"), "no data-parallel layout fits: "),
        (
            ("between processes of a host", "NOT MEASURED: processes"),
            "auto: the links inside of a host were not measured",
        ),
    ):
        name = given if isinstance(given, str) else hardware(tmp_path, *given)
        with pytest.raises(ConfigError, match=expected):
            trained(strategy={"name": "auto", "hardware": name})


def test_descriptions_are_found_by_the_devices_title():
    names = {
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA H100 PCIe": "h100-pcie",
        "NVIDIA A100-SXM4-80GB": "a100-80gb",
        "Tesla T4": "t4",
        "NVIDIA GeForce RTX 4090": "rtx4090",
        "AMD Instinct MI300X": "mi300x",
        "NVIDIA GB10": None,
    }
    assert {title: name_of_device(title) for title in names} == names
