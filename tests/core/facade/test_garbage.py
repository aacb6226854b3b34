"""Garbage is collected after the same steps on all ranks, and not in between."""

import gc
import inspect
import threading
import weakref
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn

from drivetrain import Accelerator
from drivetrain.facade.gradients import SharedCollections


@pytest.fixture
def collections():
    """The number of full collections so far, as a list of one."""
    count = [0]

    def see(phase, info):
        count[0] += phase == "start" and info["generation"] == 2

    gc.callbacks.append(see)
    yield count
    gc.callbacks.remove(see)
    gc.enable()


def test_python_collects_at_the_chosen_steps_alone(collections):
    shared = SharedCollections(3)
    counts = []
    for step in (1, 2, 3, 3, 4, 7):
        shared.after_step(step)
        assert not gc.isenabled()
        counts.append(collections[0])
    assert counts == [1, 1, 2, 2, 2, 3]
    shared.release()
    assert gc.isenabled()


def test_python_is_left_as_it_was(collections):
    SharedCollections(0).after_step(1)
    assert gc.isenabled()
    assert collections[0] == 0
    gc.disable()
    shared = SharedCollections(2)
    for step in (1, 2):
        shared.after_step(step)
    assert collections[0] == 2
    shared.release()
    assert not gc.isenabled()


@pytest.mark.parametrize("every", [0, 2])
def test_a_run_collects_each_so_many_steps_until_its_end(collections, every):
    accelerator = Accelerator(cpu=True, config={"collect_garbage_every": every})
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = collections[0]
    for _ in range(5):
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        optimizer.zero_grad()
    assert collections[0] - before == (3 if every else 0)  # after steps 1, 2 and 4
    assert gc.isenabled() == (not every)
    accelerator.end_training()
    assert gc.isenabled()


@pytest.mark.ranks(2)
def test_trainings_that_are_dropped_and_never_ended_are_freed(monkeypatch):
    # The kit would keep each Accelerator, to free it at the end.
    monkeypatch.setattr(Accelerator, "__init__", inspect.unwrap(Accelerator.__init__))

    def trial(strategy, cleared):
        accelerator = Accelerator(cpu=True, strategy=strategy)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
        for _ in range(2):
            optimizer.zero_grad()
            accelerator.backward(model(torch.ones(1, 4)).sum())
            optimizer.step()
        if cleared:
            optimizer.zero_grad()
        used = accelerator, accelerator.strategy_of(model), model, *model.parameters()
        return [weakref.ref(each) for each in used]

    zero3, local = {"name": "zero3", "keep_below": 0}, {"name": "local", "workers": "ranks"}
    for strategy, cleared in product(["ddp", zero3, "fsdp", local], [True, False]):
        left = trial(strategy, cleared)
        gc.collect()
        assert [each() for each in left] == [None] * len(left), (strategy, cleared)
    for thread in threading.enumerate():
        if thread.name.startswith("drivetrain-ring"):
            thread.join()


@pytest.mark.ranks(2, timeout=60)
def test_a_rank_may_keep_what_another_drops():
    """Groups that a script starts later have names of their own on all ranks."""
    kept = []
    for _ in range(3):
        accelerator = Accelerator(cpu=True)
        model = nn.Linear(4, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
        accelerator.backward(model(torch.ones(1, 4)).sum())
        optimizer.step()
        if accelerator.is_main_process:
            kept.append((accelerator, model, optimizer))
        del accelerator, model, optimizer
        gc.collect()
    dist.barrier(dist.new_group([0, 1], use_local_synchronization=True))
    kept.clear()
