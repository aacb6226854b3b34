"""Loops in which graphs overlap, views are kept, and gradients come on some ranks only.

Every loop trains like one process that takes all ranks' batches.
"""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from drivetrain import Accelerator
from drivetrain.sharding import reduce

WIDTH = 8
DIVIDED = {
    "fsdp": {"name": "fsdp", "unit_from": 1},
    "kept": {"name": "fsdp", "unit_from": 1, "reshard_after_forward": False},
    "grad": {"name": "fsdp", "unit_from": 1, "sharding": "grad"},
    "zero3": {"name": "zero3", "keep_below": 0, "own_unit_from": 1},
}
EACH = pytest.mark.parametrize("strategy", list(DIVIDED.values()), ids=list(DIVIDED))
TWO = pytest.mark.parametrize("strategy", [DIVIDED["fsdp"], DIVIDED["grad"]], ids=["fsdp", "grad"])


def layer():
    return nn.Linear(WIDTH, WIDTH, dtype=torch.float64)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = layer(), layer()

    def forward(self, x, both=True):
        x = x + torch.tanh(self.a(x))
        return x + torch.tanh(self.b(x)) if both else x


class Net(nn.Module):
    """A layer, blocks, and one of several heads."""

    def __init__(self):
        super().__init__()
        self.first = layer()
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.heads = nn.ModuleList(layer() for _ in range(3))

    def forward(self, x, head=0, both=True):
        x = self.first(x)
        for block in self.blocks:
            x = block(x, both)
        return self.heads[head](x)


def train(strategy, model, body, steps=2, *, before=None, by_user=False):
    """Compare a strategy with one process; the body takes (model, inputs, backward, rank).

    Before each step something may happen to the model. The user may run backward, too.
    """
    accelerator = Accelerator(strategy=strategy, cpu=True)
    reference, ranks = copy.deepcopy(model), accelerator.num_processes
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(steps):
        for each in (reference, model) if before else ():
            before(each)
        generator = torch.Generator().manual_seed(step)
        batches = torch.randn(ranks, 3, WIDTH, generator=generator, dtype=torch.float64)
        for rank in range(ranks):
            body(reference, batches[rank], mean_backward(ranks), rank)
        rank = accelerator.process_index
        body(model, batches[rank], mean_backward(1) if by_user else accelerator.backward, rank)
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
    found = accelerator.get_state_dict(model)
    torch.testing.assert_close(found, dict(reference.state_dict()), rtol=1e-10, atol=1e-12)
    accelerator.free_memory()


def mean_backward(ranks):
    return lambda loss, **options: (loss / ranks).backward(**options)


# --- graphs that overlap ---


def alternating(model, x, backward, rank):
    """A backward between two forwards that go into another one."""
    first, second = model(x).square().mean(), model(2 * x, 1).square().mean()
    backward(first)
    backward(second + model(3 * x, 2).square().mean())


def through_time(model, x, backward, rank):
    """A backward over a graph that the next forward goes on from."""
    h = model(x)
    backward(h.square().mean(), retain_graph=True)
    backward(model(h, 1).square().mean())


def gradient_as_input(model, x, backward, rank):
    x = x.clone().requires_grad_()
    y = model(x)
    (slope,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    backward(y.square().mean() + model(x.detach() + slope, 1).square().mean())


def penalty(model, x, backward, rank):
    """A gradient's gradient, and two more forwards of the same model in one loss."""
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    backward(
        model(x.detach()).square().mean() - model(2 * x.detach()).mean() + slope.square().sum()
    )


@TWO
@pytest.mark.ranks(2)
def test_graphs_that_overlap(strategy):
    for body in (alternating, through_time, gradient_as_input, penalty):
        torch.manual_seed(0)
        train(strategy, Net(), body)


# --- parameters that begin to train, and that stop ---


def in_turns(model):
    """Let one of two blocks begin to train, and the other one stop."""
    for block in (model.blocks[1], model.blocks[3]):
        block.requires_grad_(not block.a.weight.requires_grad)


@pytest.mark.complete
@pytest.mark.parametrize("by_user", [False, True], ids=["accelerator", "user"])
@EACH
@pytest.mark.ranks(2)
def test_blocks_train_in_turns(strategy, by_user):
    """The forward takes the change over, where the script calls ``loss.backward()`` itself."""
    torch.manual_seed(0)
    model = Net()
    model.blocks[1].requires_grad_(False)
    train(strategy, model, squares, steps=4, before=in_turns, by_user=by_user)


# --- views of parameters ---


class Row(Net):
    """Takes a row before the block that it belongs to runs."""

    def forward(self, x):
        row = self.blocks[0].a.weight[0]
        return super().forward(x) + row + row.sum() + row.clone()


class TiedRows(Net):
    """Takes rows of a table before the lookup, and uses them after it."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(32, WIDTH, dtype=torch.float64)

    def forward(self, x):
        rows = self.table.weight[:5]
        found = self.table((x.abs() * 10).long().clamp(max=31)[:, 0])
        return super().forward(x + found) @ rows.t()


class Output:
    """What no library knows to hold a tensor."""

    def __init__(self, hidden):
        self.hidden = hidden


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(16, WIDTH, dtype=torch.float64))

    def forward(self, length):
        return Output(self.table[:length])


class Placed(Net):
    def __init__(self):
        super().__init__()
        self.positions = Positions()

    def forward(self, x):
        positions = self.positions(3)
        return super().forward(x + positions.hidden)


class Recomputed(Net):
    """Takes a row of another module inside of what is recomputed in backward."""

    def forward(self, x):
        x = checkpoint(self.shifted, x, use_reentrant=False)
        return super().forward(x)

    def shifted(self, x):
        return torch.tanh(x + self.blocks[3].b.weight[0])


def squares(model, x, backward, rank):
    backward(model(x).square().mean())


@TWO
@pytest.mark.ranks(2)
def test_views_stay_valid_until_the_forward_ends(strategy):
    for factory in (Row, TiedRows, Placed, Recomputed):
        torch.manual_seed(0)
        train(strategy, factory(), squares, steps=3)


# --- gradients of some ranks only ---


def other_depth(model, x, backward, rank):
    """A layer inside of every block is used by one rank only."""
    backward(model(x, both=rank == 1).square().mean())


def after_a_dropped_forward(model, x, backward, rank):
    model(x, both=rank == 1)
    other_depth(model, x, backward, rank)


def after_a_look(model, x, backward, rank):
    """Reads parameters for a log, with a graph that nobody needs."""
    assert sum(block.a.weight.norm() for block in model.blocks).item() > 0
    other_depth(model, x, backward, rank)


@pytest.mark.ranks(2)
def test_no_rank_waits_for_gradients_that_do_not_come(monkeypatch):
    """There are more units than buffers, and the first one is complete on one rank only."""
    monkeypatch.setattr(reduce, "PATIENCE_S", 0.2)
    for strategy in (DIVIDED["fsdp"], {"name": "fsdp"}):  # there the heads are in the rest
        for body in (other_depth, after_a_dropped_forward, after_a_look):
            torch.manual_seed(0)
            train(strategy, Net(), body)
    train({"name": "fsdp"}, Heads(), lambda m, x, b, rank: b(m(x, rank).square().mean()))


class Heads(nn.Module):
    """Two heads in the rest of the model; the second is used on one rank."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.one, self.two = layer(), layer()

    def forward(self, x, rank):
        for block in self.blocks:
            x = block(x)
        return self.one(x) + self.two(x) if rank else self.one(x)
