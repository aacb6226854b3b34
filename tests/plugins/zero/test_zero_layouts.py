"""Where parameters lie under ZeRO: the arithmetic of units, and ties that are made late."""

import itertools
import math
import random

import pytest
import torch

from drivetrain.cost import TensorSpec
from drivetrain.hardware.sizes import MIB
from drivetrain.runtime.precision import Precision
from drivetrain.testing.conformance.suite import Twins
from drivetrain.testing.models import Case
from drivetrain_zero.options import Zero1Config, Zero3Config
from drivetrain_zero.zero import cut_model
from stacks import Tower
from zero_stages import each, start, train


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


def random_config(generator):
    whole = {
        "bucket_mib": generator.choice([1, 64, 1000, 10**6]) / MIB,
        "partition": generator.choice(["flat", "parameter"]),
    }
    least, alone = generator.choice([None, 0, 1, 12, 100]), generator.choice([1, 50, 10**6])
    if least is None:
        return Zero1Config(**whole)
    return Zero3Config(**whole, keep_below=least, own_unit_from=alone)


def test_every_parameter_has_one_place_in_units_as_backward_reaches_them():
    """Of any kind, cut in any way, for any number of ranks: tests/core/parallel has the shares."""
    for seed in range(60):
        generator = random.Random(seed)
        specs, config = random_specs(generator), random_config(generator)
        size = generator.randrange(1, 6)
        by_name = {spec.name: spec for spec in specs}
        units = cut_model(specs, Precision(), config, size)
        assert sorted(p.name for unit in units for p in unit.places) == sorted(by_name)
        for unit in units:
            for flat in unit.flats:
                members = [by_name[place.name] for place in flat.places]
                assert {(m.dtype, m.trainable) for m in members} == {(flat.dtype, flat.trainable)}
                assert sum(flat.owned(rank) for rank in range(size)) == flat.numel
                check_kind(flat, unit.sharded, members, config)
        order = list(by_name)
        first = [min(order.index(place.name) for place in unit.places) for unit in units]
        assert first == sorted(first, reverse=True)
        keys = [u.key for u in units if u.sharded]
        assert len(keys) == len(set(keys)), "what is gathered together lies in two units"


def check_kind(flat, sharded, members, config):
    """What is cut evenly, what is not cut, what is divided, and how large a bucket may be."""
    ranks = range(len(flat.places[0].shares))
    owned = [flat.owned(rank) for rank in ranks]
    if config.cut == "flat":
        assert max(owned) - min(owned) <= 1
    for place, rank in itertools.product(flat.places, ranks):
        start, stop = place.shares[rank]
        assert config.cut == "flat" or stop - start in (0, place.numel), "a cut parameter"
    least = max(config.keep_below, 1) if config.divides_parameters else math.inf
    assert all((m.numel >= least) is sharded for m in members)
    filled = [m for m in members if m.numel]
    assert sharded or flat.nbytes <= config.bucket_bytes or len(filled) == 1


def test_whole_parameters_are_spread():
    """No rank owns more than another by more than one parameter, over all units together."""
    specs = [TensorSpec("large", (100, 10), torch.float32, True)]
    specs += [TensorSpec(f"small{i}", (50, 10), torch.float32, True) for i in range(9)]
    units = cut_model(
        specs, Precision(), Zero1Config(bucket_mib=2000 / MIB, partition="parameter"), 3
    )
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
