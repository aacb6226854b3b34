"""The findings of a check, and how they are told: a summary, warnings, a refusal, a table."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

CLOCKS_APART_S = 1.0
"""Seconds by which clocks may differ without a warning: lines of logs then stand in order."""

MOST_SHOWN = 4
"""Failures that one message quotes."""

UNEVEN = 0.5
"""Share of the usual rate of pairs below which a pair is named as slow."""

Way = tuple[int, int]
"""The hosts at both ends of a way, by index: sender and receiver, or who asks and who is asked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedHost:
    """A host that takes part in a check.

    Attributes:
        index: of its launcher.
        name: the host's name.
        address: under which the other hosts reach it.
        interface: the network interface of the address, "" if unknown.
        transport: how its ranks send to other hosts, such as ``gloo over TCP``.
        measured: whether a measurement over TCP tells how fast the transport is.
    """

    index: int
    name: str
    address: str
    interface: str = ""
    transport: str = "gloo over TCP"
    measured: bool = True

    @property
    def shown(self) -> str:
        """The host in a message."""
        return f"host {self.index} ({self.name})"


@dataclass(slots=True)
class Findings:
    """The measurements of a check.

    Attributes:
        hosts: that took part.
        failures: why one host cannot reach another, by who asked and who was asked.
        silent: why a host did not take part after all.
        latencies: seconds of one way, by who answers and who asks.
        clocks: how far a host's clock is ahead of host 0's, seconds.
        inside: bytes per second between two sockets of each host.
        ring: bytes per second when all hosts send to their neighbor at once.
        pairs: bytes per second when two hosts have the network for themselves.
        seconds: that the check took.
    """

    hosts: Sequence[CheckedHost]
    failures: dict[Way, str] = field(default_factory=dict)
    silent: dict[int, str] = field(default_factory=dict)
    latencies: dict[Way, float] = field(default_factory=dict)
    clocks: dict[int, float] = field(default_factory=dict)
    inside: dict[int, float] = field(default_factory=dict)
    ring: dict[Way, float] = field(default_factory=dict)
    pairs: dict[Way, float] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def link(self) -> float:
        """Bytes per second of the slowest link of the ring; 0 where nothing tells it."""
        measured = all(host.measured for host in self.hosts)
        return min(self.ring.values(), default=0.0) if measured else 0.0

    @property
    def refusal(self) -> str:
        """The reason why a run over these hosts cannot work; "" without one."""
        if not self.failures:
            return ""
        named = {host.index: host for host in self.hosts}
        quoted = [
            f"{named[asking].shown} cannot reach {named[asked].shown} at "
            f"{named[asked].address}: {reason}"
            for (asking, asked), reason in sorted(self.failures.items())
        ]
        more = f"; and {len(quoted) - MOST_SHOWN} more" if len(quoted) > MOST_SHOWN else ""
        return (
            f"{'; '.join(quoted[:MOST_SHOWN])}{more}; ranks connect every pair of hosts at free "
            "ports: open them between the hosts, or name another network in GLOO_SOCKET_IFNAME or "
            "NCCL_SOCKET_IFNAME; launch.preflight: none leaves this check out"
        )

    def lines(self) -> Iterator[str]:
        """Yield the summary, and a line for each finding that a user should know."""
        yield f"preflight ({self.seconds:.1f} s): {self._summary()}"
        named = {host.index: host for host in self.hosts}
        for index, reason in sorted(self.silent.items()):
            yield f"preflight: {named[index].shown} was not checked: {reason}"
        for index, ahead in sorted(self.clocks.items()):
            if abs(ahead) > CLOCKS_APART_S:
                word = "ahead of" if ahead > 0 else "behind"
                yield (
                    f"preflight: the clock of {named[index].shown} is {abs(ahead):.1f} s {word} "
                    "host 0's; times in logs and of files do not compare: set it by NTP"
                )
        for (sender, receiver), rate in sorted(self._slow().items()):
            yield (
                f"preflight: slow link: from {named[sender].shown} to {named[receiver].shown} "
                f"{rate_text(rate)}, less than half of the usual {rate_text(self._usual())}"
            )

    def matrix(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Return columns and rows of the table of pairs; inside of a host on the diagonal."""
        columns = ("from", *(f"to {host.name}" for host in self.hosts))
        rows = []
        for sender in self.hosts:
            cells = [self._cell(sender.index, receiver.index) for receiver in self.hosts]
            rows.append((sender.name, *cells))
        return columns, rows

    def _cell(self, sender: int, receiver: int) -> str:
        rate = self.pairs.get((sender, receiver), 0.0)
        if sender == receiver:
            return rate_text(self.inside.get(sender, 0.0))
        latency = self.latencies.get((sender, receiver))
        return rate_text(rate) + (f", {latency_text(latency)}" if latency is not None else "")

    def _summary(self) -> str:
        first = self.hosts[0]
        interfaces = dict.fromkeys(host.interface for host in self.hosts if host.interface)
        way = ", ".join([first.transport, *interfaces])
        reached = f"{len(self.hosts)} hosts, every pair connects"
        if self.failures:
            reached = f"{len(self.hosts)} hosts, {len(self.failures)} ways between them are closed"
        elif self.silent:
            reached = f"{len(self.hosts)} hosts"
        parts = [reached]
        if self.ring:
            slowest = min(self.ring.values())
            aside = "" if first.measured else "TCP alone, "
            latency = max(self.latencies.values(), default=0.0)
            parts.append(
                f"between hosts {rate_text(slowest)}, {latency_text(latency)} ({aside}{way})"
            )
        if self.inside:
            parts.append(f"inside {rate_text(min(self.inside.values()))} over loopback")
        return "; ".join(parts)

    def _usual(self) -> float:
        rates = sorted(self.pairs.values() or self.ring.values())
        return rates[len(rates) // 2] if rates else 0.0

    def _slow(self) -> Mapping[Way, float]:
        rates = self.pairs or self.ring
        return {way: rate for way, rate in rates.items() if rate < UNEVEN * self._usual()}


def rate_text(rate: float) -> str:
    """Write bytes per second."""
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6)):
        if rate >= size:
            return f"{rate / size:.3g} {unit}"
    return f"{rate / 1e3:.3g} kB/s"


def latency_text(seconds: float) -> str:
    """Write a latency."""
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"
