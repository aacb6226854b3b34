"""Where data lie on the ranks, in chunks and spans, and how much a rank sends.

The parameters in a flat tensor: the elements of each, and their places.

A communicator that sends an approximation must know them: it approximates matrices and leaves
vectors alone, and what it keeps back from one step for the next is saved by the parameter's name::

    | weight, elements 0 to 900      | bias, all  | weight, elements 0 to 40 | (of nobody) |
    |<------------------------------ one flat slice ------------------------------------------->|
"""

import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, NamedTuple, Protocol, TypeAlias

import torch

from drivetrain.errors import UsageError
from drivetrain.runtime.mesh import Axis, HostLevels

# --- the parameters in a flat tensor ---


class ParameterRow(NamedTuple):
    """A whole parameter, and its place in a flat tensor.

    Attributes:
        name: the parameter's name.
        shape: its shape.
        outer_dim: the dim that is outermost in memory.
        start: where its elements begin in the flat tensor.
    """

    name: str
    shape: tuple[int, ...]
    outer_dim: int
    start: int


@dataclass(frozen=True, slots=True)
class ParameterSpan:
    """A range of one parameter's elements in a flat tensor.

    Attributes:
        name: the parameter's name.
        numel: elements of the whole parameter.
        columns: elements of one slice along its outermost dim.
        first: the first of its elements that is here, in the order of memory.
        start: where that element lies in the flat tensor.
        stop: where the range ends in the flat tensor.
    """

    name: str
    numel: int
    columns: int
    first: int
    start: int
    stop: int

    @property
    def is_matrix(self) -> bool:
        """Whether the parameter has rows and columns."""
        return 1 < self.columns < self.numel


@dataclass(frozen=True, slots=True)
class FlatSlice:
    """A flat tensor, or a slice of one, in terms of parameters.

    Attributes:
        numel: its elements.
        dtype: their dtype.
        spans: the parameters' ranges, in order; elements outside belong to no parameter.
    """

    numel: int
    dtype: torch.dtype
    spans: tuple[ParameterSpan, ...]

    @classmethod
    def of(cls, numel: int, dtype: torch.dtype, rows: Iterable[ParameterRow]) -> "FlatSlice":
        """Describe a flat tensor that holds whole parameters.

        Args:
            numel: elements of the flat tensor.
            dtype: of the elements.
            rows: the parameters, in the order of their elements.
        """
        spans = []
        for name, shape, outer_dim, start in rows:
            whole = prod(shape)
            columns = whole // shape[outer_dim] if shape and shape[outer_dim] else whole
            spans.append(ParameterSpan(name, whole, columns, 0, start, start + whole))
        return cls(numel, dtype, tuple(spans))

    def cut(self, start: int, stop: int) -> "FlatSlice":
        """Describe the slice from ``start`` to ``stop``."""
        spans = []
        # A model has many parameters, and is cut into as many slices as there are ranks.
        for span in self.spans[bisect_right(self.spans, start, key=lambda span: span.stop) :]:
            if span.start >= stop:
                break
            low, high = max(span.start, start), min(span.stop, stop)
            first = span.first + low - span.start
            spans.append(replace(span, first=first, start=low - start, stop=high - start))
        return replace(self, numel=stop - start, spans=tuple(spans))

    @classmethod
    def joined(cls, pieces: Sequence["FlatSlice"], dtype: torch.dtype) -> "FlatSlice":
        """Describe a flat tensor of pieces side by side.

        Args:
            pieces: describe them, in order.
            dtype: of the elements, also where there is no piece.
        """
        spans, edge = [], 0
        for piece in pieces:
            spans += [replace(s, start=s.start + edge, stop=s.stop + edge) for s in piece.spans]
            edge += piece.numel
        return cls(edge, dtype, tuple(spans))

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.numel * self.dtype.itemsize


Sent: TypeAlias = Counter[tuple[str, str]]
"""The bytes that a rank sends, by (axis, operation)."""

SlicesByRank: TypeAlias = Sequence[Sequence[FlatSlice]]
"""For each rank of an axis, in order: the slices that describe the rank's tensors."""


# --- how the data of an operation lie on the ranks, as chunks ---

Chunks: TypeAlias = Sequence[tuple[int, int]]
"""Each rank's (start, stop) in a flat tensor; together the whole tensor, in order of rank."""

Operation: TypeAlias = Literal[
    "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "barrier"
]


def chunk_of(numel: int, size: int, rank: int) -> tuple[int, int]:
    """Return the (start, stop) of one rank's chunk among those of ``chunk_bounds``."""
    return numel * rank // size, numel * (rank + 1) // size


def chunk_bounds(numel: int, size: int) -> list[tuple[int, int]]:
    """Return the (start, stop) of each rank's chunk: no padding, lengths differ by at most 1."""
    edges = [numel * index // size for index in range(size + 1)]
    return list(itertools.pairwise(edges))


def checked_chunks(chunks: Chunks | None, numel: int, size: int) -> tuple[tuple[int, int], ...]:
    """Return the caller's chunks of a flat tensor, or the even chunks without a choice.

    Raises:
        UsageError: the chunks do not cover the tensor, one per rank, in ascending order.
    """
    if chunks is None:
        return tuple(chunk_bounds(numel, size))
    edge = 0
    for start, stop in chunks:
        if start != edge or stop < start:
            break
        edge = stop
    else:
        if edge == numel and len(chunks) == size:
            return tuple(chunks)
    raise UsageError(
        f"expected one (start, stop) for each of {size} ranks, the first from 0, each from where "
        f"the one before it stops, the last to {numel}, found {list(chunks)}; an empty chunk is "
        "written (start, start); leave chunks out for an even cut"
    )


def sent_bytes(operation: Operation, lengths: Sequence[int], rank: int) -> int:
    """Return how many bytes one rank sends in one collective over chunks.

    In a ring every rank passes on all chunks but one: a reduce-scatter never sends the chunk it
    keeps, an all-gather never sends the chunk its right neighbour started with. In an all-to-all a
    rank sends every chunk but its own, each to the rank that keeps it.

    Args:
        operation: which collective; an all-reduce is a reduce-scatter and an all-gather.
        lengths: bytes of each rank's chunk, in order of rank.
        rank: the sending rank.

    Raises:
        UsageError: the operation is a broadcast, which knows no chunks.
    """
    if operation == "broadcast":
        raise UsageError(
            "expected an operation over chunks, found a broadcast: what it sends depends on its "
            "source; use sent_elements"
        )
    return _sent(operation, sum(lengths), lengths[rank], lengths[(rank + 1) % len(lengths)])


def _sent(operation: Operation, total: int, kept: int, started: int) -> int:
    """Return what a rank sends of so much, with its own chunk, and its right neighbour's."""
    scatter, gather = total - kept, total - started
    match operation:
        case "reduce_scatter" | "all_to_all":
            return scatter
        case "all_gather":
            return gather
    return scatter + gather


def sent_elements(
    operation: Operation,
    numel: int,
    *,
    size: int,
    rank: int = 0,
    source: int = 0,
    chunks: Chunks | None = None,
) -> int:
    """Return how many elements one rank sends in one collective over a flat tensor.

    Chunks go around the ring as ``sent_bytes`` says. A broadcast is a chain from the source around
    the ring; its last rank sends nothing.

    Args:
        operation: which collective.
        numel: elements of the whole flat tensor.
        size: ranks of the axis.
        rank: the sending rank.
        source: where a broadcast starts.
        chunks: what each rank holds of the tensor; None: the even cut.

    Raises:
        UsageError: the chunks do not cover the tensor, one per rank, in ascending order.
    """
    if size == 1:
        return 0
    if operation == "broadcast":
        return 0 if (rank - source) % size == size - 1 else numel
    # Chunks of one dtype: what holds for bytes holds for elements.
    if chunks is None:
        chunks_of_two = (chunk_of(numel, size, each) for each in (rank, (rank + 1) % size))
        return _sent(operation, numel, *(stop - start for start, stop in chunks_of_two))
    bounds = checked_chunks(chunks, numel, size)
    return sent_bytes(operation, [stop - start for start, stop in bounds], rank)


class ApproximateBytes(Protocol):
    """Counts the bytes that a rank sends between hosts where an approximation crosses.

    The answers are by (axis, operation); None where nothing is approximate.
    """

    def reduced(self, far: Axis, slices: SlicesByRank, *, everywhere: bool) -> Sent | None:
        """Return the bytes of a sum of gradients, for its owners alone or for all ranks."""

    def held(self, far: Axis, slices: SlicesByRank, *, everywhere: bool) -> int:
        """Return the bytes that a rank keeps from one sum to the next."""

    def gathered(self, far: Axis, slices: SlicesByRank) -> Sent | None:
        """Return the bytes of a gather of parameters, or of their updates."""

    @property
    def approximates_parameters(self) -> bool:
        """Whether gathered values of parameters may differ from the values of their owners."""

    @property
    def owns_apart(self) -> bool:
        """Whether owners keep values apart from gathered ones, which are approximate or may be."""


@dataclass(frozen=True, slots=True)
class Route:
    """The way of data over an axis: one ring, or the levels of ``ring``.

    Attributes:
        axis: the axis.
        levels: the ranks of this host and those across hosts; None for one ring.
        between: counts the bytes of channels between hosts; None where all channels are exact.
    """

    axis: Axis
    levels: HostLevels | None = None
    between: ApproximateBytes | None = None

    @property
    def approximates_parameters(self) -> bool:
        """Whether gathered values of parameters may differ from the values of their owners."""
        return self.between is not None and self.between.approximates_parameters

    @property
    def owns_apart(self) -> bool:
        """Whether owners keep values apart from gathered ones, which are approximate or may be."""
        return self.between is not None and self.between.owns_apart

    def gradients_summed(self, flat_slice: FlatSlice) -> Sent:
        """Return the bytes that this rank sends in a channel of ``gradients_summed``."""
        exact = self.all_reduced(flat_slice.numel, flat_slice.dtype.itemsize)
        if self.levels is None or self.between is None:
            return exact
        far = self.levels.far
        pieces = far_pieces(flat_slice, self.levels)
        found = self.between.reduced(far, pieces, everywhere=True)
        return exact if found is None else _without(exact, far) + found

    def gradients_scattered(self, slices: SlicesByRank) -> Sent:
        """Return the bytes that this rank sends in a channel of ``gradients_scattered``."""
        exact = self.passed("reduce_scatter", _lengths(slices))
        if self.levels is None or self.between is None:
            return exact
        near, far = self.levels
        mine = slices[near.rank :: near.size]
        found = self.between.reduced(far, mine, everywhere=False)
        return exact if found is None else _without(exact, far) + found

    def parameters_gathered(self, slices: SlicesByRank) -> Sent:
        """Return the bytes that this rank sends in one gather or update of parameters."""
        exact = self.passed("all_gather", _lengths(slices))
        if self.levels is None or self.between is None:
            return exact
        near, far = self.levels
        found = self.between.gathered(far, slices[near.rank :: near.size])
        return exact if found is None else _without(exact, far) + found

    def kept_back(self, flat_slice: FlatSlice) -> int:
        """Return the bytes that this rank keeps for the next sum in ``gradients_summed``."""
        if self.levels is None or self.between is None:
            return 0
        pieces = far_pieces(flat_slice, self.levels)
        return self.between.held(self.levels.far, pieces, everywhere=True)

    def kept_back_of(self, slices: SlicesByRank) -> int:
        """Return the bytes that this rank keeps for the next sum in ``gradients_scattered``."""
        if self.levels is None or self.between is None:
            return 0
        near, far = self.levels
        return self.between.held(far, slices[near.rank :: near.size], everywhere=False)

    def all_reduced(self, numel: int, itemsize: int) -> Sent:
        """Return the bytes that this rank sends to sum one tensor, by (axis, operation)."""
        if self.levels is None:
            sent = sent_elements("all_reduce", numel, size=self.axis.size, rank=self.axis.rank)
            return Counter({(self.axis.name, "all_reduce"): sent * itemsize})
        near, far = self.levels
        shares = [stop - start for start, stop in chunk_bounds(numel, near.size)]
        pieces = [stop - start for start, stop in chunk_bounds(shares[near.rank], far.size)]
        return Counter(
            {
                (line.name, operation): itemsize * sent_bytes(operation, lengths, line.rank)
                for line, lengths in ((near, shares), (far, pieces))
                for operation in _HALVES
            }
        )

    def passed(self, operation: Operation, lengths: Sequence[int]) -> Sent:
        """Return the bytes that this rank sends in one reduce-scatter or all-gather.

        Args:
            operation: which of the two.
            lengths: bytes of each rank's chunk, in order of rank.
        """
        if self.levels is None:
            sent = sent_bytes(operation, lengths, self.axis.rank)
            return Counter({(self.axis.name, operation): sent})
        near, far = self.levels
        of_host = [sum(lengths[place :: near.size]) for place in range(near.size)]
        of_place = lengths[near.rank :: near.size]
        return Counter(
            {
                (near.name, operation): sent_bytes(operation, of_host, near.rank),
                (far.name, operation): sent_bytes(operation, of_place, far.rank),
            }
        )

    def broadcast(self, nbytes: int) -> Sent:
        """Return the bytes that this rank sends when rank 0 of the axis sends around a tensor."""
        sent = sent_elements("broadcast", nbytes, size=self.axis.size, rank=self.axis.rank)
        return Counter({(self.axis.name, "broadcast"): sent})


def far_pieces(flat_slice: FlatSlice, levels: HostLevels) -> SlicesByRank:
    """Return the pieces of a flat tensor that ranks at this rank's place of each host sum up."""
    near, far = levels
    share = flat_slice.cut(*chunk_of(flat_slice.numel, near.size, near.rank))
    return [[share.cut(*bounds)] for bounds in chunk_bounds(share.numel, far.size)]


def _lengths(slices: SlicesByRank) -> list[int]:
    """Return the bytes of each rank's tensors."""
    return [sum(each.nbytes for each in part) for part in slices]


def _without(sent: Sent, far: Axis) -> Sent:
    """Return the bytes on all axes but one."""
    return Counter({key: nbytes for key, nbytes in sent.items() if key[0] != far.name})


_HALVES: tuple[Operation, ...] = ("reduce_scatter", "all_gather")
"""The two halves of an all-reduce."""
