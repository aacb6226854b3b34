"""Disks that fail under a training: all ranks end soon with an error; checkpoints stay whole."""

import errno
import itertools
import os
import pkgutil
import threading
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from drivetrain import Accelerator
from drivetrain.errors import CheckpointError, CollectiveError, StorageError
from drivetrain.testing.conformance.tcp import cut_connections

MIB = 2**20
CUT = {
    "zero2": {"bucket_mib": 0.02},
    "zero3": {"bucket_mib": 0.02, "own_unit_from": 1000},
    "fsdp": {"unit_from": 1000},
}
"""Small units, so that there are several."""


def layers():
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))


class Training:
    """A small model under one strategy; one unit for each layer where parameters are divided."""

    def __init__(self, name, path, *, model=None, **offload):
        strategy = {"name": name, "offload": {"optimizer": "nvme", "path": str(path), **offload}}
        strategy |= CUT[name]
        self.accelerator = Accelerator(strategy=strategy, cpu=True)
        torch.manual_seed(3)
        given = (model or layers)()
        self.width = next(given.parameters()).shape[1]
        optimizer = AdamW(given.parameters(), lr=1e-2)
        self.model, self.optimizer = self.accelerator.prepare(given, optimizer)

    @property
    def rank(self):
        return self.accelerator.process_index

    def step(self, seed):
        generator = torch.Generator().manual_seed(10 * seed + self.rank)
        x = torch.randn(4, self.width, generator=generator)
        loss = self.model(x).square().mean()
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def steps(self, *seeds):
        return [self.step(seed) for seed in seeds]

    def close(self):
        self.accelerator.free_memory()


class Disk:
    """What the system calls of this process answer instead of reading or writing.

    Args:
        call: ``preadv`` or ``pwritev``.
        answer: gets the real call and its arguments.
    """

    def __init__(self, call, answer):
        self._name, self._answer = call, answer
        self._real = getattr(os, call)
        self.calls = 0

    def __call__(self, *arguments):
        self.calls += 1
        return self._answer(self._real, *arguments)

    @contextmanager
    def broken(self):
        with mock.patch.object(os, self._name, self):
            yield self


def io_error(real, fd, buffers, offset):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def nothing(real, fd, buffers, offset):
    return 0


def a_block(real, fd, buffers, offset):
    return real(fd, [buffers[0][:4096]], offset)


STORES = {
    "zero2": ("zero2", {}),
    "zero3": ("zero3", {}),
    "fsdp, parameters": ("fsdp", {"params": "nvme"}),
    "fsdp, late": ("fsdp", {"delayed": True}),
}
EACH = pytest.mark.parametrize("which", list(STORES))


@pytest.mark.parametrize(
    ("call", "answer"), [("preadv", io_error), ("pwritev", io_error), ("preadv", nothing)]
)
@EACH
@pytest.mark.ranks(2)
def test_a_disk_that_fails_ends_all_ranks(which, call, answer, tmp_path):
    name, offload = STORES[which]
    training = Training(name, tmp_path, **offload)
    training.steps(0, 1, 2)
    odd = training.rank == 1
    disk = Disk(call, answer)
    with disk.broken() if odd else nullcontext():
        with pytest.raises(StorageError if odd else CollectiveError) as caught:
            training.steps(*range(3, 9))
        if odd:
            assert str(tmp_path) in str(caught.value)
            cut_connections()  # as the end of its process does
        training.close()


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
@pytest.mark.ranks(1)
def test_a_disk_that_fails_ends_the_only_rank(call, tmp_path):
    for name, offload in STORES.values():
        training = Training(name, tmp_path, **offload)
        training.steps(0, 1)
        with Disk(call, io_error).broken(), pytest.raises(StorageError, match=str(tmp_path)):
            training.steps(*range(2, 8))
        training.close()


@pytest.mark.ranks(2)
def test_short_transfers_go_on(tmp_path):
    expected = Training("zero2", tmp_path)
    losses = expected.steps(*range(4))
    expected.close()
    training = Training("zero2", tmp_path)
    with Disk("preadv", a_block).broken() as reads, Disk("pwritev", a_block).broken() as writes:
        assert training.steps(*range(4)) == losses
    assert reads.calls > 20
    assert writes.calls > 20
    training.close()


@EACH
@pytest.mark.ranks(2)
def test_a_save_that_cannot_read_is_not_committed(which, tmp_path):
    name, offload = STORES[which]
    training = Training(name, tmp_path, **offload)
    save = training.accelerator.save_state
    training.steps(0, 1)
    save(str(tmp_path / "earlier"))
    training.accelerator.load_state(str(tmp_path / "earlier"))  # where updates are late: take them
    expected = training.steps(2, 3)
    training.optimizer.state_dict()  # lets the step end
    for wait in (True, False):
        broken = Disk("preadv", io_error).broken() if training.rank == 1 else nullcontext()
        with broken, pytest.raises(CheckpointError, match=r"EIO.*look at the disk"):
            save(str(tmp_path / "later"), wait=wait)
        training.accelerator.wait_for_everyone()
        assert {path.name for path in tmp_path.iterdir()} == {"earlier"}
    training.accelerator.load_state(str(tmp_path / "earlier"))  # the disk reads again
    assert training.steps(2, 3) == expected
    training.close()


@pytest.mark.ranks(2)
def test_a_save_after_a_step_that_failed(tmp_path):
    """Whoever asks first hears of it: here that is the save, on all ranks."""
    training = Training("zero2", tmp_path)
    training.steps(0, 1)
    training.accelerator.save_state(str(tmp_path / "earlier"))
    submitted = threading.Event()

    def late_error(*arguments):
        submitted.wait(20)  # else the submission of the step's next block would hear of it
        io_error(*arguments)

    with Disk("preadv", late_error).broken() if training.rank == 1 else nullcontext():
        training.step(2)
        submitted.set()
        with pytest.raises(CheckpointError, match="EIO"):
            training.accelerator.save_state(str(tmp_path / "later"))
    training.accelerator.wait_for_everyone()
    assert {path.name for path in tmp_path.iterdir()} == {"earlier"}
    training.close()


@pytest.mark.ranks(1)
def test_trainings_side_by_side_do_not_meet(tmp_path):
    def alone(name):
        training = Training(name, tmp_path)
        losses = training.steps(*range(4))
        training.close()
        return losses

    expected = [alone("zero2"), alone("fsdp")]
    one, other = Training("zero2", tmp_path), Training("fsdp", tmp_path)
    found = [one.steps(0, 1), other.steps(0, 1)]
    found[0] += one.steps(2)
    other.close()
    found[0] += one.steps(3)
    other = Training("fsdp", tmp_path)
    found[1] = other.steps(*range(4))
    assert found == expected
    assert not list(tmp_path.iterdir())
    one.close()
    other.close()


# --- Ctrl-C ---


PLACES = (
    "torch.nn.Linear.forward",
    "drivetrain_offload.engine.OffloadEngine._step_of",
    "drivetrain_offload.steps.stepping.Stepper.submit",
    "drivetrain_offload.engine.OffloadEngine.give_back",
)


@EACH
@pytest.mark.ranks(2)
def test_an_interrupted_step_does_not_spoil_the_next(which, tmp_path):
    """On all ranks at the same place; then the checkpoint before gives the very same steps."""
    name, offload = STORES[which]
    training = Training(name, tmp_path, **offload)
    training.steps(0, 1)
    training.accelerator.save_state(str(tmp_path / "state"))
    training.accelerator.load_state(str(tmp_path / "state"))  # where updates are late: take them
    expected = training.steps(2, 3)
    for place, late in itertools.product(PLACES, (0, 1)):
        with interrupted(place, late), pytest.raises(KeyboardInterrupt):
            training.steps(4, 5)
        training.optimizer.zero_grad()
        training.step(6)
        training.accelerator.load_state(str(tmp_path / "state"))
        assert training.steps(2, 3) == expected, place
    training.close()


@contextmanager
def interrupted(place, late):
    """Raise in the place of a call of a function, after so many real ones."""
    owner, name = place.rsplit(".", 1)
    owner = pkgutil.resolve_name(owner)
    real, calls = getattr(owner, name), itertools.count()

    def call(*args, **kwargs):
        if next(calls) >= late:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    with mock.patch.object(owner, name, call):
        yield


def flip_bits(folder):
    """Change one bit in each block of this process's file, as a failing disk would."""
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the folder that is listed, and is closed again
            if str(entry.readlink()).startswith(f"{folder}/"):
                _flip(entry)


def _flip(path):
    with path.open("r+b", buffering=0) as file:
        for at in range(1000, os.fstat(file.fileno()).st_size, 4096):
            (byte,) = os.pread(file.fileno(), 1, at)
            os.pwrite(file.fileno(), bytes([byte ^ 1]), at)
        os.fsync(file.fileno())


@pytest.mark.parametrize("which", ["zero2", "fsdp, parameters"])
@pytest.mark.ranks(2)
def test_a_bit_that_the_disk_changes_is_seen_if_asked(which, tmp_path):
    name, offload = STORES[which]
    training = Training(name, tmp_path, store_options={"verify": True}, **offload)
    training.steps(0, 1, 2)
    training.optimizer.state_dict()  # lets the step end
    odd = training.rank == 1
    if odd:
        flip_bits(tmp_path)
    with pytest.raises(StorageError if odd else CollectiveError) as caught:
        training.steps(*range(3, 9))
    if odd:
        assert "as it was written, found other bytes; look at the disk" in str(caught.value)
        cut_connections()  # as the end of its process does
    training.close()
