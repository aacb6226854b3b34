"""Models on paper from traces of modules: work, activations and parameters, against the module."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from drivetrain.data.examples import Candidate
from drivetrain.errors import ConfigError
from drivetrain.simulator.step import Boundary, MatrixProduct, MemoryPass, flops_of
from drivetrain.simulator.traced import traced_model
from drivetrain.simulator.transformer import GptShape
from stacks import Residual

sys.path.append(str(Path(__file__).parents[3] / "examples"))
from train_gpt import GPT

LAYERS, WIDTH, HEADS, LENGTH = 3, 64, 4, 32
TOKENS = torch.randint(256, (2, LENGTH), generator=torch.Generator().manual_seed(0))


def pixels():
    """Return convolutions with a batch norm, and a head."""
    first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    second = nn.Sequential(nn.Conv2d(8, 16, 3, stride=2), nn.ReLU())
    return nn.Sequential(first, second, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def mlp():
    layers = nn.Linear(24, 96), nn.GELU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 5)
    return nn.Sequential(*layers)


def gpt(**values):
    return GPT(WIDTH, LAYERS, HEADS, LENGTH, **values)


MODELS = {
    "gpt": (gpt, TOKENS),
    "mlp": (mlp, torch.ones(2, 24)),
    "pixels": (pixels, torch.ones(2, 3, 8, 8)),
}


def seen(name):
    make, inputs = MODELS[name]
    return traced_model(make(), [Candidate("the test's", (inputs,), {})])


def kept_by_autograd(model, inputs):
    """Return the bytes of the distinct tensors between a forward, a loss, and their backward."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters and tensor.is_floating_point():
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = model(inputs)
        targets = torch.zeros(logits.numel() // logits.shape[-1]).long()
        loss = nn.functional.cross_entropy(logits.flatten(0, -2), targets)
    kept[logits.untyped_storage().data_ptr()] = (logits.nbytes, logits)  # a script holds them
    total = sum(nbytes for nbytes, _ in kept.values())
    assert loss.requires_grad  # the tensors live until here
    return total


def test_parameters_work_and_activations_are_the_modules_own():
    for name, (make, inputs) in MODELS.items():
        model, paper = make(), seen(name)
        count = sum(p.numel() for p in model.parameters())
        assert paper.parameters == count
        units = paper.units(len(inputs), "none", fused=True, width=4)
        assert sum(unit.elements for unit in units) == count
        assert all(sum(unit.sizes) == unit.elements for unit in units)
        with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
            model(inputs)
        unfused = paper.units(2, "none", fused=False, width=4)
        work = sum(flops_of(unit.forward) for unit in unfused)
        assert work == pytest.approx(paper.model_flops(2) / 3, rel=1e-6)
        if name != "gpt":  # torch's counter leaves out the CPU's attention
            assert work == counter.get_total_flops()

        kept = sum(unit.kept for unit in units)
        assert kept == pytest.approx(kept_by_autograd(make(), inputs), rel=0.03)

        six = inputs.repeat(3, *[1] * (inputs.dim() - 1))
        again = traced_model(make(), [Candidate("six rows", (six,), {})])
        assert list(again.traces) == list(paper.traces)  # the rows of an example do not count
        one, three = (paper.units(rows, "none", fused=True) for rows in (1, 3))
        for small, large in zip(one, three, strict=True):
            assert flops_of(large.forward) == pytest.approx(3 * flops_of(small.forward))
            assert large.kept == pytest.approx(3 * small.kept, rel=0.05)
            assert large.parameters == small.parameters


class Losing(nn.Module):
    """A GPT that computes its loss itself."""

    def __init__(self):
        super().__init__()
        self.gpt = gpt()

    def forward(self, tokens):
        return nn.functional.cross_entropy(self.gpt(tokens).flatten(0, 1), tokens.flatten())


def passes_of(unit):
    return {(p.nbytes, p.back, p.divided) for p in unit.forward if isinstance(p, MemoryPass)}


def test_a_gpt_is_the_gpt_of_its_sizes():
    paper = seen("gpt")
    units = paper.units(8, "none", fused=True)
    shape = GptShape(layers=LAYERS, hidden=WIDTH, heads=HEADS, seq=LENGTH, vocab=256)
    expected = shape.units(8, "none", fused=True)
    assert len(units) == len(expected)
    assert units[1] is units[2]
    for unit, other in zip(units, expected, strict=True):
        assert flops_of(unit.forward) == pytest.approx(flops_of(other.forward), rel=1e-6)
        cut, whole = ({c: n for n, c in each.parameters} for each in (unit, other))
        assert cut[True] == pytest.approx(whole[True], rel=0.02)
        one, two = (
            [b.enters for b in each.forward if isinstance(b, Boundary)] for each in (unit, other)
        )
        assert one == two
        for fact in ("enters", "heads", "borrowed"):
            assert getattr(unit, fact) == getattr(other, fact)
    assert (paper.heads, paper.seq) == (HEADS, LENGTH)
    losing = traced_model(Losing(), [Candidate("tokens", (TOKENS,), {})])
    assert losing.logits(8) == paper.logits(8) == 8 * LENGTH * 256
    assert losing.units(8, "none", fused=True)[-1].kept == units[-1].kept
    activation, scores = 8 * LENGTH * 4 * WIDTH, 8 * HEADS * LENGTH**2
    unfused = [each.units(8, "none", fused=False)[1] for each in (paper, shape)]
    assert unfused[0].kept == units[1].kept + 2 * scores  # the probabilities
    assert set.intersection(*map(passes_of, unfused)) == {
        (4 * activation, 6 * activation, "features"),  # it reads its input again in backward
        (4 * scores, 6 * scores, "features"),
    }
    added = 6 * 8 * LENGTH * WIDTH  # two activations read and one written, in both directions
    assert (added, added, "tokens") in passes_of(units[1])
    rows, table = 8 * LENGTH * (2 * 2 * WIDTH + 4), 2 * 256 * WIDTH
    assert (rows, rows + table, "features") in passes_of(units[0])  # a gradient for every word
    block = [p.divided for p in units[1].forward if isinstance(p, MatrixProduct)]
    assert block == ["columns", "copies", "copies", "inner", "columns", "inner"]
    # The shape's block drops out; the module's does not.
    assert units[1].kept == pytest.approx(expected[1].kept - 2 * 8 * LENGTH * WIDTH, rel=0.02)


def test_a_product_without_a_partner_stays_whole():
    class Block(Residual):
        def __init__(self):
            super().__init__(8, 32, act=nn.ReLU)
            self.alone = nn.Linear(8, 8)

        def forward(self, x):
            return super().forward(x + self.alone(x))

    model = nn.Sequential(Block(), Block(), nn.Linear(8, 2))
    paper = traced_model(model, [Candidate("rows", (torch.ones(2, 8),), {})])
    block = paper.units(1, "none", fused=True)[1]
    products = [p.divided for p in block.forward if isinstance(p, MatrixProduct)]
    assert products == ["", "columns", "inner"]
    assert {cut: count for count, cut in block.parameters}[False] == 8 * 8 + 8 + 32 + 8


def test_inputs_that_no_forward_accepts_are_named():
    with pytest.raises(ConfigError, match="none that it accepts: rows: RuntimeError: "):
        traced_model(mlp(), [Candidate("rows", (torch.ones(2, 3),), {})])
