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
from drivetrain_launch.ranks.failure import Ending, Verdict, judge


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The place of this launcher's ranks among all ranks, for one attempt.

    Attributes:
        attempt: number of the attempt, from 0, the same on every host.
        sizes: number of ranks of each launcher, in order.
        index: this launcher's index in ``sizes``.
        port: of the store on this host's loopback, through which ranks find each other.
        address: of this host for the other hosts.
    """

    attempt: int
    sizes: Sequence[int]
    index: int
    port: int
    address: str = LOOPBACK

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
        """
        ...

    def stop_asked(self) -> bool:
        """Whether another host's ranks have failed, so that the ranks here must stop."""
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
    """

    def __init__(self, ranks: int, max_restarts: int, start_timeout_s: float) -> None:
        self._ranks = ranks
        self._max_restarts = max_restarts
        self._limit = timedelta(seconds=start_timeout_s)
        self._attempt = 0
        self._store: TCPStore | None = None

    def meet(self) -> Place:
        """Start the store of a new attempt."""
        self._store = loopback_store(self._limit)
        return Place(attempt=self._attempt, sizes=(self._ranks,), index=0, port=self._store.port)

    def stop_asked(self) -> bool:
        """Return False: there is no other host."""
        return False

    def conclude(self, ending: Ending) -> Verdict:
        """Return the verdict on the ending."""
        verdict = judge({0: ending}, self._max_restarts - self._attempt)
        self._attempt += verdict.again
        return verdict

    def leave(self, reason: str) -> None:
        """Close the store."""
        self._store = None
