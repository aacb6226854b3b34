"""After a scheduler's notice all ranks save after the same step, and ask to be started again."""

import os
import signal
import weakref
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator, ProjectConfiguration
from drivetrain.facade import exchange as finite
from drivetrain.facade import exchange as preemption
from drivetrain.observe import report as run_report
from drivetrain.observe.history import load_history
from drivetrain.runtime.board import PREEMPTED, Notice
from drivetrain.runtime.world import World

STEPS = 8


def start(folder, strategy="ddp", naming=True, report=False):
    preemption.is_launched = lambda: True
    finite.PERIOD_S = 0.0  # in each step
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=naming)
    accelerator = Accelerator(
        cpu=True, strategy=strategy, project_config=project, config={"report": report}
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.3), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    data = TensorDataset(torch.arange(2.0 * 8 * STEPS).view(-1, 2) / 50)
    loader = DataLoader(data, batch_size=8 // accelerator.num_processes, shuffle=True)
    return accelerator, *accelerator.prepare(model, optimizer, scheduler, loader)


def train(parts, on_step=lambda step: None):
    accelerator, model, optimizer, scheduler, loader = parts
    losses = []
    try:
        for (rows,) in loader:
            loss = model(rows).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            on_step(len(losses))
    finally:
        preemption.is_launched, finite.PERIOD_S = launched, period
    return losses


launched, period = preemption.is_launched, finite.PERIOD_S


def kill_myself(*_):
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_the_notice_of_one_rank_saves_on_all_and_resumes_exactly(tmp_path, strategy, number):
    straight = start(tmp_path / "straight", strategy)
    expected = train(straight)
    told = start(tmp_path / "told", strategy, report=True)
    seen = []

    def notice(step):
        seen.append(step)
        if step == 3 and told[0].process_index == 1:
            os.kill(os.getpid(), number)

    with pytest.raises(SystemExit) as ended:
        train(told, notice)
    assert ended.value.code == 75
    steps = told[0].gather(torch.tensor([seen[-1]])).tolist()
    assert steps[0] == steps[1] < STEPS
    with mock.patch.object(run_report.subprocess, "run") as drawn:
        told[0].end_training()
    assert not drawn.called
    assert load_history(tmp_path / "told").starts[-1].outcome == "preempted"
    resumed = start(tmp_path / "told", strategy)
    assert resumed[0].resume()
    assert train(resumed) == expected[steps[0] :]
    for each in (resumed, straight):
        each[0].end_training()
    assert signal.getsignal(number) is signal.SIG_DFL


@pytest.mark.ranks(2)
def test_a_script_that_asks_decides_itself(tmp_path):
    parts = start(tmp_path, naming=False)
    seen = []

    def ask(step):
        if step == 2 and parts[0].process_index == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
        seen.append(parts[0].preempted)

    train(parts, ask)
    first = parts[0].gather(torch.tensor([seen.index(True)])).tolist()
    assert first[0] == first[1] < STEPS
    assert len(seen) == STEPS, "it went on"
    assert not (tmp_path / "checkpoints").exists()


def test_the_loader_of_an_evaluation_ends_nothing():
    class Saving:
        def save(self):
            return "a directory"

    saving, training = Saving(), object()
    window = SimpleNamespace(sync_gradients=True, uneven=False, trained_pass=training)
    state = SimpleNamespace(window=window, world=World(size=2))
    told = preemption.Preemption(state, int, weakref.WeakMethod(saving.save), told=True)
    told.after_step()
    told.between_batches(object())
    with pytest.raises(SystemExit, match=str(PREEMPTED)):
        told.between_batches(training)


@pytest.mark.ranks(1)
def test_the_scripts_own_handler_stays(tmp_path):
    mine = []
    before = signal.signal(signal.SIGTERM, lambda *_: mine.append(1))
    parts = start(tmp_path)
    assert len(train(parts, lambda step: kill_myself() if step == 1 else None)) == STEPS
    assert mine == [1]
    signal.signal(signal.SIGTERM, before)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # the child only dies
def test_who_dies_of_a_notice():
    for case in ("second", "same", "child", "orphan"):
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # no listener of an earlier test
            notice = Notice()
            notice.listen()
            if case == "orphan":
                notice._parent = -1
            if case == "child":
                notice._process = -1
            kill_myself()
            if case == "second":
                notice._first -= 100
            kill_myself()
            os._exit(0 if notice.heard == "SIGTERM" else 1)
        _, status = os.waitpid(child, 0)
        expected = 0 if case == "same" else -signal.SIGTERM
        assert os.waitstatus_to_exitcode(status) == expected, case
