"""Which elements each rank owns of a unit, and how often units are gathered: arithmetic alone."""

import itertools
import random
from collections import Counter

import pytest
import torch
from torch import nn

from drivetrain.cost import ModelSpec, TensorSpec
from drivetrain.runtime.precision import Precision
from drivetrain.sharding.estimate import gathers_again, usual_uses
from drivetrain.sharding.layout import (
    ROOT,
    UnitLayout,
    arrange,
    arrange_whole,
    block_of,
    is_block,
    offsets_in_bytes,
)

PLAIN = Precision.of("no")
SHAPES = [(), (1,), (0,), (0, 3), (3, 0), (7,), (5, 4), (2, 3, 5), (1, 9), (64,)]


def spec(name, shape, *, outer_dim=0, trainable=True, dtype=torch.float32):
    return TensorSpec(name, tuple(shape), dtype, trainable, outer_dim)


def some_specs(seed):
    """Return parameters of random shapes in random orders of memory."""
    chance = random.Random(seed)
    specs = []
    for index in range(chance.randint(1, 6)):
        shape = chance.choice([*SHAPES, tuple(chance.choices(range(7), k=chance.randint(1, 4)))])
        outer_dim = chance.randrange(len(shape)) if shape else 0
        specs.append(spec(f"p{index}", shape, outer_dim=outer_dim))
    return specs


def layout_of(cut, specs, size):
    if cut == "whole":
        return arrange_whole(specs, PLAIN, [0] * size)
    return arrange(specs, PLAIN, size, cut)


@pytest.mark.parametrize("cut", ["flat", "whole", "rows"])
def test_every_element_is_owned_once(cut):
    """In pieces that are as few as can be."""
    for seed in range(100):
        specs, size = some_specs(seed), 1 + seed % 5
        layout = layout_of(cut, specs, size)
        assert sorted(place.name for place in layout.places) == [one.name for one in specs]
        assert layout.numel == sum(one.numel for one in specs)
        edge = 0
        for place in layout.places:  # side by side, each cut from its beginning to its end
            assert place.offset == edge
            edge += place.numel
            owners = Counter(i for share in place.shares for i in range(*share))
            assert owners == Counter(range(place.numel)), (seed, place)
            assert len(place.shares) == size
        for rank in range(size):
            owned = [
                place.offset + element
                for place in layout.places
                for element in range(*place.shares[rank])
            ]
            pieces = layout.pieces(rank)
            assert layout.owned(rank) == len(owned)
            assert [element for piece in pieces for element in range(*piece)] == owned
            assert all(start < stop for start, stop in pieces)
            for (_, stop), (start, _) in itertools.pairwise(pieces):
                assert stop < start, "neighbors are one piece"
            assert cut == "rows" or len(pieces) <= 1
        if cut == "flat":
            owned = [layout.owned(rank) for rank in range(size)]
            assert max(owned) - min(owned) <= 1, owned


def test_rows_are_those_of_chunk():
    """Along the dim that is outermost in memory, the last ranks have fewer rows or none."""
    for seed in range(100):
        specs, size = some_specs(seed), 1 + seed % 6
        for place in arrange(specs, PLAIN, size, "rows").places:
            if not place.shape:
                assert place.shares == ((0, 1), *[(1, 1)] * (size - 1))
                continue
            indices = torch.arange(place.shape[place.outer_dim])
            chunks = (
                [chunk.tolist() for chunk in torch.chunk(indices, size)] if len(indices) else []
            )
            chunks += [[]] * (size - len(chunks))
            rows = [list(range(*place.rows(rank))) for rank in range(size)]
            if place.numel:
                assert rows == chunks, place
            # Rows lie one after the other in memory.
            width = place.numel // max(place.shape[place.outer_dim], 1)
            for rank in range(size):
                if place.numel:
                    assert place.shares[rank] == tuple(row * width for row in place.rows(rank))


def test_whole_parameters_go_to_those_with_the_least():
    loads = [5, 0, 0]
    layout = arrange_whole([spec("a", (2,)), spec("b", (4,)), spec("c", (3,))], PLAIN, loads)
    assert loads == [5, 4, 5]
    assert [layout.owned(rank) for rank in range(3)] == [0, 4, 5]
    assert [place.name for place in layout.places] == ["b", "c", "a"]


def test_the_dim_that_is_outermost_in_memory():
    """What a model says of its parameters is what the cut follows."""
    kernel = torch.empty(4, 3, 2, 2).to(memory_format=torch.channels_last)
    found = {
        "matrix": TensorSpec.of("matrix", torch.empty(5, 4)),
        "transposed": TensorSpec.of("transposed", torch.empty(5, 4).t()),
        "kernel": TensorSpec.of("kernel", kernel),
        "permuted": TensorSpec.of("permuted", torch.empty(2, 3, 5).permute(1, 2, 0)),
        "one row": TensorSpec.of("one row", torch.empty(1, 6)),  # which would be one rank's
        "number": TensorSpec.of("number", torch.empty(())),
        "gap": TensorSpec.of("gap", torch.empty(6, 8)[:, ::2]),  # copied row by row
    }
    assert {name: one.outer_dim for name, one in found.items()} == {
        "matrix": 0,
        "transposed": 1,
        "kernel": 0,
        "permuted": 2,
        "one row": 1,
        "number": 0,
        "gap": 0,
    }
    rows = {
        name: [place.rows(rank) for rank in range(2)]
        for name, one in found.items()
        for place in arrange([one], PLAIN, 2, "rows").places
    }
    assert rows["transposed"] == [(0, 3), (3, 5)]
    assert rows["permuted"] == [(0, 1), (1, 2)]
    assert rows["one row"] == [(0, 3), (3, 6)]
    assert rows["number"] == [(0, 1), (1, 1)]


def test_units_add_their_kinds_up():
    masters = Precision.of("bf16", param=torch.bfloat16)
    matrix = arrange([spec("a", (3, 5))], masters, 2, "rows")
    vector = arrange([spec("b", (4,), trainable=False)], masters, 2, "rows")
    assert (matrix.dtype, matrix.master, matrix.nbytes) == (torch.bfloat16, torch.float32, 30)
    assert (vector.dtype, vector.master, vector.nbytes) == (torch.float32, torch.float32, 16)
    unit = UnitLayout("blocks.0", (matrix, vector), sharded=True)
    assert unit.trainable == [matrix]
    assert [place.name for place in unit.places] == ["a", "b"]
    assert unit.nbytes == 46
    assert [unit.owned_bytes(rank) for rank in range(2)] == [2 * 10 + 8, 2 * 5 + 8]


def test_names_of_blocks_and_places_in_buffers():
    names = [
        "blocks.3.norm.weight",
        "h.0.attn.1.weight",
        "0.weight",
        "norm.weight",
        "layer2.weight",
    ]
    assert [block_of(name) for name in names] == ["blocks.3", "h.0", "0", None, None]
    assert [is_block(key) for key in ("blocks.3", "0", "head", ROOT)] == [True, True, False, False]
    assert offsets_in_bytes([1, 64, 65, 0]) == [0, 64, 128, 256, 256]


# --- how often units are gathered ---


class Layers(nn.Module):
    """An embedding, blocks, a head, and what lies between them."""

    def __init__(self, *, tied=False):
        super().__init__()
        self.token = nn.Embedding(6, 4)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(3)
        )
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.token.weight


def units_of(model, *, whole=()):
    """Return units of blocks, embedding and head; the norm is the rest of the model."""
    members = {}
    for one in ModelSpec.of(model).parameters:
        key = block_of(one.name) or one.name.rpartition(".")[0]
        members.setdefault(ROOT if key == "norm" else key, []).append(one)
    units = []
    for key, specs in members.items():
        kinds = {}
        for one in specs:
            kinds.setdefault(one.trainable, []).append(one)
        flats = tuple(arrange(kind, PLAIN, 2, "rows") for kind in kinds.values())
        units.append(UnitLayout(key, flats, sharded=key not in whole))
    return units[::-1]


def again(model, spared, *, names_only=False, **options):
    counts = gathers_again(units_of(model, **options), None if names_only else model, spared)
    return {key: count for key, count in counts.items() if count}


BLOCKS = {"blocks.0": 1, "blocks.1": 1, "blocks.2": 1}


def test_backward_gathers_what_forward_freed():
    """All but the units that backward begins with, and a table: its backward reads no values."""
    model = Layers()
    keys = [use.key for use in usual_uses(units_of(model), model)]
    assert keys == ["token", *BLOCKS, "head"]
    assert again(model, 0) == {**BLOCKS, "head": 1}
    assert again(model, 1) == BLOCKS
    assert again(model, 2) == {"blocks.0": 1, "blocks.1": 1}
    assert again(model, 9) == {}
    assert again(model, 1, names_only=True) == BLOCKS
    assert again(model, 1, whole=["blocks.1"]) == {"blocks.0": 1, "blocks.2": 1}


def test_a_tied_head_gathers_the_table_again():
    """Once for its forward; for its backward unless backward begins with it."""
    assert again(Layers(tied=True), 0) == {**BLOCKS, "token": 2}
    assert again(Layers(tied=True), 1) == {**BLOCKS, "token": 1}
    assert again(Layers(tied=True), 2) == {"blocks.0": 1, "blocks.1": 1, "token": 1}


def test_what_comes_before_all_training_is_not_gathered_again():
    for names_only in (False, True):
        model = Layers()
        model.token.requires_grad_(False)
        assert again(model, 0, names_only=names_only) == {**BLOCKS, "head": 1}
        model.blocks[0].requires_grad_(False)
        model.norm.requires_grad_(False)
        expected = {"blocks.1": 1, "blocks.2": 1, "head": 1}
        assert again(model, 0, names_only=names_only) == expected
        model.blocks.requires_grad_(False)
        assert again(model, 0, names_only=names_only) == {}, "inputs of the head need no gradients"
        model.blocks[2].requires_grad_(True)
        assert again(model, 0, names_only=names_only) == {"blocks.2": 1, "head": 1}


def test_what_a_model_has_for_itself_is_used_after_its_first_layer():
    """As vision transformers add positions to patches: the first layer's inputs are data."""
    model = nn.Module()
    model.positions = nn.Parameter(torch.zeros(4))
    model.patch = nn.Linear(4, 4).requires_grad_(False)
    model.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4)).requires_grad_(False)])
    units = [
        UnitLayout(key, (arrange(specs, PLAIN, 2, "rows"),), sharded=True)
        for key, specs in {
            "blocks.0": [spec("blocks.0.0.weight", (4, 4), trainable=False)],
            "patch": [spec("patch.weight", (4, 4), trainable=False)],
            ROOT: [spec("positions", (4,))],
        }.items()
    ]
    for known in (model, None):
        assert gathers_again(units, known, 0) == Counter({"blocks.0": 1, "patch": 0})
