"""The trackers of services, each against a module that notes its calls."""

import sys

import pytest
import torch

from drivetrain.observe.trackers import Trackers

NOTES = """
calls = []

class Noting:
    def __init__(self, name, /, *args, **kwargs):
        self._name = name
        if name.endswith("Text"):
            self.text = args[0]
        else:
            calls.append((name, *args, *kwargs.items()))

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return Noted(f"{self._name}.{name}")

class Noted:
    def __init__(self, name):
        self._name = name

    def __call__(self, *args, **kwargs):
        return None if self._name == "Task.current_task" else Noting(self._name, *args, **kwargs)

    def __getattr__(self, name):
        return Noted(f"{self._name}.{name}")

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Noted(name)
"""

VALUES = {"eval_loss": torch.tensor(2.0), "lr": 0.1, "best": {"f1": 0.5}, "note": "warm"}
FLAT = {"eval_loss": 2.0, "lr": 0.1, "best.f1": 0.5, "note": "warm"}

EXPECTED = {
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
def test_a_run_reaches_the_service(name, tmp_path, monkeypatch):
    (tmp_path / f"{name}.py").write_text(NOTES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    folder = str(tmp_path / "logs")
    trackers = Trackers(name, logging_dir=folder)
    trackers.start("project", {"depth": 2}, {name: {"option": 1}})
    trackers.log(VALUES, 3)
    trackers.finish()
    calls = [_plain(call, folder) for call in sys.modules.pop(name).calls]
    assert calls == EXPECTED[name]


def test_a_task_that_the_script_began_stays_open(tmp_path, monkeypatch):
    (tmp_path / "clearml.py").write_text(NOTES.replace("None if", "self if"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "clearml", raising=False)
    trackers = Trackers("clearml", logging_dir=None)
    trackers.start("project", {"depth": 2})
    trackers.finish()
    (only,) = sys.modules.pop("clearml").calls
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
