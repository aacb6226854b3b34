"""The contract of communicators, their handles and channels, and the communicator of one rank.

Handles are of operations under way: finished, put off until a wait, or with copies that follow. A
communicator that cannot send from several places at once copies parts side by side, and back::

    gather_parts   copy mine into a flat of bytes; all-gather;        on wait: copy the others out
    reduce_parts   per dtype: copy all into a flat; reduce-scatter;   on wait: copy mine out
"""

import itertools
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, Protocol, TypeAlias
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from drivetrain.collectives.volume import (
    Chunks,
    Layout,
    Operation,
    Parts,
    Stretch,
    StretchParts,
    as_bytes,
    byte_lengths,
    checked_chunks,
    checked_parts,
    chunk_bounds,
    sent_bytes,
    sent_elements,
)
from drivetrain.errors import UsageError
from drivetrain.runtime.mesh import Axis
from drivetrain.shards import Reader, Shard
from drivetrain.traffic import Traffic

Tensors = list[Tensor] | tuple[Tensor, ...]


class Handle(Protocol):
    """An operation under way."""

    def wait(self) -> None:
        """Return when the tensor holds the result; may be called more than once.

        On an accelerator only the current stream waits.

        Raises:
            CollectiveError: the operation failed or timed out.
        """

    def done(self) -> bool:
        """Whether ``wait`` would return, or raise, at once."""


class Finished:
    """A handle of an operation that is over."""

    def wait(self) -> None:
        """Return at once."""

    def done(self) -> bool:
        """Return True."""
        return True


class Deferred:
    """A handle whose ``wait`` does the work.

    Args:
        work: called once.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work

    def wait(self) -> None:
        """Do the work, unless it is done."""
        if self._work is not None:
            self._work()
            self._work = None

    def done(self) -> bool:
        """Whether the work is done."""
        return self._work is None


class StagedHandle:
    """Operations on flat tensors, and the copies out of them.

    Args:
        operations: those under way.
        copies: what is filled after them, and the slices of a flat tensor to fill it from; keeps
            the flat tensors alive.
    """

    def __init__(
        self, operations: Sequence[Handle], copies: Sequence[tuple[list[Tensor], list[Tensor]]]
    ) -> None:
        self._operations = operations
        self._copies = copies

    def wait(self) -> None:
        """Return when the parts hold the result; on an accelerator the current stream waits.

        Raises:
            CollectiveError: an operation failed or timed out.
        """
        for operation in self._operations:
            operation.wait()
        with torch.no_grad():
            for tensors, slices in self._copies:
                copy_all(tensors, slices)
        for _, slices in self._copies:
            if slices and slices[0].device.type != "cpu":
                # Its memory is of the stream of submission, which the current one may not be.
                slices[0].record_stream(torch.accelerator.current_stream(slices[0].device))
        self._copies = ()

    def done(self) -> bool:
        """Whether all operations have finished."""
        return all(operation.done() for operation in self._operations)


class Staging:
    """A flat tensor with room for parts of one dtype, side by side in the order of ranks.

    Args:
        parts: for each rank, its tensors; at least one tensor in all.

    Attributes:
        flat: the tensor, not filled.
        chunks: the (start, stop) of what each rank holds.
        slices: for each rank, the views of the flat tensor that stand for its tensors.
    """

    def __init__(self, parts: list[list[Tensor]]) -> None:
        lengths = [tensor.numel() for tensors in parts for tensor in tensors]
        first = next(tensor for tensors in parts for tensor in tensors)
        self.flat = first.new_empty(sum(lengths))
        views = iter(torch.split(self.flat, lengths))
        self.slices = [list(itertools.islice(views, len(tensors))) for tensors in parts]
        ends = itertools.accumulate(sum(map(Tensor.numel, tensors)) for tensors in parts)
        self.chunks = list(itertools.pairwise([0, *ends]))


def copy_all(targets: Tensors, sources: Tensors) -> None:
    """Copy many tensors at once; there may be none."""
    if targets:
        torch._foreach_copy_(targets, sources)


# --- channels: the same tensors time and again, which a slow link may approximate ---

# Here all of them are exact; ``drivetrain.compression.communicator`` has those that are not.


SumChannel: TypeAlias = Callable[[Tensor], Handle]
"""Sums the same flat tensor over ranks, time and again, on every rank."""

ReduceChannel: TypeAlias = Callable[[Parts], Handle]
"""Sums the same parts over ranks, time and again, each on the rank that keeps it."""

GatherChannel: TypeAlias = Callable[[Parts, Callable[[], None] | None], Handle]
"""Gathers the same parts, time and again; the second argument is ``first`` of ``gather_parts``."""


class Channels(ABC):
    """The channels of a communicator."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor, *, label: str = "") -> Handle:
        """Replace a tensor by its sum over ranks."""

    @abstractmethod
    def gather_parts(
        self, parts: Parts, *, label: str = "", first: Callable[[], None] | None = None
    ) -> Handle:
        """Fill the tensors of the other ranks with the values of these ranks."""

    @abstractmethod
    def reduce_parts(self, parts: Parts, *, label: str = "") -> Handle:
        """Put the sums over ranks into this rank's tensors."""

    def gradients_summed(
        self, stretch: Stretch, label: str, replaces: SumChannel | None = None
    ) -> SumChannel:
        """Return a channel that replaces gradients by their sums over ranks.

        Args:
            stretch: describes the flat tensor of the gradients.
            label: names the operations in errors.
            replaces: a channel that is given up for this one, and under way no more. The state
                that an approximation has kept for the elements of this rank goes on.
        """

        def start(tensor: Tensor) -> Handle:
            return self.all_reduce(tensor, label=label)

        return start

    def renew_channels(self) -> None:
        """Give up the channels of gradients: others are about to take their places.

        Collective over the ranks of a host. What an approximation has kept back goes on to the
        channels that come, by the names of parameters; without one there is nothing to do.
        """
        return

    def gradients_scattered(
        self,
        describe: Callable[[], StretchParts],
        label: str,
        replaces: ReduceChannel | None = None,
    ) -> ReduceChannel:
        """Return a channel that puts the sums of gradients over ranks into this rank's tensors.

        Args:
            describe: describes the tensors of each rank; only asked where that is needed.
            label: names the operations in errors.
            replaces: a channel of this communicator that is given up, of some of the same tensors;
                the new one goes on with what that has kept back.
        """

        def start(parts: Parts) -> Handle:
            return self.reduce_parts(parts, label=label)

        return start

    def parameters_gathered(
        self, describe: Callable[[], StretchParts], label: str
    ) -> GatherChannel:
        """Return a channel that fills the tensors of all ranks with parameters.

        Args:
            describe: describes the tensors of each rank; only asked where that is needed.
            label: names the operations in errors.
        """

        def start(parts: Parts, first: Callable[[], None] | None) -> Handle:
            return self.gather_parts(parts, label=label, first=first)

        return start

    def parameters_updated(self, describe: Callable[[], StretchParts], label: str) -> GatherChannel:
        """Return a channel that brings updates of parameters to all ranks.

        Between two gathers the tensors stay as they are, and alike on all ranks; ``first`` writes
        the new values of this rank's tensors, and an approximation sends the difference.

        Args:
            describe: describes the tensors of each rank; only asked where that is needed.
            label: names the operations in errors.
        """
        return self.parameters_gathered(describe, label)

    def step_decided(self, *, taken: bool) -> None:
        """Note whether optimizers step with the sums since the last step, or the step is skipped.

        An approximation then goes on with what it had kept back before these sums.
        """
        return

    def before_sums_without(self, names: Collection[str]) -> None:
        """Note parameters of which this rank has no gradient in sums that are about to start.

        Whether all ranks lack them shows later: then an approximation gets ``give_back``.
        """
        return

    def give_back(self, names: Collection[str]) -> None:
        """Go on, for parameters of which no rank had a gradient, with what was kept of them before.

        Nothing is updated by their sums.
        """
        return

    def kept(self) -> Iterator[Shard]:
        """Yield the state of channels of gradients, such as errors, for a checkpoint."""
        return iter(())

    def take_kept(self, reader: Reader) -> bool:
        """Let the channels so far go on with the state in a checkpoint.

        Returns:
            Whether channels keep anything.
        """
        return False

    def take_links(self, links: Any) -> None:
        """Let channels go on with methods for slow links that were chosen between two steps.

        Args:
            links: ``drivetrain.compression.methods.LinkMethods``; exact channels ask for none.
        """
        return

    @property
    def approximates_parameters(self) -> bool:
        """Whether gathered values of parameters may differ from the values of their owners."""
        return False

    @property
    def owns_apart(self) -> bool:
        """Whether owners keep values apart from gathered ones, which are approximate or may be."""
        return False


# --- the contract ---


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


_known: "WeakValueDictionary[int, Communicator]" = WeakValueDictionary()
_numbers = itertools.count()


def communicator_of(number: int) -> "Communicator":
    """Return the communicator with a number: operators inside of a graph take no objects.

    The number keeps none alive: a graph that outlives its strategy finds nothing.

    Raises:
        UsageError: the communicator is gone.
    """
    if (found := _known.get(number)) is None:
        raise UsageError(
            "expected the ranks that a compiled graph sends to, found that its strategy is gone, "
            "as after free_memory(); prepare the model again"
        )
    return found


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
        number: of this one in this process, for ``communicator_of``.
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
        self.number = next(_numbers)
        _known[self.number] = self

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


# --- one rank: nothing to send, every handle is finished ---


class SoloCommunicator(Communicator):
    """Collectives among one rank: only the scale is applied."""

    def all_reduce(
        self,
        tensor: Tensor,
        *,
        scale: float = 1.0,
        reduction: Reduction = "sum",
        label: str = "",
    ) -> Handle:
        """Multiply by the scale."""
        return self._scaled(tensor, scale)

    def reduce_scatter(
        self, flat: Tensor, *, scale: float = 1.0, chunks: Chunks | None = None, label: str = ""
    ) -> Handle:
        """Multiply by the scale."""
        checked_chunks(chunks, flat.numel(), self.size)
        return self._scaled(flat, scale)

    def all_gather(self, flat: Tensor, *, chunks: Chunks | None = None, label: str = "") -> Handle:
        """Return a finished handle: the only chunk is there."""
        checked_chunks(chunks, flat.numel(), self.size)
        return Finished()

    def gather_parts(
        self, parts: Parts, *, label: str = "", first: Callable[[], None] | None = None
    ) -> Handle:
        """Return a handle that only calls ``first``: all parts are this rank's."""
        checked_parts(parts, self.size)
        return Finished() if first is None else Deferred(first)

    def reduce_parts(
        self,
        parts: Parts,
        *,
        scale: float = 1.0,
        label: str = "",
        first: Callable[[], None] | None = None,
    ) -> Handle:
        """Multiply by the scale, after ``first``."""
        if first is not None:
            first()
        for tensor in checked_parts(parts, self.size)[0]:
            self._scaled(tensor, scale)
        return Finished()

    def all_to_all(
        self,
        outgoing: Sequence[Tensor],
        incoming: Sequence[Tensor],
        *,
        label: str = "",
        first: Callable[[], None] | None = None,
    ) -> Handle:
        """Return a handle that only calls ``first``: there is nobody to send to."""
        return Finished() if first is None else Deferred(first)

    def broadcast(self, tensor: Tensor, source: int = 0, *, label: str = "") -> Handle:
        """Return a finished handle: this rank is the source."""
        return Finished()

    def barrier(self) -> None:
        """Return at once."""

    def close(self) -> None:
        """Nothing to release."""

    def _scaled(self, tensor: Tensor, scale: float) -> Handle:
        flat = flatten(tensor)
        if scale != 1.0:
            flat.mul_(scale)
        return Finished()
