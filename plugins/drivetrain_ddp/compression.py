"""A bucket on the wire: whole, in another dtype, of low rank; and the knobs that choose.

PowerSGD (Vogels et al., NeurIPS 2019): a matrix crosses the wire as two thin factors.

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

The knobs of data parallelism, and the compression that they choose.
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from typing_extensions import override

from drivetrain.collectives import Communicator, Route
from drivetrain.collectives.communicator import SumChannel
from drivetrain.config.option import option
from drivetrain.errors import ConfigError
from drivetrain.parallel.replicated import MIB, Bucket, BucketLayout, plan_buckets
from drivetrain.runtime.precision import Precision

# --- a bucket on the wire ---

Finish: TypeAlias = Callable[[], object]
"""Returns when a bucket's flat tensor, tail included, holds the sum over ranks."""


def sum_in(dtype: torch.dtype, tensor: Tensor, communicator: Communicator, *, label: str) -> Finish:
    """Start to sum a tensor over the ranks in a dtype on the wire; the sum replaces its values."""
    if dtype == tensor.dtype:
        return communicator.all_reduce(tensor, label=label).wait
    rounded = tensor.to(dtype)
    handle = communicator.all_reduce(rounded, label=label)

    def finish() -> None:
        handle.wait()
        tensor.copy_(rounded)

    return finish


class CommunicationHook:
    """Turns a full bucket into its sum over the ranks; subclasses compress the message.

    Gradients are divided by N before. ``start`` is called for the same buckets in the same order on
    every rank, and so are the functions that ``start`` returns.
    """

    def __init__(self) -> None:
        self._channels: dict[BucketLayout, SumChannel] = {}

    def start(self, bucket: Bucket, missing: Sequence[int], communicator: Communicator) -> Finish:
        """Start to sum a bucket over the ranks, each gradient in its own dtype.

        Args:
            bucket: gradients / N and tail, complete; views without a gradient are zero.
            missing: indices in the bucket of parameters without a gradient on this rank.
            communicator: the data-parallel axis.
        """
        return self._channel(bucket, bucket.layout.dtype, communicator)(bucket.flat).wait

    def open(self, bucket: Bucket, communicator: Communicator) -> None:
        """Make the channel of a bucket: a checkpoint is about to be loaded into it."""
        self._channel(bucket, self._dtype(bucket.layout.dtype), communicator)

    def _dtype(self, given: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients are sent."""
        return given

    def _channel(
        self, bucket: Bucket, dtype: torch.dtype, communicator: Communicator
    ) -> SumChannel:
        """Return the channel of a bucket's sums in some dtype."""
        layout = bucket.layout
        if layout not in self._channels:
            stretch = layout.stretch(bucket.names, dtype)
            self._channels[layout] = communicator.gradients_summed(stretch, "gradient bucket")
        return self._channels[layout]

    def sent(
        self, layout: BucketLayout, names: Sequence[str], route: Route
    ) -> Counter[tuple[str, str]]:
        """Return the bytes that a rank sends for a bucket per step, by (axis, operation).

        Args:
            layout: of the bucket.
            names: of all parameters in the sequence that was planned.
            route: the way of data over the data-parallel axis.
        """
        return route.gradients_summed(layout.stretch(names))

    def held(self, layout: BucketLayout, names: Sequence[str], route: Route) -> int:
        """Return the bytes that are held for a bucket's messages between steps."""
        return route.kept_back(layout.stretch(names))

    def forget(self) -> None:
        """Drop the state of every bucket: the buckets are about to change."""
        self._channels.clear()


class CastHook(CommunicationHook):
    """Sends gradients in another dtype: converts, sums and converts back.

    Args:
        on_wire: maps the dtype of gradients to the dtype in which they are sent.
    """

    def __init__(self, on_wire: Callable[[torch.dtype], torch.dtype]) -> None:
        super().__init__()
        self._on_wire = on_wire
        self._rounded: dict[BucketLayout, Tensor] = {}

    @override
    def _dtype(self, given: torch.dtype) -> torch.dtype:
        return self._on_wire(given)

    @override
    def start(self, bucket: Bucket, missing: Sequence[int], communicator: Communicator) -> Finish:
        rounded = self._rounded.get(bucket.layout)
        if rounded is None:
            rounded = torch.empty_like(bucket.flat, dtype=self._on_wire(bucket.layout.dtype))
            self._rounded[bucket.layout] = rounded
        rounded.copy_(bucket.flat)
        handle = self._channel(bucket, rounded.dtype, communicator)(rounded)

        def finish() -> None:
            handle.wait()
            bucket.flat.copy_(rounded)

        return finish

    @override
    def sent(
        self, layout: BucketLayout, names: Sequence[str], route: Route
    ) -> Counter[tuple[str, str]]:
        return route.gradients_summed(layout.stretch(names, self._on_wire(layout.dtype)))

    @override
    def held(self, layout: BucketLayout, names: Sequence[str], route: Route) -> int:
        dtype = self._on_wire(layout.dtype)
        return layout.numel * dtype.itemsize + route.kept_back(layout.stretch(names, dtype))

    @override
    def forget(self) -> None:
        super().forget()
        self._rounded.clear()


def narrowing(dtype: torch.dtype) -> Callable[[torch.dtype], torch.dtype]:
    """Return a rule for ``CastHook``: narrow wider gradients to this dtype, leave others."""

    def on_wire(given: torch.dtype) -> torch.dtype:
        return given if given.is_complex or given.itemsize <= dtype.itemsize else dtype

    return on_wire


# --- powerSGD ---


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


# --- the knobs of data parallelism, and the compression that they choose ---


@dataclass(frozen=True, kw_only=True, slots=True)
class DdpConfig:
    """Options of the strategy ``ddp``."""

    bucket_mib: float = option(
        25.0, help="MiB of gradients that are sent together", minimum=0.001, maximum=4096
    )
    first_bucket_mib: float = option(
        1.0, help="MiB of the first bucket: small, so that sending starts early", minimum=0.001
    )
    buffers: Literal["broadcast", "none"] = option(
        "broadcast",
        help="whether rank 0's buffers (BatchNorm statistics) replace the others' after a backward",
    )
    hook: Literal["none", "bf16", "fp16", "powersgd"] = option(
        "none",
        help="compression of gradients on the wire: none, half precision, or low rank",
        question="Compress gradients on the wire?",
    )
    exchange: Literal["gradients", "momentum"] = option(
        "gradients",
        help="tensors that methods of links.far send: gradients, or momenta of Adam",
    )
    powersgd_rank: int = option(4, help="rank of the low-rank gradients of powersgd", minimum=1)
    powersgd_dtype: Literal["same", "bf16", "fp16"] = option(
        "same", help="dtype in which powersgd sends: that of the gradients, or half precision"
    )
    powersgd_start_step: int = option(
        10, help="optimizer steps with uncompressed gradients before powersgd starts", minimum=0
    )

    def buckets(
        self,
        shapes: Sequence[tuple[int, ...]],
        kinds: Sequence[tuple[torch.dtype, Hashable]],
        order: Sequence[int],
    ) -> list[BucketLayout]:
        """Return the buckets of these sizes; see ``plan_buckets``."""
        return plan_buckets(
            shapes,
            kinds,
            order,
            bucket_bytes=int(self.bucket_mib * MIB),
            first_bytes=int(self.first_bucket_mib * MIB),
        )

    def compression(self, precision: Precision) -> CommunicationHook:
        """Return the hook that the options name, or a cast to the policy's dtype.

        Raises:
            ConfigError: two of a hook, ``dtypes.reduce`` and ``exchange: momentum`` are set.
        """
        if self.exchange == "momentum" and (self.hook != "none" or precision.reduce is not None):
            raise ConfigError(
                "ddp: expected hook: none and no dtypes.reduce with exchange: momentum, found "
                f"hook: {self.hook} and {precision}; leave out one side"
            )
        if precision.reduce is not None and self.hook != "none":
            raise ConfigError(
                "ddp: expected strategy.hook or dtypes.reduce, found both: "
                f"hook: {self.hook} and {precision}; leave one of them out"
            )
        if precision.reduce is not None:
            return CastHook(precision.reduce_dtype)
        if self.hook == "powersgd":
            on_wire = _on_wire(self.powersgd_dtype)
            return PowerSgdHook(self.powersgd_rank, self.powersgd_start_step, on_wire)
        if self.hook == "none":
            return CommunicationHook()
        return CastHook(_on_wire(self.hook))


def _on_wire(word: str) -> Callable[[torch.dtype], torch.dtype]:
    """Return the dtype on the wire for each dtype of gradients."""
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return narrowing(dtypes[word]) if word in dtypes else lambda dtype: dtype
