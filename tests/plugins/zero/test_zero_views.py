"""Values that leave their units: views that modules return, saved tensors, changed masters."""

import pytest
import torch
from torch import nn
from torch.optim import SGD

from drivetrain.errors import UsageError
from drivetrain.testing.conformance.twins import Twins, adamw
from drivetrain.testing.models import HIDDEN, OUT, ROWS, WIDTH, Case, linear
from zero_stages import MASTERS, SHARDED, each, start, train


class Table(nn.Module):
    """Returns rows of its parameter: a view."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.randn(2 * ROWS, WIDTH, dtype=torch.float64))

    def forward(self, count):
        return self.rows[:count]


class Graph(nn.Module):
    """Multiplies by a sparse matrix, which autograd saves, and by rows of a table."""

    def __init__(self):
        super().__init__()
        self.first, self.last = linear(WIDTH, HIDDEN), linear(HIDDEN, OUT)
        self.table = Table()
        self.edges = torch.eye(ROWS, dtype=torch.float64).to_sparse()

    def forward(self, inputs):
        hidden = torch.tanh(self.first(inputs * self.table(len(inputs))))
        return self.last(torch.sparse.mm(self.edges, hidden))


@pytest.mark.ranks(2)
def test_what_modules_return_and_save():
    """Rows of a parameter stay until the forward ends; a model may not return them."""
    strategy = {**SHARDED, "own_unit_from": 1, "buffers": "none"}
    accelerator = start(strategy)
    twins = Twins(accelerator, Case("graph", Graph))
    for step in range(3):
        with torch.no_grad():
            twins.loss(50 + step)
        train(twins, [step])
    accelerator.free_memory()
    accelerator = start(strategy)
    model, _ = accelerator.prepare(table := Table(), SGD(table.parameters(), lr=0.1))
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled), pytest.raises(UsageError, match=r"clone\(\)"):
            model(3)
    accelerator.free_memory()


@each("sharded", "zero1")
@pytest.mark.ranks(2)
def test_surgery_changes_what_was_changed_alone(strategy):
    """Masters of other parameters keep their digits; twice an fp64 value is a change."""
    accelerator = start(strategy, **MASTERS)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model, _ = accelerator.prepare(model, adamw(model))
    shards = accelerator.strategy_of(model).shards
    before = {s.name: s.tensor.clone() for s in shards() if not s.state}
    with accelerator.gathered(model), torch.no_grad():
        model[0].bias.fill_(3.0)
    for shard in shards():
        if not shard.state:
            expected = 3.0 * torch.ones(1) if shard.name == "0.bias" else before[shard.name]
            assert shard.tensor.equal(expected.expand_as(shard.tensor)), shard.name
    accelerator.free_memory()
    accelerator = start(strategy)
    model = nn.Linear(64, 64, bias=False, dtype=torch.float64)
    model, _ = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    with accelerator.gathered(model):
        kept = model.weight.detach().clone()
        if accelerator.is_main_process:
            with torch.no_grad():
                model.weight.mul_(2)
    with accelerator.gathered(model):
        assert torch.equal(model.weight, 2 * kept)
    accelerator.free_memory()
