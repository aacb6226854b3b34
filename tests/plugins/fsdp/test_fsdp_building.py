"""Models built inside building() under fsdp: values of any number of ranks, never whole on one.

tests/core/facade/test_building.py trains them, and fills them from a file, under every strategy.
"""

import json
import os

import pytest
import torch
from torch import nn

from drivetrain import Accelerator
from drivetrain.collectives.ring import CommunicationThread
from stacks import Residual, Stack

BLOCKS, WIDTH = 12, 512
BLOCK = WIDTH * WIDTH * 4
"""Bytes of a block of the tower."""


def odd():
    """Return a model of rows that no number of ranks divides, with a tied head."""
    blocks = [Residual(7, 13, norm=nn.LayerNorm) for _ in range(3)]
    return Stack(blocks, first=nn.Embedding(11, 7), last=nn.Linear(7, 11, bias=False), tied=True)


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.ranks(n)) for n in (1, 2, 3)])
def test_values_are_those_of_plain_construction(ranks):
    """Bit for bit, in the shards that ranks keep as well as together."""
    torch.manual_seed(5)
    plain = odd()
    expected, drawn = plain.state_dict(), torch.rand(())
    accelerator = Accelerator(strategy={"name": "fsdp", "unit_from": 1}, cpu=True)
    torch.manual_seed(5)
    with accelerator.building():
        model = odd()
    assert all(p.is_meta for p in model.parameters())
    assert torch.equal(torch.rand(()), drawn)  # the generator is where construction leaves it
    model = accelerator.prepare(model)
    placement = accelerator.strategy_of(model).placement
    for slot in placement:
        share = expected[slot.name].flatten()[slice(*slot.owned)]
        assert torch.equal(placement.flat_of(slot).shard.tensor[slot.local], share), slot.name
    found = accelerator.get_state_dict(model)
    assert list(found) == list(expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    ids = torch.arange(6).view(2, 3)
    with torch.no_grad():
        torch.testing.assert_close(model(ids), plain(ids))


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


def tower():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS)))


@pytest.mark.ranks(2)
def test_no_rank_ever_has_the_whole_model(tmp_path, monkeypatch):
    """Building, preparing and a forward need the shards and a few units on top."""
    # The profiler counts what its own thread allocates: so collectives run on this one.
    monkeypatch.setattr(CommunicationThread, "submit", lambda worker, job: job.execute(None))
    trace = tmp_path / f"rank{os.environ['RANK']}.json"
    accelerator = Accelerator(strategy={"name": "fsdp", "unit_from": 1}, cpu=True)

    def run():
        with accelerator.building():
            model = tower()
        model = accelerator.prepare(model)
        with torch.no_grad():
            model(torch.ones(1, WIDTH))

    assert peak_of(tower, trace) == BLOCKS * BLOCK  # it does measure
    # Half the model, the block at work, the next one, one more; and activations.
    assert peak_of(run, trace) <= (BLOCKS / 2 + 3.5) * BLOCK
