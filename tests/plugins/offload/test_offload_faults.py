"""Disks that fail under a training: every rank ends soon with an error, and no checkpoint is hurt."""

import errno
import os
import threading
import time
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from drivetrain import Accelerator
from drivetrain.errors import CheckpointError, CollectiveError, StorageError
from drivetrain.testing.conformance.tcp import cut_connections

WIDTH = 64
SOON_S = 12.0  # far from the timeout of collectives, also on a busy machine


class Training:
    """A small model under one strategy; one unit for each layer where parameters are divided."""

    def __init__(self, name, path, **offload):
        strategy = {"name": name, "offload": {"optimizer": "nvme", "path": str(path), **offload}}
        if name == "fsdp":
            strategy["unit_from"] = 1000
        self.accelerator = Accelerator(strategy=strategy, cpu=True)
        torch.manual_seed(3)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
        model = nn.Sequential(*layers)
        optimizer = AdamW(model.parameters(), lr=1e-2)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    @property
    def rank(self):
        return self.accelerator.process_index

    def step(self, seed):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * seed + self.rank))
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


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
@pytest.mark.parametrize("answer", [io_error, nothing], ids=["EIO", "short"])
@EACH
@pytest.mark.ranks(2)
def test_a_disk_that_fails_ends_all_ranks(which, answer, call, tmp_path):
    name, offload = STORES[which]
    training = Training(name, tmp_path, **offload)
    training.steps(0, 1, 2)
    odd = training.rank == 1
    disk = Disk(call, answer)
    started = time.monotonic()
    with disk.broken() if odd else mock.MagicMock():
        with pytest.raises(StorageError if odd else CollectiveError) as caught:
            training.steps(*range(3, 9))
        print(which, call, repr(caught.value))
        if odd:
            assert str(tmp_path) in str(caught.value)
            cut_connections()  # as the end of its process does
        training.close()
    assert time.monotonic() - started < SOON_S
