"""Models built inside building() under fsdp: values of any number of ranks, never whole on one.

tests/core/facade/test_building.py trains them, and fills them from a file, under every strategy.
"""

import ctypes
from pathlib import Path

import pytest
import torch
from torch import nn

from drivetrain import Accelerator

BLOCKS, WIDTH = 12, 768
MMAP_THRESHOLD = -3  # of <malloc.h>
BLOCK = WIDTH * WIDTH * 4
"""Bytes of a block of the tower."""


class Odd(nn.Module):
    """Rows that no number of ranks divides, a tied head, and a table that is one unit."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(7, 13), nn.LayerNorm(13), nn.Linear(13, 7)) for _ in range(3)
        )
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids):
        x = self.words(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.ranks(n)) for n in (1, 2, 3)])
def test_values_are_those_of_plain_construction(ranks):
    """Bit for bit, in the shards that ranks keep as well as together."""
    torch.manual_seed(5)
    expected = Odd().state_dict()
    drawn = torch.rand(())
    accelerator = Accelerator(strategy={"name": "fsdp", "unit_from": 1}, cpu=True)
    torch.manual_seed(5)
    with accelerator.building():
        model = Odd()
    assert all(p.is_meta for p in model.parameters())
    assert torch.equal(torch.rand(()), drawn)  # the generator is where construction leaves it
    model = accelerator.prepare(model)
    slots = list(accelerator.strategy_of(model)._placement)
    for slot in slots:
        share = expected[slot.name].flatten()[slice(*slot.owned)]
        assert torch.equal(slot.flat.share.tensor[slot.local], share), slot.name
    found = accelerator.get_state_dict(model)
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    ids = torch.arange(6).view(2, 3)
    torch.manual_seed(5)
    with torch.no_grad():
        torch.testing.assert_close(model(ids), Odd()(ids))
    accelerator.free_memory()


def peak_of(action):
    """Return by how many bytes resident memory grew at most while something ran."""
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 1 << 20)  # what is freed goes back at once
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = _status("VmRSS")
    action()
    return _status("VmHWM") - before


def _status(key):
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def tower(width):
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(BLOCKS)))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's counters")
@pytest.mark.ranks(2)
def test_no_rank_ever_has_the_whole_model():
    """Building, preparing and a forward need the shards and a few units on top."""
    accelerator = Accelerator(strategy="fsdp", cpu=True)
    kept = []

    def run(width=WIDTH):
        with accelerator.building():
            model = tower(width)
        model = accelerator.prepare(model)
        kept.append(model)
        with torch.no_grad():
            model(torch.ones(1, width))

    run(8)  # loads what is loaded late
    assert peak_of(lambda: tower(WIDTH)) >= 0.9 * BLOCKS * BLOCK  # it does measure
    assert peak_of(run) <= (BLOCKS / 2 + 4) * BLOCK
    accelerator.free_memory()
