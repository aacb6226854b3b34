"""The trackers of services, each against a module that notes its calls."""

import sys

import pytest
import torch

from drivetrain.observe.trackers import Trackers

VALUES = {"eval_loss": torch.tensor(2.0), "lr": 0.1, "best": {"f1": 0.5}, "note": "warm"}
FLAT = {"eval_loss": 2.0, "lr": 0.1, "best.f1": 0.5, "note": "warm"}

OPTIONS = {"wandb": {"extra": 1}, "trackio": {"extra": 1}}
"""Options of a log."""


def run_of_wandb(**options):
    return [
        ("init", ("project", "project"), ("option", 1)),
        ("init.config.update", {"depth": 2}, *options.items()),
        ("init.log", VALUES, ("step", 3), ("extra", 1)),
        ("init.finish",),
    ]


EXPECTED = {
    "wandb": run_of_wandb(allow_val_change=True),
    "trackio": run_of_wandb(),
    "comet_ml": [
        ("start", ("project_name", "project"), ("option", 1)),
        ("start.log_parameters", {"depth": 2}),
        ("start.log_metrics", {"eval_loss": 2.0, "lr": 0.1, "best.f1": 0.5}, ("step", 3)),
        ("start.log_other", "note", "warm"),
        ("start.end",),
    ],
    "aim": [
        ("Run", ("repo", "FOLDER"), ("option", 1)),
        ("Run.set", "hparams", {"depth": 2}, ("strict", False)),
        *(("Run.track", value, ("name", name), ("step", 3)) for name, value in FLAT.items()),
        ("Run.close",),
    ],
    "clearml": [
        ("Task.init", ("project_name", "project"), ("task_name", "project"), ("option", 1)),
        ("Task.init.connect_configuration", {"depth": 2}),
        ("Task.init.get_logger",),
        *(
            ("Task.init.get_logger.report_scalar", *names, ("value", value), ("iteration", 3))
            for names, value in (
                (("loss", "eval"), 2.0),
                (("lr", "train"), 0.1),
                (("best.f1", "train"), 0.5),
            )
        ),
        ("Task.init.get_logger.report_text", "note: warm", ("print_console", False)),
        ("Task.init.close",),
    ],
    "dvclive": [
        ("Live", ("exp_name", "project"), ("option", 1)),
        ("Live.log_params", {"depth": 2}),
        *(("Live.log_metric", name, value) for name, value in FLAT.items() if name != "note"),
        ("Live.next_step",),
        ("Live.end",),
    ],
    "swanlab": [
        ("init", ("project", "project"), ("option", 1)),
        ("config.update", {"depth": 2}),
        ("init.log", VALUES, ("step", 3)),
        ("init.finish",),
    ],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_run_reaches_the_service(name, tmp_path, noted):
    noted(name)
    folder = str(tmp_path / "logs")
    trackers = Trackers(name, logging_dir=folder)
    trackers.start("project", {"depth": 2}, {name: {"option": 1}})
    trackers.log(VALUES, 3, {name: OPTIONS.get(name, {})})
    trackers.finish()
    assert [_plain(call, folder) for call in sys.modules[name].calls] == EXPECTED[name]


def test_a_task_that_the_script_began_stays_open(noted):
    noted("clearml", "None if", "self if")
    trackers = Trackers("clearml", logging_dir=None)
    trackers.start("project", {"depth": 2})
    trackers.finish()
    (only,) = sys.modules["clearml"].calls
    assert only[0].endswith("connect_configuration")


def _plain(call, folder):
    """Return a call with texts in place of a service's, and a word in place of the folder."""
    if isinstance(call, dict):
        return {key: getattr(value, "text", value) for key, value in call.items()}
    if isinstance(call, tuple):
        return tuple(_plain(part, folder) for part in call)
    if call == folder:
        return "FOLDER"
    return getattr(call, "text", call)
