"""Graphs that are no chain, under ZeRO: what is called again, shared, read or seen from outside.

The conformance suite covers models whose parameters stay whole. Here blocks are really divided, and
each graph is compared with one process.
"""

import dataclasses
import gc
import weakref
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from drivetrain.errors import UsageError
from drivetrain.testing.conformance.suite import Twins
from drivetrain.testing.models import HIDDEN, OUT, ROWS, WIDTH, Case, linear, numbers, squared_error
from stacks import Block, Parts, Tower
from zero_stages import SHARDED, assert_freed, calls, each, start, train, train_reducing_once

pytestmark = pytest.mark.ranks(2)


class Interleaved(Tower):
    def body(self, x):
        one, two, three = self.blocks
        return one(two(one(x))) + three(two(x))


def two_forwards(model, batch):
    one, two = model(batch.inputs), model(batch.inputs.sin())
    return F.mse_loss(one, batch.targets) + one.sub(two).square().mean()


def two_losses_of_one_forward(model, batch):
    hidden = model.body(model.first(batch.inputs))  # past the model's own forward
    return F.mse_loss(model.last(hidden), batch.targets) + hidden.square().mean()


class Pair(NamedTuple):
    x: Tensor
    nothing: None


@dataclasses.dataclass
class Found:
    main: Tensor
    extra: list[Pair]


class Wrapping(Block):
    def forward(self, x, *, found):
        x = super().forward(x if found is None else found.main + found.extra[0].x)
        return Found(x, [Pair(x.view(-1).view_as(x), None)])


class AnyKind(Tower):
    block = Wrapping

    def forward(self, x):
        found = None
        for block in self.blocks:
            found = block(self.first(x), found=found)
        found.main = self.last(found.main)
        return found


def main_of(model, batch):
    found = model(batch.inputs)
    return F.mse_loss(found.main, batch.targets) + found.extra[0].x.mean()


class Borrowing(Tower):
    def body(self, x):
        one, two, three = self.blocks
        x = one(F.linear(x, three.down.weight.t()[:WIDTH, :WIDTH]))
        with torch.no_grad():
            factor = two.up.weight.abs().mean()
        return three(x * factor)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.t() @ gradient


class InFunction(Tower):
    def body(self, x):
        hidden = Scaled.apply(x, self.blocks[2].down.weight)
        return super().body(Scaled.apply(hidden, self.blocks[1].up.weight))


class Hooked(Tower):
    def __init__(self):
        super().__init__()
        other = self.blocks[2].up
        self.blocks[0].register_forward_hook(lambda *_: _[-1] * other.weight.mean())
        self.blocks[1].register_forward_pre_hook(lambda _, x: (x[0] + other.bias.sum(),))
        self.blocks[1].register_full_backward_hook(lambda *_: (_[1][0] * other.weight.amax(),))

    def body(self, x):
        x = super().body(x)
        x.register_hook(lambda gradient: gradient * self.blocks[0].up.weight.detach().mean())
        return x


def function_in_the_loss(model, batch):
    weight = model.blocks[2].down.weight
    return squared_error(model, batch) + Scaled.apply(batch.inputs, weight).square().mean()


GRAPHS = (
    Case("two forwards", Interleaved, loss=two_forwards),
    Case("past forward", Tower, loss=two_losses_of_one_forward),
    Case("any kind", AnyKind, loss=main_of),
    Case("borrowing", Borrowing),
    Case("in a function", InFunction, loss=function_in_the_loss),
    Case("hooked", Hooked),
)


@each("sharded", "zero1")
def test_graphs(strategy):
    """Each as in one process; every trainable unit is reduced once per backward and freed."""
    for graph in GRAPHS:
        accelerator = start(strategy)
        try:
            train_reducing_once(Twins(accelerator, graph), range(2))
        except Exception as error:
            error.add_note(f"while training {graph.name!r}")
            raise


def slope(model, batch):
    """A loss with the gradient of a gradient, as in WGAN-GP."""
    inputs = batch.inputs.clone().requires_grad_()
    outputs = model(inputs)
    (gradient,) = torch.autograd.grad(outputs.square().sum(), inputs, create_graph=True)
    return F.mse_loss(outputs, batch.targets) + 0.001 * (gradient.norm() - 1.0).square()


@each("sharded", "zero2")
def test_backwards_in_any_order_and_gradients_by_autograd(strategy):
    """The first loss last, and a graph twice.

    Gradients by autograd are the rank's own, reduce nothing, and can be trained on; one that is
    part of a graph cannot be cut and sent.
    """
    accelerator = start(strategy)
    twins = Twins(accelerator, Case("slope", Interleaved, loss=slope))
    losses = [twins.loss(step) for step in range(3)]
    for step in (2, 0, 1):
        accelerator.backward(losses[step], retain_graph=step == 0)
        assert_freed(twins)
        twins.backward_twin(step)
    accelerator.backward(losses[0])
    twins.backward_twin(0)
    twins.step()
    train_reducing_once(twins, range(5, 7))
    batch = numbers(9, twins.axis.rank)
    found = []
    for model in (twins.model, twins.twin):
        inputs = batch.inputs.clone().requires_grad_()
        before = calls(accelerator, "reduce_scatter")
        loss = F.mse_loss(model(inputs), batch.targets)
        found.append(torch.autograd.grad(loss, inputs, retain_graph=True))
        assert_freed(twins)
        found[-1] += torch.autograd.grad(loss, list(model.parameters()))
        assert_freed(twins)
        assert calls(accelerator, "reduce_scatter") == before
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)
    assert all(parameter.grad is None for parameter in twins.model.parameters())
    train_reducing_once(twins, range(2, 4))
    with pytest.raises(UsageError, match=r"part of a graph.*torch\.autograd\.grad"):
        accelerator.backward(twins.loss(1), create_graph=True)
    twins.model.zero_grad()
    twins.optimizer.zero_grad()
    train_reducing_once(twins, range(2, 4))


def table():
    """Return what returns rows of its parameter: a view."""
    rows = nn.Parameter(torch.randn(2 * ROWS, WIDTH, dtype=torch.float64))
    return Parts(lambda m, count: m.rows[:count], rows=rows)


def sparse():
    """Return a product with a sparse matrix, which autograd saves, and with rows of a table."""

    def compute(m, inputs):
        hidden = torch.tanh(m.first(inputs * m.table(len(inputs))))
        return m.last(torch.sparse.mm(m.edges, hidden))

    edges = torch.eye(ROWS, dtype=torch.float64).to_sparse()
    ends = {"first": linear(WIDTH, HIDDEN), "last": linear(HIDDEN, OUT)}
    return Parts(compute, **ends, table=table(), edges=edges)


def test_what_modules_return_and_save():
    """Rows of a parameter stay until the forward ends; a model may not return them."""
    strategy = {**SHARDED, "own_unit_from": 1, "buffers": "none"}
    accelerator = start(strategy)
    twins = Twins(accelerator, Case("sparse", sparse))
    for step in range(3):
        with torch.no_grad():
            twins.loss(50 + step)
        train(twins, [step])
    accelerator = start(strategy)
    model, _ = accelerator.prepare(own := table(), SGD(own.parameters(), lr=0.1))
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled), pytest.raises(UsageError, match=r"clone\(\)"):
            model(3)


@each("sharded", "zero2", "fsdp")
def test_a_forward_whose_graph_is_dropped_is_freed(strategy):
    """An evaluation that forgets ``no_grad``: what it saved ends with its output."""
    accelerator = start(strategy)
    twins = Twins(accelerator, Case("blocks", Tower))
    twins.model(twins.case.batch(0, accelerator.process_index).inputs)
    prepared = weakref.ref(accelerator.strategy_of(twins.model))
    accelerator.free_memory()
    del twins
    gc.collect()
    assert prepared() is None
