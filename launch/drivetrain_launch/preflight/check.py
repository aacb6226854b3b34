"""Host 0's side of the checks: gives each host its orders, and judges the replies.

The short check asks every pair of hosts for a connection, and measures all links of a ring of hosts
at once, as a ring of ranks loads them. The full check measures every pair by itself, too.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from drivetrain_launch.preflight.findings import CheckedHost, Findings
from drivetrain_launch.preflight.probe import LONGEST_S, new_token

Extent = Literal["short", "full", "none"]

INSIDE_S, RING_S, PAIR_S = 0.25, 0.5, 0.5
"""How long a measurement takes: within each host, of a ring of all hosts, of one pair."""

REPLY_S = LONGEST_S + 3.0
"""How long a host may take to reply; its own waits are shorter."""

Ask = Callable[[int, Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
"""Send an order to the host of this index, and returns the reply."""


@dataclass(kw_only=True, slots=True)
class HostCheck:
    """One check of several hosts.

    Attributes:
        hosts: that take part, one launcher of each machine.
        ask: reaches a host's probe.
        extent: short or full.
        limit_s: how long a host may take to reply.
    """

    hosts: Sequence[CheckedHost]
    ask: Ask
    extent: Extent = "short"
    limit_s: float = REPLY_S
    _found: Findings = field(init=False)

    async def run(self) -> Findings:
        """Check, and return the findings."""
        begin = time.monotonic()
        self._found = Findings(self.hosts)
        token = new_token()
        opened = await self._all(
            {
                host.index: {"order": "open", "address": host.address, "token": token}
                for host in self.hosts
            }
        )
        ports = {index: reply["port"] for index, reply in opened.items() if "port" in reply}
        probes = {
            host.index: (host.index, host.address, ports[host.index])
            for host in self.hosts
            if host.index in ports
        }
        await self._reach(probes)
        if not self._found.failures and len(probes) == len(self.hosts):
            await self._measure(probes)
        await self._all({index: {"order": "close"} for index in probes})
        self._found.seconds = time.monotonic() - begin
        return self._found

    async def _reach(self, probes: Mapping[int, tuple[int, str, int]]) -> None:
        """Let every host speak to all others."""
        replies = await self._all(
            {
                index: {"order": "reach", "peers": [p for i, p in probes.items() if i != index]}
                for index in probes
            }
        )
        for index, reply in replies.items():
            for peer, reason in reply.get("failures", {}).items():
                self._found.failures[index, int(peer)] = reason
            for peer, (latency_s, clock_s) in reply.get("answers", {}).items():
                self._found.latencies[int(peer), index] = latency_s
                if not index:
                    self._found.clocks[int(peer)] = clock_s

    async def _measure(self, probes: Mapping[int, tuple[int, str, int]]) -> None:
        places = list(probes)
        for index, rate in (await self._rates({i: i for i in places}, probes, INSIDE_S)).items():
            self._found.inside[index] = rate
        ring = dict(zip(places, [places[-1], *places[:-1]], strict=True))
        for index, rate in (await self._rates(ring, probes, RING_S)).items():
            self._found.ring[ring[index], index] = rate
        if self.extent == "full":
            for pairs in rounds(places):
                for way in (pairs, {there: here for here, there in pairs.items()}):
                    for index, rate in (await self._rates(way, probes, PAIR_S)).items():
                        self._found.pairs[way[index], index] = rate

    async def _rates(
        self, ways: Mapping[int, int], probes: Mapping[int, tuple[int, str, int]], seconds: float
    ) -> dict[int, float]:
        """Measure several ways at once, by receiver and sender; return the rates by receiver."""
        replies = await self._all(
            {
                index: {"order": "receive", "peers": [probes[sender]], "seconds": seconds}
                for index, sender in ways.items()
            }
        )
        return {
            index: float(reply["rates"][str(ways[index])])
            for index, reply in replies.items()
            if "rates" in reply
        }

    async def _all(self, orders: Mapping[int, Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
        """Send orders to several hosts, and return the replies that come in time."""

        async def one(index: int) -> Mapping[str, Any] | None:
            try:
                async with asyncio.timeout(self.limit_s):
                    return await self.ask(index, orders[index])
            except TimeoutError:
                return None

        found = await asyncio.gather(*map(one, orders))
        replies = dict(zip(orders, found, strict=True))
        for index, reply in replies.items():
            if reply is None or "error" in reply:
                self._found.silent[index] = "no reply" if reply is None else str(reply["error"])
        return {i: reply for i, reply in replies.items() if reply and "error" not in reply}


def rounds(places: Sequence[int]) -> Iterable[dict[int, int]]:
    """Yield rounds of disjoint pairs, so that all pairs occur once: the circle method.

    For four: 0-3 1-2, then 0-2 3-1, then 0-1 2-3.
    """
    seats: list[int | None] = [*places, *([None] if len(places) % 2 else [])]
    for _ in range(len(seats) - 1):
        pairs = zip(seats[: len(seats) // 2], reversed(seats[len(seats) // 2 :]), strict=True)
        yield {a: b for a, b in pairs if a is not None and b is not None}
        seats = [seats[0], seats[-1], *seats[1:-1]]
