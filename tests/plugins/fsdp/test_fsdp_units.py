"""Which parameters FSDP gathers together: by blocks, class, size, or a function of the user's."""

import sys
import types

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from drivetrain.cost import ModelSpec
from drivetrain.errors import UsageError
from drivetrain.model.modules import clean_name
from drivetrain.parallel.gather import users
from drivetrain_fsdp.fsdp import describe, unit_keys
from drivetrain_fsdp.options import FsdpConfig
from huggingface_models import ARCHITECTURES, gpt2
from stacks import Parts, Residual, Stack
from zero_stages import start


def config_of(how="auto", classes=(), size=1_000_000, function=""):
    names = ", ".join(classes)
    return FsdpConfig(units=how, unit_classes=names, unit_from=size, unit_function=function)


def keys_of(model, *, names_only=False, **choice):
    specs = ModelSpec.of(model).parameters
    keys = unit_keys(specs, config_of(**choice), None if names_only else model)
    return dict(zip((clean_name(spec.name) for spec in specs), keys, strict=True))


def units_of(model, **choice):
    return set(keys_of(model, **choice).values()) - {""}


def both(model, **choice):
    """The units, which names alone must tell as well."""
    keys = keys_of(model, **choice)
    assert keys == keys_of(model, names_only=True, **choice)
    return keys


def block():
    return Residual(8, 8)


def tied(blocks=2):
    """Return a GPT: 40 x 8 tokens tied to the head, blocks of two layers of 72, a norm."""
    model = Stack(
        [block() for _ in range(blocks)],
        first=nn.Embedding(40, 8),
        last=nn.Linear(8, 40, bias=False),
        tied=True,
    )
    model.norm = nn.LayerNorm(8)
    return model


def experts():
    """Return lists in lists, and experts of which one is a bare parameter."""

    def layer():
        return nn.ModuleDict(
            {"gate": nn.Linear(8, 2), "experts": nn.ModuleList([block(), block()])}
        )

    return Parts(
        layers=nn.ModuleList([layer(), layer()]),
        pairs=nn.ModuleList([nn.ModuleList([block(), block()]) for _ in range(2)]),
        bank=nn.ParameterList([torch.zeros(8, 8), torch.zeros(8)]),
        banks=nn.ModuleList([nn.ParameterList([torch.zeros(8, 8)])]),
    )


def made(monkeypatch, function):
    """The path of a function in a module that exists during this test only."""
    module = types.ModuleType("made_units")
    module.choose = function
    module.number = 3
    monkeypatch.setitem(sys.modules, "made_units", module)
    return {"how": "function", "function": "made_units:choose"}


# --- auto ---


def test_blocks_and_large_layers_of_real_models():
    """The same of every architecture: its layers, and its embedding, whatever they are called."""
    for name, make in ARCHITECTURES.items():
        model = make(3)
        keys = both(model, size=4000)  # words x width = 4656
        blocks = {key for key in keys.values() if key.rpartition(".")[2].isdecimal()}
        assert len(blocks) == 3, name
        for parameter, key in keys.items():
            around = [block for block in blocks if parameter.startswith(f"{block}.")]
            assert key == around[0] if around else key not in blocks
        outside = {key for key in keys.values() if key} - blocks
        assert outside, f"{name}: no embedding"
        for key in outside:
            assert sum(p.numel() for p in model.get_submodule(key).parameters()) >= 4000


def test_ties_and_sequentials():
    keys = both(tied(), size=320)
    assert keys["first.weight"] == "first", "40 x 8 = 320 elements; once, for both ends"
    assert keys["norm.weight"] == keys["norm.bias"] == ""
    assert keys["blocks.1.down.bias"] == "blocks.1"
    assert len(keys) == 11
    assert both(tied(), size=321)["first.weight"] == ""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    assert both(model) == {"0.weight": "0", "0.bias": "0", "2.0.weight": "2", "2.0.bias": "2"}


def reader():
    table = nn.ParameterList([torch.zeros(8, 8), torch.zeros(2)])
    scale = nn.Parameter(torch.zeros(34))
    return Parts(lambda m: m.table[0] * m.scale, table=table, scale=scale)


def test_what_nothing_calls_is_no_unit():
    """Lists' members are taken; parameters in lists, and layers that are read, go to the reader."""
    keys = keys_of(experts(), size=1)
    assert keys["pairs.1.0.up.weight"] == "pairs.1.0", "pairs.1 is a list, without a forward"
    assert keys["layers.0.gate.weight"] == "layers.0.gate", "layers.0 is a dict"
    assert keys["layers.0.experts.1.up.weight"] == "layers.0.experts.1"
    assert {keys["bank.0"], keys["bank.1"], keys["banks.0.0"]} == {""}
    by_names = keys_of(experts(), size=1, names_only=True)
    assert by_names["pairs.1.0.up.weight"] == "pairs.1", "could be a Sequential"
    assert {by_names["bank.0"], by_names["bank.1"], by_names["banks.0.0"]} == {""}
    for size, key in ((100, "reader"), (101, "")):
        assert set(both(nn.ModuleDict({"reader": reader()}), size=size).values()) == {key}
    model = nn.Module()  # attention reads its projection, a parametrized layer calls its parts
    model.attention = nn.MultiheadAttention(8, 2, kdim=4)
    model.normed = parametrizations.weight_norm(nn.Linear(8, 8))
    model.forward = lambda: None
    for how in ("auto", "size"):
        keys = both(model, how=how, size=1)
        assert keys["attention.out_proj.weight"] == "attention"
        assert set(keys.values()) == {"attention", "normed"}
    assert units_of(model, how="class", classes=("Linear",)) == {"normed"}


# --- class and size ---


def test_innermost_modules_and_descendants_of_a_class_count():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, nn.LayerNorm(8), False)
    keys = keys_of(model, how="class", classes=("TransformerEncoderLayer", "MultiheadAttention"))
    assert keys["layers.1.self_attn.out_proj.bias"] == "layers.1.self_attn"
    assert keys["layers.1.linear1.weight"] == "layers.1"
    assert keys["norm.weight"] == ""
    wide = type("Wide", (Residual,), {})
    model = nn.ModuleDict({"a": block(), "b": wide(8), "c": nn.Linear(8, 8)})
    assert units_of(model, how="class", classes=("Residual",)) == {"a", "b"}
    assert units_of(model, how="class", classes=("Wide",)) == {"b"}
    keys = keys_of(tied(), how="class", classes=("Residual",), size=1)
    assert keys["first.weight"] == keys["norm.weight"] == "", "large, outside of the classes"
    for how in ("class", "function"):
        with pytest.raises(UsageError, match=f"choose units by {how}, found sizes only"):
            keys_of(tied(), names_only=True, how=how, classes=("Residual",), function="a:b")
    with pytest.raises(UsageError, match="found 'residual'") as caught:
        keys_of(tied(3), how="class", classes=("Residual", "residual"))
    assert "of each: Residual (3), Stack (1), Embedding (1)" in str(caught.value)
    for classes in (("ModuleList",), ()):
        with pytest.raises(UsageError, match=f"found '{''.join(classes)}'"):
            keys_of(tied(), how="class", classes=classes)


def test_modules_become_units_from_the_inside_out():
    layers = {f"blocks.{i}.{layer}" for i in range(2) for layer in ("up", "down")}
    for size, expected in (
        (72, {"first", *layers}),
        (144, {"first", "blocks.0", "blocks.1"}),
        (145, {"first"}),  # lists are no units
        (10**9, set()),
    ):
        assert set(both(tied(), how="size", size=size).values()) == {*expected, ""}
    inner = nn.ModuleDict({"outer": block()})
    inner.outer.up = nn.Linear(8, 100)  # what it took does not count again
    assert set(both(inner, how="size", size=100).values()) == {"outer.up", ""}


# --- function ---


def test_a_function_chooses_modules(monkeypatch):
    keys = keys_of(tied(), **made(monkeypatch, lambda m: [*m.blocks, m.blocks[0], m.last]))
    assert set(keys.values()) == {"blocks.0", "blocks.1", "last", ""}
    assert keys["blocks.1.down.bias"] == "blocks.1"
    assert keys["first.weight"] == "last", "it holds the tied parameter"
    monkeypatch.setattr(sys.modules["__main__"], "units", lambda m: m.blocks, raising=False)
    assert units_of(tied(), how="function", function="__main__:units") == {"blocks.0", "blocks.1"}


def test_functions_that_are_refused(monkeypatch):
    """Units that share a parameter, no modules of the model, nothing at all, and no function."""
    inner = "one is inside of the other; return the inner ones only"
    for choose, found, advice in (
        (lambda m: [m.first, m.last], "'first.weight' in first and in last: they share it", ""),
        (lambda m: [m.first, m.last], "", "leave at least one of them out"),
        (lambda m: [m.blocks[0], m.blocks[0].up], "'blocks.0.up.weight' in blocks.0 and in", inner),
        (lambda m: [m.blocks[0].up, m], "in blocks.0.up and in the model", inner),
        (lambda m: None, "made_units:choose to return modules", "found None; return a list"),
        (lambda m: block(), "", "found an object of class Residual; return a list"),
        (lambda m: ["blocks.0"], "", "found an object of class str; return modules"),
        (lambda m: [block()], "", "class Residual that is not in this model"),
        (lambda m: [m.blocks], "", "'blocks', an object of class ModuleList that nothing"),
    ):
        with pytest.raises(UsageError) as caught:
            keys_of(tied(), **made(monkeypatch, choose))
        assert found in str(caught.value)
        assert advice in str(caught.value)
    for path, found in (
        *((path, "as 'package.module:name', found") for path in ("", "a", "a:", ":a", "a b:c")),
        ("a:b.c", "as 'package.module:name', found"),
        ("no_such_package.units:choose", "No module named 'no_such_package'; install it"),
        ("made_units:chose", "'chose' in made_units, found nothing .* 'choose' is the nearest"),
        ("made_units:number", "found an object of class int"),
    ):
        with pytest.raises(UsageError, match=found):
            keys_of(tied(), how="function", function=path)


# --- compiled models, and the modules that gather ---


@pytest.mark.parametrize("compiled", ["block", "whole"])
def test_compiled_models_have_the_same_units(monkeypatch, compiled):
    model = tied()
    if compiled == "block":
        model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    else:
        model = torch.compile(model, backend="eager")
    for choice in (
        {"size": 300},
        {"how": "class", "classes": ("Residual", "Embedding")},
        {"how": "size", "size": 144},
        made(monkeypatch, lambda model: model.blocks),
    ):
        assert keys_of(model, **choice) == keys_of(tied(), **choice)
    if compiled == "block":  # its inside and its outside are one
        twice = made(monkeypatch, lambda m: [m.blocks[0], m.blocks[0]._orig_mod])
        assert units_of(model, **twice) == {"blocks.0"}


def gathering(model, **choice):
    """Return the names of modules by the key of the unit that their hooks gather."""
    accelerator = start({"name": "fsdp", **choice})
    model = accelerator.prepare(model)
    names = {id(module): name for name, module in model.named_modules()}
    found = {}
    for module, units in users(model, accelerator.strategy_of(model).placement.units).items():
        for unit in units:
            found.setdefault(unit.layout.key, []).append(names[id(module)])
    accelerator.free_memory()
    return found


def test_ties_decide_which_modules_gather():
    """A tied head gathers the embedding; others are between blocks, and inside of one."""
    found = gathering(gpt2(), unit_from=4000)
    assert found.pop("transformer.wte") == ["transformer.wte", "lm_head"]
    assert all(modules == [key] for key, modules in found.items())
    model = tied(3)
    model.blocks[0].down.weight = model.blocks[0].up.weight
    model.blocks[2].up.weight = model.blocks[0].up.weight
    model.blocks[2].down.bias = model.blocks[0].up.bias
    found = gathering(model, unit_from=10**9)
    assert found["blocks.0"] == ["blocks.0", "blocks.2.up", "blocks.2.down"]
    assert set(found) == {"blocks.0", "blocks.1", "blocks.2"}, "the rest has no hooks"


# --- the line for the log ---


def text_of(model, **choice):
    specs = ModelSpec.of(model).parameters
    return describe(unit_keys(specs, config_of(**choice), model), specs)


def test_the_line_for_the_log():
    model = tied()
    expected = "3 units, the largest first with 320 elements; 16 in the rest of the model"
    assert text_of(model, size=300) == expected
    model.first.requires_grad_(False)
    model.blocks.requires_grad_(False)
    assert text_of(model, size=300) == f"{expected}; 97 % frozen, which get no gradients"
    assert text_of(model, size=400, how="size") == (
        "one unit, the whole model with 624 elements; 97 % frozen, which get no gradients"
    )
    with torch.device("meta"):
        model = nn.ModuleDict({"wte": nn.Embedding(50257, 768), "norm": nn.LayerNorm(768)})
        huge = nn.ModuleDict({"table": nn.Embedding(10**7, 150)})
    assert text_of(model, size=10**6) == (
        "1 unit, the largest wte with 38.6 M elements; 1,536 in the rest of the model"
    )
    assert "table with 1.5 G elements; 0 in the rest" in text_of(huge)
    for trained, percent in (("wte", 1), ("norm", 99), ("", 100)):
        model.requires_grad_(False)
        if trained:
            model[trained].requires_grad_(True)
        assert f"; {percent} % frozen" in text_of(model)
