"""Figures of a run reach its trackers by themselves, and leave the script's own values alone."""

from types import SimpleNamespace

import pytest
import torch

from drivetrain import Accelerator
from drivetrain.cost import Traffic
from drivetrain.observe import trackers
from drivetrain.observe.figures import StepFigures
from drivetrain.observe.recorder import STEPS, RunFigures, StepRecorder, values_of
from drivetrain.observe.trackers import Tracker, Trackers
from drivetrain.runtime.world import World


class Noting(Tracker):
    """Notes the values that it is given, with their steps."""

    name = "noting"

    def __init__(self, run_name, **options):
        self.said = []

    tracker = property(lambda self: self.said)

    def store_init_configuration(self, values):
        """Keep nothing."""

    def log(self, values, step=None, **options):
        self.said.append((dict(values), step))


class OneCounter(Noting):
    name = "one_counter"
    shares_steps = True


class OwnNamesAlone(Noting):
    name = "own_names_alone"

    def log(self, values, step=None, **options):
        super().log({"loss": values["loss"]}, step)


def train(*kinds, steps, log=lambda accelerator, number: None):
    accelerator = Accelerator(cpu=True, log_with=list(kinds))
    accelerator.init_trackers("project")
    trackers = accelerator.trackers
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    for number in range(steps):
        accelerator.backward(model(torch.ones(1, 2)).sum() * 0 + number)
        optimizer.step()
        accelerator.report(accuracy=number)
        log(accelerator, number)
    accelerator.end_training()
    return trackers


def test_means_over_some_steps_come_without_a_line_of_the_script():
    (noting,) = train(Noting, steps=2 * STEPS + 3)
    assert [step for _, step in noting.said] == [STEPS, 2 * STEPS]
    values = noting.said[1][0]
    middle = STEPS + (STEPS - 1) / 2
    assert values["run/loss"] == pytest.approx(middle)
    assert values["run/accuracy"] == pytest.approx(middle)
    assert values["run/learning_rate"] == 0.5
    assert values["run/step"] == 2 * STEPS
    assert values["run/memory_bytes"] > 1e6
    assert 0 < values["run/time/backward"] < values["run/step_seconds"]


def test_steps_of_a_script_stay_where_one_counter_serves_all_values():
    def log(accelerator, number):
        if number in (4, STEPS + 4):
            accelerator.log({"mine": number}, step=number // STEPS)

    (one,) = train(OneCounter, steps=2 * STEPS + 3, log=log)
    first, second, last = one.said
    assert first == ({"mine": 4}, 0)
    assert (second[0]["mine"], second[0]["run/step"], second[1]) == (STEPS + 4, STEPS, 1)
    assert (last[0]["run/step"], last[1]) == (2 * STEPS, None)
    assert "mine" not in last[0]


def test_where_a_script_logs_nothing_all_figures_come_at_the_end(monkeypatch):
    (one,) = train(OneCounter, steps=3 * STEPS + 1)
    assert [values["run/step"] for values, _ in one.said] == [STEPS, 2 * STEPS, 3 * STEPS]
    monkeypatch.setattr(trackers, "MOST_WAITING", 3)
    (one,) = train(OneCounter, steps=5 * STEPS + 1)
    assert [values["run/step"] / STEPS for values, _ in one.said] == [2, 4, 5]


def test_a_tracker_that_refuses_the_figures_keeps_the_values_of_the_script(caplog):
    def log(accelerator, number):
        accelerator.log({"loss": 1.0}, step=number)

    (own,) = train(OwnNamesAlone, steps=3 * STEPS, log=log)
    assert own.said == [({"loss": 1.0}, number) for number in range(3 * STEPS)]
    (warning,) = [r.message for r in caplog.records if "gets no figures of the run" in r.message]
    assert "KeyError: 'loss'" in warning


def test_rates_are_those_of_all_replicas_and_bytes_those_of_a_step():
    figures = StepFigures(
        step=8,
        steps=4,
        seconds=2.0,
        samples=16,
        tokens=200,
        sent={"dp/all_gather": 60, "tp/all_reduce": 20},
        waiting={"tp": 1.0},
        memory={"resident": 5, "device": 7},
        own={"loss": 3.0, "accuracy": 0.5},
        loss=1.0,
    )
    values = values_of(figures, replicas=2)
    assert values["run/samples_per_second"] == 16
    assert values["run/tokens_per_second"] == 200
    assert values["run/sent_bytes"] == 20
    assert values["run/waiting/tp"] == 0.25
    assert values["run/step_seconds"] == 0.5
    assert (values["run/memory_bytes"], values["run/device_memory_bytes"]) == (5, 7)
    assert (values["run/loss"], values["run/accuracy"]) == (1.0, 0.5)
    assert "run/gradient_norm" not in values


def test_the_newest_figures_join_the_values_of_a_script_and_none_come_before_a_start():
    made = Trackers([OneCounter, Noting], logging_dir=None)
    figures = RunFigures(made, 1)
    for number in range(1, STEPS):
        figures.take(StepFigures(step=number))
    made.start("project")
    one, noting = made.active
    figures.take(StepFigures(step=STEPS))
    assert noting.said == []
    for number in (1, 2):
        made.log_run({"run/step": number}, number)
    made.log({"mine": 3}, step=0)
    assert one.said == [({"run/step": 2, "mine": 3}, 0)]


def recorded(traffic):
    """Return a recorder of a run with this ledger, and the list of its records."""
    scaler, records = SimpleNamespace(enabled=False), []
    run = SimpleNamespace(traffic=traffic)
    state = SimpleNamespace(run=run, optimizers=[], scaler=scaler, world=World())
    return StepRecorder(state, records.append, pytest.fail), records


def test_a_ledger_that_is_cleared_in_a_step_has_grown_from_nothing():
    traffic = Traffic()
    subject, records = recorded(traffic)
    for _ in range(2):
        subject.before_backward()
        traffic.clear()
        traffic.add("dp", "all_reduce", 100 if not records else 30)
        subject.after_backward(torch.zeros(()), None)
        subject.after_step()
    subject.finish()
    assert [each.sent for each in records] == [{"dp/all_reduce": 100}, {"dp/all_reduce": 30}]


def test_what_follows_a_batch_that_begins_no_step_is_of_the_last_one():
    traffic = Traffic()
    subject, records = recorded(traffic)
    subject.before_backward()
    traffic.add("dp", "all_reduce", 100)
    subject.after_backward(torch.zeros(()), None)
    subject.after_step()
    subject.fetching(SimpleNamespace())
    traffic.add("dp", "all_gather", 7)
    subject.finish()
    assert [each.sent for each in records] == [{"dp/all_reduce": 100, "dp/all_gather": 7}]
