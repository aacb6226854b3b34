"""The adapters, each against a small module in place of the real one."""

import json
import sys

import numpy as np
import pytest
import torch

from drivetrain.errors import ConfigError
from drivetrain.observe.trackers import JsonlTracker, TensorboardTracker, Trackers, WandbTracker


def run(name, config, *logs, init_kwargs=None, log_kwargs=None, logging_dir=None):
    trackers = Trackers(name, logging_dir=logging_dir)
    trackers.start("project", config, {name: init_kwargs or {}})
    for step, values in enumerate(logs):
        trackers.log(values, step, {name: log_kwargs or {}})
    trackers.finish()
    return sys.modules[name if name != "tensorboard" else "tensorboardX"].calls


def test_mlflow(noted):
    noted("mlflow")
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


def test_tensorboard(noted, tmp_path):
    noted("tensorboardX")
    values = {"loss": torch.tensor([2.0]), "text": "a", "both": {"a": 1, "b": 2}, "many": [1, 2]}
    calls = run("tensorboard", {"lr": 0.1, "betas": (0.9, 0.95)}, values,
                init_kwargs={"flush_secs": 1}, logging_dir=str(tmp_path))  # fmt: skip
    step = ("global_step", 0)
    writer = "SummaryWriter"
    assert calls == [
        (writer, str(tmp_path / "project"), ("flush_secs", 1)),
        (f"{writer}.add_hparams", {"lr": 0.1, "betas": "(0.9, 0.95)"}, ("metric_dict", {})),
        (f"{writer}.flush",),
        (f"{writer}.add_scalar", "loss", 2.0, step),
        (f"{writer}.add_text", "text", "a", step),
        (f"{writer}.add_scalars", "both", {"a": 1, "b": 2}, step),
        (f"{writer}.add_text", "many", "[1, 2]", step),
        (f"{writer}.flush",),
        (f"{writer}.close",),
    ]


def test_objects_of_scripts_begin_with_the_run_and_take_images_and_tables(noted, tmp_path):
    noted("tensorboardX")
    noted("wandb")
    board, run = TensorboardTracker(run_name="project", logging_dir=tmp_path), WandbTracker("p")
    trackers = Trackers([board, run], logging_dir=None)
    assert not {"tensorboardX", "wandb"} & sys.modules.keys()
    trackers.start("project")
    assert board.writer is board.tracker
    assert trackers.get("wandb").run is not None
    for tracker in (board, run):
        tracker.log_images({"seen": [1, 2]}, step=3)
    run.log_table("rows", columns=["a"], data=[[1]], step=4)
    images = ("SummaryWriter.add_images", "seen", [1, 2], ("global_step", 3))
    assert sys.modules["tensorboardX"].calls[-2:] == [images, ("SummaryWriter.flush",)]
    *_, first, second, seen, table, rows = sys.modules["wandb"].calls
    assert (first, second) == (("Image", 1), ("Image", 2))
    assert table == ("Table", ("columns", ["a"]), ("data", [[1]]), ("dataframe", None))
    assert [(each[0], *each[1], each[2]) for each in (seen, rows)] == [
        ("init.log", "seen", ("step", 3)),
        ("init.log", "rows", ("step", 4)),
    ]
    assert [image._name for image in seen[1]["seen"]] == ["Image", "Image"]
    assert rows[1]["rows"]._name == "Table"


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
        "loss": (torch.tensor(2.5), 2.5),
        "nan": (float("nan"), "nan"),
        "tensor_inf": (torch.tensor(float("inf")), "inf"),
        "count": (np.int64(3), 3),
        "flag": (np.bool_(True), True),
        "many": (torch.ones(2), str(torch.ones(2))),
        "nested": ({1: [None, "a"]}, {"1": [None, "a"]}),
    }
    tracker.log({name: given for name, (given, _) in values.items()}, step=7)
    path = tmp_path / "new" / "group_project.jsonl"
    config, line = map(json.loads, path.read_text().splitlines())  # before the file is closed
    assert config["config"] == {"lr": 0.1, "betas": [0.9, 0.95], "path": str(tmp_path)}
    assert line.pop("time") >= config["time"] > 1e9
    assert line == {"step": 7} | {name: written for name, (_, written) in values.items()}
    tracker.finish()
    again = JsonlTracker("group/project", tmp_path / "new")
    again.log({}, step=8)
    again.finish()
    assert len(path.read_text().splitlines()) == 3
