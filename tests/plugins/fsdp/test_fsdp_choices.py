"""Units by class, size and function, trained; functions and options that contradict themselves.

Which parameter belongs to which unit is told by test_fsdp_units, without ranks.
"""

import functools
import sys
import types

import pytest
import torch
import torch.distributed as dist
from torch import nn

from drivetrain.errors import ConfigError, RankMismatchError, UsageError
from drivetrain.testing.conformance.suite import Twins, adamw
from drivetrain.testing.models import WIDTH, Case, cross_entropy, tokens
from stacks import Block, Gpt, Residual
from zero_stages import start, train, units_of

GPT = Case(name="gpt", factory=functools.partial(Gpt, norm=True), batch=tokens, loss=cross_entropy)
BLOCKS = {f"blocks.{i}" for i in range(3)}
LAYERS = {f"{block}.{name}" for block in BLOCKS for name in ("up", "down")}


def fsdp(**options):
    return start({"name": "fsdp", **options})


def chosen_by(monkeypatch, choose):
    """Return options that let a function choose, which strategies import by its name."""
    module = types.ModuleType("fsdp_unit_functions")
    module.choose = choose
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return {"units": "function", "unit_function": f"{module.__name__}:choose"}


def check(options, keys, live_units=2):
    accelerator = fsdp(live_units=live_units, **options)
    twins = Twins(accelerator, GPT, adamw)
    assert {unit.layout.key for unit in units_of(twins)} == keys
    train(twins, range(3))


@pytest.mark.ranks(2)
def test_every_choice_trains_like_one_process(monkeypatch):
    by_class, by_size = {"units": "class"}, {"units": "size"}
    check({**by_class, "unit_classes": "Embedding, LayerNorm"}, {"", "embedding", "norm"}, 3)
    check({**by_class, "unit_classes": "Gpt,Block,Embedding"}, {"", "embedding", *BLOCKS}, 1)
    check({**by_size, "unit_from": 1}, {"embedding", "norm", *LAYERS}, 3)
    check({**by_size, "unit_from": 10**9}, {""}, 1)
    # The tied one is gathered for the embedding, too.
    check(chosen_by(monkeypatch, lambda model: [model.head]), {"", "head"})


@pytest.mark.ranks(2)
def test_a_class_that_only_another_stage_has():
    def prepared(classes):
        inside = {"name": "fsdp", "units": "class", "unit_classes": classes}
        accelerator = start({"name": "megatron", "pp": 2, "data_parallel": inside})
        model = nn.Sequential(Block(), Block(), Residual(WIDTH), Residual(WIDTH))
        model.dummy_inputs = {"input": torch.zeros(2, WIDTH)}
        accelerator.prepare(model, adamw(model))

    prepared("Block")
    there = r"found 'Nope'.*Block \(2\), Linear \(8\), Residual \(2\)"
    with pytest.raises(UsageError, match=there):
        prepared("Nope")


@pytest.mark.ranks(3)
def test_a_function_that_differs_between_ranks(monkeypatch):
    """All ranks fail in ``prepare`` and say that units differ; none waits for the others."""
    odd = dist.get_rank() == 2
    units = "'blocks.0.up.weight' in blocks.0 on rank 0 and in the rest of the model on rank 2"
    for theirs, found in (
        (lambda model: [model.blocks[1]], units),
        (lambda model: [], units),
        (lambda model: ["blocks.0"], "that it failed on rank 2: .*an object of class str"),
    ):
        options = chosen_by(monkeypatch, theirs if odd else lambda model: [model.blocks[0]])
        accelerator = fsdp(**options)
        own = odd and found is not units
        expected = (UsageError, "of class str") if own else (RankMismatchError, found)
        with pytest.raises(expected[0], match=expected[1]):
            Twins(accelerator, GPT)
    turned = chosen_by(monkeypatch, lambda model: [*model.blocks][:: -1 if odd else 1])
    check(turned, {"", *BLOCKS})  # the order means nothing


def test_options_that_contradict_each_other():
    for found, options in (
        ("unit_classes only with units: class, found units: auto", {"unit_classes": "Block"}),
        (
            "unit_function only with units: function, found units: size",
            {"units": "size", "unit_function": "a:b"},
        ),
        (
            "shard_size only with sharding: hybrid, found sharding: grad",
            {"sharding": "grad", "shard_size": 2},
        ),
        ("expected unit_classes with units: class, found none", {"units": "class"}),
        ("expected unit_function with units: function, found none", {"units": "function"}),
        ("from 2 on in reshard_after_forward, found 1", {"reshard_after_forward": 1}),
        (
            "true or false with sharding: hybrid, found 2",
            {"sharding": "hybrid", "reshard_after_forward": 2},
        ),
        ("shard_size", {"sharding": "hybrid", "shard_size": -1}),
        ("live_units", {"live_units": 0}),
        ("unit_from", {"unit_from": 0}),
    ):
        with pytest.raises(ConfigError, match=found) as caught:
            fsdp(**options).prepare(Block())
        assert len(str(caught.value)) > len(found) + 20, "says what to do"


@pytest.mark.ranks(3)
def test_sizes_that_do_not_divide():
    """Of groups, and of neighbors, which zero3 has too."""
    divides = "divides the 3 ranks of the axis 'dp', found "
    zero = {"name": "zero3", "keep_below": 0}
    for found, options in (
        (divides, {"sharding": "hybrid", "shard_size": 2}),
        (divides, {"sharding": "hybrid", "shard_size": 6}),
        (divides, {"reshard_after_forward": 2}),
        ("a number of", {**zero, "reshard_after_forward": 0}),
        ("a number of", {**zero, "reshard_after_forward": 1}),
        (divides, {**zero, "reshard_after_forward": 2}),
    ):
        with pytest.raises(ConfigError, match=found):
            fsdp(**options).prepare(Block())
