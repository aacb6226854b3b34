"""A parameter that has a gradient on some ranks only counts as zeros on the others, in any unit.

Such a unit is complete at another moment on each rank; what is gathered meanwhile must not mind.
"""

import pytest
import torch
from torch import nn
from torch.optim import SGD

from drivetrain import Accelerator
from drivetrain.sharding import reduce
from drivetrain.testing.conformance.twins import Twins
from drivetrain.testing.models import OUT, WIDTH, Case, by_rank, linear, numbers


class Branch(nn.Module):
    """A layer, and one more that is used only for batches whose first number is positive."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)

    def forward(self, x, chosen):
        x = x + torch.tanh(self.always(x))
        return x + torch.tanh(self.sometimes(x)) if chosen else x


class Net(nn.Module):
    """Blocks, of which another one branches on each rank."""

    def __init__(self):
        super().__init__()
        self.first = linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Branch() for _ in range(4))
        self.last = linear(WIDTH, OUT)

    def forward(self, x, which):
        x = self.first(x)
        for index, block in enumerate(self.blocks):
            x = block(x, index % 3 == which)
        return self.last(x)


def batch(step, rank):
    """Numbers, and in the place of the rank which blocks branch."""
    return numbers(step, rank)._replace(rank=(rank + step) % 3)


CASE = Case(name="branch", factory=Net, batch=batch, loss=by_rank)
STRATEGIES = {
    "fsdp": {"name": "fsdp", "unit_from": 1},
    "replicas": {"name": "fsdp", "sharding": "hybrid", "shard_size": 2, "unit_from": 1},
    "zero3": {"name": "zero3", "keep_below": 0, "own_unit_from": 1},
}


@pytest.mark.parametrize("strategy", list(STRATEGIES.values()), ids=list(STRATEGIES))
@pytest.mark.ranks(4)
def test_gradients_of_some_ranks_only(monkeypatch, strategy):
    monkeypatch.setattr(reduce, "PATIENCE_S", 0.2)
    accelerator = Accelerator(strategy=strategy, cpu=True)
    twins = Twins(accelerator, CASE, lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9))
    for step in range(4):
        twins.backward(step)
        twins.step()
    twins.check()
    accelerator.free_memory()
