"""The contract of communicators, the order that all ranks keep, and the communicator of one rank.

Handles are of operations under way: finished, put off until a wait, or with copies that follow. A
communicator that cannot send from several places at once copies parts side by side, and back::

    gather_parts   copy mine into a flat of bytes; all-gather;        on wait: copy the others out
    reduce_parts   per dtype: copy all into a flat; reduce-scatter;   on wait: copy mine out
"""

import itertools
import re
import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.profiler import record_function

from drivetrain.collectives.volume import (
    Chunks,
    FlatSlice,
    Operation,
    SlicesByRank,
    checked_chunks,
    chunk_bounds,
    sent_bytes,
    sent_elements,
)
from drivetrain.cost import Traffic
from drivetrain.errors import CollectiveError, UsageError
from drivetrain.runtime.mesh import Axis
from drivetrain.runtime.ranges import COLLECTIVE, WAIT
from drivetrain.shards import Reader, Shard

Tensors = list[Tensor] | tuple[Tensor, ...]

First: TypeAlias = Callable[[], None] | None
"""Called once, before this rank's tensors are read: maybe in another thread, at last in a wait."""

Parts: TypeAlias = Sequence[Sequence[Tensor]]
"""For each rank of the axis, in order: the rank's 1-D contiguous tensors, mostly slices of larger
tensors. Lengths and dtypes are the same on every rank."""

Layout: TypeAlias = tuple[tuple[tuple[int, torch.dtype], ...], ...]
"""For each rank of the axis, in order: elements and dtype of the rank's tensors."""


def checked_parts(parts: Parts, size: int) -> list[list[Tensor]]:
    """Return the tensors that each rank holds, outside of autograd.

    Raises:
        UsageError: there is not one list per rank, or a tensor is not 1-D and contiguous.
    """
    if len(parts) != size:
        raise UsageError(
            f"expected the tensors of each of {size} ranks, found {len(parts)} lists; the list of "
            "a rank that holds nothing is empty"
        )
    held: list[list[Tensor]] = []
    for rank, tensors in enumerate(parts):
        for tensor in tensors:
            if tensor.dim() != 1 or not tensor.is_contiguous():
                raise UsageError(
                    f"expected parts that are 1-D and contiguous, found shape "
                    f"{tuple(tensor.shape)} with strides {tensor.stride()} among those of rank "
                    f"{rank}; pass tensor.view(-1) of a contiguous tensor"
                )
        held.append([tensor.detach() for tensor in tensors])
    return held


def as_bytes(parts: Parts) -> list[list[Tensor]]:
    """Return views of the tensors' memory, dtype uint8: a message has no other dtype."""
    return [[tensor.view(torch.uint8) for tensor in tensors] for tensors in parts]


def layout_of(parts: Parts) -> Layout:
    """Return elements and dtype of every tensor."""
    return tuple(tuple((tensor.numel(), tensor.dtype) for tensor in tensors) for tensors in parts)


# --- handles ---


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


@dataclass(eq=False, slots=True)
class StagedHandle:
    """Operations on flat tensors, and the copies out of them.

    Args:
        operations: those under way.
        copies: what is filled after them, and the slices of a flat tensor to fill it from; keeps
            the flat tensors alive.
    """

    operations: Sequence[Handle]
    copies: Sequence[tuple[list[Tensor], list[Tensor]]] = ()

    def wait(self) -> None:
        """Return when the parts hold the result; on an accelerator the current stream waits.

        Raises:
            CollectiveError: an operation failed or timed out.
        """
        for operation in self.operations:
            operation.wait()
        with torch.no_grad():
            for tensors, slices in self.copies:
                copy_all(tensors, slices)
        for _, slices in self.copies:
            if slices and slices[0].device.type != "cpu":
                # Its memory is of the stream of submission, which the current one may not be.
                slices[0].record_stream(torch.accelerator.current_stream(slices[0].device))
        self.copies = ()

    def done(self) -> bool:
        """Whether all operations have finished."""
        return all(operation.done() for operation in self.operations)


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

SumChannel: TypeAlias = Callable[[Tensor], Handle]
"""Sums the same flat tensor over ranks, time and again, on every rank."""

ReduceChannel: TypeAlias = Callable[[Parts], Handle]
"""Sums the same parts over ranks, time and again, each on the rank that keeps it."""

GatherChannel: TypeAlias = Callable[[Parts, First], Handle]
"""Gathers the same parts, time and again; the second argument is ``first`` of ``gather_parts``."""


# --- the contract ---


Reduction: TypeAlias = Literal["sum", "max"]


class Request(NamedTuple):
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
    chunks: tuple[tuple[int, int], ...] | None = None
    source: int = 0
    reduction: Reduction = "sum"
    layout: Layout | None = None


# --- the order of operations ---

# Ranks that take different paths through a model or a training loop submit different operations.
# Unchecked, this is a hang, values in the wrong place, gradients of different steps in one mean or,
# where a message is longer than its buffer, the end of the process. Checked, each operation has a
# header, and costs no message more::
#
#     tags   a checksum of the header is part of the tags of all messages of the operation: ranks
#            with different headers do not take each other's data, and wait
#     words  a rank that has waited for half a second says in the store which operation it has under
#            way (``facts``): equal numbers with different headers prove that the wait is in vain
#
# The rank that finds this raises and closes its connections, which ends the wait of all others.

_MASK = (1 << 32) - 1

PARTS = "bytes"
"""The dtype of parts in a header, because parts of many dtypes are counted in bytes."""


class Header(NamedTuple):
    """A rank's next operation on a communicator.

    Attributes:
        number: the operation's sequence number on its communicator, from 1.
        elements: how many the tensor has; of parts, their bytes.
        plan: checksum of operation, dtype, chunks, source, reduction, and lengths and dtypes of
            parts.
        name: checksum of the label that the caller gave; 0 without a label: the path of the code
            may differ between hosts.
        dtype: the tensor's, as in "float32"; of parts, "bytes".
        operation: which collective.
        steps: optimizer steps that the rank had taken.
        backwards: backwards that the rank had begun.
        rates: learning rates of the rank's last step.
        loads: state dicts that the rank had loaded.
        label: of the caller, or the line of the call; not compared.
        axis: name of the mesh axis; not compared.
    """

    number: int
    elements: int
    plan: int
    name: int
    dtype: str
    operation: str
    steps: int
    backwards: int
    rates: tuple[float, ...]
    loads: int
    label: str
    axis: str

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> "Header":
        """Return the header that ``_asdict`` described."""
        return cls(**{**facts, "rates": tuple(facts["rates"])})

    @property
    def summary(self) -> tuple[str, int, str, str]:
        """Operation, elements, dtype and label."""
        return self.operation, self.elements, self.dtype, self.label

    def range(self, *, waits: bool = False) -> AbstractContextManager[object]:
        """Return the range of the operation in a profiler's trace, or of this thread's wait."""
        if not torch.autograd.profiler._is_profiler_enabled:
            return nullcontext()
        # The last two parts of a path.
        label = "/".join(self.label.rsplit("/", 2)[-2:]) if self.label[:1] == "/" else self.label
        what = f"{self.operation} #{self.number} ({label}) on {self.axis}"
        return record_function(f"{WAIT if waits else COLLECTIVE}{what}")

    def checksum(self) -> int:
        """Return 32 bits that differ for different headers, but for the rarest chance."""
        # Hashes of numbers, unlike those of texts, are the same in every process.
        return hash((self[:4], self.steps, self.backwards, self.rates, self.loads)) & _MASK

    def differences(self, other: "Header") -> list[str]:
        """Return the difference between two headers that should be equal, in words."""
        rates = _rates_in_words(self.rates, other.rates)
        kinds = {
            "sequence number": "number",
            "operation": "operation",
            "elements": "elements",
            "dtype": "dtype",
            "label": "name",
            f"optimizer steps before ({self.steps} and {other.steps})": "steps",
            f"backwards before ({self.backwards} and {other.backwards})": "backwards",
            f"learning rates of the step before ({rates})": "rates",
            f"state dicts loaded before ({self.loads} and {other.loads})": "loads",
        }
        found = [
            word for word, kind in kinds.items() if getattr(self, kind) != getattr(other, kind)
        ]
        if not found and self.plan != other.plan:  # other sizes have other chunks anyway
            parts = self.dtype == PARTS
            return ["lengths or dtypes of parts" if parts else "chunks, source or reduction"]
        return found

    def __str__(self) -> str:
        return f"{self.operation} #{self.number} of {self.elements} {self.dtype} ({self.label})"


RequestFacts: TypeAlias = tuple[int, int, int, str, int]
"""What follows from a request, for one rank: elements, plan, name and dtype of its ``Header``, and
the bytes that the rank sends."""


@lru_cache(maxsize=1 << 12)
def _facts_of(
    request: Request, numel: int, dtype: torch.dtype | None, size: int, rank: int
) -> RequestFacts:
    """Return what follows from a request; steps bring the same ones again.

    Args:
        request: the collective.
        numel: elements of its tensor.
        dtype: of the tensor; None where the request is about parts.
        size: ranks of the axis.
        rank: this one.
    """
    operation, label, chunks, source, reduction, layout = request
    # Unlike the hash of a text, this checksum is equal in every process.
    facts = repr((operation, chunks or (), source, reduction, layout, dtype))
    plan, name = zlib.crc32(facts.encode()), zlib.crc32(label.encode())
    if dtype is None:
        parts = layout or ()
        lengths = [sum(numel * each.itemsize for numel, each in tensors) for tensors in parts]
        sent = sent_bytes(operation, lengths, rank)
        return sum(lengths), plan, name, PARTS, sent
    sent = sent_elements(operation, numel, size=size, rank=rank, source=source, chunks=chunks)
    word = str(dtype).removeprefix("torch.")
    return numel, plan, name, word, sent * dtype.itemsize


def _rates_in_words(mine: tuple[float, ...], theirs: tuple[float, ...]) -> str:
    """Return the first that differs, of each side."""
    pairs = itertools.zip_longest(mine, theirs, fillvalue="none")
    return next((f"{one} and {other}" for one, other in pairs if one != other), "equal")


def disagreement(
    mine: Header, theirs: Header, sites: tuple[str, str], ranks: tuple[int, int]
) -> CollectiveError:
    """Return the error of two ranks that are about to do different things.

    Args:
        mine: the header of this rank.
        theirs: the header of the other rank.
        sites: lines of the script where both wait, "" where unknown.
        ranks: this one and the other one.
    """
    here, there = (f" ({site})" if site else "" for site in sites)
    differences = mine.differences(theirs)
    left_out = ""
    if mine.steps != theirs.steps or mine.backwards != theirs.backwards:
        left_out = "one of them has left out a backward or a step, or has one too many; "
    elif mine.loads != theirs.loads:
        left_out = "load_state_dict() belongs on every rank; otherwise "
    elif mine.rates != theirs.rates:
        left_out = (
            "set them alike on all ranks, a ReduceLROnPlateau by "
            "scheduler.step(accelerator.metric_mean(loss, count)); otherwise "
        )
    return CollectiveError(
        f"ranks must run the same operations in the same order on axis {mine.axis!r}; found "
        f"{mine} on rank {ranks[0]}, this one{here}, but {theirs} on rank {ranks[1]}{there}: they "
        f"differ in {', '.join(differences)}; {left_out}the ranks took different paths through the "
        "model or the training loop: let every rank run the same modules in the same order, "
        "whatever its data or rank says"
    )


# --- communicators ---


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


class Communicator(ABC):
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
        approximates_parameters: whether gathered values of parameters may differ from the values of
            their owners.
        owns_apart: whether owners keep values apart from gathered ones, which are approximate or
            may be.
    """

    approximates_parameters = False
    owns_apart = False

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

    def gather_parts(self, parts: Parts, *, label: str = "", first: First = None) -> Handle:
        """Fill the tensors of the other ranks with the values of these ranks.

        Bytes move, so tensors of any dtypes go together. It is an ``all_gather`` in the ledger.

        Args:
            parts: for each rank of the axis, the 1-D contiguous tensors that it holds, perhaps
                none; lengths and dtypes are the same on every rank. They must not overlap.
            label: names the operation in errors; the default is the line of the call.
            first: see ``First``.

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
        self, parts: Parts, *, scale: float = 1.0, label: str = "", first: First = None
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
        self, outgoing: Tensors, incoming: Tensors, *, label: str = "", first: First = None
    ) -> Handle:
        """Send another tensor of bytes to each rank, and receive one from each.

        Args:
            outgoing: for each rank, what it gets from this one: 1-D, contiguous, uint8, and of
                the same length whoever sends it. The entry of this rank is not read.
            incoming: for each rank, where its tensor arrives; all as long as the tensors that
                others are to send to this rank. The entry of this rank is not written.
            label: names the operation in errors; the default is the line of the call.
            first: as for ``gather_parts``.
        """
        raise TypeError(f"{type(self).__name__} has no way to send to one rank alone")

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

    # --- channels: here all of them are exact; ``compression.communicator`` has others ---

    def gradients_summed(
        self, flat_slice: FlatSlice, label: str, replaces: SumChannel | None = None
    ) -> SumChannel:
        """Return a channel that replaces gradients by their sums over ranks.

        Args:
            flat_slice: describes the flat tensor of the gradients.
            label: names the operations in errors.
            replaces: a channel that is given up for this one, and under way no more. The state
                that an approximation has kept for the elements of this rank goes on.
        """
        return partial(self.all_reduce, label=label)

    def renew_channels(self) -> None:
        """Give up the channels of gradients: others are about to take their places.

        Collective over the ranks of a host. What an approximation has kept back goes on to the
        channels that come, by the names of parameters; without one there is nothing to do.
        """
        return

    def gradients_scattered(
        self,
        describe: Callable[[], SlicesByRank],
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
        return partial(self.reduce_parts, label=label)

    def parameters_gathered(
        self, describe: Callable[[], SlicesByRank], label: str
    ) -> GatherChannel:
        """Return a channel that fills the tensors of all ranks with parameters.

        Args:
            describe: describes the tensors of each rank; only asked where that is needed.
            label: names the operations in errors.
        """

        def start(parts: Parts, first: First) -> Handle:
            return self.gather_parts(parts, label=label, first=first)

        return start

    def parameters_updated(self, describe: Callable[[], SlicesByRank], label: str) -> GatherChannel:
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

    def _header(self, request: Request, flat: Tensor | None) -> Header | None:
        """Count an operation that is being submitted, and its bytes; None: there is nothing to do.

        Args:
            request: what was asked for, by a method that the caller of this one was called by.
            flat: the tensor; None where the request is about parts.
        """
        numel, dtype = (0, None) if flat is None else (flat.numel(), flat.dtype)
        elements, plan, name, word, sent = _facts_of(request, numel, dtype, self.size, self.rank)
        if not elements:
            return None
        self.submitted += 1
        operation, label, axis = request.operation, request.label or caller(4), self.axis.name
        self.traffic.add(axis, operation, sent)
        page = self.traffic.page
        return Header(self.submitted, elements, plan, name, word, operation, *page, label, axis)


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
        self, tensor: Tensor, *, scale: float = 1.0, reduction: Reduction = "sum", label: str = ""
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

    def gather_parts(self, parts: Parts, *, label: str = "", first: First = None) -> Handle:
        """Return a handle that only calls ``first``: all parts are this rank's."""
        checked_parts(parts, self.size)
        return Finished() if first is None else Deferred(first)

    def reduce_parts(
        self, parts: Parts, *, scale: float = 1.0, label: str = "", first: First = None
    ) -> Handle:
        """Multiply by the scale, after ``first``."""
        if first is not None:
            first()
        for tensor in checked_parts(parts, self.size)[0]:
            self._scaled(tensor, scale)
        return Finished()

    def all_to_all(
        self, outgoing: Tensors, incoming: Tensors, *, label: str = "", first: First = None
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
