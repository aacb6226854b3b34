"""PowerSGD (Vogels et al., NeurIPS 2019): a matrix crosses the wire as two thin factors.

Paper: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for
Distributed Optimization", NeurIPS 2019, algorithms 1 and 2. The error of the approximation is added
to the next gradient. For a gradient as a matrix M (n, m), the error E and the factor Q (m, r) of
the step before (the warm start)::

    M <- M + E                      error feedback
    P <- mean over ranks of M Q     (n, r), sent
    P <- orthogonalised P           the same on every rank
    Q <- mean over ranks of M' P    (m, r), sent
    E <- M - P Q'                   stays on this rank
    gradient <- P Q'

Vectors, small matrices and the tail are sent whole. Gradients come divided by N already, so sums
are means, and M and E are kept in units of 1/N.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor
from typing_extensions import override

from drivetrain.collectives import Communicator, Route
from drivetrain.parts.buckets import Bucket, BucketLayout
from drivetrain_ddp.compression import CommunicationHook, Finish, sum_in


@dataclass(slots=True)
class _Matrix:
    """The state of one compressed gradient.

    Attributes:
        place: index of the parameter in its bucket.
        view: the gradient in the bucket, as (n, m).
        p: (n, r), a view of the bucket's P factors.
        q: (m, r), a view of the bucket's Q factors.
        error: (n, m), the part of earlier gradients that no step has sent.
    """

    place: int
    view: Tensor
    p: Tensor
    q: Tensor
    error: Tensor


class _LowRankBucket:
    """The sums of one bucket; keeps factors and errors between steps, the rest as one flat tensor.

    Args:
        bucket: whose gradients are summed.
        places: of the gradients that cross as factors.
        rank: columns of the factors.
    """

    def __init__(self, bucket: Bucket, places: Sequence[int], rank: int) -> None:
        flat, layout = bucket.flat, bucket.layout
        shapes = [_matrix_shape(layout.shapes[place]) for place in places]
        numels = [[rank * each for each in lengths] for lengths in zip(*shapes, strict=True)]
        self._ps, self._qs = (flat.new_empty(sum(each)) for each in numels)
        self._rest = flat.new_empty(layout.numel - sum(map(prod, shapes)))
        # A fixed seed gives every rank the same start without a message.
        generator = torch.Generator().manual_seed(0)
        self._qs.copy_(torch.randn(len(self._qs), generator=generator, dtype=flat.dtype))
        factors = (
            [piece.view(-1, rank) for piece in each.split_with_sizes(lengths)]
            for each, lengths in zip((self._ps, self._qs), numels, strict=True)
        )
        views = [_as_matrix(bucket, place) for place in places]
        self._matrices = [
            _Matrix(place, view, p, q, torch.zeros_like(view))
            for place, view, p, q in zip(places, views, *factors, strict=True)
        ]
        whole = [view for place, view in enumerate(bucket.views) if place not in places]
        self._whole = [*whole, bucket.flags]

    def start(
        self, missing: Collection[int], communicator: Communicator, dtype: torch.dtype
    ) -> Finish:
        """Start to sum P and the rest; Q follows when the sum is waited for."""
        start = partial(sum_in, dtype, communicator=communicator)
        torch.cat([tensor.flatten() for tensor in self._whole], out=self._rest)
        sum_rest = start(self._rest, label="powersgd rest")
        for matrix in self._matrices:
            # Without a gradient here the error waits: were the gradient missing on all ranks, the
            # parameter would not be updated and the error would be lost.
            if matrix.place not in missing:
                matrix.view.add_(matrix.error)
            torch.mm(matrix.view, matrix.q, out=matrix.p)
        sum_ps = start(self._ps, label="powersgd P")

        def finish() -> None:
            sum_ps()
            for matrix in self._matrices:
                matrix.p.copy_(torch.linalg.qr(matrix.p).Q)
                # M' P as (P' M)', which reads M by rows: MKL takes a third of the time.
                matrix.q.copy_(torch.mm(matrix.p.T, matrix.view).T)
            sum_qs = start(self._qs, label="powersgd Q")
            sum_rest()
            pieces = self._rest.split_with_sizes([tensor.numel() for tensor in self._whole])
            for tensor, piece in zip(self._whole, pieces, strict=True):
                tensor.copy_(piece.view(tensor.shape))
            sum_qs()
            for matrix in self._matrices:
                approximation = matrix.p @ matrix.q.T
                # P Q' approximates the sum of M over the ranks; 1/N of it stands for this rank's M.
                if matrix.place not in missing:
                    share = 1.0 / communicator.size
                    torch.sub(matrix.view, approximation, alpha=share, out=matrix.error)
                matrix.view.copy_(approximation)

        return finish


class PowerSgdHook(CommunicationHook):
    """Compresses matrices to a given rank, with error feedback and warm start.

    Args:
        rank: columns of the factors.
        start_step: how many sums of each bucket are plain before compression starts; again so
            after a change of the buckets.
        on_wire: maps the dtype of gradients to the dtype in which all is sent.
    """

    def __init__(
        self, rank: int, start_step: int, on_wire: Callable[[torch.dtype], torch.dtype]
    ) -> None:
        super().__init__()
        self._on_wire = on_wire
        self._rank = rank
        self._start_step = start_step
        self._steps: dict[BucketLayout, int] = {}
        self._memories: dict[BucketLayout, _LowRankBucket] = {}

    @override
    def start(self, bucket: Bucket, missing: Sequence[int], communicator: Communicator) -> Finish:
        layout = bucket.layout
        step = self._steps[layout] = self._steps.get(layout, 0) + 1
        places, dtype = self._compressed(layout), self._on_wire(layout.dtype)
        if step <= self._start_step or not places:
            return sum_in(dtype, bucket.flat, communicator, label="gradient bucket")
        if layout not in self._memories:
            self._memories[layout] = _LowRankBucket(bucket, places, self._rank)
        return self._memories[layout].start(frozenset(missing), communicator, dtype)

    @override
    def sent(
        self, layout: BucketLayout, names: Sequence[str], route: Route
    ) -> Counter[tuple[str, str]]:
        ps, qs, rest = self._numels(layout)
        parts = (ps, qs, rest) if ps else (layout.numel,)
        itemsize = self._on_wire(layout.dtype).itemsize
        return sum((route.all_reduced(part, itemsize) for part in parts), Counter())

    @override
    def held(self, layout: BucketLayout, names: Sequence[str], route: Route) -> int:
        ps, qs, rest = self._numels(layout)
        if not ps:
            return 0
        errors = sum(prod(layout.shapes[place]) for place in self._compressed(layout))
        return (ps + qs + rest + errors) * layout.dtype.itemsize

    @override
    def forget(self) -> None:
        self._memories.clear()
        self._steps.clear()

    def _compressed(self, layout: BucketLayout) -> list[int]:
        """Return the places of the gradients whose factors are smaller than the matrix."""
        if layout.dtype not in (torch.float32, torch.float64):
            return []  # factors of half-precision gradients would be noise
        places = []
        for place, shape in enumerate(layout.shapes):
            if len(shape) < 2 or not prod(shape):
                continue
            rows, columns = _matrix_shape(shape)
            if (rows + columns) * self._rank < rows * columns and self._rank <= min(rows, columns):
                places.append(place)
        return places

    def _numels(self, layout: BucketLayout) -> tuple[int, int, int]:
        """Return the elements of all P, of all Q, and of the tensors that are sent whole."""
        shapes = [_matrix_shape(layout.shapes[place]) for place in self._compressed(layout)]
        ps = sum(rows for rows, _ in shapes) * self._rank
        qs = sum(columns for _, columns in shapes) * self._rank
        return ps, qs, layout.numel - sum(rows * columns for rows, columns in shapes)


def _matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return rows and columns: the first dim, and all others as one (paper, section 3)."""
    return shape[0], prod(shape[1:])


def _as_matrix(bucket: Bucket, place: int) -> Tensor:
    """Return a gradient as a matrix that is a view of the bucket, whatever its strides."""
    view = bucket.views[place]
    rows, columns = _matrix_shape(bucket.layout.shapes[place])
    try:
        return view.view(rows, columns)
    except RuntimeError:
        # Strides that no matrix has (channels_last): the same elements in memory order, which is
        # as good a matrix, since every rank reads it in the same order.
        start = view.storage_offset() - bucket.flat.storage_offset()
        return bucket.flat[start : start + view.numel()].view(rows, columns)
