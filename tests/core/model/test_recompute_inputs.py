"""Inputs of recomputed blocks in parts over an axis, and on the host."""

import gc
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from drivetrain.collectives import connect
from drivetrain.cost import Traffic
from drivetrain.model.recompute import SMALL_NBYTES, KeptInputs, attach
from drivetrain.runtime.mesh import Mesh
from drivetrain.runtime.world import World
from stacks import Parts, Stack

ROWS, WIDTH = 53, 37  # a product that divides by neither 2 nor 3


def block():
    def compute(m, x, mask, *, count=None):
        y = torch.tanh(m.layer(x * 1.5)).masked_fill(mask, 0.0)
        return nn.functional.dropout(y, 0.3) + 0 * count

    return Parts(compute, layer=nn.Linear(WIDTH, WIDTH))


def build(mode=None, inputs=None, *, layers=4):
    torch.manual_seed(0)
    model = Stack([block() for _ in range(layers)]).double()
    if mode is not None:
        attach([(str(i), b) for i, b in enumerate(model.blocks)], mode, inputs)
    return model


def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(WIDTH, ROWS, generator=generator, dtype=torch.float64).t()  # not contiguous
    mask = torch.rand(ROWS, WIDTH, generator=generator) < 0.2
    return x, torch.stack([mask] * 3)[0].repeat(3, 1)[:ROWS], torch.tensor(3)


def train(model):
    x, mask, count = data()
    torch.manual_seed(9)
    model(x, mask, count=count).square().sum().backward()
    return [p.grad for p in model.parameters()]


@contextmanager
def connected():
    """A communicator over all ranks, and its ledger."""
    world = World.discover(cpu=True)
    traffic = Traffic()
    mesh = Mesh.build({"tp": world.size}, world)
    communicator = connect(mesh["tp"], traffic, world.device, world.timeout)
    yield communicator, traffic
    communicator.close()


def live_bytes():
    gc.collect()
    found = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in found}.values())


@pytest.mark.parametrize(
    ("size", "mode"),
    [
        pytest.param(1, "full", marks=pytest.mark.ranks(1)),
        pytest.param(2, "full", marks=pytest.mark.ranks(2)),
        pytest.param(3, "selective", marks=pytest.mark.ranks(3)),
    ],
)
def test_parts(size, mode):
    """Alone or on the CPU nothing moves."""
    with connected() as (communicator, traffic):
        found = train(build(mode, KeptInputs("cpu", communicator)))
    assert all(map(torch.equal, train(build()), found))
    sent = traffic.sent().get(("tp", "all_gather"), 0)
    assert sent == pytest.approx(4 * data()[0].nbytes * (size - 1) / size, abs=8)


@pytest.mark.ranks(2)
def test_what_each_rank_keeps():
    """Its part, but of what is small, a parameter, or has gaps; and nothing twice."""
    with connected() as (communicator, _):
        check_kept(communicator)


def check_kept(communicator):
    inputs = KeptInputs("device", communicator)
    model = build("full", inputs, layers=8)
    x, mask, count = data()
    before = live_bytes()
    out = model(x, mask, count=count)
    kept = live_bytes() - before - out.nbytes
    assert kept == pytest.approx(8 * x.nbytes / 2 + 8 * 5056, rel=0.02)
    assert kept < 8 * x.nbytes * 0.9

    inputs = KeptInputs("device", communicator)
    parameter = nn.Parameter(torch.zeros(SMALL_NBYTES))
    small, large = torch.zeros(SMALL_NBYTES // 8), torch.zeros(SMALL_NBYTES)
    gaps = torch.zeros(SMALL_NBYTES, 2)[:, 0]
    for tensor in (parameter, small, gaps, large.expand(3, -1)):
        assert not inputs._moves(tensor)
    first = inputs._put_away(large)
    assert inputs._put_away(large) is first
    large.add_(1)
    second = inputs._put_away(large)
    assert second is not first
    assert torch.equal(first.whole(), torch.zeros_like(large))
    assert torch.equal(second.whole(), large)
    assert inputs._put_away(large.clone()) is not second
