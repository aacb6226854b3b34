"""At the first infinite or NaN loss or gradient all ranks stop, skip the step or go back."""

import math
import os
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import Accelerator, CheckpointError, NonFiniteError
from drivetrain import ProjectConfiguration as Project
from drivetrain.checkpoint import commit
from drivetrain.checkpoint.commit import complete, is_finite, saved_steps
from drivetrain.facade import exchange as finite
from drivetrain.runtime.world import MEMORY_VARIABLE

ROW = torch.ones(1, 2)


def start(strategy="ddp", policy="stop", checkpoint=None, **options):
    config = {"on_nonfinite": policy, "report": False, "checkpoint": checkpoint or {}}
    accelerator = Accelerator(cpu=True, strategy=strategy, config=config, **options)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def step(accelerator, model, optimizer, row, *, clip=True):
    accelerator.backward(model(row).sum())
    if clip:
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def bad_on_rank_1(accelerator):
    return ROW * math.nan if accelerator.process_index == accelerator.num_processes - 1 else ROW


def weights(accelerator, model):
    with accelerator.gathered(model):
        return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("strategy", "clip"), [("ddp", False), ("zero3", True)])
def test_the_loss_of_one_rank_is_named_on_every_rank(monkeypatch, strategy, clip):
    monkeypatch.setattr(finite, "PERIOD_S", 0.0)
    accelerator, model, optimizer = start(strategy)
    step(accelerator, model, optimizer, ROW, clip=clip)
    before = weights(accelerator, model)
    with pytest.raises(NonFiniteError) as caught:
        step(accelerator, model, optimizer, bad_on_rank_1(accelerator), clip=clip)
    message = str(caught.value)
    assert "rank 1: in step 2 the loss of micro-batch 1 is nan" in message
    assert "the loss" not in message.partition("rank 1")[0].partition("found")[2]
    assert all(map(torch.equal, before, weights(accelerator, model)))
    accelerator.free_memory()


@pytest.mark.ranks(2)
def test_fast_steps_stop_a_little_later_and_save_nothing_before(monkeypatch, tmp_path):
    monkeypatch.setattr(finite, "PERIOD_S", 1e9)  # all steps are fast
    accelerator, model, optimizer = start()
    step(accelerator, model, optimizer, ROW, clip=False)
    step(accelerator, model, optimizer, bad_on_rank_1(accelerator), clip=False)
    with pytest.raises(NonFiniteError, match=r"rank 1: in step 2 the loss.*nothing was saved"):
        accelerator.save_state(tmp_path / "ck")
    assert not (tmp_path / "ck").exists()
    with pytest.raises(NonFiniteError, match=r"rank 1: in step 2 the loss.*ends the run"):
        for _ in range(finite.MOST_STEPS):
            step(accelerator, model, optimizer, ROW, clip=False)
    accelerator.free_memory()


def test_on_an_accelerator_an_exchange_reads_what_the_one_before_copied(monkeypatch, tmp_path):
    """A copy of the numbers at hand would be there only when the device has done all its work."""
    monkeypatch.setattr(finite, "PERIOD_S", 0.0)
    monkeypatch.setattr(finite.FiniteCheck, "_on_cpu", False)
    copied, read = [], []

    class Late(finite.LateNumbers):
        def __init__(self, values):
            copied.append(self)
            super().__init__(values)

        def read(self):
            read.append(copied.index(self))
            return super().read()

    monkeypatch.setattr(finite, "LateNumbers", Late)
    accelerator, model, optimizer = start()
    for turn in range(4):
        step(accelerator, model, optimizer, ROW)
        assert len(copied) == turn + 1
        assert read == list(range(turn))
    step(accelerator, model, optimizer, ROW * math.nan)
    with pytest.raises(NonFiniteError, match=r"rank 0: in step 5 the loss.*ends the run"):
        step(accelerator, model, optimizer, ROW)


def test_the_first_parameter_is_named_where_the_loss_is_finite():
    accelerator, model, optimizer = start()
    hook = model[0].weight.register_hook(lambda grad: torch.full_like(grad, 3e38))
    step(accelerator, model, optimizer, ROW, clip=False)  # only the sum of them is too large
    hook.remove()
    torch.nn.init.ones_(model[0].weight)
    model[1].weight.register_hook(lambda grad: grad * math.inf)
    with pytest.raises(NonFiniteError, match=r"rank 0: in step 2 the gradient of 1\.weight: on_n"):
        step(accelerator, model, optimizer, ROW)


def test_without_a_norm_gradients_are_looked_at_in_turn():
    for layer, name, steps, message in (
        (0, "weight", 1, r"in step 1 the gradient of 0\.weight: on_n"),  # in the first turn
        (0, "bias", 2, r"in step 2 the gradient of 0\.bias: on_n"),  # in the second one
        (1, "bias", 2, "in step 2 the loss of micro-batch 1 is -inf"),  # in the last: it is faster
    ):
        accelerator, model, optimizer = start()
        if (name, layer) == ("bias", 0):
            step(accelerator, model, optimizer, ROW, clip=False)
        getattr(model[layer], name).register_hook(lambda grad: grad * math.inf)
        with pytest.raises(NonFiniteError, match=message):
            for _ in range(steps):
                step(accelerator, model, optimizer, ROW, clip=False)


def test_each_of_several_models_has_its_own_turns():
    accelerator, model, optimizer = start()
    other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    other, second = accelerator.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1))
    other[0].weight.register_hook(lambda grad: grad * math.inf)  # looked at in the first turn
    step(accelerator, model, optimizer, ROW, clip=False)
    with pytest.raises(NonFiniteError, match=r"the gradient of 0\.weight"):
        step(accelerator, other, second, ROW, clip=False)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_run_goes_back_to_its_newest_finite_checkpoint(tmp_path, strategy):
    project = Project(project_dir=tmp_path, automatic_checkpoint_naming=True)
    accelerator, model, optimizer = start(strategy, "rollback", project_config=project)
    step(accelerator, model, optimizer, ROW)
    accelerator.save_state()
    saved = weights(accelerator, model)
    step(accelerator, model, optimizer, ROW)
    for _ in range(3):
        step(accelerator, model, optimizer, bad_on_rank_1(accelerator))
        assert all(map(torch.equal, saved, weights(accelerator, model)))
        assert optimizer.steps == 1
    step(accelerator, model, optimizer, ROW)
    with pytest.raises(NonFiniteError, match="went back 3 times"):
        step(accelerator, model, optimizer, bad_on_rank_1(accelerator))
    accelerator.free_memory()


@pytest.mark.parametrize("wait", [True, False])
def test_the_last_finite_checkpoint_is_never_pruned(tmp_path, wait, caplog):
    project = Project(project_dir=tmp_path, automatic_checkpoint_naming=True, total_limit=2)
    accelerator, model, optimizer = start(policy="ignore", project_config=project)
    model.register_buffer("mask", torch.tensor(-math.inf))
    step(accelerator, model, optimizer, ROW)
    accelerator.save_state(wait=wait)
    step(accelerator, model, optimizer, ROW * math.nan)
    assert model[1].weight.isnan().all(), "ignored"
    for _ in range(3):
        accelerator.save_state(wait=wait)
    accelerator.wait_for_checkpoint()
    kept = sorted((tmp_path / "checkpoints").iterdir())
    assert [path.name for path in kept] == ["checkpoint_0", "checkpoint_2", "checkpoint_3"]
    assert list(map(is_finite, kept)) == [True, False, False]
    assert "holds weights that are infinite or NaN" in caplog.text


def test_of_the_checkpoints_that_a_script_named_the_newest_is_taken(tmp_path, monkeypatch):
    accelerator, model, optimizer = start(policy="rollback")
    with pytest.raises(CheckpointError, match="cannot go back"):
        step(accelerator, model, optimizer, ROW * math.nan)
    accelerator, model, optimizer = start(policy="rollback")
    for moment, name in enumerate("ab", 1):
        step(accelerator, model, optimizer, ROW)
        accelerator.save_state(tmp_path / name)
        os.utime(tmp_path / name, (moment, moment))
    saved = weights(accelerator, model)
    step(accelerator, model, optimizer, ROW)
    step(accelerator, model, optimizer, ROW * math.nan)
    assert optimizer.steps == 2
    assert all(map(torch.equal, saved, weights(accelerator, model)))

    accelerator, model, optimizer = start(policy="rollback")
    accelerator.load_state(tmp_path / "a")
    saved = weights(accelerator, model)
    step(accelerator, model, optimizer, ROW)
    step(accelerator, model, optimizer, ROW * math.nan)
    assert all(map(torch.equal, saved, weights(accelerator, model))), "one that was loaded counts"

    finish = commit.commit
    monkeypatch.setattr(commit, "commit", lambda *a, **k: (time.sleep(0.3), finish(*a, **k)))
    step(accelerator, model, optimizer, ROW)
    saved = weights(accelerator, model)
    accelerator.save_state(tmp_path / "c", wait=False)
    step(accelerator, model, optimizer, ROW)
    for _ in range(finite.MOST_RETURNS):  # since the save
        step(accelerator, model, optimizer, ROW * math.nan)
        assert all(map(torch.equal, saved, weights(accelerator, model))), "the save ends before"


def test_a_run_never_goes_back_to_a_checkpoint_of_another_one(tmp_path):
    project = Project(project_dir=tmp_path, automatic_checkpoint_naming=True)
    accelerator, *parts = start(policy="rollback", project_config=project)
    step(accelerator, *parts, ROW)
    accelerator.save_state()
    accelerator, *parts = start(policy="rollback", project_config=project)
    with pytest.raises(CheckpointError, match="expected a checkpoint of this run"):
        step(accelerator, *parts, ROW * math.nan)
    accelerator.save_state()
    step(accelerator, *parts, ROW * math.nan)
    accelerator, *parts = start(policy="rollback", project_config=project)
    assert accelerator.resume()
    step(accelerator, *parts, ROW * math.nan)


def test_a_run_that_went_back_forgets_what_it_has_in_memory(tmp_path, monkeypatch):
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setenv(MEMORY_VARIABLE, str(memory))
    config = {"local": "memory", "local_every": 1}
    accelerator, model, optimizer = start(policy="rollback", checkpoint=config)
    (memory,) = memory.iterdir()
    good, bad = torch.ones(2), torch.full((2,), math.nan)
    loader = accelerator.prepare(DataLoader([*5 * [good], *4 * [bad, good, good, good]], 1))
    steps = []

    def train():
        for row in loader:
            accelerator.wait_for_checkpoint()
            steps.append([saved_steps(path) for path in complete(memory)])
            step(accelerator, model, optimizer, row)
            if optimizer.steps == 2 and not (tmp_path / "ck").exists():
                accelerator.save_state(tmp_path / "ck")

    with pytest.raises(NonFiniteError, match="went back 3 times"):
        train()
    later = [[2], [3, 2], [4, 3], [5, 4]]
    assert steps == [[], [], *4 * later]
    loaded = []
    accelerator.register_load_state_pre_hook(lambda models, folder: loaded.append(folder))
    assert accelerator.resume()
    assert (loaded, optimizer.steps) == ([str(complete(memory)[0])], 5)
    accelerator.load_state(tmp_path / "ck")
    assert complete(memory) == []


def test_skipped_steps_in_a_row_are_counted_from_the_last_good_one(monkeypatch):
    monkeypatch.setattr(finite, "MOST_IN_A_ROW", 2)
    accelerator, model, optimizer = start(policy="skip")
    for row in 3 * [ROW * math.nan, ROW]:
        step(accelerator, model, optimizer, row)
    with pytest.raises(NonFiniteError, match="2 steps in a row were skipped"):
        for _ in range(3):
            step(accelerator, model, optimizer, ROW * math.nan)
