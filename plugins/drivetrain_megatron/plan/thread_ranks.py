"""Ranks as threads of one process, to try a division of a model before any rank is started.

Each thread runs the code of one rank, forward and backward: autograd runs backward on the CPU in
the calling thread. A collective is a meeting of all threads. Between meetings one thread runs at a
time, with random generators of its own, which all begin in the same state: what ranks draw is
alike, as when they are processes.
"""

import functools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
from torch import Tensor

from drivetrain.collectives import Communicator, Handle, Reduction
from drivetrain.collectives.communicator import Finished, Request, caller, flatten
from drivetrain.collectives.volume import Chunks, checked_chunks
from drivetrain.errors import CollectiveError
from drivetrain.runtime import rng
from drivetrain.runtime.mesh import Axis
from drivetrain.traffic import Traffic

Result = TypeVar("Result")
PATIENCE = timedelta(seconds=60)
"""How long threads wait for each other, unless told otherwise."""


@dataclass(frozen=True, slots=True)
class Offer:
    """The data that one rank brings to a collective: 1-D, only read by the others."""

    call: Request
    where: str
    flat: Tensor

    def agrees(self, other: "Offer") -> bool:
        """Whether two ranks are about to do the same thing."""
        mine, theirs = self.call, other.call
        return (
            mine.operation == theirs.operation
            and (mine.chunks, mine.source, mine.reduction)
            == (theirs.chunks, theirs.source, theirs.reduction)
            and (self.flat.numel(), self.flat.dtype) == (other.flat.numel(), other.flat.dtype)
        )

    def __str__(self) -> str:
        return f"{self.call.operation} of {self.flat.numel()} {self.flat.dtype} ({self.where})"


class Turn:
    """The right to run, which one thread has at a time, with its own random generators."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._states: dict[int, Mapping[str, Tensor]] = {}
        self._first = rng.capture()

    def take(self, rank: int) -> None:
        """Wait until no other thread runs."""
        self._lock.acquire()
        rng.restore(self._states.get(rank, self._first))

    def leave(self, rank: int) -> None:
        """Let another thread run."""
        self._states[rank] = rng.capture()
        self._lock.release()

    def end(self) -> None:
        """Give the generators the state that they had before."""
        rng.restore(self._first)


class Meeting:
    """A barrier at which the threads of all ranks see each other's data."""

    def __init__(self, size: int, timeout: timedelta) -> None:
        self.turn = Turn()
        self._offers: list[Offer | None] = [None] * size
        self._barrier = threading.Barrier(size, timeout=timeout.total_seconds())
        self._timeout = timeout

    def exchange(
        self, rank: int, offer: Offer, combine: Callable[[list[Tensor]], Tensor]
    ) -> Tensor:
        """Return this rank's function of the data of all ranks, before any of these data change.

        Raises:
            CollectiveError: a rank does something else, does not come, or has failed.
        """
        self._offers[rank] = offer
        self._meet(rank, offer)
        offers = [each for each in self._offers if each is not None]
        if not all(offer.agrees(each) for each in offers):
            found = "; ".join(f"rank {r}: {each}" for r, each in enumerate(offers))
            raise CollectiveError(
                f"ranks must run the same operations in the same order, found {found}; they took "
                "different paths through the model"
            )
        result = combine([each.flat for each in offers])
        self._meet(rank, offer)
        return result

    def abort(self) -> None:
        """Let nobody wait any longer."""
        self._barrier.abort()

    def _meet(self, rank: int, offer: Offer) -> None:
        self.turn.leave(rank)
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise CollectiveError(
                f"rank {rank} waited for the others in {offer}, but one of them has failed or did "
                f"not come within {self._timeout.total_seconds():g} s"
            ) from None
        finally:
            self.turn.take(rank)


class EmulatedCommunicator(Communicator):
    """Collectives among threads; every operation is over when it is submitted.

    The ledger gets the bytes that the ring algorithm sends.
    """

    def __init__(self, axis: Axis, traffic: Traffic, timeout: timedelta, meeting: Meeting) -> None:
        super().__init__(axis, traffic, timeout)
        self._meeting = meeting

    def all_reduce(
        self, tensor: Tensor, *, scale: float = 1.0, reduction: Reduction = "sum", label: str = ""
    ) -> Handle:
        """Replace a contiguous tensor of any shape by the reduction over ranks, times scale."""
        combine = functools.partial(_reduced, reduction=reduction, scale=scale)
        return self._run(
            Request("all_reduce", label, reduction=reduction), flatten(tensor), combine
        )

    def reduce_scatter(
        self, flat: Tensor, *, scale: float = 1.0, chunks: Chunks | None = None, label: str = ""
    ) -> Handle:
        """Put the sum over ranks, times scale, into this rank's chunk; the others stay."""
        bounds = checked_chunks(chunks, flat.numel(), self.size)
        start, stop = bounds[self.rank]
        return self._run(
            Request("reduce_scatter", label, tuple(bounds)),
            flatten(flat, (flat.numel(),)),
            lambda flats: _reduced([each[start:stop] for each in flats], "sum", scale),
            bounds[self.rank],
        )

    def all_gather(self, flat: Tensor, *, chunks: Chunks | None = None, label: str = "") -> Handle:
        """Fill a flat tensor from the chunks of all ranks."""
        bounds = checked_chunks(chunks, flat.numel(), self.size)
        return self._run(
            Request("all_gather", label, tuple(bounds)),
            flatten(flat, (flat.numel(),)),
            lambda flats: torch.cat([f[a:b] for f, (a, b) in zip(flats, bounds, strict=True)]),
        )

    def broadcast(self, tensor: Tensor, source: int = 0, *, label: str = "") -> Handle:
        """Copy a contiguous tensor from the rank with index ``source``."""
        call = Request("broadcast", label, source=source)
        return self._run(call, flatten(tensor), lambda flats: flats[source].clone())

    def barrier(self) -> None:
        """Return when every rank has come here."""
        self._run(Request("barrier", "barrier"), torch.zeros(self.size), lambda flats: flats[0])

    def close(self) -> None:
        """Nothing to release."""

    def _run(
        self,
        call: Request,
        flat: Tensor,
        combine: Callable[[list[Tensor]], Tensor],
        part: tuple[int, int] | None = None,
    ) -> Handle:
        if flat.numel():
            self._number()
            self.traffic.add(self.axis.name, call.operation, self._sent_bytes(call, flat))
            start, stop = part or (0, flat.numel())
            offer = Offer(call, call.label or caller(), flat)
            with torch.no_grad():
                flat[start:stop] = self._meeting.exchange(self.rank, offer, combine)
        return Finished()


def run_emulated(
    size: int, function: Callable[[Communicator], Result], timeout: timedelta = PATIENCE
) -> list[Result]:
    """Run a function as each of several ranks, one thread per rank, and return the results by rank.

    The function gets the rank's communicator, on an axis named ``tp``. Grad mode and the state of
    random generators are the caller's, who gets the generators back as they were. A rank waits for
    the others in one operation until the timeout.

    Raises:
        Exception: the first exception that a rank raised; the other ranks are stopped at their next
            collective.
    """
    meeting = Meeting(size, timeout)
    results: dict[int, Result] = {}
    failures: list[BaseException] = []
    grad = torch.is_grad_enabled()

    def body(rank: int) -> None:
        axis = Axis(
            name="tp", size=size, rank=rank, ranks=tuple(range(size)), hosts=("here",) * size
        )
        communicator = EmulatedCommunicator(axis, Traffic(), timeout, meeting)
        meeting.turn.take(rank)
        try:
            with torch.set_grad_enabled(grad):
                results[rank] = function(communicator)
        except BaseException as error:  # ends the thread, not the process
            failures.append(error)
            meeting.abort()  # no other rank waits for this one
        finally:
            meeting.turn.leave(rank)

    threads = [
        threading.Thread(target=body, args=(rank,), name=f"emulated rank {rank}")
        for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    meeting.turn.end()
    if failures:
        raise failures[0]
    return [results[rank] for rank in range(size)]


def _reduced(flats: list[Tensor], reduction: Reduction, scale: float) -> Tensor:
    """Return the reduction, in the order of ranks, so that all get the same bits."""
    combine = torch.add if reduction == "sum" else torch.maximum
    total = functools.reduce(combine, flats[1:], flats[0].clone())
    return total.mul_(scale) if scale != 1.0 else total
