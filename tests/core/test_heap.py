"""Freed memory of the C library's heap, and how the system gets it back."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from drivetrain import Accelerator
from drivetrain.memory import offer

MIB = 2**20
ROLLUP = Path("/proc/self/smaps_rollup")

pytestmark = pytest.mark.skipif(not ROLLUP.exists(), reason="Linux alone shows the kinds of pages")


def pages(kind):
    """Return the bytes of this process's pages of a kind, such as LazyFree."""
    lines = ROLLUP.read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{kind}:"))


def test_offered_pages_are_the_systems_to_take():
    tensor = torch.ones(8 * MIB // 4)
    before = pages("LazyFree")
    offer(tensor.untyped_storage())
    offered = pages("LazyFree") - before
    # Pages that the storage shares with its neighbors in the heap are not offered.
    assert 7 * MIB < offered <= 8 * MIB
    tensor.fill_(2.0)
    assert pages("LazyFree") - before < MIB, "written anew, the pages are in use"
    assert tensor.min() == tensor.max() == 2.0


def test_small_storages_are_left_alone_and_growth_is_given_back_once():
    small, none = torch.ones(1024), torch.empty(0)
    before = pages("LazyFree")
    offer(small.untyped_storage())
    offer(none.untyped_storage())
    assert pages("LazyFree") <= before
    assert small.eq(1).all()

    # A process of its own: here, holes that earlier tests left would take the blocks, and the heap
    # would not grow.
    command = [sys.executable, "-c", GROWTH]
    run = subprocess.run(command, check=False, capture_output=True, text=True)
    if "without malloc_trim" in run.stderr:
        pytest.skip(run.stderr)
    assert run.returncode == 0, run.stderr


GROWTH = """
import gc
import sys
from pathlib import Path

import torch

from drivetrain.memory import Heap


def resident():
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Rss:"))


heap = Heap()
if heap._trim is None or heap._count is None:
    sys.exit("a C library without malloc_trim")
heap.relieve_growth()
# Blocks that live on lie between those that are freed, and keep these from the heap's end. All
# are below 128 KiB: glibc may give a larger one a mapping of its own.
blocks = [(torch.ones(2**14), torch.ones(64)) for _ in range(1600)]
kept = [last for _, last in blocks]
before = resident()
del blocks
gc.collect()
heap.relieve_growth()
assert before - resident() > 80 * 2**20, (before, resident())
assert len(kept) == 1600
trims = []
heap._trim = trims.append
heap.relieve_growth()
assert not trims, "the heap has not grown since"
"""


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", [{"name": "zero3", "keep_below": 0}, {"name": "fsdp"}])
def test_units_that_are_freed_are_offered(strategy, monkeypatch):
    offered = []

    def note(memory):
        offered.append((memory._cdata, memory.nbytes()))
        offer(memory)

    monkeypatch.setattr("drivetrain.parallel.unit.offer", note)
    accelerator = Accelerator(strategy=strategy, cpu=True)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inputs = torch.randn(2, 1024)
    for _ in range(2):
        offered.clear()
        accelerator.backward(model(inputs).square().mean())
        optimizer.step()
    freed = [unit for unit in accelerator.strategy_of(model).placement.units if unit.layout.sharded]
    assert freed
    for unit in freed:
        assert unit.live_bytes == 0
        for flat in unit.flats:
            # The memory, before it goes: an empty storage has no pages.
            assert (flat.values.untyped_storage()._cdata, flat.layout.nbytes) in offered
    accelerator.free_memory()
