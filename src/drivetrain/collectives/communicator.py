"""The contract of communicators, and of handles of operations under way, for every algorithm."""

import re
import sys
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from drivetrain.collectives.channels import Channels
from drivetrain.collectives.handles import Finished, Handle, StagedHandle, Staging, copy_all
from drivetrain.collectives.volume import (
    Chunks,
    Layout,
    Operation,
    Parts,
    as_bytes,
    byte_lengths,
    checked_parts,
    chunk_bounds,
    sent_bytes,
    sent_elements,
)
from drivetrain.errors import UsageError
from drivetrain.runtime.mesh import Axis
from drivetrain.traffic import Traffic

Reduction: TypeAlias = Literal["sum", "max"]


@dataclass(frozen=True, slots=True)
class Request:
    """One collective that a caller asked for: everything but the tensor.

    Attributes:
        operation: which collective.
        label: names the operation in errors; empty: the line of the call does.
        chunks: each rank's range of the tensor; None where an operation is not about chunks.
        source: where a broadcast starts.
        reduction: how values are combined.
        layout: lengths and dtypes of the parts; None where an operation is about one tensor.
    """

    operation: Operation
    label: str = ""
    chunks: Chunks | None = None
    source: int = 0
    reduction: Reduction = "sum"
    layout: Layout | None = None

    def elements(self, flat: Tensor | None) -> int:
        """Return the elements of the tensor, or, where there is none, the bytes of the parts."""
        return sum(byte_lengths(self.layout or ())) if flat is None else flat.numel()


class Communicator(Channels):
    """Collectives over one axis, in place, asynchronous, in the order of submission.

    Every rank of the axis must submit the same operations in the same order, with tensors of equal
    size and dtype. A tensor must not be read or written between submission and ``wait``. All ranks
    end with bit-identical results. Sums are taken in the tensor's own dtype.

    Args:
        axis: the mesh axis.
        traffic: the ledger; gets the payload bytes that this rank sends.
        timeout: how long one operation may take.

    Attributes:
        disagreement: what ranks were about to do differently, once that was found.
        companions: communicators over other axes that cannot go on when this one has failed.
    """

    def __init__(self, axis: Axis, traffic: Traffic, timeout: timedelta) -> None:
        self.axis = axis
        self.size = axis.size
        self.rank = axis.rank
        self.traffic = traffic
        self.timeout = timeout
        self.submitted = 0
        self.companions: Sequence[Communicator] = ()
        self.disagreement = ""

    def chunk(self, numel: int) -> list[tuple[int, int]]:
        """Return the even cut: the (start, stop) that each rank holds of numel elements."""
        return chunk_bounds(numel, self.size)

    @abstractmethod
    def all_reduce(
        self, tensor: Tensor, *, scale: float = 1.0, reduction: Reduction = "sum", label: str = ""
    ) -> Handle:
        """Replace a contiguous tensor of any shape by the reduction over ranks, times scale."""

    @abstractmethod
    def reduce_scatter(
        self, flat: Tensor, *, scale: float = 1.0, chunks: Chunks | None = None, label: str = ""
    ) -> Handle:
        """Put the sum over ranks, times scale, into this rank's chunk of a flat tensor.

        The other chunks hold partial sums afterwards.

        Args:
            flat: 1-D and contiguous, shape (numel,).
            scale: the factor.
            chunks: the (start, stop) that each rank keeps, some may be empty; the same on every
                rank; None: the even cut.
            label: names the operation in errors; the default is the line of the call.

        Raises:
            UsageError: the chunks do not cover the tensor, one per rank, in ascending order.
        """

    @abstractmethod
    def all_gather(self, flat: Tensor, *, chunks: Chunks | None = None, label: str = "") -> Handle:
        """Fill a flat tensor from the ranks' chunks.

        Args:
            flat: 1-D and contiguous, shape (numel,).
            chunks: the (start, stop) that each rank holds, some may be empty; the same on every
                rank; None: the even cut.
            label: names the operation in errors; the default is the line of the call.

        Raises:
            UsageError: the chunks do not cover the tensor, one per rank, in ascending order.
        """

    def gather_parts(
        self, parts: Parts, *, label: str = "", first: Callable[[], None] | None = None
    ) -> Handle:
        """Fill the tensors of the other ranks with the values of these ranks.

        Bytes move, so tensors of any dtypes go together. It is an ``all_gather`` in the ledger.

        Args:
            parts: for each rank of the axis, the 1-D contiguous tensors that it holds, perhaps
                none; lengths and dtypes are the same on every rank. They must not overlap.
            label: names the operation in errors; the default is the line of the call.
            first: called once, before this rank's tensors are read; maybe in another thread, and
                as late as in ``wait``.

        Raises:
            UsageError: there is not one list per rank, or a tensor is not 1-D and contiguous.
        """
        if first is not None:
            first()
        held = as_bytes(checked_parts(parts, self.size))
        if not any(held):
            return Finished()
        staging = Staging(held)
        with torch.no_grad():
            copy_all(staging.slices[self.rank], held[self.rank])
        gather = self.all_gather(staging.flat, chunks=staging.chunks, label=label or caller(2))
        others = [rank for rank in range(self.size) if rank != self.rank]
        return StagedHandle([gather], [(held[rank], staging.slices[rank]) for rank in others])

    def reduce_parts(
        self,
        parts: Parts,
        *,
        scale: float = 1.0,
        label: str = "",
        first: Callable[[], None] | None = None,
    ) -> Handle:
        """Put the sums over ranks, times scale, into this rank's tensors.

        Each tensor is summed in its own dtype. What those of the other ranks hold afterwards is
        of no use. It is a ``reduce_scatter`` in the ledger.

        Args:
            parts: for each rank of the axis, the 1-D contiguous tensors that it keeps, perhaps
                none; lengths and dtypes are the same on every rank. They must not overlap.
            scale: the factor.
            label: names the operation in errors; the default is the line of the call.
            first: as for ``gather_parts``.

        Raises:
            UsageError: there is not one list per rank, or a tensor is not 1-D and contiguous.
        """
        if first is not None:
            first()
        held, label = checked_parts(parts, self.size), label or caller(2)
        operations, copies = [], []
        for dtype in dict.fromkeys(tensor.dtype for tensors in held for tensor in tensors):
            kind = [[tensor for tensor in tensors if tensor.dtype == dtype] for tensors in held]
            staging = Staging(kind)
            with torch.no_grad():
                for tensors, slices in zip(kind, staging.slices, strict=True):
                    copy_all(slices, tensors)
            operations.append(
                self.reduce_scatter(staging.flat, scale=scale, chunks=staging.chunks, label=label)
            )
            copies.append((kind[self.rank], staging.slices[self.rank]))
        return StagedHandle(operations, copies)

    def all_to_all(
        self,
        outgoing: Sequence[Tensor],
        incoming: Sequence[Tensor],
        *,
        label: str = "",
        first: Callable[[], None] | None = None,
    ) -> Handle:
        """Send another tensor of bytes to each rank, and receive one from each.

        A communicator that cannot send to one rank alone gathers all messages on every rank.

        Args:
            outgoing: for each rank, what it gets from this one: 1-D, contiguous, uint8, and of
                the same length whoever sends it. The entry of this rank is not read.
            incoming: for each rank, where its tensor arrives; all as long as the tensors that
                others are to send to this rank. The entry of this rank is not written.
            label: names the operation in errors; the default is the line of the call.
            first: as for ``gather_parts``.
        """
        if first is not None:
            first()
        return _swap_by_gather(self, outgoing, incoming, label or caller(2))

    def accompany(self, companions: "Sequence[Communicator]") -> None:
        """Let the failure of this communicator reach the ranks of others."""
        self.companions = companions

    def disagreed(self) -> str:
        """Return the difference between ranks, or "" if none is known."""
        return self.disagreement

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int = 0, *, label: str = "") -> Handle:
        """Copy a contiguous tensor from the rank with index ``source`` on the axis."""

    @abstractmethod
    def barrier(self) -> None:
        """Return when every rank of the axis has come here."""

    def alarm(self) -> None:
        """Let every rank of the axis fail soon, because this one cannot go on.

        Backends with a watchdog of their own need nothing.
        """
        return

    @abstractmethod
    def close(self) -> None:
        """Finish submitted operations and release threads and memory; the group stays usable."""

    def _sent_bytes(self, request: Request, tensor: Tensor | None) -> int:
        if tensor is None:
            return sent_bytes(request.operation, byte_lengths(request.layout or ()), self.rank)
        elements = sent_elements(
            request.operation,
            tensor.numel(),
            size=self.size,
            rank=self.rank,
            source=request.source,
            chunks=request.chunks,
        )
        return elements * tensor.element_size()

    def _number(self) -> int:
        """Return the sequence number of the operation that is being submitted."""
        self.submitted += 1
        return self.submitted


def _swap_by_gather(
    communicator: Communicator, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], label: str
) -> Handle:
    """Gather the messages of all ranks for all ranks, and take those for this rank."""
    rank, size = communicator.rank, communicator.size
    lengths = [tensor.numel() for tensor in outgoing]
    total = sum(lengths)
    everyone = outgoing[rank].new_empty(size, total)
    torch.cat(tuple(outgoing), out=everyone[rank])
    chunks = [(total * each, total * (each + 1)) for each in range(size)]
    gather = communicator.all_gather(everyone.view(-1), chunks=chunks, label=label)
    start = sum(lengths[:rank])
    mine = [row[start : start + lengths[rank]] for row in everyone]
    others = [each for each in range(size) if each != rank]
    copies = ([incoming[each] for each in others], [mine[each] for each in others])
    return StagedHandle([gather], [copies])


def caller(depth: int = 3) -> str:
    """Return file:line of the code that called a communicator's method, so many frames up."""
    frame = sys._getframe(depth)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def reason(error: BaseException) -> str:
    """Return the message of a backend's error, without its source lines and advice."""
    text = str(error).partition("This is typically")[0]
    return re.sub(r"^\[[^\]]*\.cc:\d+\] ", "", text).strip().rstrip(".") or type(error).__name__


def flatten(tensor: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Return a 1-D view of a contiguous tensor, outside of autograd.

    Raises:
        UsageError: the tensor is not contiguous, or has the wrong shape.
    """
    if not tensor.is_contiguous():
        raise UsageError(
            f"expected a contiguous tensor for a collective, found shape {tuple(tensor.shape)} "
            f"with strides {tensor.stride()}; pass tensor.contiguous() and copy the result back"
        )
    if shape is not None and tensor.shape != torch.Size(shape):
        raise UsageError(f"expected shape {tuple(shape)}, found {tuple(tensor.shape)}")
    return tensor.detach().view(-1)
