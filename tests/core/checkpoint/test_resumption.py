"""A run that goes on keeps its global batch, and tells the launcher how far its checkpoints are."""

import json
import logging

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import Accelerator, CheckpointError, ProjectConfiguration
from drivetrain.checkpoint.commit import Resumption, saved_steps
from drivetrain.runtime.world import CONFIG_VARIABLE, World, saved_mark
from said import said


def resumption(root, mode="auto", *, divides=False):
    return Resumption(mode, root, divides=divides, world=World())


def save(root, number, saved: Resumption | None, accumulation=0):
    """Leave what of a checkpoint is looked at, as a run would that continues another one."""
    directory = root / f"checkpoint_{number}"
    directory.mkdir(parents=True)
    state = saved.facts(accumulation) if saved is not None else {}
    (directory / "state.json").write_text(json.dumps({"state": state}))
    (directory / "manifest.json").touch()


def test_ranks_share_the_micro_batches_of_a_step_anew(tmp_path, caplog, monkeypatch):
    first = resumption(tmp_path)
    assert first.accumulation(2, 4) == 2
    save(tmp_path, 0, first, 2)
    found = [resumption(tmp_path).accumulation(2, ranks) for ranks in (1, 2, 4, 8)]
    assert found == [8, 4, 2, 1]
    assert resumption(tmp_path).accumulation(3, 2) == 3  # another configuration
    assert resumption(tmp_path, "script").accumulation(2, 1) == 2
    assert resumption(None).accumulation(2, 1) == 2
    with monkeypatch.context() as patch:
        patch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        assert resumption(tmp_path, "script").accumulation(2, 1) == 8
    odd = resumption(tmp_path)  # cannot keep the batch, says so, and it comes back
    with caplog.at_level(logging.WARNING):
        assert odd.accumulation(2, 3) == 3
    assert "the global batch changes: 8 micro-batches per step before, 9 now" in caplog.text
    save(tmp_path, 1, odd, 3)
    assert resumption(tmp_path).accumulation(2, 1) == 8
    save(tmp_path, 2, first, 5)  # the script has changed the number between two steps
    assert resumption(tmp_path).accumulation(2, 2) == 10
    save(tmp_path, 3, None)  # of a version that did not tell
    assert resumption(tmp_path).accumulation(2, 2) == 10


def test_the_steps_of_a_checkpoint_are_the_most_of_an_optimizer(tmp_path):
    for state, steps in (({"steps": [3, 6, 4]}, 6), ({"iteration": 5}, 5), ({}, -1)):
        (tmp_path / "state.json").write_text(json.dumps({"state": state}))
        assert saved_steps(tmp_path) == steps


def train(folder, steps=3, resume="script"):
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True)
    config = {"launch": {"resume": resume}, "report": False}
    accelerator = Accelerator(cpu=True, config=config, project_config=project)
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    resumed = accelerator.resume()
    for _ in range(steps):
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        optimizer.zero_grad()
    return accelerator, optimizer, resumed


def test_the_launcher_is_told_the_steps_of_the_newest_checkpoint(tmp_path, monkeypatch):
    config = tmp_path / "config.yaml"
    config.write_text("{}")
    monkeypatch.setenv(CONFIG_VARIABLE, str(config))
    for steps, wait in ((3, True), (6, False), (9, True)):
        accelerator, *_ = train(tmp_path / "run")
        accelerator.save_state(wait=wait)
        accelerator.end_training()
        assert saved_mark(config).read_text() == str(steps)


def test_a_launcher_that_cannot_be_told_is_an_error_of_all_ranks(tmp_path, monkeypatch):
    accelerator, *_ = train(tmp_path / "run")
    monkeypatch.setenv(CONFIG_VARIABLE, str(tmp_path / "gone" / "config.yaml"))
    with pytest.raises(CheckpointError, match=r"checkpoint_0, which is saved: No such file.*gone"):
        accelerator.save_state()  # by rank 0 alone it would leave the others waiting
    monkeypatch.undo()
    assert accelerator.load_state().endswith("checkpoint_0")


@pytest.mark.parametrize("asks", [False, True])
def test_a_script_that_asked_in_vain_is_not_told_to_ask(tmp_path, monkeypatch, asks):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    accelerator.prepare(nn.Linear(2, 1))
    assert not (asks and accelerator.resume(tmp_path / "ck"))
    with said("drivetrain", "began anew") as lines:
        accelerator.save_state(tmp_path / "ck")
    assert len(lines) == (0 if asks else 1)


def test_never_begins_anew_until_the_run_has_saved_by_itself(tmp_path, monkeypatch):
    accelerator, _, _ = train(tmp_path / "run")
    accelerator.save_state()
    config = tmp_path / "config.yaml"
    config.write_text("{}")
    monkeypatch.setenv(CONFIG_VARIABLE, str(config))
    accelerator, optimizer, resumed = train(tmp_path / "run", resume="never")
    assert (resumed, optimizer.steps) == (False, 3)
    accelerator.save_state()
    _, optimizer, resumed = train(tmp_path / "run", resume="never")
    assert (resumed, optimizer.steps) == (True, 6)


def test_another_number_of_samples_per_step_is_said_at_load(tmp_path, capfd):
    for size, accumulation, line in ((2, 2, ""), (4, 1, ""), (2, 1, "2 samples per step; the")):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        accelerator.prepare(model, optimizer, DataLoader(torch.ones(8, 2), size))
        capfd.readouterr()
        if (size, accumulation) == (2, 2):
            accelerator.save_state(tmp_path / "saved")
        accelerator.load_state(tmp_path / "saved")
        assert capfd.readouterr().err.strip() == (line and f"{line} saved run had 4")
        accelerator.end_training()
