"""Collectives over gloo as pipelined rings of point-to-point messages, on a thread of their own.

gloo's reduce-scatter is an all-reduce in disguise and its reduction is a scalar loop. Here every
rank sends to its right neighbour and receives from its left one::

    reduce-scatter   step s: send chunk r-s-1, receive chunk r-s-2 and add it to mine   (s < N-1)
    all-gather       step s: send chunk r-s,   receive chunk r-s-1 in place             (s < N-1)

so that rank r ends with the sum of chunk r, then with all sums. Chunks travel in pieces: while one
piece is added, the next ones are on the wire, and a piece that is complete starts its way around
the all-gather at once.
"""

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.errors import CollectiveError
from drivetrain.parts.collectives.communicator import (
    Call,
    Communicator,
    Handle,
    Reduction,
    caller,
    flatten,
    reason,
)
from drivetrain.parts.collectives.neighbors import Neighbors, Tag
from drivetrain.parts.collectives.order import CheckedNeighbors, Disagreement
from drivetrain.parts.collectives.solo import Finished
from drivetrain.parts.collectives.volume import Chunks, checked_chunks
from drivetrain.parts.collectives.worker import Job, Worker
from drivetrain.parts.traffic import Traffic
from drivetrain.runtime.mesh import Axis

PIECE_BYTES = 1 << 21
"""Largest message: big enough to amortise a message's cost, small enough to pipeline."""

WINDOW = 4
"""Pieces of a reduction that may be under way to this rank; each needs a receive buffer."""


class RingCommunicator(Communicator):
    """Rings over one gloo group; one thread runs the operations in the order of submission.

    Args:
        axis: the mesh axis.
        traffic: the ledger.
        timeout: how long a rank waits for one message.
        group: the axis' gloo group; only communicators may send point-to-point messages on it.
        checked: whether neighbors compare what they are about to do before each operation.
    """

    def __init__(
        self,
        axis: Axis,
        traffic: Traffic,
        timeout: timedelta,
        group: dist.ProcessGroup,
        *,
        checked: bool = False,
    ) -> None:
        super().__init__(axis, traffic, timeout)
        self._neighbors = (CheckedNeighbors if checked else Neighbors)(axis, group, timeout)
        self._scratch = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._worker = Worker(f"drivetrain-ring-{axis.name}")

    def all_reduce(
        self, tensor: Tensor, *, scale: float = 1.0, reduction: Reduction = "sum", label: str = ""
    ) -> Handle:
        """Replace a contiguous tensor by the reduction over ranks, times scale."""
        flat = flatten(tensor)
        bounds = self.chunk(flat.numel())
        return self._submit(
            Call("all_reduce", label, reduction=reduction),
            lambda: self._reduce(flat, bounds, scale, reduction, gather=True),
            flat,
        )

    def reduce_scatter(
        self, flat: Tensor, *, scale: float = 1.0, chunks: Chunks | None = None, label: str = ""
    ) -> Handle:
        """Put the sum over ranks, times scale, into this rank's chunk of a flat tensor."""
        flat = flatten(flat, (flat.numel(),))
        bounds = checked_chunks(chunks, flat.numel(), self.size)
        return self._submit(
            Call("reduce_scatter", label, bounds),
            lambda: self._reduce(flat, bounds, scale, "sum", gather=False),
            flat,
        )

    def all_gather(self, flat: Tensor, *, chunks: Chunks | None = None, label: str = "") -> Handle:
        """Fill a flat tensor from the chunks that the ranks hold of it."""
        flat = flatten(flat, (flat.numel(),))
        bounds = checked_chunks(chunks, flat.numel(), self.size)
        return self._submit(
            Call("all_gather", label, bounds), lambda: self._gather(flat, bounds), flat
        )

    def broadcast(self, tensor: Tensor, source: int = 0, *, label: str = "") -> Handle:
        """Copy a contiguous tensor from the rank with index ``source`` on the axis."""
        flat = flatten(tensor)
        return self._submit(
            Call("broadcast", label, source=source), lambda: self._chain(flat, source), flat
        )

    def barrier(self) -> None:
        """Return when every rank of the axis has come here."""
        token = torch.zeros(self.size, dtype=torch.uint8, device="cpu")
        bounds = self.chunk(self.size)
        self._submit(
            Call("barrier", "barrier"),
            lambda: self._reduce(token, bounds, 1.0, "sum", gather=True),
            token,
        ).wait()

    def close(self) -> None:
        """Finish what was submitted and join the thread."""
        self._worker.close()
        self._scratch = torch.empty(0, dtype=torch.uint8, device="cpu")

    # --- submission, on the caller's thread ---

    def _submit(self, call: Call, run: Callable[[], None], flat: Tensor) -> Handle:
        if flat.numel() == 0:
            return Finished()
        number, label = self._number(), call.label or caller()
        self.traffic.add(self.axis.name, call.operation, self._sent_bytes(call, flat))

        def timed() -> None:
            start = time.perf_counter()
            self._neighbors.begin(call, number, label, flat)
            run()
            self._neighbors.end()
            self.traffic.took(self.axis.name, call.operation, time.perf_counter() - start)

        def describe(error: BaseException) -> CollectiveError:
            self._neighbors.alarm()
            if isinstance(error, Disagreement):
                return CollectiveError(str(error))
            ranks, near = self.axis.ranks, self._neighbors
            return CollectiveError(
                f"{call.operation} #{number} ({label}) on axis {self.axis.name!r} failed on rank "
                f"{ranks[self.rank]}, {self.rank} of {self.size} on the axis, between ranks "
                f"{ranks[near.left]} and {ranks[near.right]}, with a timeout of "
                f"{self.timeout.total_seconds():g} s: {reason(error)}; look for the rank that "
                "failed first, or that does not answer"
            )

        job = Job(timed, describe)
        self._worker.submit(job)
        return job

    # --- the algorithms, on the communication thread ---

    def _reduce(
        self, flat: Tensor, bounds: Chunks, scale: float, reduction: Reduction, *, gather: bool
    ) -> None:
        chunks = self._pieces(flat, bounds)
        rank, size = self.rank, self.size
        incoming = [chunks[(rank - step - 2) % size] for step in range(size - 1)]
        arrivals = self._arrivals([piece for chunk in incoming for piece in chunk])
        sends = [self._neighbors.send(piece, Tag.SCATTER) for piece in chunks[(rank - 1) % size]]
        # Posted early, so that a neighbour's finished piece never waits for its buffer. It cannot
        # come too early: the sum it carries needs the piece that lies in this place until then.
        gathered = self._post_gather(chunks) if gather else []
        combine = torch.add if reduction == "sum" else torch.maximum
        for step, chunk in enumerate(incoming):
            last = step == size - 2
            for piece in chunk:
                combine(piece, next(arrivals), out=piece)
                if last and scale != 1.0:
                    piece.mul_(scale)
                if not last:
                    sends.append(self._neighbors.send(piece, Tag.SCATTER))
                elif gather:
                    sends.append(self._neighbors.send(piece, Tag.GATHER))
        sends += self._forward(gathered)
        self._neighbors.finish(sends)

    def _gather(self, flat: Tensor, bounds: Chunks) -> None:
        chunks = self._pieces(flat, bounds)
        gathered = self._post_gather(chunks)
        sends = [self._neighbors.send(piece, Tag.GATHER) for piece in chunks[self.rank]]
        self._neighbors.finish(sends + self._forward(gathered))

    def _chain(self, flat: Tensor, source: int) -> None:
        """Pass a tensor from the source around the ring, piece by piece."""
        pieces = self._split(flat)
        last = (self.rank - source) % self.size == self.size - 1
        sends = []
        receives: list[Any] = []
        if self.rank != source:
            receives = [self._neighbors.receive(piece, Tag.GATHER) for piece in pieces]
        for index, piece in enumerate(pieces):
            if receives:
                self._neighbors.wait(receives[index])
            if not last:
                sends.append(self._neighbors.send(piece, Tag.GATHER))
        self._neighbors.finish(sends)

    def _post_gather(self, chunks: list[list[Tensor]]) -> list[list[tuple[Tensor, Any]]]:
        """Post the receives of an all-gather, in place, in the order of arrival."""
        return [
            [
                (piece, self._neighbors.receive(piece, Tag.GATHER))
                for piece in chunks[(self.rank - step - 1) % self.size]
            ]
            for step in range(self.size - 1)
        ]

    def _forward(self, gathered: list[list[tuple[Tensor, Any]]]) -> list[Any]:
        """Wait for the pieces of an all-gather; pass on all but those of the last step."""
        sends = []
        for chunk in gathered[:-1]:
            for piece, receive in chunk:
                self._neighbors.wait(receive)
                sends.append(self._neighbors.send(piece, Tag.GATHER))
        for chunk in gathered[-1:]:
            self._neighbors.finish([receive for _, receive in chunk])
        return sends

    def _arrivals(self, pieces: list[Tensor]) -> Iterator[Tensor]:
        """Yield what the left neighbour sends for each piece; valid until the next is asked for."""
        buffers = self._buffers(pieces)
        posted = []
        for index, piece in enumerate(pieces[:WINDOW]):
            buffer = buffers[index][: piece.numel()]
            posted.append((buffer, self._neighbors.receive(buffer, Tag.SCATTER)))
        return self._arriving(pieces, buffers, posted)

    def _arriving(
        self, pieces: list[Tensor], buffers: list[Tensor], posted: list[tuple[Tensor, Any]]
    ) -> Iterator[Tensor]:
        for index in range(len(pieces)):
            buffer, receive = posted[index]
            self._neighbors.wait(receive)
            yield buffer
            following = index + WINDOW
            if following < len(pieces):
                buffer = buffers[following % WINDOW][: pieces[following].numel()]
                posted.append((buffer, self._neighbors.receive(buffer, Tag.SCATTER)))

    def _buffers(self, pieces: list[Tensor]) -> list[Tensor]:
        """Return the reused receive buffers, as large as the largest piece needs."""
        if not pieces:
            return []
        longest = max(piece.numel() for piece in pieces)
        itemsize = pieces[0].element_size()
        slot = -(-longest * itemsize // 64) * 64  # keep every buffer on its own cache line
        if self._scratch.numel() < slot * WINDOW:
            self._scratch = torch.empty(slot * WINDOW, dtype=torch.uint8, device="cpu")
        dtype = pieces[0].dtype
        return [
            self._scratch[index * slot : (index + 1) * slot].view(dtype) for index in range(WINDOW)
        ]

    def _pieces(self, flat: Tensor, bounds: Chunks) -> list[list[Tensor]]:
        """Cut a flat tensor into a chunk per rank, and each chunk into messages."""
        return [self._split(flat[start:stop]) for start, stop in bounds]

    def _split(self, flat: Tensor) -> list[Tensor]:
        """Cut a chunk into messages: none for an empty chunk, here as on the other side."""
        if flat.numel() == 0:
            return []
        return list(torch.split(flat, PIECE_BYTES // flat.element_size()))
