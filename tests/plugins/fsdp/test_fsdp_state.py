"""Training state under fsdp: what ranks save is the model once, and every number of ranks has it.

The conformance suite covers resume bit by bit, tests/integration how training goes on under other
strategies. Here whole states are compared, with their moments and steps: not a bit may change.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import AdamW

from drivetrain import Accelerator
from drivetrain.checkpoint import describe, find_problems, read_export
from drivetrain.shards import Part
from drivetrain.testing.conformance.twins import everyone

SMALL = {"name": "fsdp", "unit_from": 8}
HYBRID = {**SMALL, "sharding": "hybrid", "shard_size": 2}
SAVERS = {1: SMALL, 2: SMALL, 3: {**SMALL, "accumulate": "local"}, 4: HYBRID}
OTHERS = ({"name": "ddp"}, {"name": "zero3", "keep_below": 0})


class Awkward(nn.Module):
    """Rows that divide by nothing, transposed, channels-last, 0-d, empty, frozen and tied ones."""

    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(7, 5)
        self.turned = nn.Parameter(torch.randn(3, 5).t())  # (5, 3), column by column
        self.kernel = nn.Parameter(torch.randn(3, 2, 3, 1).to(memory_format=torch.channels_last))
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 5))
        self.fixed = nn.Linear(5, 5).requires_grad_(False)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.token.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens):
        self.calls += 1
        x = self.token(tokens)  # (rows, 5)
        image = (x @ self.turned)[:, None, :, None].expand(-1, 2, -1, -1)  # (rows, 2, 3, 1)
        x = x + F.conv2d(image, self.kernel).flatten(1).sum(1, keepdim=True) * self.scale
        for block in self.blocks:
            x = x + torch.tanh(block(self.fixed(x)))
        return self.head(x) + (x @ self.empty.t()).sum()


def build():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return Awkward()


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def made(parameters):
    return AdamW(parameters, lr=0.01)


def train(accelerator, model, optimizer, steps):
    for step in range(steps):
        tokens = (torch.arange(6) + step) % 7  # the same everywhere
        accelerator.backward(F.cross_entropy(model(tokens), tokens.flip(0)))
        optimizer.step()
        optimizer.zero_grad()


class Run:
    """The model under a strategy."""

    def __init__(self, strategy):
        self.accelerator = Accelerator(strategy=strategy, cpu=True)
        built = build()
        self.model, self.optimizer = self.accelerator.prepare(built, made(trained(built)))

    def train(self, steps):
        train(self.accelerator, self.model, self.optimizer, steps)

    def state(self):
        return whole_state(self.accelerator.strategy_of(self.model))

    def close(self):
        self.accelerator.free_memory()


def whole_state(strategy):
    """Return {(name, state): tensor} of what all ranks would save, each element exactly once."""
    own = [(s.name, s.state, s.tensor.clone(), s.shape, s.part) for s in strategy.shards()]
    found, counts = {}, {}
    for name, state, tensor, shape, part in (one for rank in everyone(own) for one in rank):
        key = name, state
        whole = found.setdefault(key, torch.zeros(shape, dtype=tensor.dtype))
        count = counts.setdefault(key, torch.zeros(shape, dtype=torch.int64))
        place(whole, part).copy_(tensor)
        place(count, part).add_(1)
    for key, count in counts.items():
        assert torch.equal(count, torch.ones_like(count)), f"{key} is not saved exactly once"
    return found


def place(whole, part: Part):
    """Return a part of a contiguous tensor as a view."""
    box = whole[tuple(slice(o, o + n) for o, n in zip(part.offsets, part.sizes, strict=True))]
    return box if part.flat is None else box.view(-1)[slice(*part.flat)]


def check_equal(found, expected, where):
    assert found.keys() == expected.keys(), where
    for key, tensor in found.items():
        assert tensor.dtype == expected[key].dtype, (where, key)
        assert torch.equal(tensor, expected[key]), (where, key)


def every_world():
    return pytest.mark.parametrize(
        "world", [pytest.param(n, marks=pytest.mark.ranks(n)) for n in SAVERS]
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("states")


@every_world()
def test_save(folder, world):
    """Everything is there, and written once: replicas write nothing."""
    run = Run(SAVERS[world])
    run.train(3)
    state = run.state()
    names = {name for name, key in state if not key}
    assert names == {*dict(run.model.named_parameters()), "calls"}
    stepped = {name for name, p in build().named_parameters() if p.requires_grad and p.numel()}
    for key in ("0.exp_avg", "0.exp_avg_sq", "0.step"):
        assert {name for name, other in state if other == key} == stepped
    run.accelerator.save_state(folder / f"{world}")
    if run.accelerator.is_main_process:
        torch.save(state, folder / f"{world}.pt")
        assert find_problems(folder / f"{world}") == []
        (tensors,) = describe(folder / f"{world}").manifest.models
        assert {(one.name, one.state) for one in tensors} == set(state)
    run.close()


@every_world()
def test_load(folder, world):
    """At any other number of ranks, under other strategies, and back, with every bit."""
    for savers in SAVERS:
        saved = folder / f"{savers}.pt"
        if not saved.exists():
            pytest.skip("needs what test_save saves, which did not run or failed")
        expected = torch.load(saved, weights_only=True)
        where = f"saved on {savers}, loaded on {world}"
        run = Run(SAVERS[world])
        run.train(1)  # moments and values that must go
        run.accelerator.load_state(folder / f"{savers}")
        check_equal(run.state(), expected, where)
        run.close()
    for other in OTHERS:
        run = Run(other)
        run.accelerator.load_state(folder / f"{world}")
        expected = torch.load(folder / f"{world}.pt", weights_only=True)
        check_equal(run.state(), expected, f"{other['name']} on {world}")
        there = folder / f"{other['name']}-{world}"
        run.accelerator.save_state(there)
        run.close()
        run = Run(SAVERS[world])
        run.accelerator.load_state(there)
        check_equal(run.state(), expected, f"back from {other['name']} on {world}")
        run.close()


@pytest.mark.parametrize(
    ("strategy", "world"),
    [
        pytest.param(SMALL, 2, marks=pytest.mark.ranks(2), id="full-2"),
        pytest.param(SMALL, 3, marks=pytest.mark.ranks(3), id="full-3"),
        pytest.param(HYBRID, 4, marks=pytest.mark.ranks(4), id="hybrid-4"),
    ],
)
def test_optimizer_with_a_past(strategy, world):
    """State from before ``prepare`` is cut like the parameters, uneven and transposed ones too."""
    model = build()
    optimizer = made(trained(model))
    for step in range(2):
        tokens = (torch.arange(6) + step) % 7
        F.cross_entropy(model(tokens), tokens.flip(0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = {(name, ""): tensor.detach().clone() for name, tensor in named(model).items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if parameter.numel():
                expected[name, f"0.{key}"] = value.clone()
    accelerator = Accelerator(strategy=strategy, cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    check_equal(whole_state(accelerator.strategy_of(model)), expected, f"on {world}")
    accelerator.free_memory()


def named(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@pytest.mark.ranks(3)
def test_optimizer_made_after_prepare():
    """It gets rows all the same, and its state is that of one made before."""
    before = Run(SMALL)
    before.train(3)
    accelerator = Accelerator(strategy=SMALL, cpu=True)
    model = accelerator.prepare(build())
    optimizer = accelerator.prepare(made(trained(model)))
    train(accelerator, model, optimizer, 3)
    check_equal(whole_state(accelerator.strategy_of(model)), before.state(), "made after")
    owned = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    whole = sum(p.numel() for p in trained(build()))
    assert sum(everyone(owned)) == whole
    before.close()
    accelerator.free_memory()


@pytest.mark.parametrize(
    ("strategy", "world"),
    [
        pytest.param(SMALL, 3, marks=pytest.mark.ranks(3), id="full-3"),
        pytest.param(HYBRID, 4, marks=pytest.mark.ranks(4), id="hybrid-4"),
    ],
)
def test_weights_as_one_process_has_them(strategy, world, tmp_path):
    """State dict and safetensors hold the user's names, tied ones too, and the same bits."""
    plain = build()
    run = Run(strategy)
    found = run.accelerator.get_state_dict(run.model)
    expected = plain.state_dict()
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), f"{name} on {world}"
    assert found["head.weight"] is found["token.weight"]
    run.accelerator.save_model(run.model, tmp_path / "export")
    everyone(None)
    exported = dict(read_export(tmp_path / "export"))
    alone = Accelerator(strategy="ddp", cpu=True)
    alone.save_model(alone.prepare(plain), tmp_path / "alone")
    everyone(None)
    written = dict(read_export(tmp_path / "alone"))
    assert exported.keys() == written.keys()
    for name, tensor in written.items():
        assert torch.equal(exported[name], tensor), f"{name} on {world}"
    alone.free_memory()
    run.close()
