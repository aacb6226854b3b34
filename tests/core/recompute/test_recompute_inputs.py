"""Inputs of recomputed blocks in parts over an axis, and on the host."""

import gc

import pytest
import torch
from torch import nn

from drivetrain.collectives import connect
from drivetrain.recompute import KeptInputs, attach
from drivetrain.recompute.inputs import SMALL_NBYTES
from drivetrain.runtime.mesh import Mesh
from drivetrain.runtime.world import World
from drivetrain.traffic import Traffic

ROWS, WIDTH = 53, 37  # a product that divides by neither 2 nor 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask, *, count=None):
        y = torch.tanh(self.layer(x)).masked_fill(mask, 0.0)
        return nn.functional.dropout(y, 0.3) + 0 * count


class Net(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x, mask, count):
        for block in self.blocks:
            x = block(x.mul(1.5), mask, count=count)
        return x


def build(layers=4):
    torch.manual_seed(0)
    return Net(layers).double()


def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(WIDTH, ROWS, generator=generator, dtype=torch.float64).t()  # not contiguous
    mask = torch.rand(ROWS, WIDTH, generator=generator) < 0.2
    return x, torch.stack([mask] * 3)[0].repeat(3, 1)[:ROWS], torch.tensor(3)


def train(model):
    torch.manual_seed(9)
    model(*data()).square().sum().backward()
    return [p.grad for p in model.parameters()]


def axis_of_all():
    world = World.discover(cpu=True)
    axis = Mesh.build({"tp": world.size}, world)["tp"]
    traffic = Traffic()
    return connect(axis, traffic, world.device, world.timeout), traffic


def live_bytes():
    gc.collect()
    found = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in found}.values())


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize(
    "size",
    [pytest.param(2, marks=pytest.mark.ranks(2)), pytest.param(3, marks=pytest.mark.ranks(3))],
)
def test_parts(size, mode):
    expected = train(build())
    model = build()
    communicator, traffic = axis_of_all()
    attach([(str(i), b) for i, b in enumerate(model.blocks)], mode, KeptInputs("cpu", communicator))
    for again, mine in zip(expected, train(model), strict=True):
        assert torch.equal(mine, again)
    x, _, _ = data()
    assert traffic.sent()["tp", "all_gather"] == pytest.approx(
        4 * x.nbytes * (size - 1) / size, abs=8
    )
    communicator.close()


@pytest.mark.ranks(2)
def test_each_rank_keeps_its_part():
    communicator, _ = axis_of_all()
    kept = {}
    for name, inputs in (("whole", None), ("parts", KeptInputs("device", communicator))):
        model = build(8)
        attach([(str(i), b) for i, b in enumerate(model.blocks)], "full", inputs)
        x, mask, count = data()
        before = live_bytes()
        out = model(x, mask, count)
        kept[name] = live_bytes() - before - out.nbytes
        del out
    # Whole inputs are held where Python does not see them.
    assert kept["parts"] == pytest.approx(8 * x.nbytes / 2 + 8 * 5056, rel=0.02)
    assert kept["parts"] < 8 * x.nbytes * 0.9
    communicator.close()


@pytest.mark.ranks(1)
def test_alone_or_on_the_cpu_nothing_moves():
    communicator, traffic = axis_of_all()
    model = build()
    attach(
        [(str(i), b) for i, b in enumerate(model.blocks)], "full", KeptInputs("cpu", communicator)
    )
    for again, mine in zip(train(build()), train(model), strict=True):
        assert torch.equal(mine, again)
    assert not traffic.sent()
    communicator.close()


@pytest.mark.ranks(2)
def test_what_stays_and_what_is_shared():
    communicator, _ = axis_of_all()
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
    communicator.close()
