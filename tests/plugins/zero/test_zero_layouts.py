"""Where parameters lie under ZeRO: the arithmetic of units, late ties, gradients now and then."""

import itertools
import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import AdamW

from drivetrain.cost import TensorSpec
from drivetrain.runtime.precision import Precision
from drivetrain.testing.conformance.twins import Twins, everyone
from drivetrain.testing.models import OUT, WIDTH, Case, linear, numbers
from drivetrain_zero.units import Sizes, cut_model
from towers import Tower
from zero_stages import each, start, train

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


def test_every_parameter_has_one_place():
    """Of any kind, cut in any way, for any number of ranks: tests/core/sharding has the shares."""
    for seed in range(60):
        generator = random.Random(seed)
        specs, sizes = random_specs(generator), random_sizes(generator)
        size = generator.randrange(1, 6)
        by_name = {spec.name: spec for spec in specs}
        units = cut_model(specs, Precision(), sizes, size)
        assert sorted(p.name for unit in units for p in unit.places) == sorted(by_name)
        for unit in units:
            for flat in unit.flats:
                members = [by_name[place.name] for place in flat.places]
                assert {(m.dtype, m.trainable) for m in members} == {(flat.dtype, flat.trainable)}
                assert sum(flat.owned(rank) for rank in range(size)) == flat.numel
                check_kind(flat, unit.sharded, members, sizes)
        keys = [u.key for u in units if u.sharded]
        assert len(keys) == len(set(keys)), "what is gathered together lies in two units"


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


@each("sharded", "zero1")
@pytest.mark.ranks(2)
def test_a_tie_made_after_prepare(strategy):
    """A parameter in another's place is found where it lies; the one that is gone stays still."""
    accelerator = start(strategy)
    twins = Twins(accelerator, Case("untied", lambda: Tower(2)))
    train(twins, range(2))
    for model in (twins.model, twins.twin):
        model.blocks[1].up.weight = model.blocks[0].up.weight
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
        self.layers = nn.ModuleList(linear(WIDTH, WIDTH) for _ in range(4))
        self.last, self.never = linear(WIDTH, OUT), linear(WIDTH, WIDTH)

    def forward(self, x, chosen):
        for index in chosen:
            x = torch.tanh(self.layers[index](x))
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


def sums_of_moments(twins):
    """Return sums over ranks of |moment| and the steps of every parameter, by name."""
    names = twins.accelerator.strategy_of(twins.model).names()
    found = {names[id(held)]: moments(state) for held, state in twins.optimizer.state.items()}
    merged = {}
    for name, (moment, step) in (item for one in everyone(found) for item in one.items()):
        merged[name] = merged.get(name, (0.0, 0))[0] + moment, step
    return merged


@each("zero1", "matrices", "zero3")
@pytest.mark.ranks(3)
def test_gradients_now_and_then(strategy):
    """Without one on any rank nothing moves, not even by momentum or decay; else zeros count."""
    for use, window in zip(USES, (1, 2, 1, 2), strict=True):
        accelerator = start(strategy)
        twins = Twins(accelerator, seldom(use), decaying)
        for step in range(6):
            for part in range(window):
                twins.backward(window * step + part)
            twins.step()
        twins.check()
        states = twins.twin_optimizer.state
        theirs = {n: moments(states[p]) for n, p in twins.twin.named_parameters() if p in states}
        ours = sums_of_moments(twins)
        assert ours.keys() == theirs.keys()
        for name, (moment, steps) in theirs.items():
            assert math.isclose(ours[name][0], moment, rel_tol=1e-9), name
            assert ours[name][1] == steps, name
        accelerator.free_memory()
