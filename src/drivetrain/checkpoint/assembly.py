"""Puts any part of a tensor together from any parts of it: box algebra, nothing else.

Every part is a few boxes, so every copy between two parts is a few copies between overlapping
boxes, done by strided views.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from math import prod
from typing import TypeAlias

from torch import Tensor

from drivetrain.shards import Box, Part, boxes

Extent: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a box."""


def numel(part: Part) -> int:
    """Return how many elements a part has."""
    first, last = part.range
    return last - first


def fits(part: Part, shape: Sequence[int]) -> bool:
    """Return whether a part lies inside a tensor of this shape."""
    if not len(part.offsets) == len(part.sizes) == len(shape):
        return False
    inside = all(
        min(offset, size) >= 0 and offset + size <= extent
        for offset, size, extent in zip(part.offsets, part.sizes, shape, strict=True)
    )
    return inside and (part.flat is None or 0 <= part.flat[0] <= part.flat[1] <= prod(part.sizes))


def copy_overlap(target: Tensor, wanted: Part, source: Tensor, saved: Part) -> int:
    """Copy the elements that two parts of one global tensor share.

    Args:
        target: 1-D, contiguous, the memory of the wanted part; written.
        wanted: the part of ``target``.
        source: 1-D, contiguous, the memory of the saved part; only the shared elements are read.
        saved: the part of ``source``.

    Returns:
        How many elements were copied.
    """
    if _overlap(wanted.offsets, wanted.sizes, saved.offsets, saved.sizes) is None:
        return 0
    copied = 0
    pieces = list(boxes(saved))
    for goal in boxes(wanted):
        for piece in pieces:
            common = _overlap(goal.offsets, goal.sizes, piece.offsets, piece.sizes)
            if common is not None:
                _window(target, goal, *common).copy_(_window(source, piece, *common))
                copied += prod(common[1])
    return copied


def first_overlap(parts: Sequence[Part]) -> tuple[Part, Part] | None:
    """Return two parts of one tensor that share elements, None when no two do.

    Parts of the same box are compared by their ranges; only boxes that overlap are compared
    element range by element range. So it stays quick for a part on each of many ranks.
    """
    by_box: dict[Extent, list[Part]] = {}
    for part in parts:
        if numel(part):
            by_box.setdefault((part.offsets, part.sizes), []).append(part)
    for same in by_box.values():
        same.sort(key=lambda part: part.range)
        for one, other in pairwise(same):
            if other.range[0] < one.range[1]:
                return one, other
    for box, another in _overlapping(sorted(by_box)):
        found = _first_shared(by_box[box], by_box[another])
        if found is not None:
            return found
    return None


def _overlapping(ordered: Sequence[Extent]) -> Iterator[tuple[Extent, Extent]]:
    """Yield the pairs of boxes that overlap, of boxes sorted by their offsets."""
    for index, (offsets, sizes) in enumerate(ordered):
        for other in ordered[index + 1 :]:
            if other[0][0] >= offsets[0] + sizes[0]:
                break
            if _overlap(offsets, sizes, *other) is not None:
                yield (offsets, sizes), other


def _first_shared(some: Sequence[Part], others: Sequence[Part]) -> tuple[Part, Part] | None:
    for one, other in product(some, others):
        for box, second in product(boxes(one), boxes(other)):
            if _overlap(box.offsets, box.sizes, second.offsets, second.sizes) is not None:
                return one, other
    return None


def _overlap(
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    other_offsets: tuple[int, ...],
    other_sizes: tuple[int, ...],
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the box that two boxes share, None when they share nothing."""
    low = tuple(map(max, offsets, other_offsets))
    high = (
        min(a + n, b + m)
        for a, n, b, m in zip(offsets, sizes, other_offsets, other_sizes, strict=True)
    )
    extent = tuple(end - begin for begin, end in zip(low, high, strict=True))
    return (low, extent) if all(size > 0 for size in extent) else None


def _window(memory: Tensor, box: Box, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    """Return the view of a box's memory that is the given smaller box, in global coordinates."""
    view = memory[box.start : box.start + prod(box.sizes)].view(box.sizes)
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        view = view.narrow(dim, offset - box.offsets[dim], size)
    return view
