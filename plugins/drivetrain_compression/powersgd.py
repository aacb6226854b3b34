"""PowerSGD: a matrix crosses a slow link as two thin factors.

Paper: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for
Distributed Optimization", NeurIPS 2019, algorithms 1 and 2. For the sum over a host's ranks of a
gradient, as a matrix M (n, m), the error E and the factor Q (m, r) of the step before (the warm
start)::

    M <- M + E                        error feedback
    P <- sum over hosts of M Q        (n, r), sent
    P <- orthogonalised P             the same on every host
    Q <- sum over hosts of M' P       (m, r), sent; the next step starts with it
    gradient <- P Q'
    E <- M - P Q' / hosts             stays on this rank

A rank has some rows of a parameter: these are a matrix, and the elements of a row that is cut go as
they are, like vectors and small matrices. All hosts must compute alike, bit by bit: the same kind
of processor, and the same version of torch.

``hook: powersgd`` of ``ddp`` is the same sum, in which every rank stands for a host.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from drivetrain.collectives import Communicator, Handle, Parts, Route, chunk_bounds, sent_bytes
from drivetrain.collectives.communicator import Deferred, StagedHandle
from drivetrain.collectives.volume import ParameterSpan, Sent, SlicesByRank
from drivetrain.compression.compressor import (
    SMALLEST,
    Compressor,
    ElementRange,
    FarGather,
    FarReduction,
    Fidelity,
    Followed,
    Kept,
    OnWire,
    Rounded,
    are_finite,
    as_it_is,
    is_finite,
)
from drivetrain.config.schema import option
from drivetrain.runtime.mesh import Axis


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
        slices: of each rank along the axis between hosts.
        rank: columns of the factors.
        between_ranks: whether every rank stands for a host. Then small matrices cross as factors,
            too, and factors of fp64 gradients are fp64.
        on_wire: maps the dtype of numbers to the dtype in which they cross.

    Attributes:
        rank: columns of the factors.
        dtype: of factors and errors.
        matrices: in order.
        plain: for each rank, the other elements.
        plain_bytes: of these, as they cross.
        ps: elements of all P.
        qs: elements of all Q.
        errors: elements of all E.
        on_wire: maps the dtype of numbers to the dtype in which they cross.
    """

    def __init__(
        self,
        slices: SlicesByRank,
        rank: int,
        *,
        between_ranks: bool = False,
        on_wire: OnWire = as_it_is,
    ) -> None:
        self.rank = rank
        self.dtype = torch.float32
        self.on_wire = on_wire
        self._smallest = 0 if between_ranks else SMALLEST
        self.matrices: list[LowRankMatrix] = []
        self.plain: list[list[ElementRange]] = []
        self.plain_bytes: list[int] = []
        for owner, part in enumerate(slices):
            self.plain.append([])
            self.plain_bytes.append(0)
            for index, flat_slice in enumerate(part):
                edge = 0
                for span in flat_slice.spans:
                    found = self._matrix(owner, index, span, flat_slice.dtype)
                    if found is not None:
                        self.matrices.append(found)
                        if between_ranks:
                            self.dtype = torch.promote_types(self.dtype, flat_slice.dtype)
                        self._leave(ElementRange(index, edge, found.place.start), flat_slice.dtype)
                        edge = found.place.stop
                self._leave(ElementRange(index, edge, flat_slice.numel), flat_slice.dtype)
        self.ps = rank * sum(each.rows for each in self.matrices)
        self.qs = rank * sum(each.columns for each in self.matrices)
        self.errors = sum(each.rows * each.columns for each in self.matrices)

    def _leave(self, elements: ElementRange, dtype: torch.dtype) -> None:
        if elements.numel:
            self.plain[-1].append(elements)
            self.plain_bytes[-1] += elements.numel * self.on_wire(dtype).itemsize

    def _matrix(
        self, owner: int, tensor: int, span: ParameterSpan, dtype: torch.dtype
    ) -> LowRankMatrix | None:
        """Return the whole rows of a span, if their factors are smaller."""
        if not span.is_matrix or span.numel < self._smallest or not dtype.is_floating_point:
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

    def first_qs(self) -> Tensor:
        """Return the Q of the first step: the same on every rank, without a message."""
        generator = torch.Generator().manual_seed(0)
        return torch.randn(self.qs, generator=generator, dtype=self.dtype)

    def p(self, ps: Tensor) -> list[Tensor]:
        """Return P (n, r) of each matrix, as views."""
        return self._factors(ps, [each.rows for each in self.matrices])

    def q(self, qs: Tensor) -> list[Tensor]:
        """Return Q (m, r) of each matrix, as views."""
        return self._factors(qs, [each.columns for each in self.matrices])

    def _factors(self, flat: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        pieces = flat.split_with_sizes([self.rank * length for length in lengths])
        return [each.view(-1, self.rank) for each in pieces]

    def e(self, errors: Tensor) -> list[Tensor]:
        """Return E (n, m) of each matrix, as views."""
        pieces = errors.split_with_sizes([each.place.numel for each in self.matrices])
        return [
            piece.view(each.rows, each.columns)
            for piece, each in zip(pieces, self.matrices, strict=True)
        ]

    def plain_of(self, parts: Parts) -> list[list[Tensor]]:
        """Return the elements of each rank that go as they are."""
        return [
            [each.of(tensors) for each in chosen]
            for chosen, tensors in zip(self.plain, parts, strict=True)
        ]


_PIECE = 2**17
"""Numbers of a piece of a matrix: half a megabyte."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PowerSgdOptions:
    """Options of ``powersgd``."""

    rank: int = option(4, help="columns of the factors; more are more exact", minimum=1)


class LowRankReduction(FarReduction):
    """A sum over hosts of matrices as factors.

    Args:
        far: the ranks at one place of each host.
        plan: the matrices.
        everywhere: whether all ranks get all sums.
    """

    def __init__(self, far: Communicator, plan: FactorPlan, *, everywhere: bool) -> None:
        self._far = far
        self._plan = plan
        self._everywhere = everywhere
        self._qs = plan.first_qs()
        self._errors = torch.zeros(plan.errors, dtype=plan.dtype)

    @override
    def start(self, parts: Parts, *, first: Callable[[], None], label: str) -> Handle:
        device = next(tensor.device for tensors in parts for tensor in tensors)
        if self._errors.device != device:
            self._qs, self._errors = self._qs.to(device), self._errors.to(device)
        far, plan = self._far, self._plan
        plain = [Rounded(tensors, plan.on_wire) for tensors in plan.plain_of(parts)]
        rest = [each.sent for each in plain]
        # The factors of before stay, in case the step is bad.
        ps, qs = (
            torch.empty(numel, dtype=plan.on_wire(plan.dtype), device=device)
            for numel in (plan.ps, plan.qs)
        )
        bases = ps if ps.dtype == plan.dtype else torch.empty_like(ps, dtype=plan.dtype)

        def multiply() -> None:
            first()
            self._multiply(parts, ps)
            for each in plain:
                each.leave()

        def turn() -> None:
            summed.wait()
            self._turn(parts, ps, bases, qs)

        def turned() -> Handle:
            return self._summed(qs, turn, f"{label}, Q")

        def finish() -> None:
            for each in plain:
                each.arrive()
            self._finish(parts, bases, qs)

        summed = self._summed(ps, multiply, f"{label}, P")
        # An accelerator would wait for the sum of P at once, in the midst of a backward.
        sums = [summed, turned() if device.type == "cpu" else Deferred(lambda: turned().wait())]
        if any(plan.plain_bytes):
            sums.append(far.reduce_parts(rest, label=label))
            if self._everywhere:
                sums.append(far.gather_parts(rest, label=label, first=sums[-1].wait))
        return Followed(StagedHandle(sums, ()), finish)

    @override
    def feedback(self) -> Iterator[Kept]:
        for each, errors in zip(self._plan.matrices, self._plan.e(self._errors), strict=True):
            yield Kept(each.span, errors.view(-1))

    @override
    def factors(self) -> Iterator[tuple[ParameterSpan, Tensor]]:
        for each, q in zip(self._plan.matrices, self._plan.q(self._qs), strict=True):
            yield each.span, q

    def _summed(self, factors: Tensor, first: Callable[[], None], label: str) -> Handle:
        """Sum factors over hosts, once ``first`` has made them."""
        chunks = [[factors[start:stop]] for start, stop in self._far.chunk(factors.numel())]
        reduced = self._far.reduce_parts(chunks, label=label, first=first)
        return self._far.gather_parts(chunks, label=label, first=reduced.wait)

    def _multiply(self, parts: Parts, ps: Tensor) -> None:
        """Make P of this host's gradients and errors; a NaN or infinity spoils all P."""
        for matrix, p, q, error in self._each(ps, self._qs):
            # Added up as products: errors change only when the sum is known to be finite.
            p.copy_(torch.addmm(error @ q, _view(matrix, parts).to(q.dtype), q))
        ps.masked_fill_(~are_finite(parts), float("nan"))

    def _turn(self, parts: Parts, ps: Tensor, bases: Tensor, qs: Tensor) -> None:
        """Orthogonalise the sum of P, and make Q of it; after a NaN all is NaN."""
        factors = zip(self._plan.p(bases), self._each(ps, qs), strict=True)
        for base, (matrix, p, q, error) in factors:
            base.copy_(torch.linalg.qr(p.to(base.dtype)).Q)
            gradient = _view(matrix, parts).to(base.dtype)
            q.copy_(_turned(gradient, base).add_(_turned(error, base)))

    def _finish(self, parts: Parts, bases: Tensor, qs: Tensor) -> None:
        """Write the sums; keep errors and factors for the next one, unless a gradient is bad."""
        finite = bool(is_finite(qs))
        for matrix, p, q, error in self._each(bases, qs):
            gradient = _view(matrix, parts)
            if not finite:
                gradient.fill_(float("nan"))
                continue
            _write_sum(gradient, error, p, q.to(p.dtype), self._far.size)
        if finite:
            self._qs.copy_(qs)

    def _each(
        self, ps: Tensor, qs: Tensor
    ) -> Iterator[tuple[LowRankMatrix, Tensor, Tensor, Tensor]]:
        plan = self._plan
        return zip(plan.matrices, plan.p(ps), plan.q(qs), plan.e(self._errors), strict=True)


class LowRankGather(FarGather):
    """A gather over hosts of updates of parameters as factors.

    The owner of a matrix finds both factors of its update alone::

        P <- orthogonalised (M Q),  Q <- M' P        M: new values - those of the last gather
        values += P Q'                                on all ranks, from the same message

    What the factors lack is part of the next update (``drivetrain.compression.compressor``). A new
    run begins with another Q: its first factors fit less well, and later ones make up for it.

    Args:
        far: the ranks at one place of each host.
        plan: the matrices.
    """

    def __init__(self, far: Communicator, plan: FactorPlan) -> None:
        self._far = far
        self._plan = plan
        self._qs = plan.first_qs()

    @override
    def start(self, parts: Parts, *, first: Callable[[], None], label: str) -> Handle:
        device = next(tensor.device for tensors in parts for tensor in tensors)
        self._qs = self._qs.to(device)
        ps = torch.empty(self._plan.ps, dtype=self._plan.dtype, device=device)
        mine = [each for each in self._factors(ps) if each[0].owner == self._far.rank]

        def encode() -> None:
            before = [_view(matrix, parts).to(ps.dtype, copy=True) for matrix, *_ in mine]
            first()
            for (matrix, p, q), old in zip(mine, before, strict=True):
                values = _view(matrix, parts)
                update = values.to(old.dtype) - old  # no view: the next line overwrites the values
                values.copy_(old)
                if not bool(torch.isfinite(q.sum())):  # a checkpoint was loaded after a bad step
                    q.normal_()
                p.copy_(torch.linalg.qr(update @ q).Q)
                q.copy_(_turned(update, p))

        messages = self._plan.plain_of(parts)
        for matrix, p, q in self._factors(ps):
            messages[matrix.owner] += [p.view(-1), q.view(-1)]
        gathered = self._far.gather_parts(messages, label=label, first=encode)

        def read() -> None:
            for matrix, p, q in self._factors(ps):
                values = _view(matrix, parts)
                values.copy_(torch.addmm(values.to(p.dtype), p, q.T))

        return Followed(gathered, read)

    def _factors(self, ps: Tensor) -> Iterator[tuple[LowRankMatrix, Tensor, Tensor]]:
        return zip(self._plan.matrices, self._plan.p(ps), self._plan.q(self._qs), strict=True)


class PowerSgd(Compressor[PowerSgdOptions]):
    """Matrices of low rank.

    Args:
        config: the options.
        between_ranks: whether every rank stands for a host.
        on_wire: maps the dtype of numbers to the dtype in which they cross.
    """

    summary: ClassVar[str] = "matrices as two factors of low rank: r (n + m) numbers for n x m"
    fidelity: ClassVar[Fidelity] = Fidelity.THEORY
    updates: ClassVar[bool] = True
    keeps_feedback = True
    Config: ClassVar[type] = PowerSgdOptions

    def __init__(
        self,
        config: PowerSgdOptions,
        *,
        between_ranks: bool = False,
        on_wire: OnWire = as_it_is,
    ) -> None:
        super().__init__(config)
        self._plan = partial(
            FactorPlan, rank=config.rank, between_ranks=between_ranks, on_wire=on_wire
        )

    @override
    def approximates(self, slices: SlicesByRank) -> bool:
        return bool(self._plan(slices).matrices)

    @override
    def reduction(
        self, far: Communicator, slices: SlicesByRank, *, everywhere: bool
    ) -> FarReduction:
        return LowRankReduction(far, self._plan(slices), everywhere=everywhere)

    @override
    def sent(self, far: Route, slices: SlicesByRank, *, everywhere: bool) -> Sent:
        plan = self._plan(slices)
        itemsize = plan.on_wire(plan.dtype).itemsize
        factors = [
            [itemsize * (stop - start) for start, stop in chunk_bounds(numel, far.axis.size)]
            for numel in (plan.ps, plan.qs)
        ]
        gathered = [*factors, plan.plain_bytes] if everywhere else factors
        sums = [far.passed("reduce_scatter", each) for each in (*factors, plan.plain_bytes)]
        return sum((*sums, *(far.passed("all_gather", each) for each in gathered)), Counter())

    @override
    def held(self, far: Axis, slices: SlicesByRank, *, everywhere: bool) -> int:
        plan = self._plan(slices)
        return plan.dtype.itemsize * (plan.errors + plan.qs)

    @override
    def rehearse(self, matrix: Tensor) -> None:
        q = torch.randn(matrix.shape[1], self.config.rank, dtype=matrix.dtype, device=matrix.device)
        # Twice, as of gradients and of errors.
        p = torch.linalg.qr(torch.addmm(matrix @ q, matrix, q)).Q
        q = _turned(matrix, p).add_(_turned(matrix, p))
        _write_sum(matrix, torch.empty_like(matrix), p, q, 1)

    @override
    def gathering(self, far: Communicator, slices: SlicesByRank, *, updates: bool) -> FarGather:
        return LowRankGather(far, self._plan(slices))

    @override
    def sent_gathering(self, far: Axis, slices: SlicesByRank) -> Sent:
        plan = self._plan(slices)
        lengths = list(plan.plain_bytes)
        for matrix in plan.matrices:
            numel = plan.rank * (matrix.rows + matrix.columns)
            lengths[matrix.owner] += plan.dtype.itemsize * numel
        return Counter({(far.name, "all_gather"): sent_bytes("all_gather", lengths, far.rank)})


def _view(matrix: LowRankMatrix, parts: Parts) -> Tensor:
    """Return the gradient of a matrix, (n, m), as a view of the owner's tensors."""
    tensors: Sequence[Tensor] = parts[matrix.owner]
    return matrix.place.of(tensors).view(matrix.rows, matrix.columns)


def _write_sum(gradient: Tensor, error: Tensor, p: Tensor, q: Tensor, hosts: int) -> None:
    """Replace a gradient (n, m) by the sum P Q', and keep its error.

    Some rows at a time: four passes then find them in a processor's caches.
    """
    rows = max(1, _PIECE // gradient.shape[1])
    pieces = zip(*(torch.split(each, rows) for each in (gradient, error, p)), strict=True)
    for numbers, lacking, factor in pieces:
        lacking.add_(numbers)
        total = numbers.to(p.dtype)  # of this dtype: the gradient itself
        torch.mm(factor, q.T, out=total)
        lacking.sub_(total, alpha=1.0 / hosts)
        numbers.copy_(total)


def _turned(matrix: Tensor, p: Tensor) -> Tensor:
    """Return M' P, (m, r), of a matrix M (n, m) and a factor P (n, r)."""
    # Both products read M by rows: M Q as it stands, and M' P as (P' M)'. For the other forms
    # MKL takes three to five times as long, with rank 4 and AVX-512.
    return torch.mm(p.T, matrix).T
