"""Which parameters FSDP gathers together: by blocks, class, size, or a function of the user's."""

import sys
import types

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from drivetrain import Accelerator
from drivetrain.cost import ModelSpec
from drivetrain.errors import UsageError
from drivetrain.parts.naming import clean_name
from drivetrain.sharding.hooks import users
from drivetrain_fsdp.units import UnitChoice, describe, unit_keys
from huggingface_models import ARCHITECTURES, gpt2


def keys_of(model, *, names_only=False, **choice):
    specs = ModelSpec.of(model).parameters
    keys = unit_keys(specs, UnitChoice(**choice), None if names_only else model)
    return dict(zip((clean_name(spec.name) for spec in specs), keys, strict=True))


def units_of(model, **choice):
    return set(keys_of(model, **choice).values()) - {""}


def both(model, **choice):
    """The units, which names alone must tell as well."""
    keys = keys_of(model, **choice)
    assert keys == keys_of(model, names_only=True, **choice)
    return keys


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Tied(nn.Module):
    """A GPT's outline: 4 x 8 tokens tied to the head, two blocks, a norm."""

    def __init__(self, blocks=2):
        super().__init__()
        self.tokens = nn.Embedding(40, 8)
        self.layers = nn.ModuleList([Block() for _ in range(blocks)])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 40, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x):
        x = self.tokens(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Experts(nn.Module):
    """Lists in lists, and experts of which one is a bare parameter."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"gate": nn.Linear(8, 2), "experts": nn.ModuleList([Block(), Block()])})
            for _ in range(2)
        )
        self.pairs = nn.ModuleList([nn.ModuleList([Block(), Block()]) for _ in range(2)])
        self.bank = nn.ParameterList([torch.zeros(8, 8), torch.zeros(8)])
        self.banks = nn.ModuleList([nn.ParameterList([torch.zeros(8, 8)])])


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


def test_a_tied_parameter_comes_once():
    keys = both(Tied(), size=320)
    assert keys["tokens.weight"] == "tokens", "40 x 8 = 320 elements"
    assert keys["norm.weight"] == keys["norm.bias"] == ""
    assert keys["layers.1.down.bias"] == "layers.1"
    assert len(keys) == 11
    assert both(Tied(), size=321)["tokens.weight"] == ""


def test_members_of_a_sequential_are_blocks():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    assert both(model) == {"0.weight": "0", "0.bias": "0", "2.0.weight": "2", "2.0.bias": "2"}


def test_what_nothing_calls_is_no_unit():
    """The lists' members are taken, and parameters in lists go to what reads them."""
    keys = keys_of(Experts(), size=1)
    assert keys["pairs.1.0.up.weight"] == "pairs.1.0", "pairs.1 is a list, without a forward"
    assert keys["layers.0.gate.weight"] == "layers.0.gate", "layers.0 is a dict"
    assert keys["layers.0.experts.1.up.weight"] == "layers.0.experts.1"
    assert {keys["bank.0"], keys["bank.1"], keys["banks.0.0"]} == {""}
    by_names = keys_of(Experts(), size=1, names_only=True)
    assert by_names["pairs.1.0.up.weight"] == "pairs.1", "could be a Sequential"
    assert {by_names["bank.0"], by_names["bank.1"], by_names["banks.0.0"]} == {""}


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.ParameterList([torch.zeros(8, 8), torch.zeros(2)])
        self.scale = nn.Parameter(torch.zeros(34))

    def forward(self):
        return self.table[0] * self.scale


def test_parameters_of_a_list_count_for_the_module_around_it():
    model = nn.ModuleDict({"reader": Reader()})
    for size, key in ((100, "reader"), (101, "")):
        assert set(both(model, size=size).values()) == {key}


def test_layers_that_are_read_and_not_called_belong_to_their_reader():
    """Attention reads its projection's weight; a parametrized layer calls its parametrizations."""
    model = nn.Module()
    model.attention = nn.MultiheadAttention(8, 2, kdim=4)
    model.normed = parametrizations.weight_norm(nn.Linear(8, 8))
    model.forward = lambda: None
    for how, size in (("auto", 1), ("size", 1)):
        keys = both(model, how=how, size=size)
        assert keys["attention.out_proj.weight"] == "attention"
        assert set(keys.values()) == {"attention", "normed"}
    assert units_of(model, how="class", classes=("Linear",)) == {"normed"}


# --- class ---


def test_innermost_modules_and_descendants_of_a_class_count():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, nn.LayerNorm(8), False)
    keys = keys_of(model, how="class", classes=("TransformerEncoderLayer", "MultiheadAttention"))
    assert keys["layers.1.self_attn.out_proj.bias"] == "layers.1.self_attn"
    assert keys["layers.1.linear1.weight"] == "layers.1"
    assert keys["norm.weight"] == ""
    wide = type("Wide", (Block,), {})
    model = nn.ModuleDict({"a": Block(), "b": wide(), "c": nn.Linear(8, 8)})
    assert units_of(model, how="class", classes=("Block",)) == {"a", "b"}
    assert units_of(model, how="class", classes=("Wide",)) == {"b"}
    keys = keys_of(Tied(), how="class", classes=("Block",), size=1)
    assert keys["tokens.weight"] == keys["norm.weight"] == "", "large, outside of the classes"
    for how in ("class", "function"):
        with pytest.raises(UsageError, match=f"choose units by {how}, found sizes only"):
            keys_of(Tied(), names_only=True, how=how, classes=("Block",), function="a:b")


def test_a_class_that_the_model_does_not_have():
    with pytest.raises(UsageError) as caught:
        keys_of(Tied(3), how="class", classes=("Block", "block"))
    assert "found 'block'" in str(caught.value)
    assert "of each: Block (3), Tied (1), Embedding (1), Linear (6), LayerNorm (1)" in str(
        caught.value
    )
    with pytest.raises(UsageError, match="found 'ModuleList'"):
        keys_of(Tied(), how="class", classes=("ModuleList",))
    with pytest.raises(UsageError, match="found ''"):
        keys_of(Tied(), how="class")


# --- size ---


def test_modules_become_units_from_the_inside_out():
    model = Tied()  # a block: two layers of 72
    layers = {f"layers.{i}.{layer}" for i in range(2) for layer in ("up", "down")}
    for size, expected in (
        (72, {"tokens", *layers}),
        (144, {"tokens", "layers.0", "layers.1"}),
        (145, {"tokens"}),  # lists are no units
        (10**9, set()),
    ):
        assert set(both(model, how="size", size=size).values()) == {*expected, ""}
    inner = nn.ModuleDict({"outer": Block()})
    inner.outer.up = nn.Linear(8, 100)  # what it took does not count again
    assert set(both(inner, how="size", size=100).values()) == {"outer.up", ""}


# --- function ---


def test_a_function_chooses_modules(monkeypatch):
    keys = keys_of(Tied(), **made(monkeypatch, lambda m: [*m.layers, m.layers[0], m.head]))
    assert set(keys.values()) == {"layers.0", "layers.1", "head", ""}
    assert keys["layers.1.down.bias"] == "layers.1"
    assert keys["tokens.weight"] == "head", "it holds the tied parameter"
    monkeypatch.setattr(sys.modules["__main__"], "units", lambda m: m.layers, raising=False)
    assert units_of(Tied(), how="function", function="__main__:units") == {"layers.0", "layers.1"}


def test_units_that_share_a_parameter_are_refused(monkeypatch):
    inner = "one is inside of the other; return the inner ones only"
    for choose, found, advice in (
        (lambda m: [m.tokens, m.head], "'tokens.weight' in tokens and in head: they share it", ""),
        (lambda m: [m.tokens, m.head], "", "leave at least one of them out"),
        (lambda m: [m.layers[0], m.layers[0].up], "'layers.0.up.weight' in layers.0 and in", inner),
        (lambda m: [m.layers[0].up, m], "in layers.0.up and in the model", inner),
    ):
        with pytest.raises(UsageError) as caught:
            keys_of(Tied(), **made(monkeypatch, choose))
        assert found in str(caught.value)
        assert advice in str(caught.value)


def test_a_function_that_returns_something_else(monkeypatch):
    for returned, found in (
        (None, "found None; return a list"),
        (Block(), "found an object of class Block; return a list"),
        (["layers.0"], "found an object of class str; return modules"),
        ([Block()], "class Block that is not in this model"),
    ):
        with pytest.raises(UsageError, match=f"made_units:choose to return modules .*{found}"):
            keys_of(Tied(), **made(monkeypatch, lambda model, returned=returned: returned))
    for path in ("", "choose", "made_units:", ":choose", "a b:c", "a:b.c"):
        with pytest.raises(UsageError, match="as 'package.module:name', found"):
            keys_of(Tied(), how="function", function=path)


def test_a_function_that_returns_what_nothing_calls(monkeypatch):
    choice = made(monkeypatch, lambda model: [model.layers])
    with pytest.raises(UsageError, match="'layers', an object of class ModuleList that nothing"):
        keys_of(Tied(), **choice)


def test_a_function_that_is_not_there(monkeypatch):
    made(monkeypatch, lambda model: [])
    for path, found in (
        ("no_such_package.units:choose", "No module named 'no_such_package'; install it"),
        ("made_units:chose", "'chose' in made_units, found nothing .* 'choose' is the nearest"),
        ("made_units:number", "found an object of class int"),
    ):
        with pytest.raises(UsageError, match=found):
            keys_of(Tied(), how="function", function=path)


# --- compiled models ---


@pytest.mark.parametrize("compiled", ["block", "whole"])
def test_compiled_models_have_the_same_units(monkeypatch, compiled):
    model = Tied()
    if compiled == "block":
        model.layers[0] = torch.compile(model.layers[0], backend="eager")
    else:
        model = torch.compile(model, backend="eager")
    chosen = made(monkeypatch, lambda model: model.layers)
    for choice in (
        {"size": 300},
        {"how": "class", "classes": ("Block", "Embedding")},
        {"how": "size", "size": 144},
    ):
        assert keys_of(model, **choice) == keys_of(Tied(), **choice)
    assert keys_of(model, **chosen) == keys_of(Tied(), **chosen)
    if compiled == "block":  # its inside and its outside are one
        twice = made(monkeypatch, lambda m: [m.layers[0], m.layers[0]._orig_mod])
        assert units_of(model, **twice) == {"layers.0"}


# --- the modules that gather ---


def gathering(model, **choice):
    """Return the names of modules by the key of the unit that their hooks gather."""
    accelerator = Accelerator(strategy={"name": "fsdp", **choice}, cpu=True)
    model = accelerator.prepare(model)
    names = {id(module): name for name, module in model.named_modules()}
    found = {}
    for module, units in users(model, accelerator.strategy_of(model).placement.units).items():
        for unit in units:
            found.setdefault(unit.layout.key, []).append(names[id(module)])
    accelerator.free_memory()
    return found


def test_a_tied_head_gathers_the_embedding():
    found = gathering(gpt2(), unit_from=4000)
    assert found.pop("transformer.wte") == ["transformer.wte", "lm_head"]
    assert all(modules == [key] for key, modules in found.items())


def test_ties_between_blocks_and_inside_of_one():
    model = Tied(3)
    model.layers[0].down.weight = model.layers[0].up.weight
    model.layers[2].up.weight = model.layers[0].up.weight
    model.layers[2].down.bias = model.layers[0].up.bias
    found = gathering(model, unit_from=10**9)
    assert found["layers.0"] == ["layers.0", "layers.2.up", "layers.2.down"]
    assert set(found) == {"layers.0", "layers.1", "layers.2"}, "the rest has no hooks"


# --- the line for the log ---


def text_of(model, **choice):
    specs = ModelSpec.of(model).parameters
    return describe(unit_keys(specs, UnitChoice(**choice), model), specs)


def test_the_line_for_the_log():
    model = Tied()
    assert text_of(model, size=300) == (
        "3 units, the largest tokens with 320 elements; 16 in the rest of the model"
    )
    model.tokens.requires_grad_(False)
    model.layers.requires_grad_(False)
    assert text_of(model, size=300).endswith("; 97 % frozen, which get no gradients")
    assert text_of(model, size=400, how="size") == (
        "one unit, the whole model with 624 elements; 97 % frozen, which get no gradients"
    )


def test_the_line_for_the_log_of_large_models():
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
