"""Any part of a tensor comes out right from any parts of it."""

from itertools import pairwise
from math import prod

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.checkpoint.encoding import copy_overlap
from drivetrain.checkpoint.manifest import fits, numel
from drivetrain.runtime.parts import Part, boxes

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)
shapes_with_empty = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def memory_of(tensor, part):
    """The reference: slice the box, flatten it, slice the range."""
    for dim, (offset, size) in enumerate(zip(part.offsets, part.sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    flat = tensor.reshape(-1)
    return flat.clone() if part.flat is None else flat[slice(*part.flat)].clone()


@st.composite
def parts_of(draw, shape):
    offsets = tuple(draw(st.integers(0, n)) for n in shape)
    sizes = tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offsets, strict=True))
    total = prod(sizes)
    if draw(st.booleans()):
        return Part(offsets, sizes)
    first = draw(st.integers(0, total))
    return Part(offsets, sizes, (first, draw(st.integers(first, total))))


@st.composite
def partitions_of(draw, shape):
    """Cut the tensor into a grid of boxes, and some of the boxes into flat ranges."""
    grid = [((), ())]
    for extent in shape:
        cuts = sorted(draw(st.sets(st.integers(1, max(extent - 1, 1)), max_size=2)) | {0, extent})
        cuts = [cut for cut in cuts if cut <= extent]
        spans = [(a, b - a) for a, b in pairwise(cuts)]
        grid = [((*o, a), (*s, n)) for o, s in grid for a, n in spans]
    parts = []
    for offsets, sizes in grid:
        total = prod(sizes)
        cuts = sorted(draw(st.sets(st.integers(0, total), max_size=3)) | {0, total})
        if len(cuts) == 2 and draw(st.booleans()):
            parts.append(Part(offsets, sizes))
        else:
            ranges = pairwise(cuts)
            parts += [Part(offsets, sizes, (a, b)) for a, b in ranges]
    return draw(st.permutations(parts))


def test_boxes_of_a_range_follow_each_other_in_memory():
    found = list(boxes(Part((5, 0), (3, 4), (2, 11))))
    assert found == [((5, 2), (1, 2), 0), ((6, 0), (1, 4), 2), ((7, 0), (1, 3), 6)]


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_part_from_any_partition(data):
    shape = data.draw(shapes)
    whole = torch.arange(prod(shape)).reshape(shape)
    saved = data.draw(partitions_of(shape))
    wanted = data.draw(parts_of(shape))
    target = torch.full((numel(wanted),), -1)
    copied = sum(copy_overlap(target, wanted, memory_of(whole, one), one) for one in saved)
    assert copied == numel(wanted)
    assert torch.equal(target, memory_of(whole, wanted))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_boxes_cover_a_part_in_the_order_of_its_memory(data):
    shape = data.draw(shapes_with_empty)
    whole = torch.arange(prod(shape)).reshape(shape)
    part = data.draw(parts_of(shape))
    pieces = list(boxes(part))
    assert len(pieces) <= max(1, 2 * len(shape) - 1)
    found = [memory_of(whole, Part(box.offsets, box.sizes)) for box in pieces]
    assert [box.start for box in pieces] == [sum(map(len, found[:i])) for i in range(len(found))]
    joined = torch.cat(found) if found else whole.new_empty(0)
    assert torch.equal(joined, memory_of(whole, part))


def test_fits():
    inside = [Part((0, 0), (2, 3)), Part((1, 1), (1, 2), (0, 2)), Part((2, 3), (0, 0))]
    outside = [
        *(Part((0,), (2,)), Part((0, 0), (2,)), Part((1, 0), (2, 3))),
        *(Part((-1, 0), (1, 3)), Part((0, 0), (-1, 3))),
        *(Part((0, 0), (2, 3), (0, 7)), Part((1, 1), (1, 2), (0, 3))),
        *(Part((0, 0), (2, 3), (4, 3)), Part((0, 0), (2, 3), (-1, 3))),
    ]
    assert all(fits(part, (2, 3)) for part in inside)
    assert not any(fits(part, (2, 3)) for part in outside)
