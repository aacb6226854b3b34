"""Collectives over hosts in levels: inside of each host, then between hosts, then inside again.

One ring over H hosts with k ranks each sends a whole tensor from host to host, and twice so for an
all-reduce. In levels, rank j of a host exchanges a share alone, with rank j of the other hosts::

    near     rank j of a host gets the host's sums of share j        reduce-scatter, k ranks
    far      ranks j of all hosts exchange the sums of share j       reduce-scatter, all-gather
    near     the ranks of a host exchange their shares               all-gather, k ranks

Sums are the same in every run, and equal on all ranks; their order differs from that of one ring.
The decomposition is that of Cho et al., "BlueConnect: Decomposing All-Reduce for Deep Learning on
Heterogeneous Network Hierarchy", MLSys 2019.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta

from torch import Tensor

from drivetrain.collectives.communicator import (
    Communicator,
    First,
    Handle,
    Parts,
    Reduction,
    StagedHandle,
    caller,
    checked_parts,
    flatten,
)
from drivetrain.collectives.volume import Chunks, checked_chunks
from drivetrain.cost import Traffic
from drivetrain.runtime.mesh import Axis, HostLevels

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
        self,
        outgoing: Sequence[Tensor],
        incoming: Sequence[Tensor],
        *,
        label: str = "",
        first: First = None,
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
