"""Parts of tensors, in coordinates of whole tensors: which elements a piece holds. No torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Part:
    """Which part of a global tensor a shard holds.

    Attributes:
        offsets: first index of the box, per dim.
        sizes: extent of the box, per dim.
        flat: None for the whole box, or a half-open range of the flattened box: a flat range
            inside a tensor-parallel shard is a box with a range.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    flat: tuple[int, int] | None = None

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Part":
        """Return the part that is the whole tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @classmethod
    def range_of(cls, shape: Sequence[int], start: int, stop: int) -> "Part":
        """Return a half-open range of the flattened tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape), (start, stop))

    @property
    def range(self) -> tuple[int, int]:
        """The half-open range of the flattened box."""
        return (0, prod(self.sizes)) if self.flat is None else self.flat


class Box(NamedTuple):
    """A box of the global tensor that lies contiguous in a part's memory.

    Attributes:
        offsets: first global index, per dim.
        sizes: extent, per dim.
        start: where the box begins in the part's flat memory, in elements.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int


def boxes(part: Part) -> Iterator[Box]:
    """Yield the boxes of a part, in the order of memory; none for an empty part.

    A flat range of a box of d dims is at most 2d - 1 boxes, each contiguous in the part's memory.
    """
    first, last = part.range
    start = 0
    for offsets, sizes in _split(part.sizes, first, last):
        at = tuple(a + b for a, b in zip(part.offsets, offsets, strict=True))
        yield Box(at, sizes, start)
        start += prod(sizes)


def _split(
    sizes: tuple[int, ...], first: int, last: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Split the flat range [first, last) of a box into boxes (offsets, sizes), in order."""
    if first >= last:
        return
    if last - first == prod(sizes):
        yield (0,) * len(sizes), sizes
        return
    rest = sizes[1:]
    row = prod(rest)
    (top, head), (bottom, tail) = divmod(first, row), divmod(last, row)
    if top == bottom:
        yield from _in_row(top, rest, head, tail)
        return
    if head:
        yield from _in_row(top, rest, head, row)
        top += 1
    if top < bottom:
        yield (top, *(0,) * len(rest)), (bottom - top, *rest)
    yield from _in_row(bottom, rest, 0, tail)


def _in_row(
    index: int, rest: tuple[int, ...], first: int, last: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for offsets, sizes in _split(rest, first, last):
        yield (index, *offsets), (1, *sizes)


def label(name: str, state: str) -> str:
    """Return a tensor's name for messages: of the parameter, and of a state its key too."""
    return f"{name!r}, optimizer state {state!r}" if state else repr(name)
