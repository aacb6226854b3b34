"""How the launchers of a run agree on each attempt; one host agrees with itself.

A launcher meets the others, starts its ranks, and tells how they ended. It then hears the verdict,
which is the same for every host: the run is over, or all ranks start again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from drivetrain.runtime.world import LOOPBACK, loopback_store
from drivetrain.telemetry.work import RankTimes
from drivetrain_launch.console import say
from drivetrain_launch.ranks.failure import Ending, IdleAttempts, Verdict, judge
from drivetrain_launch.watching.stragglers import StragglerWatch
from drivetrain_launch.watching.watch import Hosts


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The place of this launcher's ranks among all ranks, for one attempt.

    Attributes:
        attempt: number of the attempt, from 0, the same on every host.
        sizes: number of ranks of each launcher, in order.
        index: this launcher's index in ``sizes``.
        port: of the store on this host's loopback, through which ranks find each other.
        address: of this host for the other hosts.
        nodes: for each launcher the index of its machine: launchers that a scheduler starts for
            one rank each may share a machine. Empty: each has a machine of its own.
        link: bytes per second between hosts that were measured; 0 where they were not.
    """

    attempt: int
    sizes: Sequence[int]
    index: int
    port: int
    address: str = LOOPBACK
    nodes: Sequence[int] = ()
    link: float = 0.0

    @property
    def node(self) -> int:
        """Index of this launcher's machine."""
        return self.nodes[self.index] if self.nodes else self.index

    @property
    def neighbors(self) -> Sequence[int]:
        """Indices of the launchers on this machine, this one among them."""
        nodes = self.nodes or range(len(self.sizes))
        return [index for index, node in enumerate(nodes) if node == self.node]

    @property
    def first_rank(self) -> int:
        """Global rank of the first rank here."""
        return sum(self.sizes[: self.index])

    @property
    def size(self) -> int:
        """Number of ranks here."""
        return self.sizes[self.index]

    @property
    def world_size(self) -> int:
        """Number of all ranks."""
        return sum(self.sizes)


class HostMeeting(Protocol):
    """Where the launchers of a run agree."""

    def meet(self) -> Place:
        """Wait for every host and return the place for the next attempt.

        Raises:
            ConfigError: hosts contradict each other.
            PreflightError: a host did not come in time.
            RunOver: the run has ended while this launcher waited for a place.
        """
        ...

    def stop_asked(self) -> bool:
        """Whether another host's ranks have failed, so that the ranks here must stop."""
        ...

    def hosts(self, place: Place) -> Hosts | None:
        """Return the connection of the watch over hanging ranks; None on one host."""
        ...

    def tell_work(self, place: Place, works: Sequence[RankTimes]) -> None:
        """Tell the times of ranks here, to be compared with those of all ranks."""
        ...

    def notice_asked(self) -> bool:
        """Whether the ranks here must be told, once, to save and end: a host wants to join."""
        ...

    def conclude(self, ending: Ending) -> Verdict:
        """Tell the ending of the ranks here, and wait for the verdict of all hosts."""
        ...

    def leave(self, reason: str) -> None:
        """Leave the run; the other hosts need not wait. Does nothing after the last verdict."""
        ...


class SingleHost:
    """The only host agrees with itself, and listens on loopback alone.

    torch's agent keeps one store for all attempts, so that restarted ranks read the addresses of
    dead ranks. Here each attempt has a store of its own.

    Args:
        ranks: number of ranks.
        max_restarts: how often they start again after a failure.
        start_timeout_s: how long ranks may wait for each other at their start.
        straggler_margin: how much longer than the others' the work of a named rank takes.
    """

    def __init__(
        self, ranks: int, max_restarts: int, start_timeout_s: float, straggler_margin: float
    ) -> None:
        self._ranks = ranks
        self._max_restarts = max_restarts
        self._limit = timedelta(seconds=start_timeout_s)
        self._attempt = 0
        self._stragglers = StragglerWatch(straggler_margin, say)
        self._store: TCPStore | None = None
        self._idle_attempts = IdleAttempts()

    def meet(self) -> Place:
        """Start the store of a new attempt."""
        self._store = loopback_store(self._limit)
        return Place(attempt=self._attempt, sizes=(self._ranks,), index=0, port=self._store.port)

    def stop_asked(self) -> bool:
        """Return False: there is no other host."""
        return False

    def hosts(self, place: Place) -> Hosts | None:
        """Return None: there is no other host."""
        return None

    def tell_work(self, place: Place, works: Sequence[RankTimes]) -> None:
        """Name stragglers on the error stream."""
        self._stragglers.take(works, place.world_size, place.attempt)

    def notice_asked(self) -> bool:
        """Return False: no host can join."""
        return False

    def conclude(self, ending: Ending) -> Verdict:
        """Return the verdict on the ending."""
        idle = self._idle_attempts.after([ending])
        verdict = judge({0: ending}, self._max_restarts - self._attempt, idle=idle)
        self._attempt += verdict.again
        return verdict

    def leave(self, reason: str) -> None:
        """Close the store."""
        self._store = None
