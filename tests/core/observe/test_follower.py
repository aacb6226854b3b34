"""``--profile STEPS``: the steps that were asked for, whatever the run does."""

import json
import logging
from pathlib import Path

import pytest
import torch
from torch import nn

from drivetrain import Accelerator, ProfileKwargs
from drivetrain.communication import broadcast_object_list
from drivetrain.errors import ConfigError, UsageError
from drivetrain.observe.profile import StepWindow
from drivetrain.observe.trace import TraceReader
from drivetrain.runtime.ranges import STEP, is_profiled
from said import said


def test_steps_are_read_as_a_slice():
    texts = {"5": (2, 7), 5: (2, 7), "10:15": (10, 15), "0:1": (0, 1), ":3": (0, 3)}
    for text, place in (texts | {" 4:6 ": (4, 6)}).items():
        assert StepWindow.parse(text) == StepWindow(*place)

    for text in ("0", "5:5", "6:5", "x", "5:", "-1", "1:2:3", "1.5"):
        with pytest.raises(ConfigError, match="5 profiles five steps after two that warm up"):
            StepWindow.parse(text)


def run(tmp_path, profile, count=5, accumulation=1):
    (folder,) = broadcast_object_list([str(tmp_path)])
    if profile:
        profile = {"dir": f"{folder}/out", **profile}
    config = {"strategy": "ddp", "profile": profile, "accumulation": accumulation}
    accelerator = Accelerator(cpu=True, config=config)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    data = torch.utils.data.DataLoader(torch.arange(80.0).view(20, 4), batch_size=1)
    optimizers = [torch.optim.SGD(layer.parameters(), lr=1e-4) for layer in model]
    model, first, second, data = accelerator.prepare(model, *optimizers, data)
    losses = []
    for index, rows in enumerate(data):
        if index == count * accumulation:
            break
        with accelerator.accumulate(model):
            for optimizer in (first, second):  # as adversaries take turns in one step
                loss = model(rows).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        losses.append(float(loss.detach()))
    sent = accelerator.traffic.sent()
    accelerator._profiler.end()  # as end_training, which would leave the group of the tests
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    return Path(folder), losses, sent


def steps_in(folder, kind=STEP):
    events = TraceReader(folder / "profile_0.json")
    return [event["name"] for event in events if str(event["name"]).startswith(kind)]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_steps_that_were_asked_for_are_profiled(tmp_path, accumulation):
    plain = run(tmp_path, {}, accumulation=accumulation)
    folder, *numbers = run(tmp_path, {"steps": "1:3"}, accumulation=accumulation)
    assert numbers == list(plain[1:])  # losses, and bytes sent
    assert not is_profiled()
    assert steps_in(folder / "out") == ["step 2", "step 3"]
    forwards = 2 * 2 * accumulation  # of two steps, each with two optimizers
    assert len(steps_in(folder / "out", "forward of 0")) == forwards
    assert json.loads((folder / "out/costs.json").read_text())["steps"] == 2
    assert (folder / "out/trace.json.gz").is_file()
    again, *_ = run(tmp_path, {"steps": ":1"}, accumulation=accumulation)
    assert steps_in(again / "out-2") == ["step 1"]


@pytest.mark.ranks(2)
def test_a_run_that_ends_too_early_says_so_and_leaves_what_there_is(tmp_path):
    with said("drivetrain.observe.profile", level=logging.WARNING) as lines:
        folder, *_ = run(tmp_path, {"steps": "10:12"})
    assert not (folder / "out").exists()
    if torch.distributed.get_rank() == 0:
        (line,) = lines
        assert "steps 11 to 12 were asked for, and the run ended after 5" in line
    else:
        assert not lines
    with said("drivetrain.observe.profile", level=logging.WARNING) as lines:
        folder, *_ = run(tmp_path, {"steps": "3:9"})
    assert steps_in(folder / "out") == ["step 4", "step 5", "step 6"]  # whose batch was read
    assert (folder / "out/trace.json.gz").is_file()
    ended = [line for line in lines if "the profile has the first 2 of them" in line]
    assert len(ended) == (torch.distributed.get_rank() == 0)


def test_two_profiles_at_once_are_refused(tmp_path):
    accelerator = Accelerator(cpu=True)
    with (
        accelerator.profile(),
        pytest.raises(UsageError, match="expected one profile at a time"),
        accelerator.profile(ProfileKwargs(output_trace_dir=tmp_path)),
    ):
        pytest.fail("not reached")
    assert not is_profiled()
