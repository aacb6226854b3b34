"""Disks that fail and steps that are interrupted: checkpoints stay whole, next steps are right."""

import errno
import itertools
import os
import pkgutil
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest

from drivetrain.errors import CheckpointError, StorageError
from offloaded_trainings import STRATEGIES, Training

pytestmark = pytest.mark.ranks(2)

STORES = {
    "zero2": ("zero2", {}),
    "zero3": ("zero3", {}),
    "fsdp, parameters": ("fsdp", {"params": "nvme"}),
    "fsdp, late": ("fsdp", {"delayed": True}),
}


def started(which, path):
    name, offload = STORES[which]
    offload = {"optimizer": "nvme", "path": str(path), **offload}
    return Training({**STRATEGIES[name], "offload": offload})


def broken(call):
    """Let system calls of this process fail: ``preadv`` or ``pwritev``."""

    def fail(*arguments):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    return mock.patch.object(os, call, fail)


@pytest.mark.ranks(1)
def test_a_disk_that_fails_ends_the_only_rank(tmp_path):
    for which, call in (
        ("zero2", "preadv"),
        ("fsdp, parameters", "preadv"),
        ("fsdp, late", "pwritev"),
    ):
        training = started(which, tmp_path).steps(2)
        with broken(call), pytest.raises(StorageError, match=str(tmp_path)):
            training.steps(6)


@pytest.mark.parametrize("which", ["zero2", "fsdp, late"])
def test_a_save_that_cannot_read_is_not_committed(which, tmp_path):
    training = started(which, tmp_path).steps(2)
    save = training.accelerator.save_state
    save(str(tmp_path / "earlier"))
    training.optimizer.state_dict()  # lets the step end
    for wait in (True, False):
        disk = broken("preadv") if training.accelerator.process_index == 1 else nullcontext()
        with disk, pytest.raises(CheckpointError, match=r"EIO.*look at the disk"):
            save(str(tmp_path / "later"), wait=wait)
        training.accelerator.wait_for_everyone()
        assert {path.name for path in tmp_path.iterdir()} == {"earlier"}
    training.accelerator.load_state(str(tmp_path / "earlier"))  # the disk reads again
    training.steps(1)


PLACES = (
    "torch.nn.Linear.forward",
    "drivetrain_offload.strategy.OffloadEngine._step_of",
    "drivetrain_offload.stepping.Stepper.submit",
    "drivetrain_offload.strategy.OffloadEngine.give_back",
)


@pytest.mark.parametrize("which", ["zero3", "fsdp, late"])
def test_an_interrupted_step_does_not_spoil_the_next(which, tmp_path):
    """On all ranks at the same place; then the checkpoint before gives the very same steps."""
    training = started(which, tmp_path).steps(2)
    training.accelerator.save_state(str(tmp_path / "state"))

    def again():
        training.accelerator.load_state(str(tmp_path / "state"))
        training.losses = []
        return list(training.steps(2, first=2).losses)

    expected = again()
    for place in PLACES:
        with interrupted(place), pytest.raises(KeyboardInterrupt):
            training.steps(2, first=4)
        training.optimizer.zero_grad()
        training.micro(6)
        assert again() == expected, place


@contextmanager
def interrupted(place):
    """Raise in the place of a function, after one real call."""
    owner, name = place.rsplit(".", 1)
    owner = pkgutil.resolve_name(owner)
    real, calls = getattr(owner, name), itertools.count()

    def call(*args, **kwargs):
        if next(calls):
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    with mock.patch.object(owner, name, call):
        yield
