"""The figures of a run: each step on each rank, and the numbers of the run stay as they are."""

import gc
import json
import logging
import re
import subprocess
import time
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator, GradScalerKwargs
from drivetrain.config import read_sets, resolve
from drivetrain.cost import Cost, ModelSpec, Traffic
from drivetrain.errors import UsageError
from drivetrain.observe import page, recorder
from drivetrain.observe import report as run_report
from drivetrain.observe.figures import starts_of
from drivetrain.observe.history import load_history
from drivetrain.observe.recorder import StepClock
from drivetrain.runtime.mesh import Mesh
from drivetrain.runtime.precision import Precision
from drivetrain.runtime.world import World


def start(folder=None, **options):
    accelerator = Accelerator(cpu=True, project_dir=folder, strategy="ddp", **options)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(8, 2)), batch_size=2)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def train(accelerator, model, optimizer, loader, *, clip=True):
    """Train an epoch, and return the losses."""
    losses = []
    for (rows,) in loader:
        with accelerator.accumulate(model):
            loss = model(rows).square().mean()
            accelerator.backward(loss)
            if clip:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def end(accelerator):
    """End a training, without a drawing of its report."""
    with mock.patch.object(page, "missing_packages", return_value="drawn elsewhere:"):
        accelerator.end_training()


def records(folder, rank=0):
    return starts_of(folder)[-1].journals()[rank].records


def test_every_step_is_recorded(tmp_path):
    accelerator, model, optimizer, loader = start(tmp_path)
    losses = train(accelerator, model, optimizer, loader)
    assert accelerator.report.latest().step == 3  # the last step goes on
    end(accelerator)
    found = records(tmp_path)
    assert [each.step for each in found] == [1, 2, 3, 4]
    assert [each.loss for each in found] == pytest.approx(losses)
    assert [each.lr for each in found] == [0.1] * 4
    assert [each.samples for each in found] == [2] * 4
    assert all(each.grad_norm > 0 and each.memory["resident"] > 1e6 for each in found)
    for each in found:
        parts = sum(each.sections.values()) + sum(each.waiting.values())
        assert parts == pytest.approx(each.seconds, rel=1e-3)
        assert {"data", "forward", "backward", "optimizer"} <= set(each.sections)
    facts = starts_of(tmp_path)[-1].facts()
    (described,) = facts["models"]
    assert (described["parameters"], facts["ranks"]) == (17, 1)
    assert described["held"]["optimizer"] == 2 * 17 * 4 + 4 * 4  # moments, and counters of steps
    origins = {each["key"]: each["origin"] for each in facts["configuration"]}
    assert origins["launch.device"].startswith("code: Accelerator(cpu=")
    assert origins["seed"] == "default"


def test_a_window_is_one_step_and_its_loss_a_mean(tmp_path, monkeypatch):
    accelerator, model, optimizer, loader = start(tmp_path, gradient_accumulation_steps=2)
    losses = train(accelerator, model, optimizer, loader)
    for (rows,) in loader:  # another backward of a batch adds no samples
        for _ in range(2):
            accelerator.backward(model(rows).square().mean())
        optimizer.step()
    monkeypatch.setattr(accelerator.report, "_preemption", mock.Mock(agreed=True))
    with mock.patch.object(page, "missing_packages") as asked:
        accelerator.end_training()
    assert not asked.called, "who gave notice does not wait for a drawing"
    (_, ended) = starts_of(tmp_path)[-1].journals()[0].events[-1]
    assert ended["outcome"] == "preempted"
    assert not load_history(tmp_path).starts[-1].good
    first, second, *rest = records(tmp_path)
    assert (first.step, first.samples, second.step) == (1, 4, 2)
    assert first.loss == pytest.approx(sum(losses[:2]) / 2)
    assert second.loss == pytest.approx(sum(losses[2:]) / 2)
    assert [each.samples for each in rest] == [2] * 4


def test_tokens_are_counted_and_weights_weigh(tmp_path):
    accelerator, model, optimizer, _ = start(tmp_path, gradient_accumulation_steps=2)
    words = [{"input_ids": torch.ones(2, length, dtype=torch.long)} for length in (3, 5)]
    loader = accelerator.prepare(DataLoader(words, batch_size=None))
    values = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(batch["input_ids"].float().mean() * torch.ones(1, 2)).square().mean()
            weight = batch["input_ids"].numel()
            accelerator.backward(loss * weight / 3, weight=weight)
            values.append((loss.item() * weight / 3, weight))
            optimizer.step()
    end(accelerator)
    (only,) = records(tmp_path)
    assert (only.tokens, only.samples) == (16, 4)
    assert only.loss == pytest.approx(sum(a * b for a, b in values) / 16)


def test_figures_of_the_script_belong_to_their_step(tmp_path):
    accelerator, model, optimizer, loader = start(tmp_path)
    for number, (rows,) in enumerate(loader):
        accelerator.backward(model(rows).square().mean())
        optimizer.step()
        accelerator.report(accuracy=torch.tensor([number / 10]), tokens=100 + number)
    end(accelerator)
    found = records(tmp_path)
    assert [each.own["accuracy"] for each in found] == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert [each.tokens for each in found] == [100, 101, 102, 103]
    for wrong in ("much", torch.ones(2), None):
        with pytest.raises(UsageError, match=r"expected a number .* for report\(size="):
            accelerator.report(size=wrong)


def test_an_evaluation_belongs_to_the_step_before_it_also_to_the_last(tmp_path):
    accelerator, model, optimizer, loader = start(tmp_path)
    held_out = accelerator.prepare(DataLoader(TensorDataset(torch.randn(4, 2))))
    for epoch in range(2):
        train(accelerator, model, optimizer, loader)
        next(iter(loader))  # a batch that begins no step
        for (rows,) in held_out:
            model(rows)
            time.sleep(0.01)
        accelerator.report(held_out=epoch)
        accelerator.save_state(tmp_path / f"saved{epoch}")
    end(accelerator)
    found = records(tmp_path)
    assert [each.own for each in found] == [*3 * [{}], {"held_out": 0}, *3 * [{}], {"held_out": 1}]
    for each in (found[3], found[7]):
        assert each.sections["evaluation"] >= 0.03
        assert each.sections["checkpoint"] > 0


def test_a_skipped_step_is_told_and_the_error_of_a_script(tmp_path, monkeypatch):
    fp16 = {"mixed_precision": "fp16", "kwargs_handlers": [GradScalerKwargs(init_scale=4.0)]}
    accelerator, model, optimizer, loader = start(tmp_path, **fp16)
    handle = model[1].weight.register_hook(lambda grad: grad * float("inf"))
    train(accelerator, model, optimizer, loader, clip=False)
    handle.remove()
    monkeypatch.setattr("sys.last_value", ValueError("no rows"), raising=False)
    end(accelerator)
    (_, failed) = starts_of(tmp_path)[-1].journals()[0].events[-1]
    assert (failed["event"], failed["error"]) == ("failed", "ValueError: no rows")
    assert [each.skipped for each in records(tmp_path)] == [1, 1, 1, 1]
    assert records(tmp_path)[0].loss_scale is not None


def test_the_peak_says_what_it_is_of():
    world = mock.Mock(device=torch.device("cuda"), device_name="NVIDIA H200")
    for name, words in (("bf16", "bf16"), ("fp8", "bf16, which fp8 may exceed")):
        run = mock.Mock(world=world, precision=Precision.of(name))
        assert run_report._peak(run, ())["of"] == words
    run, low = mock.Mock(world=world, precision=Precision.of("no")), nn.Linear(9, 9).bfloat16()
    models = [ModelSpec.of(nn.Linear(3, 3)), ModelSpec.of(low)]
    assert run_report._peak(run, models)["of"] == "bf16"
    # It is the dtype of most numbers, not of most tensors.
    mixed = nn.Sequential(nn.Linear(64, 64, dtype=torch.bfloat16), nn.LayerNorm(8), nn.LayerNorm(8))
    assert run_report._peak(run, [ModelSpec.of(mixed)])["of"] == "bf16"

    low.bias.requires_grad = False
    held, sent, apart = {"parameters": 180}, {("dp", "all_reduce"): 162}, {"pp": "activations"}
    promised = Cost(held=held, sent=sent, uncounted=apart)
    entry = mock.Mock(given=ModelSpec.of(low), model=low, strategy=3, promised=lambda _: promised)
    assert run_report._described(entry) == {
        "name": "Linear", "parameters": 90, "trained": 81, "strategy": "int",
        "held": held, "sent": {"dp/all_reduce": 162}, "uncounted": apart,
    }  # fmt: skip

    world = World(rank=2, size=4, hosts=("a", "a", "b", "b"))
    run = mock.Mock(world=world, mesh=Mesh.plan({"tp": 1, "dp": 2, "pp": 2}, world))
    header = run_report.header_of(resolve(read_sets(["strategy={name: megatron, pp: 2}"])), run)
    assert (header["peers"], header["place"]) == ("pp=1", {"tp": 0, "dp": 0, "pp": 1})
    assert (header["rank"], header["host"]) == (2, "b")


def test_a_resumed_run_goes_on_counting(tmp_path, capsys):
    accelerator, *objects = start(tmp_path)
    train(accelerator, *objects)
    accelerator.save_state(tmp_path / "saved")
    end(accelerator)
    accelerator, *objects = start(tmp_path)
    accelerator.load_state(tmp_path / "saved")
    train(accelerator, *objects)
    end(accelerator)
    assert len(starts_of(tmp_path)) == 2
    assert [each.step for each in records(tmp_path)] == [5, 6, 7, 8]
    events = [event["event"] for _, event in starts_of(tmp_path)[-1].journals()[0].events]
    assert events == ["resumed", "ended"]
    accelerator, *_ = start(tmp_path)  # everything is trained
    accelerator.resume(tmp_path / "saved")
    end(accelerator)
    assert "nothing left to train: the run ended at step 4; to train" in capsys.readouterr().err
    run = load_history(tmp_path)
    assert (run.starts[-1].outcome, list(run.remarks)) == ("ended without a step", [])


def test_the_command_is_recorded_without_secrets_and_with_its_commit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["train.py", "--lr", "0.1", "--hub-token", "a", "--api_key=b", "--name", "a run"]
    monkeypatch.setattr("sys.argv", words)
    accelerator, *objects = start(tmp_path)
    train(accelerator, *objects)
    end(accelerator)
    (facts,) = [json.loads(path.read_text()) for path in tmp_path.glob("run/*/run.json")]
    assert facts["started"] == {
        "command": "train.py --lr 0.1 --hub-token ... --api_key=... --name 'a run'",
        "folder": str(tmp_path),
        "commit": "",
    }
    for words in (("init", "-q"), ("commit", "-qm", "one", "--allow-empty")):
        git = ("git", "-c", "user.name=a", "-c", "user.email=a@b.c")
        subprocess.run([*git, *words], check=True)
    assert re.fullmatch("[0-9a-f]{12}", run_report._commit())


def test_reports_need_a_folder_unless_they_are_off(tmp_path):
    accelerator, *objects = start(tmp_path, config={"report": False})
    train(accelerator, *objects)
    accelerator.report(accuracy=1.0)
    end(accelerator)
    assert accelerator.report.latest() is None
    assert list(tmp_path.iterdir()) == []

    with pytest.raises(UsageError, match=r"expected a project_dir .* pass project_dir"):
        start(config={"report": True})


def test_a_folder_that_cannot_be_written_ends_no_training(tmp_path, caplog):
    (tmp_path / "run").write_text("a file", encoding="utf-8")
    accelerator, *objects = start(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert len(train(accelerator, *objects)) == 4
        train(accelerator, *objects)
    assert sum("not recorded" in record.message for record in caplog.records) == 1
    end(accelerator)


def test_waiting_is_taken_off_the_section_in_which_it_passed(monkeypatch):
    now, traffic = 0.0, Traffic()
    monkeypatch.setattr(recorder.time, "perf_counter", lambda: now)
    steps = StepClock(traffic)
    steps.enter("forward")
    now = 5.0
    traffic.waited("dp", 2.0)
    steps.enter("backward")
    now = 9.0
    assert steps.cut() == (9.0, {"forward": 3.0, "backward": 4.0})


def test_the_ledger_can_be_printed():
    traffic = Traffic()
    assert repr(traffic) == "Traffic: nothing sent yet"
    traffic.add("dp", "all_reduce", 4096)
    traffic.took("dp", "all_reduce", 0.25)
    traffic.waited("dp", 0.125)
    assert [line.split() for line in str(traffic).splitlines()] == [
        ["axis", "operation", "calls", "bytes", "sent", "seconds"],
        ["dp", "all_reduce", "1", "4,096", "0.250"],
        ["waited", "0.125", "s", "on", "axis", "dp"],
    ]


def test_losses_that_no_step_uses_are_let_go(monkeypatch):
    monkeypatch.setattr(recorder, "MOST_LOSSES", 2)
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 1))
    counts = []
    for _ in range(5):
        accelerator.backward(model(torch.ones(1, 2)).sum())
        counts.append(sum(isinstance(each, torch.Tensor) for each in gc.get_objects()))
    assert len(set(counts[2:])) == 1, counts
    end(accelerator)
