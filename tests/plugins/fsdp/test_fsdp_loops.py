"""Loops in which graphs overlap, views are kept, and gradients come on some ranks only.

Every loop trains like one process that takes all ranks' batches.
"""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from drivetrain.parallel import reduce
from drivetrain.testing.conformance.suite import Twins
from drivetrain.testing.models import WIDTH, Case, linear, numbers
from stacks import Parts, Stack
from zero_stages import FSDP, each, start

pytestmark = pytest.mark.ranks(2)


def layer():
    return linear(WIDTH, WIDTH)


def block():
    def compute(m, x, both=True):
        x = x + torch.tanh(m.a(x))
        return x + torch.tanh(m.b(x)) if both else x

    return Parts(compute, a=layer(), b=layer())


class Net(Stack):
    """A layer, blocks, one of several heads, and maybe another one beside it."""

    def __init__(self):
        super().__init__((block() for _ in range(5)), first=layer())
        self.heads = nn.ModuleList(layer() for _ in range(3))
        self.other = layer()

    def forward(self, x, head=0, *, both=True, other=False):
        x = super().forward(x, both)
        return self.heads[head](x) + (self.other(x) if other else 0)


def train(strategy, body, *, factory=Net, steps=2):
    """Compare a strategy with one process; the body takes (model, inputs, backward, rank)."""
    twins = Twins(start(strategy), Case("net", factory))
    size, own = twins.axis.size, twins.axis.rank
    for step in range(steps):
        for rank in range(size):
            body(twins.twin, numbers(step, rank).inputs, mean_backward(size), rank)
        body(twins.model, numbers(step, own).inputs, twins.accelerator.backward, own)
        twins.step()
    twins.check()


def mean_backward(ranks):
    return lambda loss, **options: (loss / ranks).backward(**options)


def squares(model, x, backward, rank):
    backward(model(x).square().mean())


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
    more = model(x.detach()).square().mean() - model(2 * x.detach()).mean()
    backward(more + slope.square().sum())


@each("fsdp", "grad")
def test_graphs_that_overlap(strategy):
    for body in (alternating, through_time, gradient_as_input, penalty):
        train(strategy, body)


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


class Placed(Net):
    def __init__(self):
        super().__init__()
        table = nn.Parameter(torch.randn(16, WIDTH, dtype=torch.float64))
        self.positions = Parts(lambda m, length: Output(m.table[:length]), table=table)

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


@each("fsdp", "grad")
def test_views_stay_valid_until_the_forward_ends(strategy):
    for factory in (Row, TiedRows, Placed, Recomputed):
        train(strategy, squares, factory=factory, steps=3)


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


def another_head(model, x, backward, rank):
    """A second head, which lies in the rest of the model, is used on one rank."""
    backward(model(x, other=rank == 1).square().mean())


def test_no_rank_waits_for_gradients_that_do_not_come(monkeypatch):
    """There are more units than buffers, and the first one is complete on one rank only."""
    monkeypatch.setattr(reduce, "PATIENCE_S", 0.05)
    for body in (other_depth, after_a_dropped_forward, after_a_look):
        train(FSDP, body)
    for body in (other_depth, another_head):
        train({"name": "fsdp"}, body)
