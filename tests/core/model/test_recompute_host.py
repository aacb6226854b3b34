"""Inputs on their way to host memory and back: how many at once, and in which order."""

import gc
from collections import Counter

import pytest
import torch
from torch import nn

from drivetrain.errors import UsageError
from drivetrain.model.recompute import SMALL_NBYTES, KeptInputs, attach
from stacks import Parts, Stack

LAYERS = 6
ROWS = SMALL_NBYTES // 8  # of 4 numbers: x is moved; a scale of 4 numbers is not


class FakeFlight:
    """A copy by hand: the tensors hold the values only once it has landed."""

    def __init__(self, sky, kind, source, target):
        self.sky, self.kind, self.landed = sky, kind, False
        target.copy_(source)
        sky.up[kind] += 1
        sky.most[kind] = max(sky.most[kind], sky.up[kind])

    def land(self):
        self.sky.up[self.kind] -= 1
        self.landed = True

    def __del__(self):
        if not self.landed:
            self.land()
            self.sky.lost.append(self.kind)


class Sky:
    """The lanes of a device that does not exist; remembers what was on its way at once."""

    def __init__(self):
        self.events, self.lost = [], []
        self.up, self.most = Counter(), Counter()

    def leave(self, tensor):
        host = tensor.clone()
        self.events.append(("out", host[0, 0].item()))
        return host, FakeFlight(self, "out", tensor, host)

    def come(self, host):
        tensor = torch.empty_like(host)
        self.events.append(("back", host[0, 0].item()))
        return tensor, FakeFlight(self, "back", host, tensor)


class OffDevice(KeptInputs):
    """As if the tensors were on an accelerator."""

    def __init__(self, sky):
        super().__init__("cpu")
        self.sky = sky

    def _leaves(self, tensor):
        return True

    def _lanes_of(self, device):
        return self.sky


def noted(block, x):
    """Compute, and note which block runs."""
    block.log.append(("run", block.number))
    return torch.sin(x * block.weight)


class Numbered(Stack):
    """The first number of a block's input is its place."""

    def forward(self, x):
        for number, block in enumerate(self.blocks):
            numbered = torch.zeros_like(x)
            numbered[0, 0] = number + 1
            x = block(x * (numbered == 0) + numbered)
        return x


def build(sky, *, kept=True):
    torch.manual_seed(0)
    model = Numbered(
        Parts(noted, log=sky.events, number=number, weight=nn.Parameter(torch.ones(4)))
        for number in range(LAYERS)
    )
    if kept:
        blocks = [(str(i), block) for i, block in enumerate(model.blocks)]
        attach(blocks, "full", OffDevice(sky))
    return model


def batch(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, 4, generator=generator)


def test_two_leave_at_once_and_the_block_before_comes_while_one_computes():
    sky = Sky()
    model = build(sky)
    loss = model(batch()).sum()
    assert [n for kind, n in sky.events if kind == "out"] == [1, 2, 3, 4, 5, 6]
    sky.events.clear()
    loss.backward()
    assert sky.most == {"out": 2, "back": 1}  # the other one that came is in use
    # The last two never left the device; each other one comes before the block after it runs.
    expected = [("run", 5)]
    for number in range(LAYERS - 3, -1, -1):
        expected += [("back", number + 1), ("run", number + 1)]
    expected += [("run", 0)]
    assert sky.events == expected
    gc.collect()
    assert sky.up["back"] == 0


def test_several_forwards_before_their_backwards():
    """What is brought for nothing, as for the forward before the second, is let go."""
    for order in ((0, 1, 2), (0, 2, 1), (1, 2, 0)):
        sky = Sky()
        model, plain = build(sky), build(Sky(), kept=False)
        for one in (model, plain):
            losses = [one(batch(seed)).sum() for seed in (1, 2, 3)]
            for index in order:
                losses[index].backward()
                losses[index] = None
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad)
        assert sky.most["back"] <= 2
        assert sky.most["out"] == 2
        gc.collect()
        assert "back" not in sky.lost


def test_a_forward_without_backward_leaves_nothing():
    sky = Sky()
    model = build(sky)
    out = model(batch())
    assert sky.up["out"] == 2
    del out
    gc.collect()
    assert sky.lost == ["out", "out"]  # which real copies tell the allocator
    model(batch()).sum().backward()
    assert sky.most["out"] == 2


def test_an_input_that_is_changed_while_it_leaves_is_an_error():
    sky = Sky()
    model = build(sky)
    x = batch()
    out = model.blocks[0](x)
    x.add_(1)
    for block in model.blocks[1:4]:
        out = block(out * 1)
    with pytest.raises(UsageError, match=r"shape \(512, 4\).*in place"):
        out.sum().backward()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_on_a_device_memory_is_bounded_and_values_are_the_same():
    device = torch.accelerator.current_accelerator()
    width, layers = 2048, 24

    def train(keep):
        torch.manual_seed(0)
        blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)
        ).to(device)
        if keep is not None:
            attach([(str(i), b) for i, b in enumerate(blocks)], "full", KeptInputs(keep))
        x = torch.randn(8 * width, width, device=device)
        for _ in range(2):
            torch.accelerator.synchronize()
            torch.accelerator.reset_peak_memory_stats()
            before = torch.accelerator.memory_allocated()
            out = x
            for block in blocks:
                out = block(out * 1.0)
            out.square().mean().backward()
            torch.accelerator.synchronize()
            peak = torch.accelerator.max_memory_allocated() - before
            grads = [p.grad.clone() for p in blocks.parameters()]
            blocks.zero_grad(set_to_none=True)
        return grads, peak, x.nbytes

    plain, _, _ = train(None)
    here, whole, nbytes = train("device")
    away, bounded, _ = train("cpu")
    torch.testing.assert_close([*away], [*plain], rtol=0, atol=0)
    assert all(torch.equal(a, b) for a, b in zip(here, away, strict=True))
    assert whole > layers * nbytes
    assert bounded < 12 * nbytes  # whatever the number of layers
