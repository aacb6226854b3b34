"""``notebook_launcher`` and ``debug_launcher``: a function on several processes."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException

from drivetrain.config import read_file
from drivetrain.errors import UsageError
from drivetrain.processes import debug_launcher, notebook_launcher
from drivetrain.runtime.world import World, launched_config


def test_every_process_is_a_rank_of_one_world(tmp_path):
    secret = 3  # a closure cannot be pickled: this shows that nothing is

    def train(folder, factor):
        world = World.discover()
        value = torch.tensor([float(world.rank + secret)])
        dist.all_reduce(value)
        text = f"{world.rank}/{world.size} {world.local_rank} {value.item() * factor:g}"
        (folder / str(world.rank)).write_text(text)

    before = dict(os.environ)
    notebook_launcher(train, (tmp_path, 10), num_processes=2)
    assert [(tmp_path / str(rank)).read_text() for rank in (0, 1)] == ["0/2 0 70", "1/2 1 70"]
    assert dict(os.environ) == before


def test_a_process_for_each_core_that_this_one_may_use(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})

    def note():
        (tmp_path / os.environ["WORLD_SIZE"]).touch()

    notebook_launcher(note)
    assert (tmp_path / "1").exists()


def test_debug_launcher_computes_on_the_cpu(tmp_path, monkeypatch):
    def train(folder):
        values = read_file(launched_config()).values
        launch = values["launch"]
        text = f"{launch['device']} {launch.get('timeout_s')} {values.get('strategy')}"
        (folder / os.environ["RANK"]).write_text(text)

    (tmp_path / "run.yaml").write_text("strategy: zero1\nlaunch: {timeout_s: 7}")
    monkeypatch.setenv("DRIVETRAIN_CONFIG", str(tmp_path / "run.yaml"))
    debug_launcher(train, (tmp_path,))
    assert [(tmp_path / str(rank)).read_text() for rank in (0, 1)] == ["cpu 7 zero1"] * 2
    monkeypatch.delenv("DRIVETRAIN_CONFIG")
    debug_launcher(train, (tmp_path,), num_processes=1)
    assert (tmp_path / "0").read_text() == "cpu None None"
    with pytest.raises(ProcessExitedException, match="exit code 5"):
        notebook_launcher(os._exit, (5,), num_processes=1)


def test_no_rank_begins_before_all_are_connected(tmp_path, monkeypatch):
    """A rank that exchanges nothing would end, and gloo would fail on those that connect."""
    connect = dist.init_process_group

    def late(*args, rank, **kwargs):
        connect(*args, rank=rank, **kwargs)
        if rank == 1:
            time.sleep(0.5)
            (tmp_path / "connected").touch()

    def train():
        assert (tmp_path / "connected").exists()

    monkeypatch.setattr(dist, "init_process_group", late)
    debug_launcher(train)


def test_accelerator_that_is_in_use_is_refused(monkeypatch):
    class Device:
        @staticmethod
        def is_initialized():
            return True

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: Device)
    for count, message in ((2, "restart the notebook"), (0, "found num_processes=0")):
        with pytest.raises(UsageError, match=message):
            notebook_launcher(print, num_processes=count)
