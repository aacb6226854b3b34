"""The adapters, each against a small module in place of the real one."""

import json
import sys

import numpy as np
import pytest
import torch

from drivetrain.errors import ConfigError
from drivetrain.observe.trackers import JsonlTracker, TensorboardTracker, Trackers, WandbTracker

RUN = """
calls = []

class Config(dict):
    def update(self, values, **options):
        calls.append(("config", values, options))

class Run:
    config = Config()

    def log(self, values, **options):
        calls.append(("log", values, options))

    def finish(self):
        calls.append(("finish",))

def init(**options):
    calls.append(("init", options))
    return Run()

def Image(image):
    return ("image", image)

def Table(**options):
    return ("table", options)
"""

MODULE = """
calls = []

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *args, **kwargs: calls.append((name, *args, *kwargs.items()))

class SummaryWriter:
    def __init__(self, logdir, **options):
        calls.append(("open", logdir, options))

    def __getattr__(self, name):
        return lambda *args, **kwargs: calls.append((name, *args, *kwargs.items()))
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Put a module of this source on the path."""

    def put(name, source):
        folder = tmp_path / "modules" / name
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(source)
        monkeypatch.syspath_prepend(folder.parent)
        monkeypatch.delitem(sys.modules, name, raising=False)

    installed = {"tensorboardX", "wandb", "trackio", "mlflow"}
    monkeypatch.setattr("drivetrain.observe.trackers.is_installed", installed.__contains__)
    before = set(sys.modules)
    yield put
    for name in {"wandb", "trackio", "mlflow", "tensorboardX"} - before:
        sys.modules.pop(name, None)


def run(name, config, *logs, init_kwargs=None, log_kwargs=None, logging_dir=None):
    trackers = Trackers(name, logging_dir=logging_dir)
    trackers.start("project", config, {name: init_kwargs or {}})
    for step, values in enumerate(logs):
        trackers.log(values, step, {name: log_kwargs or {}})
    trackers.finish()
    return sys.modules[name if name != "tensorboard" else "tensorboardX"].calls


@pytest.mark.parametrize(
    ("name", "options"), [("wandb", {"allow_val_change": True}), ("trackio", {})]
)
def test_wandb_and_trackio(fake, name, options):
    fake(name, RUN)
    calls = run(name, {"lr": 0.1}, {"loss": 2.0}, init_kwargs={"group": "g"},
                log_kwargs={"extra": 1})  # fmt: skip
    assert calls == [
        ("init", {"project": "project", "group": "g"}),
        ("config", {"lr": 0.1}, options),
        ("log", {"loss": 2.0}, {"step": 0, "extra": 1}),
        ("finish",),
    ]


def test_mlflow(fake):
    fake("mlflow", MODULE)
    config = {"model": {"depth": 2}, "text": "x" * 900, **{f"p{i}": i for i in range(150)}}
    values = {"loss": torch.tensor(2.0), "val": {"acc": 0.5}, "note": "warm", "many": [1, 2]}
    calls = run("mlflow", config, values, init_kwargs={"run_name": "r"})
    assert calls[:2] == [("set_experiment", "project"), ("start_run", ("run_name", "r"))]
    (_, first), (_, second) = [call for call in calls if call[0] == "log_params"]
    assert (len(first), len(first) + len(second)) == (100, 152)
    assert (first["model.depth"], first["text"]) == ("2", "x" * 500)
    assert ("log_metrics", {"loss": 2.0, "val.acc": 0.5}, ("step", 0)) in calls
    assert ("set_tags", {"note": "warm", "many": "[1, 2]"}) in calls
    assert calls[-1] == ("end_run",)


def test_tensorboard(fake, tmp_path):
    fake("tensorboardX", MODULE)
    values = {"loss": torch.tensor([2.0]), "text": "a", "both": {"a": 1, "b": 2}, "many": [1, 2]}
    calls = run("tensorboard", {"lr": 0.1, "betas": (0.9, 0.95)}, values,
                init_kwargs={"flush_secs": 1}, logging_dir=str(tmp_path))  # fmt: skip
    step = ("global_step", 0)
    assert calls == [
        ("open", str(tmp_path / "project"), {"flush_secs": 1}),
        ("add_hparams", {"lr": 0.1, "betas": "(0.9, 0.95)"}, ("metric_dict", {})),
        ("flush",),
        ("add_scalar", "loss", 2.0, step),
        ("add_text", "text", "a", step),
        ("add_scalars", "both", {"a": 1, "b": 2}, step),
        ("add_text", "many", "[1, 2]", step),
        ("flush",),
        ("close",),
    ]


def test_objects_of_scripts_begin_with_the_run_and_take_images_and_tables(fake, tmp_path):
    fake("tensorboardX", MODULE)
    fake("wandb", RUN)
    board, run = TensorboardTracker(run_name="project", logging_dir=tmp_path), WandbTracker("p")
    trackers = Trackers([board, run], logging_dir=None)
    assert not {"tensorboardX", "wandb"} & sys.modules.keys()
    trackers.start("project")
    assert board.writer is board.tracker
    assert trackers.get("wandb").run is not None
    for tracker in (board, run):
        tracker.log_images({"seen": [1, 2]}, step=3)
    run.log_table("rows", columns=["a"], data=[[1]], step=4)
    images = ("add_images", "seen", [1, 2], ("global_step", 3))
    assert sys.modules["tensorboardX"].calls[-2:] == [images, ("flush",)]
    table = ("table", {"columns": ["a"], "data": [[1]], "dataframe": None})
    assert sys.modules["wandb"].calls[-2:] == [
        ("log", {"seen": [("image", 1), ("image", 2)]}, {"step": 3}),
        ("log", {"rows": table}, {"step": 4}),
    ]


def test_tensorboard_missing(tmp_path, monkeypatch):
    for home in ("drivetrain.observe.trackers", "drivetrain.availability"):
        monkeypatch.setattr(f"{home}.is_installed", lambda module: False)
    with pytest.raises(ConfigError, match="pip install tensorboardX"):
        Trackers("tensorboard", logging_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="tensorboard or tensorboardX, found neither"):
        TensorboardTracker("project", tmp_path).start()


def test_jsonl(tmp_path):
    tracker = JsonlTracker("group/project", tmp_path / "new")
    tracker.store_init_configuration({"lr": 0.1, "betas": (0.9, 0.95), "path": tmp_path})
    values = {
        "loss": torch.tensor(2.5),
        "nan": float("nan"),
        "tensor_inf": torch.tensor(float("inf")),
        "count": np.int64(3),
        "flag": np.bool_(True),
        "many": torch.ones(2),
        "nested": {1: [None, "a"]},
    }
    tracker.log(values, step=7)
    path = tmp_path / "new" / "group_project.jsonl"
    config, line = map(json.loads, path.read_text().splitlines())  # before the file is closed
    assert config["config"] == {"lr": 0.1, "betas": [0.9, 0.95], "path": str(tmp_path)}
    assert line.pop("time") >= config["time"] > 1e9
    assert line == {
        "step": 7,
        "loss": 2.5,
        "nan": "nan",
        "tensor_inf": "inf",
        "count": 3,
        "flag": True,
        "many": str(torch.ones(2)),
        "nested": {"1": [None, "a"]},
    }
    tracker.finish()
    again = JsonlTracker("group/project", tmp_path / "new")
    again.log({}, step=8)
    again.finish()
    assert len(path.read_text().splitlines()) == 3
