"""Disks that fail under a run's checkpoints: the newest whole one is never lost."""

import os
import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn

from drivetrain import Accelerator, ProjectConfiguration
from drivetrain.errors import CheckpointError


def start(folder, limit=1):
    project = ProjectConfiguration(
        project_dir=folder, automatic_checkpoint_naming=True, total_limit=limit
    )
    accelerator = Accelerator(cpu=True, project_config=project, config={"report": False})
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return accelerator, *accelerator.prepare(model, optimizer)


def step(accelerator, model, optimizer):
    accelerator.backward(model(torch.ones(1, 64)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("cannot mount a tmpfs here")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.mark.parametrize("wait", [True, False])
def test_a_full_disk_keeps_the_only_checkpoint(small_disk, wait):
    accelerator, model, optimizer = start(small_disk)
    step(accelerator, model, optimizer)
    accelerator.save_state()
    weights = model.weight.detach().clone()
    room = shutil.disk_usage(small_disk).free
    (small_disk / "other").write_bytes(bytes(room - 8192))
    step(accelerator, model, optimizer)
    with pytest.raises(CheckpointError, match="No space left on device"):
        accelerator.save_state(wait=wait)
        accelerator.save_state()  # the next call tells of the save in the background
    found = sorted(path.name for path in (small_disk / "checkpoints").iterdir())
    assert found == ["checkpoint_0"]
    assert accelerator.resume()
    assert torch.equal(model.weight, weights)
    (small_disk / "other").unlink()
    accelerator.save_state()
    accelerator.end_training()


def test_a_folder_that_vanished_is_made_again(tmp_path):
    accelerator, model, optimizer = start(tmp_path / "run")
    step(accelerator, model, optimizer)
    accelerator.save_state()
    shutil.rmtree(tmp_path / "run")
    step(accelerator, model, optimizer)
    accelerator.save_state()
    weights = model.weight.detach().clone()
    step(accelerator, model, optimizer)
    assert accelerator.resume()
    assert torch.equal(model.weight, weights)
    accelerator.end_training()


SAVE = """
import sys
from drivetrain.checkpoint.encoding import Contents
from drivetrain.checkpoint.saving import Save
from drivetrain.runtime.world import World
from drivetrain.shards import Part, Shard
import torch
tensor = torch.ones(1000)
contents = Contents(models=[[Shard("w", "", tensor, (1000,), Part.whole((1000,)))]])
Save(sys.argv[1], World()).finish(contents)
"""


@pytest.mark.exhaustive
def test_an_error_of_the_kernel_names_the_file_and_leaves_no_draft(tmp_path):
    if shutil.which("strace") is None:
        pytest.skip("needs strace, which lets system calls fail")
    inject = ("-e", "trace=fsync", "-e", "inject=fsync:error=EIO:when=2")
    command = ["strace", "-f", "-qq", "-o", "/dev/null", *inject, sys.executable, "-c", SAVE]
    done = subprocess.run(
        [*command, str(tmp_path / "saved")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "PTRACE" in done.stderr or "ptrace" in done.stderr:
        pytest.skip(f"no tracing here: {done.stderr.splitlines()[0]}")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "CheckpointError" in last
    assert "Input/output error" in last
    assert str(tmp_path / "saved") in last
    assert list(tmp_path.iterdir()) == []
