"""Loaders of every rank in one process: no communication, each rank an axis made by hand."""

from collections.abc import Callable

import pytest
import torch

from drivetrain.config import DataConfig
from drivetrain.data import Delivery, prepare_data_loader
from drivetrain.runtime.mesh import Axis
from drivetrain.runtime.world import World
from read_samples import CountingDataset


class Recorder:
    """An observer that knows the loaders of the passes under way; windows have one micro-batch."""

    num_steps = 1
    windows = 0

    def __init__(self):
        self.passes = []

    @property
    def stack(self):
        return [each.loader for each in self.passes]

    def deliver(self, one, batch):
        if one not in self.passes:
            self.passes.append(one)

    def end(self, one, *, finished):
        if one in self.passes:
            self.passes.remove(one)


@pytest.fixture
def counting():
    return CountingDataset


@pytest.fixture
def recorder():
    return Recorder()


@pytest.fixture
def prepare() -> Callable:
    """Prepare a loader for one rank of an axis, without communication."""

    def make(loader, rank=0, size=1, *, seed=0, observer=None, device=None, **config):
        hosts = ("localhost",) * size
        axis = Axis(name="dp", size=size, rank=rank, ranks=tuple(range(size)), hosts=hosts)
        return prepare_data_loader(
            loader,
            axis=axis,
            world=World(),
            config=DataConfig(**config),
            seed=seed,
            delivery=Delivery(device=device, observer=observer),
        )

    return make


@pytest.fixture
def read_all(prepare):
    """Read an epoch on every rank; returns, per rank, lists of samples, and the loaders."""

    def read(make_loader, size, state=None, **config):
        loaders = [prepare(make_loader(), rank, size, **config) for rank in range(size)]
        batches = []
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
            batches.append([as_list(batch) for batch in loader])
        return batches, loaders

    return read


def as_list(batch):
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


@pytest.fixture
def gathered():
    """Put the batches of all ranks together as gather_for_metrics does."""

    def gather(batches, remainder=-1):
        rounds = max(map(len, batches), default=0)
        samples = []
        for i in range(rounds):
            step = [sample for rank in batches if i < len(rank) for sample in rank[i]]
            is_last = i == rounds - 1
            samples += step[:remainder] if is_last and remainder >= 0 else step
        return samples

    return gather
