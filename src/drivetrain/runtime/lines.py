"""The lines of a mesh: the global ranks along an axis, in groups, or connected by several axes.

Everybody computes the lines of all ranks, because all ranks start all process groups.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping


def lines_along(name: str, sizes: Mapping[str, int]) -> Iterator[tuple[int, ...]]:
    """Yield the lines of global ranks along one axis."""
    cumulative = itertools.accumulate([1, *sizes.values()], lambda a, b: a * b)
    strides = dict(zip(sizes, cumulative, strict=False))
    others = [
        [strides[axis] * i for i in range(size)] for axis, size in sizes.items() if axis != name
    ]
    for corner in itertools.product(*reversed(others)):
        yield tuple(sum(corner) + strides[name] * i for i in range(sizes[name]))


def neighbors_of(lines: Iterable[tuple[int, ...]], size: int) -> Iterator[tuple[int, ...]]:
    """Yield the groups of ``size`` neighbors into which lines are cut."""
    for line in lines:
        for start in range(0, len(line), size):
            yield line[start : start + size]


def connected(lines: Mapping[str, Iterable[tuple[int, ...]]]) -> list[tuple[int, ...]]:
    """Return the sets of ranks that lines of any axis connect, each in ascending order."""
    found: dict[int, set[int]] = {}
    for line in itertools.chain.from_iterable(lines.values()):
        block = set(line).union(*(found.get(rank, ()) for rank in line))
        found.update(dict.fromkeys(block, block))
    return sorted({tuple(sorted(block)) for block in found.values()})
