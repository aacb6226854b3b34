"""Collectives over gloo as pipelined rings of point-to-point messages, on a thread of their own.

gloo's reduce-scatter is an all-reduce in disguise and its reduction is a scalar loop. Here every
rank sends to its right neighbour and receives from its left one::

    reduce-scatter   step s: send chunk r-s-1, receive chunk r-s-2 and add it to mine   (s < N-1)
    all-gather       step s: send chunk r-s,   receive chunk r-s-1 in place             (s < N-1)

so that rank r ends with the sum of chunk r, then with all sums. Chunks travel in pieces: while one
piece is added, the next ones are on the wire, and a piece that is complete starts its way around
the all-gather at once.

How the tensors of one rank become messages: a large tensor travels as it lies, in slices, and
nothing is copied. Small ones of one dtype travel together, through a buffer: to copy them costs
less than a message of their own::

    tensors    [ large           ] [s] [t] [ large ] [u]
    messages   [       ] [       ]         [       ]     [s t u]

Whoever knows lengths and dtypes knows the messages, so sender and receiver agree on them.

Over hosts there are rings in levels. One ring over H hosts with k ranks each sends a whole tensor
from host to host, and twice so for an all-reduce. In levels, rank j of a host exchanges a share
alone, with rank j of the other hosts::

    near     rank j of a host gets the host's sums of share j        reduce-scatter, k ranks
    far      ranks j of all hosts exchange the sums of share j       reduce-scatter, all-gather
    near     the ranks of a host exchange their shares               all-gather, k ranks

Sums are the same in every run, and equal on all ranks; their order differs from that of one ring.
The decomposition is that of Cho et al., "BlueConnect: Decomposing All-Reduce for Deep Learning on
Heterogeneous Network Hierarchy", MLSys 2019.
"""

import atexit
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any
from weakref import finalize

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.collectives.communicator import (
    Communicator,
    Finished,
    First,
    Handle,
    Header,
    Parts,
    Reduction,
    Request,
    StagedHandle,
    Tensors,
    as_bytes,
    caller,
    checked_parts,
    flatten,
    layout_of,
    reason,
)
from drivetrain.collectives.facts import Wait
from drivetrain.collectives.neighbors import Arrivals, Neighbors, Tag
from drivetrain.collectives.volume import Chunks, checked_chunks
from drivetrain.cost import Traffic
from drivetrain.errors import CollectiveError
from drivetrain.runtime.board import board
from drivetrain.runtime.mesh import Axis, HostLevels
from drivetrain.runtime.world import CountingThread

# --- one ring ---

PACKED_SHARE = 16
"""A piece is small if a message has room for so many pieces of its size."""


class ChunkMessages:
    """The chunk of one rank, cut into messages.

    Args:
        tensors: 1-D and contiguous, may be empty.
        piece_bytes: the longest message.

    Attributes:
        messages: what is sent or received, in order: 1-D tensors, none of them empty; slices of
            the tensors, or buffers.
    """

    def __init__(self, tensors: Sequence[Tensor], piece_bytes: int) -> None:
        self.messages: list[Tensor] = []
        self._packs: list[tuple[Tensor, list[Tensor]]] = []
        small: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            for piece in _slices(tensor, piece_bytes):
                if piece.nbytes * PACKED_SHARE <= piece_bytes:
                    small.setdefault(piece.dtype, []).append(piece)
                else:
                    self.messages.append(piece)
        for pieces in small.values():
            for group in _groups(pieces, piece_bytes):
                self._add(group)

    def pack(self) -> None:
        """Fill the buffers from the tensors, before their messages are sent or added to."""
        for buffer, pieces in self._packs:
            torch.cat(pieces, out=buffer)

    def unpack(self) -> None:
        """Fill the tensors from the buffers, when their messages have come or are complete."""
        for buffer, pieces in self._packs:
            lengths = [piece.numel() for piece in pieces]
            torch._foreach_copy_(pieces, torch.split(buffer, lengths))

    def _add(self, pieces: list[Tensor]) -> None:
        if len(pieces) == 1:
            self.messages.append(pieces[0])
            return
        buffer = pieces[0].new_empty(sum(piece.numel() for piece in pieces))
        self._packs.append((buffer, pieces))
        self.messages.append(buffer)


def _slices(tensor: Tensor, piece_bytes: int) -> Sequence[Tensor]:
    """Cut a tensor into slices: none of an empty one, here as on the other side."""
    if tensor.nbytes <= piece_bytes:
        return [tensor] if tensor.numel() else []
    return torch.split(tensor, piece_bytes // tensor.element_size())


def _groups(pieces: list[Tensor], piece_bytes: int) -> Iterator[list[Tensor]]:
    """Yield the pieces, in order, in groups as large as a message may be."""
    group: list[Tensor] = []
    nbytes = 0
    for piece in pieces:
        if nbytes + piece.nbytes > piece_bytes:
            yield group
            group, nbytes = [], 0
        group.append(piece)
        nbytes += piece.nbytes
    yield group


# --- the communication thread: runs submitted tasks strictly in order and keeps their outcome ---


EXIT_WAIT_S = 3.0
"""An ending process waits so long for operations under way, because other ranks need their results.
Without an error these are the operations of the last step."""

LONG_WAIT_S = 0.5
"""A wait for an operation is watched from this time on, and each time it has passed again."""


@dataclass(eq=False, slots=True)
class CollectiveTask:
    """One submitted operation, and the handle for waiting on it.

    Args:
        run: does the work, on the communication thread.
        header: describes the operation.
        watch: makes a watch over a wait that takes long, which also explains a failure.
        waited: is told the seconds of each wait for an unfinished task.

    Attributes:
        header: describes the operation.
    """

    run: Callable[[], None] | None
    header: Header
    watch: Callable[[], "OperationWatch"]
    waited: Callable[[float], None]
    _inference: bool = field(default_factory=torch.is_inference_mode_enabled)
    _error: CollectiveError | None = None
    _finished: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._finished.acquire()

    def wait(self) -> None:
        """Return when the task has run.

        Raises:
            CollectiveError: it failed, or an earlier one did.
        """
        if not self._finished.acquire(blocking=False):
            start = time.perf_counter()
            with self.header.range(waits=True):
                if not self._finished.acquire(timeout=LONG_WAIT_S):
                    self._wait_long(self.watch())
            # A level that waits for the level before it keeps nobody from computing.
            if not isinstance(threading.current_thread(), CountingThread):
                self.waited(time.perf_counter() - start)
        self._finished.release()
        if self._error is not None:
            raise self._error

    def _wait_long(self, watch: "OperationWatch") -> None:
        """Wait on, and look around from time to time: other ranks may never come."""
        start = time.monotonic() - LONG_WAIT_S
        watch.look(LONG_WAIT_S)
        while not self._finished.acquire(timeout=LONG_WAIT_S):
            watch.look(time.monotonic() - start)
        if self._error is None:
            watch.over()

    def done(self) -> bool:
        """Whether the task has run or failed."""
        return not self._finished.locked()

    def execute(self, broken: CollectiveError | None) -> CollectiveError | None:
        """Run the task, unless an earlier failure broke the communicator; return the failure."""
        self._error = broken
        if broken is None and self.run is not None:
            try:
                with torch.inference_mode(self._inference):
                    self.run()
            except Exception as error:
                self._error = CollectiveError(self.watch().failure(error))
                self._error.__cause__ = error
        self.run = None  # lets go of the tensors
        self._finished.release()
        return self._error


class CommunicationThread:
    """A thread with a queue of tasks; the first failure fails every later task.

    Args:
        name: the thread's name, for stack dumps.
        place: name of the operations' order, the same on all ranks.
    """

    def __init__(self, name: str, place: str) -> None:
        self._tasks: SimpleQueue[CollectiveTask | None] = SimpleQueue()
        self._broken: CollectiveError | None = None
        self._closed = False
        self._thread = CountingThread(target=self._serve, name=name, daemon=True)
        self.place = self._thread.place = place
        self._thread.start()
        atexit.register(self._end)

    def submit(self, task: CollectiveTask) -> None:
        """Queue a task.

        Raises:
            CollectiveError: an earlier task failed, or the thread has ended.
        """
        if self._closed:
            raise CollectiveError(
                "this communicator was closed, so nothing can be sent any more; finish with the "
                "prepared model before free_memory()"
            )
        if self._broken is not None:
            raise CollectiveError(
                f"this communicator is broken by an earlier failure: {self._broken}"
            ) from self._broken
        self._thread.submitted += 1
        self._tasks.put(task)

    def close(self) -> None:
        """Run queued operations, then end the thread; may be called more than once."""
        atexit.unregister(self._end)
        self._closed = True
        self._tasks.put(None)
        self._thread.join()

    def dismiss(self) -> None:
        """Let the thread end by itself: nobody can submit a task any more."""
        atexit.unregister(self._end)
        self._tasks.put(None)

    def _end(self) -> None:
        """Let queued tasks finish before the interpreter ends, unless other ranks do not answer."""
        self._tasks.put(None)
        self._thread.join(EXIT_WAIT_S)

    @torch.no_grad()
    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._thread.current = task.header._asdict
            self._broken = task.execute(self._broken)
            self._thread.current = None
            del task  # a finished task must not keep its tensors alive until the next one comes


# --- the communicator ---


PIECE_BYTES = 1 << 21
"""Largest message: big enough to amortise a message's cost, small enough to pipeline."""

COMPANION_S = 0.3
"""How long a communicator that failed waits for a companion to say why."""


class RingCommunicator(Communicator):
    """Rings over one gloo group; one thread runs the operations in the order of submission.

    Args:
        axis: the mesh axis.
        traffic: the ledger.
        timeout: how long a rank waits for one message.
        group: the axis' gloo group; only communicators may send point-to-point messages on it.
    """

    def __init__(
        self,
        axis: Axis,
        traffic: Traffic,
        timeout: timedelta,
        group: dist.ProcessGroup,
    ) -> None:
        super().__init__(axis, traffic, timeout)
        self.neighbors = Neighbors(axis, group, timeout)
        self._arrivals = Arrivals(self.neighbors)
        self._worker = CommunicationThread(
            f"drivetrain-ring-{axis.name}",
            f"{group.group_name}/{self.neighbors.number(Tag.ALARM)}",
        )
        self._row = board.open(self._worker.place, axis.ranks)
        # Where a script drops its model and its Accelerator without a word, nothing closes this.
        self._ends = [finalize(self, self._worker.dismiss), finalize(self, self._row.close)]
        for end in self._ends:
            end.atexit = False

    def all_reduce(
        self, tensor: Tensor, *, scale: float = 1.0, reduction: Reduction = "sum", label: str = ""
    ) -> Handle:
        """Replace a contiguous tensor by the reduction over ranks, times scale."""
        flat = flatten(tensor)

        def reduce() -> None:
            self._reduce(_held(flat, self.chunk(flat.numel())), scale, reduction, gather=True)

        return self._submit(Request("all_reduce", label, reduction=reduction), reduce, flat)

    def reduce_scatter(
        self, flat: Tensor, *, scale: float = 1.0, chunks: Chunks | None = None, label: str = ""
    ) -> Handle:
        """Put the sum over ranks, times scale, into this rank's chunk of a flat tensor."""
        flat = flatten(flat, (flat.numel(),))
        bounds = checked_chunks(chunks, flat.numel(), self.size)
        return self._submit(
            Request("reduce_scatter", label, bounds),
            lambda: self._reduce(_held(flat, bounds), scale),
            flat,
        )

    def all_gather(self, flat: Tensor, *, chunks: Chunks | None = None, label: str = "") -> Handle:
        """Fill a flat tensor from the ranks' chunks."""
        flat = flatten(flat, (flat.numel(),))
        bounds = checked_chunks(chunks, flat.numel(), self.size)
        return self._submit(
            Request("all_gather", label, bounds), lambda: self._gather(_held(flat, bounds)), flat
        )

    def gather_parts(self, parts: Parts, *, label: str = "", first: First = None) -> Handle:
        """Fill the tensors of the other ranks; large ones in place, small ones packed together."""
        held = checked_parts(parts, self.size)
        request = Request("all_gather", label, layout=layout_of(held))
        return self._submit(request, lambda: self._gather(as_bytes(held)), None, first)

    def reduce_parts(
        self, parts: Parts, *, scale: float = 1.0, label: str = "", first: First = None
    ) -> Handle:
        """Put the sums over ranks, times scale, into this rank's tensors; small ones packed."""
        held = checked_parts(parts, self.size)
        request = Request("reduce_scatter", label, layout=layout_of(held))
        return self._submit(request, lambda: self._reduce(held, scale), None, first)

    def all_to_all(
        self, outgoing: Tensors, incoming: Tensors, *, label: str = "", first: First = None
    ) -> Handle:
        """Send another tensor of bytes to each rank, and receive one from each."""
        held = checked_parts([[tensor] for tensor in outgoing], self.size)
        arriving = checked_parts([[tensor] for tensor in incoming], self.size)
        request = Request("all_to_all", label, layout=layout_of(held))
        swap = partial(swap_all, self.neighbors, held, arriving)
        return self._submit(request, swap, None, first)

    def broadcast(self, tensor: Tensor, source: int = 0, *, label: str = "") -> Handle:
        """Copy a contiguous tensor from the rank with index ``source`` on the axis."""
        flat = flatten(tensor)
        chain = partial(pass_along, self.neighbors, flat, source)
        return self._submit(Request("broadcast", label, source=source), chain, flat)

    def barrier(self) -> None:
        """Return when every rank of the axis has come here."""
        token = torch.zeros(self.size, dtype=torch.uint8, device="cpu")
        bounds = self.chunk(self.size)
        self._submit(
            Request("barrier", "barrier"),
            lambda: self._reduce(_held(token, bounds), gather=True),
            token,
        ).wait()

    def alarm(self) -> None:
        """Close this rank's connections, which ends every wait on the axis."""
        self.neighbors.alarm()

    def close(self) -> None:
        """Finish submitted operations and join the thread."""
        for end in self._ends:
            end.detach()
        self._worker.close()
        self._row.close()
        self._arrivals.forget()

    # --- submission, on the caller's thread ---

    def _submit(
        self, request: Request, run: Callable[[], None], flat: Tensor | None, first: First = None
    ) -> Handle:
        header = self._header(request, flat)
        if header is None:
            return Finished()

        def timed() -> None:
            start = time.perf_counter()
            checksum = header.checksum()
            self._row.begin(header.number, checksum, *header.summary)
            with header.range():
                self.neighbors.begin(checksum)
                if first is not None:
                    first()
                run()
            self._row.end()
            self.traffic.took(self.axis.name, header.operation, time.perf_counter() - start)

        waited = partial(self.traffic.waited, self.axis.name)
        task = CollectiveTask(timed, header, partial(self._watch, request, header), waited)
        self._row.submit(header.number)
        self._worker.submit(task)
        return task

    def _watch(self, request: Request, header: Header) -> "OperationWatch":
        """Return a watch over an operation, and the ranks without which this one cannot end it.

        In the chain of a broadcast these are the ranks between the source and this one, and the
        one that this rank sends to: the others may come later, or be done already.
        """
        everyone = needed = self.axis.ranks
        if request.operation == "broadcast":
            place = (self.rank - request.source) % self.size
            chain = range(min(place + 2, self.size))
            needed = tuple(everyone[(request.source + each) % self.size] for each in chain)
        doing = f"{header.operation} #{header.number} ({header.label}) on axis {self.axis.name!r}"
        place_of_order, rank = self._worker.place, everyone[self.rank]
        return OperationWatch(self, doing, place_of_order, header.number, everyone, rank, needed)

    # --- the algorithms, on the communication thread ---

    def _reduce(
        self,
        held: Parts,
        scale: float = 1.0,
        reduction: Reduction = "sum",
        *,
        gather: bool = False,
    ) -> None:
        chunks = self._cut(held)
        rank, size = self.rank, self.size
        incoming = [chunks[(rank - step - 2) % size] for step in range(size - 1)]
        arrivals = self._arrivals.of([piece for chunk in incoming for piece in chunk.messages])
        first = chunks[(rank - 1) % size]
        first.pack()
        sends = [self.neighbors.send(piece, Tag.SCATTER) for piece in first.messages]
        # Posted early, so that a neighbour's finished piece never waits for its buffer. It cannot
        # come too early: the sum it carries needs the piece that lies in this place until then.
        gathered = self._post_gather(chunks) if gather else []
        combine = torch.add if reduction == "sum" else torch.maximum
        for step, chunk in enumerate(incoming):
            last = step == size - 2
            chunk.pack()
            for piece in chunk.messages:
                combine(piece, next(arrivals), out=piece)
                if last and scale != 1.0:
                    piece.mul_(scale)
                if not last:
                    sends.append(self.neighbors.send(piece, Tag.SCATTER))
                elif gather:
                    sends.append(self.neighbors.send(piece, Tag.GATHER))
        chunks[rank].unpack()
        sends += self._forward(gathered)
        self.neighbors.finish(sends)

    def _gather(self, held: Parts) -> None:
        chunks = self._cut(held)
        gathered = self._post_gather(chunks)
        mine = chunks[self.rank]
        mine.pack()
        sends = [self.neighbors.send(piece, Tag.GATHER) for piece in mine.messages]
        self.neighbors.finish(sends + self._forward(gathered))

    def _post_gather(self, chunks: list[ChunkMessages]) -> list[tuple[ChunkMessages, list[Any]]]:
        """Post the receives of an all-gather, in place, in the order of arrival."""
        coming = [chunks[(self.rank - step - 1) % self.size] for step in range(self.size - 1)]
        return [
            (chunk, [self.neighbors.receive(piece, Tag.GATHER) for piece in chunk.messages])
            for chunk in coming
        ]

    def _forward(self, gathered: list[tuple[ChunkMessages, list[Any]]]) -> list[Any]:
        """Wait for the pieces of an all-gather; pass on all but those of the last step."""
        sends = []
        for chunk, receives in gathered[:-1]:
            for piece, receive in zip(chunk.messages, receives, strict=True):
                self.neighbors.wait(receive)
                sends.append(self.neighbors.send(piece, Tag.GATHER))
            chunk.unpack()
        for chunk, receives in gathered[-1:]:
            self.neighbors.finish(receives)
            chunk.unpack()
        return sends

    def _cut(self, held: Parts) -> list[ChunkMessages]:
        """Cut each rank's tensors into messages."""
        return [ChunkMessages(tensors, PIECE_BYTES) for tensors in held]


class OperationWatch(Wait):
    """A wait for an operation of a ring: the operation fails when the wait is in vain.

    Args:
        communicator: of the operation.
        wait: the arguments of ``Wait``.
    """

    def __init__(self, communicator: RingCommunicator, *wait: Any) -> None:
        super().__init__(*wait)
        self._communicator = communicator

    def look(self, waited: float) -> str:
        """Look around if it is time to."""
        why = super().look(waited)
        if why:
            self._communicator.disagreement = why
            self._communicator.alarm()
        return why

    def failure(self, error: BaseException) -> str:
        """Let all ranks of the axis fail too, and return the reason of the failure."""
        ring = self._communicator
        for each in (ring, *ring.companions):
            each.alarm()
        if ring.companions and not ring.disagreement:  # they may be about to say the reason
            time.sleep(COMPANION_S)
        for each in (ring, *ring.companions):
            if each.disagreed():
                return each.disagreed()
        ranks, near = ring.axis.ranks, ring.neighbors
        return (
            f"{self.doing} failed on rank {self.rank}, {ring.rank} of {ring.size} on the axis, "
            f"between ranks {ranks[near.left]} and {ranks[near.right]}, with a timeout of "
            f"{ring.timeout.total_seconds():g} s: {reason(error)}; {self.missing()}"
        )


def pass_along(neighbors: Neighbors, flat: Tensor, source: int) -> None:
    """Pass a tensor from the source around the ring, piece by piece."""
    pieces = ChunkMessages([flat], PIECE_BYTES).messages
    rank, size = neighbors.axis.rank, neighbors.axis.size
    last = (rank - source) % size == size - 1
    sends = []
    receives: list[Any] = []
    if rank != source:
        receives = [neighbors.receive(piece, Tag.GATHER) for piece in pieces]
    for index, piece in enumerate(pieces):
        if receives:
            neighbors.wait(receives[index])
        if not last:
            sends.append(neighbors.send(piece, Tag.GATHER))
    neighbors.finish(sends)


def swap_all(neighbors: Neighbors, outgoing: Parts, incoming: Parts) -> None:
    """Exchange tensors with each other rank, the nearest to the right first."""
    sends, receives = [], []
    for step in range(1, neighbors.axis.size):
        left = (neighbors.axis.rank - step) % neighbors.axis.size
        right = (neighbors.axis.rank + step) % neighbors.axis.size
        for piece in ChunkMessages(incoming[left], PIECE_BYTES).messages:
            receives.append(neighbors.receive(piece, Tag.SCATTER, left))
        for piece in ChunkMessages(outgoing[right], PIECE_BYTES).messages:
            sends.append(neighbors.send(piece, Tag.SCATTER, right))
    neighbors.finish(receives)
    neighbors.finish(sends)


def _held(flat: Tensor, bounds: Chunks) -> Parts:
    """Return each rank's chunk of a flat tensor."""
    return [[flat[start:stop]] for start, stop in bounds]


# --- rings in levels ---

ConnectAxis = Callable[[Axis], Communicator]


class HierarchicalCommunicator(Communicator):
    """Sums and gathers in levels; a broadcast is one chain, which passes from host to host once.

    The levels have threads of their own: while the ranks of a host exchange one tensor, the hosts
    exchange the tensor before it.

    Args:
        axis: the mesh axis.
        levels: its ranks on this host, and those at the same place of each host.
        connect: makes a communicator that can sum and gather parts, for an axis.
        traffic: the ledger.
        timeout: how long one message may take.
    """

    def __init__(
        self,
        axis: Axis,
        levels: HostLevels,
        connect: ConnectAxis,
        traffic: Traffic,
        timeout: timedelta,
    ) -> None:
        super().__init__(axis, traffic, timeout)
        self._chain = connect(axis)
        self._collecting = connect(levels.near)
        self._far = connect(levels.far)
        # Not the same as before: a gather waits for the far level, the next reduction must not.
        self._spreading = connect(levels.near)
        self._levels = (self._chain, self._collecting, self._far, self._spreading)
        for one in self._levels:  # a failure of one reaches the ranks of the others
            one.accompany([other for other in self._levels if other is not one])

    def all_reduce(
        self, tensor: Tensor, *, scale: float = 1.0, reduction: Reduction = "sum", label: str = ""
    ) -> Handle:
        """Replace a contiguous tensor by the reduction over ranks, times scale.

        A maximum, which is taken of few numbers, goes around one ring.
        """
        label = label or caller(2)
        if reduction != "sum":
            return self._chain.all_reduce(tensor, scale=scale, reduction=reduction, label=label)
        flat = flatten(tensor)
        shares = [[flat[start:stop]] for start, stop in self._collecting.chunk(flat.numel())]
        mine = shares[self._collecting.rank][0]
        near = self._collecting.reduce_parts(shares, label=label)
        pieces = [[mine[start:stop]] for start, stop in self._far.chunk(mine.numel())]
        far = self._far.reduce_parts(pieces, scale=scale, label=label, first=near.wait)
        joined = self._far.gather_parts(pieces, label=label, first=far.wait)
        spread = self._spreading.gather_parts(shares, label=label, first=joined.wait)
        return StagedHandle([near, far, joined, spread], ())

    def reduce_scatter(
        self, flat: Tensor, *, scale: float = 1.0, chunks: Chunks | None = None, label: str = ""
    ) -> Handle:
        """Put the sum over ranks, times scale, into this rank's chunk of a flat tensor."""
        return self.reduce_parts(self._held(flat, chunks), scale=scale, label=label or caller(2))

    def all_gather(self, flat: Tensor, *, chunks: Chunks | None = None, label: str = "") -> Handle:
        """Fill a flat tensor from the ranks' chunks."""
        return self.gather_parts(self._held(flat, chunks), label=label or caller(2))

    def reduce_parts(
        self, parts: Parts, *, scale: float = 1.0, label: str = "", first: First = None
    ) -> Handle:
        """Put the sums over ranks, times scale, into this rank's tensors."""
        near_parts, far_parts = self._in_levels(parts)
        label = label or caller(2)
        near = self._collecting.reduce_parts(near_parts, label=label, first=first)
        far = self._far.reduce_parts(far_parts, scale=scale, label=label, first=near.wait)
        return StagedHandle([near, far], ())

    def gather_parts(self, parts: Parts, *, label: str = "", first: First = None) -> Handle:
        """Fill the tensors of the other ranks with the values of these ranks."""
        near_parts, far_parts = self._in_levels(parts)
        label = label or caller(2)
        far = self._far.gather_parts(far_parts, label=label, first=first)
        near = self._spreading.gather_parts(near_parts, label=label, first=far.wait)
        return StagedHandle([far, near], ())

    def all_to_all(
        self, outgoing: Tensors, incoming: Tensors, *, label: str = "", first: First = None
    ) -> Handle:
        """Send another tensor of bytes to each rank, and receive one from each: no levels."""
        return self._chain.all_to_all(outgoing, incoming, label=label or caller(2), first=first)

    def broadcast(self, tensor: Tensor, source: int = 0, *, label: str = "") -> Handle:
        """Copy a contiguous tensor from the rank with index ``source`` on the axis."""
        return self._chain.broadcast(tensor, source, label=label or caller(2))

    def barrier(self) -> None:
        """Return when every rank of the axis has come here."""
        self._chain.barrier()

    def accompany(self, companions: Sequence[Communicator]) -> None:
        """Let the failure of any level reach the ranks of other communicators too."""
        super().accompany(companions)
        for one in self._levels:
            one.accompany([*(other for other in self._levels if other is not one), *companions])

    def disagreed(self) -> str:
        """Return the difference between ranks on one of the levels, or ""."""
        return next((found for level in self._levels if (found := level.disagreed())), "")

    def alarm(self) -> None:
        """Let every rank of the axis fail soon, because this one cannot go on."""
        for level in self._levels:
            level.alarm()

    def close(self) -> None:
        """Finish submitted operations and release threads and memory, the first level first."""
        for level in (self._collecting, self._far, self._spreading, self._chain):
            level.close()

    def _held(self, flat: Tensor, chunks: Chunks | None) -> Parts:
        """Return each rank's chunk of a flat tensor."""
        flat = flatten(flat, (flat.numel(),))
        bounds = checked_chunks(chunks, flat.numel(), self.size)
        return [[flat[start:stop]] for start, stop in bounds]

    def _in_levels(self, parts: Parts) -> tuple[Parts, Parts]:
        """Return the parts of each rank of this host, and those of this place on each host.

        A rank of this host stands for the ranks at its place on all hosts.
        """
        held, near = checked_parts(parts, self.size), self._collecting
        shares = [
            [tensor for tensors in held[place :: near.size] for tensor in tensors]
            for place in range(near.size)
        ]
        return shares, held[near.rank :: near.size]
