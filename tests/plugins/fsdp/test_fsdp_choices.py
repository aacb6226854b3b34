"""Units by class, size and function, trained; functions and options that contradict themselves.

Which parameter belongs to which unit is told by test_fsdp_units, without ranks.
"""

import contextlib
import functools
import sys
import types

import pytest
import torch.distributed as dist
from torch import nn

from drivetrain import Accelerator
from drivetrain.errors import ConfigError, RankMismatchError, UsageError
from drivetrain.testing.conformance.twins import Twins, adamw
from drivetrain.testing.models import Case, cross_entropy, tokens
from towers import Block, Gpt

FUNCTIONS = "fsdp_unit_functions"


GPT = Case(name="gpt", factory=functools.partial(Gpt, norm=True), batch=tokens, loss=cross_entropy)


def start(**options):
    return Accelerator(strategy={"name": "fsdp", **options}, cpu=True)


@contextlib.contextmanager
def function(choose):
    """Options that let a function choose, which strategies import by its name."""
    module = types.ModuleType(FUNCTIONS)
    module.choose = choose
    sys.modules[FUNCTIONS] = module
    try:
        yield {"units": "function", "unit_function": f"{FUNCTIONS}:choose"}
    finally:
        del sys.modules[FUNCTIONS]


def first_and_last(model):
    return [model.blocks[0], model.blocks[2], model.norm]


CHOICES = {
    "class": (
        {"units": "class", "unit_classes": "Block"},
        {"", *(f"blocks.{i}" for i in range(3))},
    ),
    "classes": (
        {"units": "class", "unit_classes": "Embedding, LayerNorm"},
        {"", "embedding", "norm"},
    ),
    "nested": (
        {"units": "class", "unit_classes": "Gpt,Block,Embedding"},
        {"", "embedding", *(f"blocks.{i}" for i in range(3))},
    ),
    "every layer": (
        {"units": "size", "unit_from": 1},
        {
            "embedding",
            "norm",
            *(f"blocks.{i}.{name}" for i in range(3) for name in ("up", "down")),
        },
    ),
    "blocks by size": (
        {"units": "size", "unit_from": 600},
        {"", *(f"blocks.{i}" for i in range(3))},
    ),
    "one": ({"units": "size", "unit_from": 10**9}, {""}),
}


def trains(options, keys, live_units):
    accelerator = start(live_units=live_units, **options)
    twins = Twins(accelerator, GPT, adamw)
    units = accelerator.strategy_of(twins.model).placement.units
    assert {unit.layout.key for unit in units} == keys
    for step in range(3):
        twins.backward(step)
        assert not [unit.label for unit in units if unit.live_bytes]
        twins.step()
    twins.check()
    accelerator.free_memory()


@pytest.mark.ranks(2)
def test_every_choice_trains_like_one_process():
    for options, keys in CHOICES.values():
        for live_units in (1, 3):
            trains(options, keys, live_units)
    with function(first_and_last) as options:
        trains(options, {"", "blocks.0", "blocks.2", "norm"}, 2)
    with function(lambda model: [model.head]) as options:
        trains(options, {"", "head"}, 2)  # the tied one is gathered for the embedding, too


@pytest.mark.ranks(2)
def test_functions_that_return_rubbish():
    """Every rank says what is wrong, and the next model is prepared as ever."""
    rubbish = {
        "one is inside of the other": lambda m: [m.blocks[0], m.blocks[0].up],
        "found 'embedding.weight' in embedding and in head": lambda m: [m.embedding, m.head],
        "found None": lambda m: None,
        "found an object of class str": lambda m: ["blocks.0"],
        "is not in this model": lambda m: [nn.Linear(2, 2)],
        "that nothing calls": lambda m: [m.blocks],
    }
    for found, choose in rubbish.items():
        with function(choose) as options:
            accelerator = start(**options)
            with pytest.raises(UsageError, match=found):
                Twins(accelerator, GPT)
            accelerator.free_memory()
    with function(first_and_last) as options:
        trains(options, {"", "blocks.0", "blocks.2", "norm"}, 2)


def other_units(model):
    return [model.blocks[1 if dist.get_rank() == 2 else 0]]


def none_on_one_rank(model):
    return [] if dist.get_rank() == 2 else [model.blocks[0]]


def rubbish_on_one_rank(model):
    return ["blocks.0"] if dist.get_rank() == 2 else [model.blocks[0]]


@pytest.mark.ranks(3)
def test_a_function_that_differs_between_ranks():
    """All ranks fail in ``prepare`` and say that units differ; none waits for the others."""
    same = "'blocks.0.up.weight' in blocks.0 on rank 0 and in the rest of the model on rank 2"
    for choose, found in (
        (other_units, same),
        (none_on_one_rank, same),
        (rubbish_on_one_rank, "that it failed on rank 2: .*an object of class str"),
    ):
        with function(choose) as options:
            accelerator = start(**options)
            own = choose is rubbish_on_one_rank and dist.get_rank() == 2
            expected = (UsageError, "of class str") if own else (RankMismatchError, found)
            with pytest.raises(expected[0], match=expected[1]):
                Twins(accelerator, GPT)
            accelerator.free_memory()
    turned = dist.get_rank() == 2
    with function(lambda m: [*m.blocks][:: -1 if turned else 1]) as options:
        trains(options, {"", *(f"blocks.{i}" for i in range(3))}, 2)  # the order means nothing


CONTRADICTIONS = {
    "unit_classes only with units: class, found units: auto": {"unit_classes": "Block"},
    "unit_function only with units: function, found units: size": {
        "units": "size",
        "unit_function": "a:b",
    },
    "shard_size only with sharding: hybrid, found sharding: grad": {
        "sharding": "grad",
        "shard_size": 2,
    },
    "expected unit_classes with units: class, found none": {"units": "class"},
    "expected unit_function with units: function, found none": {"units": "function"},
    "from 2 on in reshard_after_forward, found 1": {"reshard_after_forward": 1},
    "true or false with sharding: hybrid, found 2": {
        "sharding": "hybrid",
        "reshard_after_forward": 2,
    },
    "shard_size": {"sharding": "hybrid", "shard_size": -1},
    "live_units": {"live_units": 0},
    "unit_from": {"unit_from": 0},
}


def test_options_that_contradict_each_other():
    for found, options in CONTRADICTIONS.items():
        with pytest.raises(ConfigError, match=found) as caught:
            start(**options).prepare(Block())
        assert len(str(caught.value)) > len(found) + 20, "says what to do"


@pytest.mark.ranks(3)
def test_sizes_that_do_not_divide():
    for options in (
        {"sharding": "hybrid", "shard_size": 2},
        {"sharding": "hybrid", "shard_size": 6},
        {"reshard_after_forward": 2},
    ):
        with pytest.raises(ConfigError, match="divides the 3 ranks of the axis 'dp', found "):
            start(**options).prepare(Block())
