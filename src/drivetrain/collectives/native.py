"""Collectives by ``torch.distributed`` itself: NCCL and every backend that is good at them."""

import itertools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.collectives.communicator import (
    Communicator,
    Finished,
    First,
    Handle,
    Reduction,
    Request,
    StagedHandle,
    Tensors,
    caller,
    checked_parts,
    flatten,
    reason,
)
from drivetrain.collectives.volume import Chunks, checked_chunks
from drivetrain.cost import Traffic
from drivetrain.errors import CollectiveError
from drivetrain.runtime.board import NATIVE, board
from drivetrain.runtime.mesh import Axis

# torch 2.13 renamed the two operations on one flat tensor and deprecated the old names.
_gather_flat: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
_scatter_flat: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


class AllOf:
    """Several operations of the backend, as one.

    Args:
        works: the backend's handles.
    """

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait for each."""
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        """Whether all have finished."""
        return all(work.is_completed() for work in self._works)


@dataclass(eq=False, slots=True)
class NativeHandle:
    """An operation of the backend, and a scale to apply afterwards.

    Args:
        work: the backend's own handle.
        result: what the scale is applied to.
        scale: the factor.
        describe: turns an exception into the error to raise.
        waited: is told the seconds of the wait.
        waiting: makes a context for the wait.
    """

    work: Any
    result: Tensor | None
    scale: float
    describe: Callable[[BaseException], CollectiveError]
    waited: Callable[[float], None]
    waiting: Callable[[], AbstractContextManager[object]]

    def wait(self) -> None:
        """Let the current stream, or on the CPU this thread, wait for the result.

        Raises:
            CollectiveError: the backend reports a failure.
        """
        if self.result is None:
            return
        start = time.perf_counter()
        try:
            with self.waiting():
                self.work.wait()
        except RuntimeError as error:
            raise self.describe(error) from error
        self.waited(time.perf_counter() - start)
        if self.scale != 1.0:
            self.result.mul_(self.scale)
        self.result = None

    def done(self) -> bool:
        """Whether the backend has finished."""
        return self.result is None or bool(self.work.is_completed())


class NativeCommunicator(Communicator):
    """Hands every operation to the axis' process group.

    The ledger gets the bytes of the ring algorithm; how long an operation took on the device's
    stream is not known without stopping it, so the seconds stay zero. The order of operations is
    not checked, whatever ``connect`` is asked for: a backend has its own means to find that.
    """

    def __init__(
        self, axis: Axis, traffic: Traffic, timeout: timedelta, group: dist.ProcessGroup
    ) -> None:
        super().__init__(axis, traffic, timeout)
        self._group = group
        self._row = board.open(f"{group.group_name}/{NATIVE}", axis.ranks)
        # gloo refuses to gather a list of unequal chunks; NCCL runs it as grouped broadcasts.
        self._lists_are_even = "gloo" in str(dist.get_backend(group))

    def all_reduce(
        self, tensor: Tensor, *, scale: float = 1.0, reduction: Reduction = "sum", label: str = ""
    ) -> Handle:
        """Replace a contiguous tensor by the reduction over ranks, times scale."""
        flat = flatten(tensor)
        op = dist.ReduceOp.SUM if reduction == "sum" else dist.ReduceOp.MAX
        request = Request("all_reduce", label, reduction=reduction)
        reduce = partial(dist.all_reduce, flat, op, self._group, async_op=True)
        return self._start(request, reduce, flat, flat, scale)

    def reduce_scatter(
        self, flat: Tensor, *, scale: float = 1.0, chunks: Chunks | None = None, label: str = ""
    ) -> Handle:
        """Put the sum over ranks, times scale, into this rank's chunk of a flat tensor."""
        flat = flatten(flat, (flat.numel(),))
        bounds = checked_chunks(chunks, flat.numel(), self.size)
        parts = [flat[start:stop] for start, stop in bounds]
        mine = parts[self.rank]
        uneven = partial(dist.reduce_scatter, mine, parts)
        reduce = partial(_scatter_flat, mine, flat) if _even(parts) else uneven
        scatter = partial(reduce, dist.ReduceOp.SUM, group=self._group, async_op=True)
        return self._start(Request("reduce_scatter", label, bounds), scatter, flat, mine, scale)

    def all_gather(self, flat: Tensor, *, chunks: Chunks | None = None, label: str = "") -> Handle:
        """Fill a flat tensor from the ranks' chunks."""
        flat = flatten(flat, (flat.numel(),))
        bounds = checked_chunks(chunks, flat.numel(), self.size)
        parts = [flat[start:stop] for start, stop in bounds]
        mine = parts[self.rank]

        def gather() -> Any:
            if _even(parts):
                return _gather_flat(flat, mine, group=self._group, async_op=True)
            if self._lists_are_even:
                pairs = zip(parts, self.axis.ranks, strict=True)
                held = [(part, root) for part, root in pairs if part.numel()]
                return AllOf(
                    [dist.broadcast(part, root, self._group, async_op=True) for part, root in held]
                )
            return dist.all_gather(parts, mine, group=self._group, async_op=True)

        return self._start(Request("all_gather", label, bounds), gather, flat, flat)

    def all_to_all(
        self, outgoing: Tensors, incoming: Tensors, *, label: str = "", first: First = None
    ) -> Handle:
        """Send another tensor of bytes to each rank, and receive one from each."""
        if first is not None:
            first()
        held = checked_parts([[tensor] for tensor in outgoing], self.size)
        arriving = checked_parts([[tensor] for tensor in incoming], self.size)
        sent, received = (torch.cat([one for (one,) in each]) for each in (held, arriving))
        lengths, mine = [one.numel() for (one,) in held], [one.numel() for (one,) in arriving]
        swap = partial(dist.all_to_all_single, received, sent, mine, lengths)
        launch = partial(swap, group=self._group, async_op=True)
        chunks = tuple(itertools.pairwise(itertools.accumulate(lengths, initial=0)))
        request = Request("all_to_all", label or caller(2), chunks=chunks)
        handle = self._start(request, launch, sent, received)
        others = [rank for rank in range(self.size) if rank != self.rank]
        slices = torch.split(received, mine)
        copies = ([arriving[rank][0] for rank in others], [slices[rank] for rank in others])
        return StagedHandle([handle], [copies])

    def broadcast(self, tensor: Tensor, source: int = 0, *, label: str = "") -> Handle:
        """Copy a contiguous tensor from the rank with index ``source`` on the axis."""
        flat = flatten(tensor)
        root = self.axis.ranks[source]
        send = partial(dist.broadcast, flat, root, self._group, async_op=True)
        return self._start(Request("broadcast", label, source=source), send, flat, flat)

    def barrier(self) -> None:
        """Return when every rank of the axis has come here."""
        dist.barrier(self._group)

    def close(self) -> None:
        """Take this communicator off the board; the group belongs to the mesh."""
        self._row.close()

    def _start(
        self,
        request: Request,
        launch: Callable[[], Any],
        flat: Tensor,
        result: Tensor,
        scale: float = 1.0,
    ) -> Handle:
        header = self._header(request, flat)
        if header is None:
            return Finished()

        def describe(error: BaseException) -> CollectiveError:
            return CollectiveError(
                f"{header.operation} #{header.number} ({header.label}) on axis {self.axis.name!r} "
                f"failed on rank {self.axis.ranks[self.rank]}, {self.rank} of {self.size} on the "
                f"axis: {reason(error)}; look for the rank that failed first, or that does not "
                "answer"
            )

        self._row.submit(header.number)
        with torch.no_grad(), header.range():
            try:
                work = launch()
            except RuntimeError as error:
                raise describe(error) from error
        # Nobody knows on the host when a device has finished: the board shows the last submission.
        self._row.begin(header.number, header.checksum(), *header.summary)
        waited = partial(self.traffic.waited, self.axis.name)
        return NativeHandle(
            work, result, scale, describe, waited, partial(header.range, waits=True)
        )


def _even(parts: list[Tensor]) -> bool:
    """Whether all chunks are equally long, as the operations on a flat tensor need."""
    return len({part.numel() for part in parts}) == 1
