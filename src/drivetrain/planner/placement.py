"""The order of hosts under measured links: hosts with much to say sit beside each other.

A mesh lays axes over ranks in the order of the hosts, so that another order of the hosts is another
placement. A ring is as fast as its slowest link; stages of a pipeline follow each other in a chain.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from drivetrain.errors import ConfigError
from drivetrain.hardware.description import HostPairs
from drivetrain.runtime.mesh import lines_along

MOST_EXHAUSTIVE = 7
"""Hosts of which every order is tried; more are put in a chain of best links, then swapped."""

GIGA = 1e9


@dataclass(frozen=True, slots=True)
class HostOrder:
    """An order of hosts, and its costs.

    Attributes:
        hosts: indices of the given hosts; the first one is host 0.
        seconds: of a step's known messages over the slowest link of each line, one after the other.
        chain: seconds per gigabyte over all links between neighbors.
    """

    hosts: tuple[int, ...]
    seconds: float
    chain: float


@dataclass(frozen=True)
class HostPlacement:
    """Hosts and the messages of their ranks.

    Attributes:
        names: of the hosts, as given.
        slots: ranks of each.
        sizes: of the mesh's axes, the closest first.
        sent: bytes that a rank sends in a step by axis, as far as they are known.
        pairs: measured rates between hosts.
    """

    names: Sequence[str]
    slots: Sequence[int]
    sizes: Mapping[str, int]
    sent: Mapping[str, float]
    pairs: HostPairs

    def __post_init__(self) -> None:
        """Refuse hosts that were not measured.

        Raises:
            ConfigError: names them.
        """
        missing = sorted(set(self.names) - set(self.pairs.hosts))
        if missing:
            raise ConfigError(
                f"expected measured links of every host, found none of {', '.join(missing)}; "
                f"measured are {', '.join(self.pairs.hosts)}: run `drivetrain hardware measure` on "
                "all hosts"
            )

    def given(self) -> HostOrder:
        """Return the order in which the hosts were given."""
        return self.judged(tuple(range(len(self.names))))

    def best(self) -> HostOrder:
        """Return the best order; the given one where none is better."""
        first = self.given()
        if len(self.names) <= MOST_EXHAUSTIVE:
            orders: Iterator[tuple[int, ...]] = itertools.permutations(first.hosts)
            return min([first, *map(self.judged, orders)], key=_key)
        starts = map(self._chained, range(len(self.names)))
        found = min([first, *map(self.judged, starts)], key=_key)
        while True:
            better = min(map(self.judged, _swapped(found.hosts)), key=_key)
            if _key(better) >= _key(found):
                return found
            found = better

    def judged(self, order: tuple[int, ...]) -> HostOrder:
        """Return an order with its costs."""
        of_rank = [host for host in order for _ in range(self.slots[host])]
        seconds = chain = 0.0
        for name in self.sizes:
            slowest, total = math.inf, 0.0
            for line in lines_along(name, self.sizes):
                rates = list(self._rates([of_rank[rank] for rank in line], ring=name in self.sent))
                slowest = min([slowest, *rates])
                total += sum(1 / rate for rate in rates)
            seconds += self.sent.get(name, 0.0) / (slowest * GIGA)
            chain += total
        return HostOrder(order, seconds, chain)

    def _rates(self, hosts: Sequence[int], *, ring: bool) -> Iterator[float]:
        """Yield the rates between neighbors on different hosts; a ring comes back to its start."""
        ends = [*hosts, hosts[0]] if ring else hosts
        for one, other in itertools.pairwise(ends):
            if one != other:
                yield self._rate(one, other)

    def _rate(self, one: int, other: int) -> float:
        return self.pairs.rate(self.names[one], self.names[other])

    def _chained(self, start: int) -> tuple[int, ...]:
        """Return the chain from a host on that always takes the best link."""
        chain, left = [start], set(range(len(self.names))) - {start}
        while left:
            near = max(left, key=lambda host: (self._rate(chain[-1], host), -host))
            chain.append(near)
            left.remove(near)
        return tuple(chain)


def _swapped(order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the orders in which two hosts have changed places, or a stretch is turned round."""
    for first, last in itertools.combinations(range(len(order)), 2):
        swapped = list(order)
        swapped[first], swapped[last] = swapped[last], swapped[first]
        yield tuple(swapped)
        yield (*order[:first], *reversed(order[first : last + 1]), *order[last + 1 :])


def _key(order: HostOrder) -> tuple[float, float]:
    """Round, so that sums in another order are not better."""
    return round(order.seconds, 9), round(order.chain, 9)
