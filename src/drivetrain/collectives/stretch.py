"""The parameters in a flat tensor: the elements of each, and their places.

A communicator that sends an approximation must know them: it approximates matrices and leaves
vectors alone, and what it keeps back from one step for the next is saved by the parameter's name::

    | weight, elements 0 to 900      | bias, all  | weight, elements 0 to 40 | (of nobody) |
    |<------------------------------ one stretch ------------------------------------------->|
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple, TypeAlias

import torch


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
class Stretch:
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
    def of(cls, numel: int, dtype: torch.dtype, rows: Iterable[ParameterRow]) -> "Stretch":
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

    def cut(self, start: int, stop: int) -> "Stretch":
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
    def joined(cls, pieces: Sequence["Stretch"], dtype: torch.dtype) -> "Stretch":
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


StretchParts: TypeAlias = Sequence[Sequence[Stretch]]
"""For each rank of an axis, in order: the stretches that describe the rank's tensors."""
