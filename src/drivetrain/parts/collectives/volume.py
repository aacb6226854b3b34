"""How a flat tensor is cut into chunks, one per rank, and how much a rank sends: arithmetic."""

import itertools
from typing import Literal, TypeAlias

Operation: TypeAlias = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier"]


def chunk_bounds(numel: int, size: int) -> list[tuple[int, int]]:
    """Return the (start, stop) of each rank's chunk: no padding, lengths differ by at most 1."""
    edges = [numel * index // size for index in range(size + 1)]
    return list(itertools.pairwise(edges))


def sent_elements(
    operation: Operation, numel: int, *, size: int, rank: int = 0, source: int = 0
) -> int:
    """Return how many elements one rank sends in one collective over a flat tensor.

    In a ring every rank passes on all chunks but one: a reduce-scatter never sends the chunk it
    keeps, an all-gather never sends the chunk its right neighbour started with. A broadcast is a
    chain from the source around the ring; its last rank sends nothing.

    Args:
        operation: which collective.
        numel: elements of the whole flat tensor.
        size: ranks of the axis.
        rank: the sending rank.
        source: where a broadcast starts.
    """
    if size == 1:
        return 0
    if operation == "broadcast":
        return 0 if (rank - source) % size == size - 1 else numel
    bounds = chunk_bounds(numel, size)
    lengths = [stop - start for start, stop in bounds]
    scatter = numel - lengths[rank]
    gather = numel - lengths[(rank + 1) % size]
    match operation:
        case "reduce_scatter":
            return scatter
        case "all_gather":
            return gather
    return scatter + gather
