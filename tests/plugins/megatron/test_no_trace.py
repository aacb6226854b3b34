"""What prepare() tries leaves no trace, and forwards draw alike on the ranks that share layers."""

import copy
import random
from collections import deque

import numpy
import pytest
import torch
from torch import nn

from cell_twins import Twins, loss_of
from drivetrain import Accelerator, set_seed
from drivetrain.errors import UsageError
from drivetrain.model.untouched import untouched
from drivetrain.runtime import rng
from drivetrain.testing.conformance.suite import everyone
from emulated_tensors import close
from stacks import Residual, Stack

WORDS, WIDTH = 11, 16


class Block(Residual):
    """A residual block that writes into a buffer, fills a list and may draw."""

    def __init__(self, draw=None):
        super().__init__(WIDTH, norm=nn.LayerNorm)
        self.mixed = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.register_buffer("count", torch.zeros(2))
        self.statistics = torch.zeros(3)
        self.recent, self.draw = deque(maxlen=4), draw

    def forward(self, x):
        torch.add(self.count, 1.0, out=self.count)
        self.statistics.mul_(0.5).add_(1.0)
        self.recent.append(x.shape)
        y = super().forward(x) + self.mixed(x)
        return y if self.draw is None else x + self.draw(y)


class Model(Stack):
    """Blocks between an embedding and a head that is spectrally normalised, too."""

    def __init__(self, draw=None, drop=0.0):
        last = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WORDS))
        first = nn.Embedding(WORDS, WIDTH)
        super().__init__((Block(draw) for _ in range(4)), first=first, last=last)
        self.drop, self.calls = drop, {"seen": []}
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, ids):
        self.calls["seen"].append(len(ids))
        x = self.first(ids) + torch.rand(WIDTH, generator=self.generator)
        for block in self.blocks:
            if self.training and self.drop and torch.rand([]) < self.drop:
                continue
            x = block(x)
        return self.last(x)


def facts_of(model):
    """Return everything that a forward of the model changes."""
    blocks = [(b.count.clone(), b.statistics.clone(), list(b.recent)) for b in model.blocks]
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    return blocks, buffers, copy.deepcopy(model.calls), model.generator.get_state(), rng.capture()


def batch():
    return torch.randint(0, WORDS, (4, 6), generator=torch.Generator().manual_seed(0))


def test_untouched():
    """Tensors, lists and generators that modules hold are as before, and what is shared is."""
    model = nn.Module()
    model.held = [torch.zeros(2), {"x": torch.ones(1)}]
    model.child = nn.Module()
    model.child.same = model.held
    model.random, model.numbers = random.Random(1), numpy.random.default_rng(1)
    model.register_buffer("mean", torch.zeros(2))
    held, mean, state = model.held, model.mean, (model.random.getstate(), rng.capture())
    first = copy.deepcopy(model.numbers).random()
    with untouched(model, 5):
        assert model.child.same is model.held
        model.held[0].add_(1)
        model.held[1]["y"] = 2
        model.held.append(3)
        model.mean.fill_(5)
        model.random.random(), model.numbers.random()
        model.other = 1
        drawn = (torch.rand(()).item(), random.random(), numpy.random.rand())
    assert model.held is held
    assert model.mean is mean
    torch.testing.assert_close(held, [torch.zeros(2), {"x": torch.ones(1)}])
    torch.testing.assert_close(mean, torch.zeros(2))
    assert not hasattr(model, "other")
    assert model.numbers.random() == first
    torch.testing.assert_close((model.random.getstate(), rng.capture()), state)
    set_seed(7)
    with untouched(model, 5):
        assert (torch.rand(()).item(), random.random(), numpy.random.rand()) == drawn


@pytest.mark.ranks(2)
def test_prepare_leaves_no_trace():
    """Spectral normalisation moved by looks and trials; the first loss is one process's."""
    model = Model().double()
    before = facts_of(model)
    both = Twins(model, tp=2)
    assert "blocks.0.up.weight" in both.divided
    torch.testing.assert_close(facts_of(both.model), before, rtol=0, atol=0)
    close(loss_of(both.model, batch()), loss_of(both.twin, batch()))
    for name, buffer in both.twin.named_buffers():
        close(dict(both.model.named_buffers())[name], buffer)


def path(y):
    return y * y.new_empty(y.shape[0], 1, 1).bernoulli_(0.5) * 2


def noise(y):
    return y + torch.randn_like(y) * random.random() * numpy.random.rand()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.ranks(2)
def test_ranks_that_share_layers_draw_alike(training):
    """Hidden states, and the weights after steps, are the same on all; also of a forward's own."""
    for draw, drop in ((path, 0.0), (noise, 0.0), (None, 0.5)):
        accelerator = Accelerator(strategy={"name": "megatron", "tp": 2}, cpu=True)
        set_seed(0)
        model = Model(draw, drop)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        known = accelerator.strategy_of(model)._facts
        assert all(known[f"blocks.{i}.up.weight"].partition for i in range(4))
        set_seed(0, device_specific=True)
        model.train(training)
        found = []
        for _ in range(3):
            logits = model(batch())
            found.append(logits.detach())
            accelerator.backward(logits.square().mean())
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            model(batch())  # an evaluation may draw nothing
            model.train(training)
        assert not torch.equal(found[0], found[2])
        mine = [x.tolist() for x in found], model.first.weight.tolist()
        first, second = everyone(mine)
        assert first == second


@pytest.mark.ranks(2)
def test_a_forward_that_begins_to_draw_apart_is_refused():
    """Generators are not shared while nothing draws; then every rank says so."""
    accelerator = Accelerator(strategy={"name": "megatron", "tp": 2}, cpu=True)
    set_seed(0)
    model = Model(lambda y: y + torch.rand(()) if model.noisy else y)
    model.noisy = False
    model = accelerator.prepare(model)
    # What draws in one process alone, as another thread, sends no rank another way.
    hook = model.first.register_forward_hook(lambda *_: random.random() and None)
    if accelerator.is_main_process:
        hook.remove()
    model(batch())
    hook.remove()
    model(batch())
    model(batch())
    set_seed(0, device_specific=True)
    model.noisy = True
    with pytest.raises(UsageError, match="draw the same random numbers"):
        model(batch())
    model(batch())
