"""Where parameters lie under ZeRO: the arithmetic of units, and models that make odd ones.

Units of one element or none, of several dtypes under one block, ties across units, gradients that
come in some steps and on some ranks only: each is compared with one process.
"""

import itertools
import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import AdamW

from drivetrain import Accelerator
from drivetrain.cost import TensorSpec
from drivetrain.runtime.precision import Precision
from drivetrain.testing.conformance.twins import Twins, adamw, everyone, momentum, weights
from drivetrain.testing.models import (
    HIDDEN,
    OUT,
    VOCABULARY,
    WIDTH,
    Case,
    cross_entropy,
    linear,
    numbers,
    squared_error,
    tokens,
)
from drivetrain_zero.units import Sizes, cut_model
from towers import Block

SMALL = {"bucket_mib": 0.001}
STAGES = {
    "zero1": {"name": "zero1", **SMALL},
    "zero2": {"name": "zero2", **SMALL},
    "zero3": {"name": "zero3", **SMALL},
    "sharded": {"name": "zero3", "keep_below": 0, "own_unit_from": 1},
    "matrices": {"name": "zero2", "partition": "parameter", **SMALL},
    "sharded-matrices": {"name": "zero3", "keep_below": 0, "partition": "parameter"},
}
EACH = pytest.mark.parametrize("strategy", list(STAGES.values()), ids=list(STAGES))
WORLDS = pytest.mark.parametrize(
    "size", [pytest.param(n, marks=pytest.mark.ranks(n), id=f"ranks{n}") for n in (1, 3)]
)


def start(strategy):
    return Accelerator(strategy=strategy, cpu=True)


def case(factory, batch=numbers, loss=squared_error):
    return Case(name=factory.__name__, factory=factory, batch=batch, loss=loss)


def train(twins, steps):
    for step in steps:
        twins.backward(step)
        twins.step()
    twins.check()


# --- the arithmetic ---


def random_specs(generator):
    shapes = [(), (1,), (0, 3), (1, 7), (5,), (3, 4), (13, 7), (64,), (2, 3, 5)]
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.complex64]
    specs = []
    for index in range(generator.randrange(1, 30)):
        owner = generator.choice(["embedding", "head.out", *(f"layers.{i}.mlp" for i in range(3))])
        dtype = generator.choice(dtypes)
        trainable = dtype is not torch.int8 and generator.random() < 0.7
        specs.append(TensorSpec(f"{owner}.p{index}", generator.choice(shapes), dtype, trainable))
    return specs


def random_sizes(generator):
    return Sizes(
        bucket_bytes=generator.choice([1, 64, 1000, 10**6]),
        cut=generator.choice(["flat", "whole"]),
        shard_from=generator.choice([None, 0, 1, 12, 100]),
        own_unit_from=generator.choice([1, 50, 10**6]),
    )


@pytest.mark.parametrize("seed", range(60))
def test_every_element_has_one_place_and_one_owner(seed):
    """Of any parameters, cut in any way, for any number of ranks."""
    generator = random.Random(seed)
    specs, sizes, size = random_specs(generator), random_sizes(generator), generator.randrange(1, 6)
    by_name = {spec.name: spec for spec in specs}
    units = cut_model(specs, Precision(), sizes, size)
    assert sorted(p.name for unit in units for p in unit.places) == sorted(by_name)
    for unit in units:
        for flat in unit.flats:
            members = [by_name[place.name] for place in flat.places]
            check_flat(flat, members, size)
            check_kind(flat, unit.sharded, members, sizes)
    keys = [u.key for u in units if u.sharded]
    assert len(keys) == len(set(keys)), "what is gathered together lies in two units"


def check_flat(flat, members, size):
    """Parameters of one kind side by side, every element owned by one rank."""
    assert {(m.dtype, m.trainable) for m in members} == {(flat.dtype, flat.trainable)}
    ends = [place.offset + place.numel for place in flat.places]
    assert [place.offset for place in flat.places] == [0, *ends[:-1]], "a gap or an overlap"
    assert [(p.shape, p.numel) for p in flat.places] == [(m.shape, m.numel) for m in members]
    pieces = sorted(piece for rank in range(size) for piece in flat.pieces(rank))
    starts = [start for start, _ in pieces]
    stops = [stop for _, stop in pieces]
    assert starts == [0, *stops[:-1]][: len(starts)], "ranks leave a gap"
    assert max(stops, default=0) == flat.numel == ends[-1]
    assert all(len(flat.pieces(rank)) <= 1 for rank in range(size)), "one range each"


def check_kind(flat, sharded, members, sizes):
    """What is cut evenly, what is not cut, what is divided, and how large a bucket may be."""
    ranks = range(len(flat.places[0].shares))
    owned = [flat.owned(rank) for rank in ranks]
    if sizes.cut == "flat":
        assert max(owned) - min(owned) <= 1
    for place, rank in itertools.product(flat.places, ranks):
        start, stop = place.shares[rank]
        assert sizes.cut == "flat" or stop - start in (0, place.numel), "a cut parameter"
    large = [sizes.shard_from is not None and m.numel >= max(sizes.shard_from, 1) for m in members]
    assert all(one is sharded for one in large)
    filled = [m for m in members if m.numel]
    assert sharded or flat.nbytes <= sizes.bucket_bytes or len(filled) == 1


def test_whole_parameters_are_spread():
    """No rank owns more than another by more than one parameter, over all units together."""
    specs = [TensorSpec("large", (100, 10), torch.float32, True)]
    specs += [TensorSpec(f"small{i}", (50, 10), torch.float32, True) for i in range(9)]
    units = cut_model(specs, Precision(), Sizes(2000, "whole"), 3)
    owned = [sum(f.owned(rank) for unit in units for f in unit.flats) for rank in range(3)]
    assert sum(owned) == 5500
    assert max(owned) - min(owned) <= 1000


# --- odd units ---


class Bits(nn.Module):
    """A block of a 0-d parameter and an empty one, and one of a single row."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.25, dtype=torch.float64))
        self.empty = nn.Parameter(torch.empty(0, WIDTH, dtype=torch.float64))

    def forward(self, x):
        return torch.sin(x * self.scale) + (x @ self.empty.T).sum()


class Row(nn.Module):
    def __init__(self):
        super().__init__()
        self.row = nn.Parameter(torch.randn(1, WIDTH, dtype=torch.float64))
        self.pair = nn.Parameter(torch.randn(2, dtype=torch.float64))

    def forward(self, x):
        return x * self.row + self.pair.prod()


class Void(nn.Module):
    """A block of nothing but an empty parameter."""

    def __init__(self):
        super().__init__()
        self.empty = nn.Parameter(torch.empty(WIDTH, 0, dtype=torch.float64))

    def forward(self, x):
        return x + (x @ self.empty).sum()


def tiny():
    """Blocks with fewer elements than ranks, around a layer larger than a bucket."""
    large = nn.Sequential(linear(WIDTH, 61), nn.Tanh(), linear(61, WIDTH))
    return nn.Sequential(Bits(), Row(), large, Bits(), Void(), linear(WIDTH, OUT))


class Blend(nn.Module):
    """A block of five dtypes, one of which does not train."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float32)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64))
        self.filter = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex128))
        self.coarse = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64))
        self.codes = nn.Parameter(
            torch.randint(-9, 9, (WIDTH, WIDTH), dtype=torch.int8), requires_grad=False
        )

    def forward(self, x):
        x = x + self.norm(x.float()).double() @ self.weight
        waves = torch.fft.fft(x) * self.filter
        waves = waves + (waves.to(torch.complex64) @ self.coarse).to(torch.complex128)
        return torch.tanh(torch.fft.ifft(waves).real + 0.01 * (x @ self.codes.double()))


def blends():
    return nn.Sequential(Blend(), Blend(), linear(WIDTH, OUT))


def trained_by_adamw(model):
    """Return an optimizer of what requires gradients: int8 may not be stepped."""
    return AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


MODELS = {"tiny": (case(tiny), momentum), "dtypes": (case(blends), trained_by_adamw)}


@pytest.mark.parametrize("model", list(MODELS))
@WORLDS
@EACH
def test_odd_units(strategy, size, model):
    """Steps are those of one process; every parameter keeps its dtype and shape."""
    accelerator = start(strategy)
    twins = Twins(accelerator, *MODELS[model])
    if model == "dtypes":
        twins.tolerance = 1e-5  # complex64 and fp32 are part of it
    train(twins, range(3))
    facts = [(p.dtype, p.shape, p.requires_grad) for p in twins.model.parameters()]
    assert facts == [(p.dtype, p.shape, p.requires_grad) for p in twins.twin.parameters()]
    accelerator.free_memory()


# --- ties across units ---


class TiedAcross(nn.Module):
    """An embedding tied to a head behind the blocks, two blocks with one matrix, a module twice."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN, dtype=torch.float64)
        self.blocks = nn.ModuleList(Block(HIDDEN, WIDTH) for _ in range(3))
        self.blocks[2].up.weight = self.blocks[0].up.weight
        self.blocks.append(self.blocks[1])
        self.head = nn.Linear(HIDDEN, VOCABULARY, dtype=torch.float64)
        self.head.weight = self.embedding.weight

    def forward(self, inputs):
        x = self.embedding(inputs).mean(1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@WORLDS
@EACH
def test_ties_across_units(strategy, size, tmp_path):
    """Gradients of all uses are added once; the tie outlives steps, saving and loading."""
    accelerator = start(strategy)
    twins = Twins(accelerator, case(TiedAcross, tokens, cross_entropy), adamw)
    before = weights(accelerator, twins.model)["embedding.weight"]
    train(twins, range(3))
    assert tied(twins.model)
    moved = weights(accelerator, twins.model)["embedding.weight"].sub(before).abs().amin(1)
    assert moved.gt(0).all(), "a row of the vocabulary never moved"
    accelerator.save_state(tmp_path / "state")
    accelerator.free_memory()
    accelerator = start(strategy)
    resumed = Twins(accelerator, case(TiedAcross, tokens, cross_entropy), adamw)
    accelerator.load_state(tmp_path / "state")
    resumed.twin, resumed.twin_optimizer = twins.twin, twins.twin_optimizer
    train(resumed, range(3, 5))
    assert tied(resumed.model)
    accelerator.free_memory()


def tied(model):
    blocks = model.blocks
    return (
        model.head.weight is model.embedding.weight
        and blocks[2].up.weight is blocks[0].up.weight
        and blocks[3] is blocks[1]
    )


class Untied(nn.Module):
    """Two layers that one ties after ``prepare``."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(linear(WIDTH, WIDTH) for _ in range(2))
        self.last = linear(WIDTH, OUT)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.last(x)


@WORLDS
@EACH
def test_a_tie_made_after_prepare(strategy, size):
    """A parameter in another's place is found where it lies; the one that is gone stays still."""
    accelerator = start(strategy)
    twins = Twins(accelerator, case(Untied))
    train(twins, range(2))
    for model in (twins.model, twins.twin):
        model.blocks[1].weight = model.blocks[0].weight
    train(twins, range(2, 4))
    accelerator.free_memory()


# --- gradients that come now and then ---

USES = {
    "all ranks": lambda step, rank, layer: step % 3 == layer % 3,
    "some ranks": lambda step, rank, layer: (step + rank) % 2 == layer % 2,
    "rank 0": lambda step, rank, layer: rank == 0 and step % 2 == layer % 2,
    "last rank, other order": lambda step, rank, layer: rank == layer or (step + layer) % 4 == 0,
}


class Seldom(nn.Module):
    """Four layers side by side; the call says which of them run, and in which order."""

    def __init__(self):
        super().__init__()
        for name in ("first", "second", "third", "fourth"):
            self.add_module(name, linear(WIDTH, WIDTH))
        self.last = linear(WIDTH, OUT)
        self.never = linear(WIDTH, WIDTH)

    def forward(self, x, chosen):
        layers = (self.first, self.second, self.third, self.fourth)
        for index in chosen:
            x = torch.tanh(layers[index](x))
        return self.last(x)


def seldom(use):
    def batch(step, rank):
        chosen = [layer for layer in range(4) if USES[use](step, rank, layer)]
        turned = step if use == "all ranks" else step + rank
        return numbers(step, rank), chosen[::-1] if turned % 2 else chosen

    def loss(model, batch):
        return F.mse_loss(model(batch[0].inputs, batch[1]), batch[0].targets)

    return Case(name=use, factory=Seldom, batch=batch, loss=loss)


def decaying(model):
    return AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def moments(state):
    return state["exp_avg"].abs().sum().item(), state["step"].item()


def fragment_states(twins):
    """Return sums over ranks of |moment| and the steps of every parameter, by name."""
    names = twins.accelerator.strategy_of(twins.model).names()
    found = {}
    for fragment, state in twins.optimizer.state.items():
        found[names[id(fragment)]] = moments(state)
    merged = {}
    for one in everyone(found):
        for name, (moment, step) in one.items():
            total, _ = merged.get(name, (0.0, 0))
            merged[name] = (total + moment, step)
    return merged


@pytest.mark.parametrize("use", list(USES))
@WORLDS
@EACH
def test_gradients_now_and_then(strategy, size, use):
    """Without one on any rank nothing moves, not even by momentum or decay; else zeros count."""
    if "own_unit_from" in strategy and use != "all ranks":
        strategy = {**strategy, "own_unit_from": 10**6}  # one unit: all ranks need the same ones
    accelerator = start(strategy)
    for window in (1, 2):
        twins = Twins(accelerator, seldom(use), decaying)
        for step in range(6):
            for part in range(window):
                twins.backward(window * step + part)
            twins.step()
        twins.check()
        theirs = {
            name: moments(twins.twin_optimizer.state[parameter])
            for name, parameter in twins.twin.named_parameters()
            if parameter in twins.twin_optimizer.state
        }
        ours = fragment_states(twins)
        assert ours.keys() == theirs.keys()
        for name, (moment, steps) in theirs.items():
            assert math.isclose(ours[name][0], moment, rel_tol=1e-9), name
            assert ours[name][1] == steps, name
    accelerator.free_memory()
