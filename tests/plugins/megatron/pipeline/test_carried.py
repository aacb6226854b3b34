"""Nets that are no chain of like blocks: two stages equal one process, and send what cost says."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from drivetrain import Accelerator
from drivetrain.cost import ModelSpec
from drivetrain.testing.conformance.twins import everyone

WIDTH, ROWS = 6, 4
EXACT = {"rtol": 1e-10, "atol": 1e-12}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x, told=None):
        return self.down(torch.tanh(self.up(x if told is None else x + told)))


class EncoderDecoder(nn.Module):
    """Every block of the decoder reads the normed output of the encoder."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.decoder = nn.ModuleList(Block() for _ in range(3))
        self.start = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        for block in self.encoder:
            x = block(x)
        read, x = self.norm(x), x * 0 + self.start
        for block in self.decoder:
            x = block(x, read)
        return x


class TiedAround(nn.Module):
    """One weight makes the first tensor, which passes two blocks by, and the last."""

    def __init__(self):
        super().__init__()
        self.words = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        first = self.words(x) * 2
        for index, layer in enumerate(self.layers):
            x = layer(x if index != 2 else x + first)
        return F.linear(x, self.words.weight)


NETS = {
    "tied around": (TiedAround, "2,2", 1),
    "cut in the encoder": (EncoderDecoder, "2,4", 2),
}


def numbers(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)


def cut_in_two(cut="2,2", micro_batches=2):
    strategy = {"name": "megatron", "pp": 2, "micro_batches": micro_batches, "cut": cut}
    return Accelerator(strategy=strategy, cpu=True)


def check_state(accelerator, model, twin):
    state = accelerator.get_state_dict(model)
    for key, value in twin.state_dict().items():
        torch.testing.assert_close(state[key], value, **EXACT)


def step(model, optimizer, x, backward):
    loss = model(x).square().mean()
    backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss


@pytest.mark.parametrize("name", NETS)
@pytest.mark.ranks(2)
def test_two_stages_equal_one_process(name):
    make, cut, micro_batches = NETS[name]
    torch.manual_seed(0)
    model = make().double()
    model.example_inputs = numbers(9)
    twin, whole = copy.deepcopy(model), copy.deepcopy(model)
    sgd = torch.optim.SGD(twin.parameters(), lr=0.1)
    accelerator = cut_in_two(cut, micro_batches)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before: dict = {}
    for seed in range(4):  # the first two compare batches
        before = accelerator.traffic.sent() if seed == 2 else before
        x = numbers(seed)
        expected = step(twin, sgd, x, torch.Tensor.backward)
        found = step(model, optimizer, x, accelerator.backward)
        torch.testing.assert_close(found.item(), expected.item(), rtol=1e-12, atol=1e-12)
    sent = accelerator.traffic.sent()
    growth = {key: (count - before.get(key, 0)) / 2 for key, count in sent.items()}
    strategy = accelerator.strategy_of(model)
    spec = ModelSpec.of(whole, states=0, inputs=((numbers(0),), {}))
    cost = type(strategy).cost(strategy.config, spec, strategy.run)
    assert {key: count for key, count in growth.items() if count} == dict(cost.sent)
    check_state(accelerator, model, twin)
    with torch.no_grad():
        found = model.eval()(x)
        torch.testing.assert_close(found, twin.eval()(x), **EXACT)
    everyone(None)
    accelerator.free_memory()


class Uncounted(nn.Module):
    """A sketch of the input is returned beside the output; the loss may leave it out."""

    def __init__(self):
        super().__init__()
        self.sketch = nn.Linear(WIDTH, 2)
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        sketch = self.sketch(x)
        for layer in self.layers:
            x = x + layer(x)
        return x, sketch.tanh()


@pytest.mark.parametrize("counted", [0, 1])
@pytest.mark.ranks(2)
def test_parameters_that_the_loss_does_not_reach_do_not_decay(counted):
    torch.manual_seed(0)
    model = Uncounted().double()
    model.example_inputs = numbers(9)
    twin = copy.deepcopy(model)
    options = {"lr": 0.1, "weight_decay": 0.5}
    adamw = torch.optim.AdamW(twin.parameters(), **options)
    accelerator = cut_in_two()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), **options))
    for seed in range(3):
        x = numbers(seed)
        step(lambda x: twin(x)[counted], adamw, x, torch.Tensor.backward)
        step(lambda x: model(x)[counted], optimizer, x, accelerator.backward)
    check_state(accelerator, model, twin)
    everyone(None)
    accelerator.free_memory()


class TwoTowers(nn.Module):
    """Returns the whole output of the first tower; the second reads its mean alone."""

    def __init__(self):
        super().__init__()
        self.first = nn.ModuleList(Block() for _ in range(2))
        self.second = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for block in self.first:
            x = block(x)
        read, told = x, x.mean(-1, keepdim=True)
        for block in self.second:
            told = block(told.expand(x.shape))
        return told, read


@pytest.mark.ranks(2)
def test_evaluations_return_what_no_later_stage_reads():
    torch.manual_seed(0)
    model, x = TwoTowers().double(), numbers(9)
    model.example_inputs = x
    twin = copy.deepcopy(model).eval()
    accelerator = cut_in_two()
    model = accelerator.prepare(model).eval()
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(model(x), twin(x), **EXACT)
    everyone(None)
    accelerator.free_memory()
