"""Values that leave their units: views that modules return, saved tensors, changed masters."""

import pytest
import torch
from torch import nn
from torch.optim import SGD

from drivetrain import Accelerator
from drivetrain.errors import UsageError
from drivetrain.testing.conformance.twins import Twins, adamw, momentum
from drivetrain.testing.models import CASES, HIDDEN, OUT, ROWS, WIDTH, Case, linear, numbers
from drivetrain.testing.models import squared_error as loss_of

SHARDED = {"name": "zero3", "keep_below": 0, "own_unit_from": 1}
STAGES = {
    "zero1": {"name": "zero1", "bucket_mib": 0.001},
    "zero2": {"name": "zero2", "accumulate": "local", "bucket_mib": 0.001},
    "sharded": SHARDED,
}
MASTERS = {"mixed_precision": "bf16", "config": {"dtypes": {"param": "bf16"}}}
each = pytest.mark.parametrize("strategy", list(STAGES.values()), ids=list(STAGES))


class Table(nn.Module):
    """Returns rows of its parameter: a view."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.randn(2 * ROWS, WIDTH, dtype=torch.float64))

    def forward(self, count):
        return self.rows[:count]


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.last = Table(), linear(WIDTH, OUT)

    def forward(self, inputs):
        return self.last(inputs * self.table(len(inputs)))


class Graph(nn.Module):
    """Multiplies by a sparse matrix, which autograd saves."""

    def __init__(self):
        super().__init__()
        self.first, self.last = linear(WIDTH, HIDDEN), linear(HIDDEN, OUT)
        self.edges = torch.eye(ROWS, dtype=torch.float64).to_sparse()

    def forward(self, inputs):
        return self.last(torch.sparse.mm(self.edges, torch.tanh(self.first(inputs))))


@pytest.mark.parametrize("factory", [Positions, Graph], ids=["view", "sparse"])
@pytest.mark.ranks(2)
def test_what_modules_return_and_save(factory):
    strategy = {**SHARDED, "buffers": "none"}
    accelerator = Accelerator(strategy=strategy, cpu=True)
    case = Case(name="case", factory=factory, batch=numbers, loss=loss_of)
    twins = Twins(accelerator, case, momentum)
    for step in range(3):
        with torch.no_grad():
            twins.loss(50 + step)
        twins.backward(step)
        twins.step()
    twins.check()
    accelerator.free_memory()


@pytest.mark.ranks(2)
def test_a_model_that_returns_a_view():
    accelerator = Accelerator(strategy=SHARDED, cpu=True)
    model, _ = accelerator.prepare(table := Table(), SGD(table.parameters(), lr=0.1))
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled), pytest.raises(UsageError, match=r"clone\(\)"):
            model(3)
    accelerator.free_memory()


@each
@pytest.mark.ranks(2)
def test_two_models_in_a_short_window(strategy):
    """Both get the mean over the micro-batches that there were, not over those of a full window."""
    accelerator = Accelerator(strategy=strategy, cpu=True, gradient_accumulation_steps=4)
    pair = [Twins(accelerator, CASES["mlp"], momentum) for _ in range(2)]
    loader = accelerator.prepare_data_loader(
        torch.utils.data.DataLoader(torch.arange(2 * accelerator.num_processes), batch_size=1)
    )
    count = 0
    for step, _ in enumerate(loader):
        count += 1
        with accelerator.accumulate(*(twins.model for twins in pair)):
            for twins in pair:
                accelerator.backward(twins.loss(step))
                for rank in range(twins.axis.size):
                    loss = twins.case.loss(twins.twin, twins.case.batch(step, rank))
                    torch.autograd.backward(loss / twins.axis.size / 2)
            for twins in pair:
                twins.optimizer.step()
                twins.optimizer.zero_grad()
    assert count == 2
    for twins in pair:
        twins.twin_optimizer.step()
        twins.check()
    accelerator.free_memory()


@each
@pytest.mark.ranks(2)
def test_surgery_keeps_the_digits_of_other_masters(strategy):
    """Only what was changed is rounded to the dtype that it was changed in."""
    accelerator = Accelerator(strategy=strategy, cpu=True, **MASTERS)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model, _ = accelerator.prepare(model, adamw(model))
    strategy = accelerator.strategy_of(model)
    before = {s.name: s.tensor.clone() for s in strategy.shards() if not s.state}
    with accelerator.gathered(model), torch.no_grad():
        model[0].bias.fill_(3.0)
    for shard in strategy.shards():
        if shard.state:
            continue
        if shard.name == "0.bias":
            assert (shard.tensor == 3).all()
        else:
            assert torch.equal(shard.tensor, before[shard.name]), f"{shard.name} was rounded"
    accelerator.free_memory()


@each
@pytest.mark.ranks(2)
def test_doubled_fp64_values_are_a_change(strategy):
    accelerator = Accelerator(strategy=strategy, cpu=True)
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
