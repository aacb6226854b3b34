"""Nets that are no chain of like blocks: two stages equal one process, and send what cost says."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, AdamW

from drivetrain.cost import ModelSpec
from stacks import Parts, Residual, Stack
from staged_twins import EXACT, Twins

pytestmark = pytest.mark.ranks(2)

WIDTH, ROWS = 6, 4


class Block(Residual):
    def __init__(self):
        super().__init__(WIDTH, 16)

    def forward(self, x, told=None):
        return super().forward(x if told is None else x + told)


def encoder_decoder():
    """Return a model each of whose decoder's blocks reads the normed output of the encoder."""

    def compute(m, x):
        for block in m.encoder:
            x = block(x)
        read, x = m.norm(x), x * 0 + m.start
        for block in m.decoder:
            x = block(x, read)
        return x

    sides = {side: nn.ModuleList(Block() for _ in range(3)) for side in ("encoder", "decoder")}
    return Parts(compute, **sides, norm=nn.LayerNorm(WIDTH), start=nn.Parameter(torch.ones(WIDTH)))


class TiedAround(Stack):
    """One weight makes the first tensor, which passes two blocks by, and the last."""

    def __init__(self):
        first = nn.Linear(WIDTH, WIDTH, bias=False)
        super().__init__((Block() for _ in range(4)), first=first)

    def forward(self, x):
        first = self.first(x) * 2
        for index, layer in enumerate(self.blocks):
            x = layer(x if index != 2 else x + first)
        return F.linear(x, self.first.weight)


class Uncounted(Stack):
    """A sketch of the input is returned beside the output; the loss may leave it out."""

    def __init__(self):
        super().__init__((Block() for _ in range(4)), first=nn.Linear(WIDTH, 2))

    def forward(self, x):
        sketch = self.first(x)
        return self.body(x), sketch.tanh()


def two_towers():
    """Return what returns the first tower's whole output; the second reads its mean alone."""

    def compute(m, x):
        for block in m.first:
            x = block(x)
        read, told = x, x.mean(-1, keepdim=True)
        for block in m.second:
            told = block(told.expand(x.shape))
        return told, read

    first, second = (nn.ModuleList(Block() for _ in range(2)) for _ in range(2))
    return Parts(compute, first=first, second=second)


def numbers(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)


def build(kind):
    torch.manual_seed(0)
    return kind().double()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (TiedAround, {"cut": "2,2", "micro_batches": 1}),
        (encoder_decoder, {"cut": "2,4", "micro_batches": 2}),
    ],
)
def test_two_stages_equal_one_process(kind, options):
    model = build(kind)
    spec = ModelSpec.of(copy.deepcopy(model), states=0, inputs=((numbers(0),), {}))
    both = Twins(model, numbers(9), make=partial(SGD, lr=0.1), **options)
    for seed in range(4):  # the first two compare batches
        if seed == 2:
            both.accelerator.traffic.clear()
        both.backward(*(each.square().mean() for each in both(numbers(seed))), rtol=1e-12)
        both.step()
    sent = {key: count / 2 for key, count in both.accelerator.traffic.sent().items() if count}
    strategy = both.strategy
    cost = type(strategy).cost(strategy.config, spec, strategy.run)
    assert sent == dict(cost.sent)
    both.check_state()
    both.eval()
    with torch.no_grad():
        torch.testing.assert_close(*both(numbers(3)), **EXACT)


@pytest.mark.parametrize("counted", [0, 1])
def test_parameters_that_the_loss_does_not_reach_do_not_decay(counted):
    adamw = partial(AdamW, lr=0.1, weight_decay=0.5)
    both = Twins(build(Uncounted), numbers(9), make=adamw, cut="2,2", micro_batches=2)
    for seed in range(3):
        both.backward(*(each[counted].square().mean() for each in both(numbers(seed))))
        both.step()
    both.check_state()


def test_evaluations_return_what_no_later_stage_reads():
    both = Twins(build(two_towers), numbers(9), cut="2,2", micro_batches=2)
    both.eval()
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(*both(numbers(9)), **EXACT)
