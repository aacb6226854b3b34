"""Graphs that are no chain, under ZeRO: what is called again, shared, read from outside, or cut.

The conformance suite covers models whose parameters stay whole. Here blocks are really divided, and
each graph is compared with one process; a unit must be reduced once in a backward and hold no
memory after it.
"""

import dataclasses
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from drivetrain import Accelerator
from drivetrain.errors import UsageError
from drivetrain.testing.conformance.twins import Twins
from drivetrain.testing.models import OUT, WIDTH, Case, numbers, squared_error
from towers import Block, Tower

SMALL = {"bucket_mib": 0.001}
SHARDED = {"name": "zero3", "keep_below": 0}
STAGES = {
    "zero1": {"name": "zero1", **SMALL},
    "zero2": {"name": "zero2", **SMALL},
    "zero3": {"name": "zero3", **SMALL},
    "sharded": SHARDED,
    "kept": {**SHARDED, "reshard_after_forward": False},
}
EACH = pytest.mark.parametrize("strategy", list(STAGES.values()), ids=list(STAGES))
WORLDS = pytest.mark.parametrize(
    "size", [pytest.param(n, marks=pytest.mark.ranks(n), id=f"ranks{n}") for n in (1, 3)]
)


def case(factory=Tower, loss=squared_error):
    return Case(name=factory.__name__, factory=factory, batch=numbers, loss=loss)


def start(strategy, **options):
    return Accelerator(strategy=strategy, cpu=True, **options)


def units_of(twins):
    return twins.accelerator.strategy_of(twins.model).placement.units


def reductions(twins):
    entry = twins.accelerator.traffic.entries().get(("dp", "reduce_scatter"))
    return entry.calls if entry else 0


def assert_freed(twins):
    whole = [u.label for u in units_of(twins) if not u.resident and u.live_bytes]
    assert not whole, f"still whole: {whole}"


def train(twins, steps):
    """Train both; every trainable unit is reduced once per backward and freed after it."""
    trained = sum(bool(unit.layout.trainable) for unit in units_of(twins))
    for step in steps:
        loss = twins.loss(step)
        before = reductions(twins)
        twins.accelerator.backward(loss)
        twins.backward_twin(step)
        assert_freed(twins)
        if twins.axis.size > 1:
            assert reductions(twins) - before == trained
        twins.step()
    twins.check()


# --- called again, shared, used in part ---


class Albert(Tower):
    def body(self, x):
        return self.blocks[1](self.blocks[1](self.blocks[1](x)))


class Interleaved(Tower):
    def body(self, x):
        one, two, three = self.blocks
        return one(two(one(x))) + three(two(x))


class Deeper(Block):
    def forward(self, x, depth=2):
        inner = self(x, depth - 1) if depth else x
        return x + self.down(torch.tanh(self.up(inner)))


class Recursive(Tower):
    block = Deeper


class Whole(Tower):
    def forward(self, x, again=True):
        x = F.pad(self(x, again=False), (0, WIDTH - OUT)) if again else x
        return super().forward(x)


class Sides(Block):
    def forward(self, x):
        hidden = torch.tanh(self.up(x))
        return x + self.down(hidden), {"side": hidden.sum(), "none": None}


class PartlyUsed(Tower):
    block = Sides

    def body(self, x):
        x, _ = self.blocks[0](x)
        _, side = self.blocks[1](x)
        self.blocks[2](x)
        return x * side["side"].tanh()


class Detached(Tower):
    """What enters the second block requires no gradient, and the third is called without."""

    def body(self, x):
        x = self.blocks[1](self.blocks[0](x).detach())
        with torch.no_grad():
            factor = self.blocks[2](x)
        return x * factor


class Frozen(Tower):
    """Nothing requires a gradient before the second block, nor in the middle of the third."""

    def __init__(self):
        super().__init__()
        for layer in (self.first, self.blocks[0], self.blocks[2].up):
            layer.requires_grad_(False)


def two_forwards(model, batch):
    one, two = model(batch.inputs), model(batch.inputs.sin())
    return F.mse_loss(one, batch.targets) + one.sub(two).square().mean()


def two_losses_of_one_forward(model, batch):
    hidden = model.body(model.first(batch.inputs))  # past the model's own forward
    return F.mse_loss(model.last(hidden), batch.targets) + hidden.square().mean()


# --- outputs and inputs of any kind ---


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


class WritingBlock(Block):
    def forward(self, x):
        hidden = self.up(x * 1.0)  # x is written to, and what a layer saves must not be
        hidden[:, :2].mul_(0.5)
        x.add_(self.down(torch.tanh(hidden)))
        return x[:, :]


class Writing(Tower):
    block = WritingBlock

    def body(self, x):
        for block in self.blocks:
            x = block(x.clone())
            x.view(-1)[::2].mul_(0.5)
        return x.clone()


def main_of(model, batch):
    found = model(batch.inputs)
    return F.mse_loss(found.main, batch.targets) + found.extra[0].x.mean()


def written_after(model, batch):
    outputs = model(batch.inputs)
    outputs.view(-1)[1:].mul_(2.0)
    return F.mse_loss(outputs, batch.targets)


# --- parameters read outside of the forward of their owner ---


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


def penalized(model, batch):
    penalty = sum(parameter.square().sum() for parameter in model.parameters())
    norm = model.blocks[1].up.weight.norm()
    return squared_error(model, batch) + 0.01 * penalty + norm


def function_in_the_loss(model, batch):
    weight = model.blocks[2].down.weight
    return squared_error(model, batch) + Scaled.apply(batch.inputs, weight).square().mean()


GRAPHS = {
    "albert": case(Albert),
    "interleaved": case(Interleaved),
    "recursive": case(Recursive),
    "model in itself": case(Whole),
    "two forwards": case(loss=two_forwards),
    "two forwards of albert": case(Albert, two_forwards),
    "past forward": case(loss=two_losses_of_one_forward),
    "partly used": case(PartlyUsed),
    "detached": case(Detached),
    "frozen": case(Frozen),
    "any kind": case(AnyKind, main_of),
    "written in place": case(Writing, written_after),
    "borrowing": case(Borrowing),
    "in a function": case(InFunction, function_in_the_loss),
    "hooked": case(Hooked),
    "penalized": case(loss=penalized),
}


@pytest.mark.parametrize("graph", list(GRAPHS))
@WORLDS
@EACH
def test_graphs(strategy, size, graph):
    accelerator = start(strategy)
    train(Twins(accelerator, GRAPHS[graph]), range(3))
    accelerator.free_memory()


# --- several backwards ---


@WORLDS
@EACH
def test_backwards_in_any_order(strategy, size):
    """The first loss last, a graph twice, and a part of the loss after the rest of it."""
    accelerator = start(strategy)
    twins = Twins(accelerator, case(Interleaved))
    losses = [twins.loss(step) for step in range(3)]
    for step in (2, 0, 1):
        accelerator.backward(losses[step], retain_graph=step == 0)
        assert_freed(twins)
        twins.backward_twin(step)
    accelerator.backward(losses[0])
    twins.backward_twin(0)
    twins.step()
    norms = []
    for model in (twins.model, twins.twin):
        first, second, third = (block.up.weight for block in model.blocks)
        loss = twins.case.loss(model, numbers(4, twins.axis.rank))
        norms.append((loss, 0.01 * (F.linear(first, second) @ third).norm()))
    for loss in norms[0]:
        accelerator.backward(loss)
        assert_freed(twins)
    twins.backward_twin(4)
    norms[1][1].backward()
    twins.step()
    train(twins, range(5, 7))
    accelerator.free_memory()


def slope(model, batch):
    """A loss with the gradient of a gradient, as in WGAN-GP."""
    inputs = batch.inputs.clone().requires_grad_()
    outputs = model(inputs)
    (gradient,) = torch.autograd.grad(outputs.square().sum(), inputs, create_graph=True)
    return F.mse_loss(outputs, batch.targets) + 0.001 * (gradient.norm() - 1.0).square()


@WORLDS
@EACH
def test_gradients_by_autograd(strategy, size):
    """They are the rank's own, of inputs and parameters, reduce nothing, and can be trained on."""
    accelerator = start(strategy)
    twins = Twins(accelerator, case(Interleaved, slope))
    train(twins, range(2))
    batch = numbers(9, twins.axis.rank)
    found = []
    for model in (twins.model, twins.twin):
        inputs = batch.inputs.clone().requires_grad_()
        before = reductions(twins)
        loss = F.mse_loss(model(inputs), batch.targets)
        found.append(torch.autograd.grad(loss, inputs, retain_graph=True))
        assert_freed(twins)
        found[-1] += torch.autograd.grad(loss, list(model.parameters()))
        assert_freed(twins)
        assert reductions(twins) == before
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)
    assert all(parameter.grad is None for parameter in twins.model.parameters())
    train(twins, range(2, 4))
    accelerator.free_memory()


@WORLDS
@EACH
def test_a_backward_that_makes_a_graph_is_refused(strategy, size):
    """Gradients that are part of a graph cannot be cut and sent; training goes on after it."""
    accelerator = start(strategy)
    twins = Twins(accelerator, case())
    train(twins, range(1))
    with pytest.raises(UsageError, match=r"part of a graph.*torch\.autograd\.grad"):
        accelerator.backward(twins.loss(1), create_graph=True)
    twins.model.zero_grad()
    twins.optimizer.zero_grad()
    train(twins, range(2, 4))
    accelerator.free_memory()
