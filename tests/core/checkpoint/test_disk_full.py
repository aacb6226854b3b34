"""A file system without room: every rank says so with the numbers, and the old one stays."""

import os
import re
import shutil
import subprocess

import pytest
import torch
import torch.distributed as dist

from drivetrain.checkpoint.encoding import Contents
from drivetrain.checkpoint.export import plan_export, read_export, write_export
from drivetrain.checkpoint.loading import open_checkpoint
from drivetrain.checkpoint.saving import Save
from drivetrain.errors import CheckpointError
from drivetrain.runtime.parts import Part
from drivetrain.runtime.world import World
from drivetrain.shards import Shard, TensorFacts


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small file system needs root and mount")
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    mounted = subprocess.run(command, check=False, capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def save(directory, world, numel, name="w"):
    tensor = torch.ones(numel, dtype=torch.uint8)
    shard = Shard(name, "", tensor, (numel,), Part.whole((numel,)))
    Save(directory, world, overwrite=True).finish(Contents(models=[[shard]]))


@pytest.mark.ranks(2)
def test_disk_full_on_one_rank_is_told_to_both(small_disk):
    world = World.discover(cpu=True)
    save(small_disk / "ck", world, 1000, f"w{world.rank}")
    with pytest.raises(CheckpointError) as caught:
        save(small_disk / "ck", world, 2_000_000 if world.rank else 1000, f"w{world.rank}")
    messages = [None, None]
    dist.all_gather_object(messages, str(caught.value))
    assert messages[0] == messages[1]
    needed = (
        r"rank 1: No space left on device: .*safetensors; this rank's files need 2000000 bytes, \d"
    )
    assert re.search(needed, messages[0])
    assert [path.name for path in small_disk.iterdir()] == ["ck"]
    assert open_checkpoint(small_disk / "ck", world).model(0).shape("w1") == (1000,)


def test_disk_full_in_an_export(small_disk):
    def write(numel):
        tensor = torch.ones(numel, dtype=torch.uint8)
        plan = plan_export([TensorFacts.of("w", tensor)])
        write_export(small_disk, plan, lambda _: [("w", tensor)], world=World())

    write(1000)
    with pytest.raises(CheckpointError, match="No space left on device"):
        write(2_000_000)
    assert [path.name for path in small_disk.iterdir()] == ["model.safetensors"]
    assert len(dict(read_export(small_disk))["w"]) == 1000


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match=r"Not a directory|File exists"):
        save(tmp_path / "file" / "ck", World(), 1)


def test_read_only_file_system(small_disk):
    save(small_disk / "ck", World(), 1000)
    command = ["mount", "-o", "remount,ro", str(small_disk)]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(CheckpointError, match="Read-only file system"):
        save(small_disk / "ck", World(), 1000)
    assert open_checkpoint(small_disk / "ck", World()).model(0).shape("w") == (1000,)
