"""Models built inside building() under fsdp: values of any number of ranks, never whole on one.

tests/core/facade/test_building.py trains them, and fills them from a file, under every strategy.
"""

import json
import os

import pytest
import torch
from torch import nn

from drivetrain import Accelerator
from drivetrain.collectives.worker import CommunicationThread

BLOCKS, WIDTH = 12, 768
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
    placement = accelerator.strategy_of(model).placement
    for slot in placement:
        share = expected[slot.name].flatten()[slice(*slot.owned)]
        assert torch.equal(placement.flat_of(slot).shard.tensor[slot.local], share), slot.name
    found = accelerator.get_state_dict(model)
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    ids = torch.arange(6).view(2, 3)
    torch.manual_seed(5)
    with torch.no_grad():
        torch.testing.assert_close(model(ids), Odd()(ids))
    accelerator.free_memory()


def peak_of(action, trace):
    """Return by how many bytes the tensors of this thread grew at most while something ran.

    The allocator counts them, and the profiler writes each count into its trace.
    """
    with torch.profiler.profile(profile_memory=True) as profiler:
        action()
    profiler.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    counts = [event["args"] for event in events if event["name"] == "[memory]"]
    before = counts[0]["Total Allocated"] - counts[0]["Bytes"]
    return max(count["Total Allocated"] for count in counts) - before


def tower(width):
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(BLOCKS)))


@pytest.mark.ranks(2)
def test_no_rank_ever_has_the_whole_model(tmp_path, monkeypatch):
    """Building, preparing and a forward need the shards and a few units on top."""
    # The profiler counts what its own thread allocates: so collectives run on this one.
    monkeypatch.setattr(CommunicationThread, "submit", lambda worker, job: job.execute(None))
    trace = tmp_path / f"rank{os.environ['RANK']}.json"
    accelerator = Accelerator(strategy="fsdp", cpu=True)

    def run():
        with accelerator.building():
            model = tower(WIDTH)
        model = accelerator.prepare(model)
        with torch.no_grad():
            model(torch.ones(1, WIDTH))

    assert peak_of(lambda: tower(WIDTH), trace) == BLOCKS * BLOCK  # it does measure
    # Half the model, the block at work, the next one, one more; and activations.
    assert peak_of(run, trace) <= (BLOCKS / 2 + 3.5) * BLOCK
    accelerator.free_memory()
