"""The matrices of one sum that cross a slow link as two thin factors, and all other elements.

A rank has some rows of a parameter: these are a matrix, and the elements of a row that is cut go as
they are, like vectors and small matrices.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from drivetrain.collectives.stretch import ParameterSpan, StretchParts
from drivetrain.links.codec import SMALLEST
from drivetrain.links.encoded import ElementRange


@dataclass(frozen=True, slots=True)
class LowRankMatrix:
    """Rows of one parameter that cross as factors.

    Attributes:
        owner: the rank, along the axis between hosts, whose tensors hold them.
        place: the elements among the tensors of the owner.
        span: the same elements of the parameter.
        rows: n.
        columns: m.
    """

    owner: int
    place: ElementRange
    span: ParameterSpan
    rows: int
    columns: int


class FactorPlan:
    """The matrices of one reduction, and the elements that go as they are.

    Args:
        stretches: of each rank along the axis between hosts.
        rank: columns of the factors.

    Attributes:
        rank: columns of the factors.
        matrices: in order.
        plain: for each rank, the other elements.
        plain_bytes: of these.
        ps: elements of all P.
        qs: elements of all Q.
        errors: elements of all E.
    """

    def __init__(self, stretches: StretchParts, rank: int) -> None:
        self.rank = rank
        self.matrices: list[LowRankMatrix] = []
        self.plain: list[list[ElementRange]] = []
        self.plain_bytes: list[int] = []
        for owner, part in enumerate(stretches):
            self.plain.append([])
            self.plain_bytes.append(0)
            for index, stretch in enumerate(part):
                edge = 0
                for span in stretch.spans:
                    found = self._matrix(owner, index, span, stretch.dtype)
                    if found is not None:
                        self.matrices.append(found)
                        self._leave(ElementRange(index, edge, found.place.start), stretch.dtype)
                        edge = found.place.stop
                self._leave(ElementRange(index, edge, stretch.numel), stretch.dtype)
        self.ps = rank * sum(each.rows for each in self.matrices)
        self.qs = rank * sum(each.columns for each in self.matrices)
        self.errors = sum(each.rows * each.columns for each in self.matrices)

    def _leave(self, elements: ElementRange, dtype: torch.dtype) -> None:
        if elements.numel:
            self.plain[-1].append(elements)
            self.plain_bytes[-1] += elements.numel * dtype.itemsize

    def _matrix(
        self, owner: int, tensor: int, span: ParameterSpan, dtype: torch.dtype
    ) -> LowRankMatrix | None:
        """Return the whole rows of a span, if their factors are smaller."""
        if not span.is_matrix or span.numel < SMALLEST or not dtype.is_floating_point:
            return None
        columns = span.columns
        skipped = -span.first % columns
        rows = (span.stop - span.start - skipped) // columns
        if rows < self.rank or columns < self.rank:
            return None
        if (rows + columns) * self.rank >= rows * columns:
            return None
        start = span.start + skipped
        stop = start + rows * columns
        whole = replace(span, first=span.first + skipped, start=start, stop=stop)
        return LowRankMatrix(owner, ElementRange(tensor, start, stop), whole, rows, columns)

    def split(self, ps: Tensor, qs: Tensor, errors: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return P (n, r), Q (m, r) and E (n, m) of each matrix, as views."""
        rows = [each.rows for each in self.matrices]
        columns = [each.columns for each in self.matrices]
        rank = self.rank
        numels = [n * m for n, m in zip(rows, columns, strict=True)]
        return [
            (p.view(n, rank), q.view(m, rank), e.view(n, m))
            for p, q, e, n, m in zip(
                ps.split_with_sizes([n * rank for n in rows]),
                qs.split_with_sizes([m * rank for m in columns]),
                errors.split_with_sizes(numels),
                rows,
                columns,
                strict=True,
            )
        ]
