"""Which elements each rank owns of a unit, and how often units are gathered: arithmetic alone."""

import itertools
import random
import time
from collections import Counter

import torch
from torch import nn

from drivetrain.cost import ModelSpec, TensorSpec
from drivetrain.parallel.estimate import usual_uses
from drivetrain.parallel.layout import (
    ROOT,
    UnitLayout,
    arrange,
    arrange_whole,
    block_of,
    is_block,
    offsets_in_bytes,
    owned_by_all,
)
from drivetrain.runtime.precision import Precision
from drivetrain.simulator.contract import times_again
from stacks import Residual, Stack

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


def test_every_element_is_owned_once():
    """In pieces that are as few as can be."""
    for cut, seed in itertools.product(["flat", "whole", "rows"], range(100)):
        specs, size = some_specs(seed), 1 + seed % 5
        layout = layout_of(cut, specs, size)
        assert sorted(place.name for place in layout.places) == [one.name for one in specs]
        assert layout.numel == sum(one.numel for one in specs)
        edge = 0
        for place in layout.places:  # side by side, each cut from its beginning to its end
            assert place.offset == edge
            edge += place.numel
            owners = Counter(i for share in place.shares for i in range(*share))
            assert owners == Counter(range(place.numel)), (cut, seed, place)
            assert len(place.shares) == size
        for rank in range(size):
            owned = [
                place.offset + i for place in layout.places for i in range(*place.shares[rank])
            ]
            pieces = layout.pieces(rank)
            assert layout.owned(rank) == len(owned)
            assert owned_by_all([layout], lambda _: 3)[rank] == 3 * len(owned)
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
                assert [*place.shares] == [(0, 1), *[(1, 1)] * (size - 1)]
                continue
            if not place.numel:
                continue
            indices = torch.arange(place.shape[place.outer_dim])
            chunks = [chunk.tolist() for chunk in torch.chunk(indices, size)]
            chunks += [[]] * (size - len(chunks))
            assert [list(range(*place.rows(rank))) for rank in range(size)] == chunks, place
            width = place.numel // len(indices)  # rows lie one after the other in memory
            for rank in range(size):
                assert place.shares[rank] == tuple(row * width for row in place.rows(rank))


def test_a_hundred_thousand_ranks_take_no_time():
    specs, begun = [spec(f"{i}", (64, 64)) for i in range(20)], time.process_time()
    for cut in ("flat", "rows"):
        layout = arrange(specs, PLAIN, 10**5, cut)
        assert owned_by_all([layout], lambda _: 1)[0] == layout.owned(0)
    assert time.process_time() - begun < 5


def test_whole_parameters_and_the_kinds_of_a_unit():
    """Parameters go to those with the least; what a unit holds is the sum of its kinds."""
    loads = [5, 0, 0]
    layout = arrange_whole([spec("a", (2,)), spec("b", (4,)), spec("c", (3,))], PLAIN, loads)
    assert loads == [5, 4, 5]
    assert [layout.owned(rank) for rank in range(3)] == [0, 4, 5]
    assert [place.name for place in layout.places] == ["b", "c", "a"]
    masters = Precision.of("bf16", param=torch.bfloat16)
    matrix = arrange([spec("a", (3, 5))], masters, 2, "rows")
    vector = arrange([spec("b", (4,), trainable=False)], masters, 2, "rows")
    assert (matrix.dtype, matrix.master, matrix.nbytes) == (torch.bfloat16, torch.float32, 30)
    assert (vector.dtype, vector.master, vector.nbytes) == (torch.float32, torch.float32, 16)
    unit = UnitLayout("blocks.0", (matrix, vector), sharded=True)
    assert unit.trainable == [matrix]
    assert [place.name for place in unit.places] == ["a", "b"]
    assert unit.nbytes == 46
    assert owned_by_all(unit.flats, lambda flat: flat.dtype.itemsize) == [2 * 10 + 8, 2 * 5 + 8]


def test_the_dim_that_is_outermost_in_memory():
    """What a model says of its parameters is what the cut follows."""
    kernel = torch.empty(4, 3, 2, 2).to(memory_format=torch.channels_last)
    for tensor, dim, rows in (
        (torch.empty(5, 4), 0, [(0, 3), (3, 5)]),
        (torch.empty(5, 4).t(), 1, [(0, 3), (3, 5)]),
        (kernel, 0, [(0, 2), (2, 4)]),
        (torch.empty(2, 3, 5).permute(1, 2, 0), 2, [(0, 1), (1, 2)]),
        (torch.empty(1, 6), 1, [(0, 3), (3, 6)]),  # which would be one rank's
        (torch.empty(()), 0, [(0, 1), (1, 1)]),
        (torch.empty(6, 8)[:, ::2], 0, [(0, 3), (3, 6)]),  # copied row by row
    ):
        found = TensorSpec.of("p", tensor)
        assert found.outer_dim == dim, tensor.stride()
        (place,) = arrange([found], PLAIN, 2, "rows").places
        assert [place.rows(rank) for rank in range(2)] == rows, tensor.stride()


def test_names_of_blocks_and_places_in_buffers():
    names = ["blocks.3.norm", "h.0.attn.1", "0.weight", "norm.weight", "layer2.weight"]
    assert [block_of(name) for name in names] == ["blocks.3", "h.0", "0", None, None]
    assert [is_block(key) for key in ("blocks.3", "0", "head", ROOT)] == [True, True, False, False]
    assert offsets_in_bytes([1, 64, 65, 0]) == [0, 64, 128, 256, 256]


# --- how often units are gathered ---


def layers(*, tied=False):
    """Return an embedding, blocks, a head, and a norm between them."""
    blocks = [Residual(4) for _ in range(3)]
    first, last = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
    model = Stack(blocks, first=first, last=last, tied=tied)
    model.norm = nn.LayerNorm(4)
    return model


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
    uses = usual_uses(units_of(model, **options), None if names_only else model)
    counts = times_again(uses, spared)
    return {key: count for key, count in counts.items() if count}


LATER = {"blocks.1": 1, "blocks.2": 1}
BLOCKS = {"blocks.0": 1, **LATER}


def test_backward_gathers_what_forward_freed():
    """All but the units that backward begins with, and a table: its backward reads no values.

    A tied head gathers it once for its forward, and for its backward unless that is the first.
    """
    model = layers()
    keys = [use.key for use in usual_uses(units_of(model), model)]
    assert keys == ["first", *BLOCKS, "last"]
    assert again(model, 0) == {**BLOCKS, "last": 1}
    assert again(model, 1) == BLOCKS
    assert again(model, 2) == {"blocks.0": 1, "blocks.1": 1}
    assert again(model, 9) == {}
    assert again(model, 1, names_only=True) == BLOCKS
    assert again(model, 1, whole=["blocks.1"]) == {"blocks.0": 1, "blocks.2": 1}
    assert again(layers(tied=True), 0) == {**BLOCKS, "first": 2}
    assert again(layers(tied=True), 1) == {**BLOCKS, "first": 1}
    assert again(layers(tied=True), 2) == {"blocks.0": 1, "blocks.1": 1, "first": 1}


def test_what_comes_before_all_training_is_not_gathered_again():
    for names_only in (False, True):
        model = layers()
        for part, trained, expected in (
            (model.first, False, {**BLOCKS, "last": 1}),
            (
                nn.ModuleList([model.blocks[0], model.norm]),
                False,
                {"blocks.1": 1, "blocks.2": 1, "last": 1},
            ),
            (model.blocks, False, {}),  # inputs of the head need no gradients
            (model.blocks[2], True, {"blocks.2": 1, "last": 1}),
        ):
            part.requires_grad_(trained)
            assert again(model, 0, names_only=names_only) == expected


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
        assert times_again(usual_uses(units, known), 0) == Counter({"blocks.0": 1, "patch": 0})
