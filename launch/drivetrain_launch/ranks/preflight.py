"""Hosts are checked before a run: their software, ways between all pairs, and clocks.

A host's end answers other hosts and measures the ways to them; host 0 gives each host its orders
and judges the replies.
"""

import asyncio
import hashlib
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil
import torch

from drivetrain import __version__
from drivetrain_launch.console import listed

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


def rate_text(rate: float) -> str:
    """Write bytes per second."""
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6)):
        if rate >= size:
            return f"{rate / size:.3g} {unit}"
    return f"{rate / 1e3:.3g} kB/s"


def latency_text(seconds: float) -> str:
    """Write a latency."""
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


# --- network of a host as its ranks will use it: which transport, over which address ---


BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
RDMA = Path("/sys/class/infiniband")
"""A folder with one entry per adapter that NCCL uses instead of TCP."""

INTERFACES = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}
"""Variables that name the interfaces of a backend, separated by commas."""


def machine_id() -> str:
    """Return a text that is equal for all processes of this machine, or of this container."""
    boot = BOOT_ID.read_text(encoding="ascii").strip() if BOOT_ID.exists() else ""
    return f"{socket.gethostname()} {boot}"


def transport_of(backend: str, adapters: Path = RDMA) -> tuple[str, bool]:
    """Return how ranks send to other hosts, and whether a measurement over TCP tells how fast."""
    found = sorted(path.name for path in adapters.iterdir()) if adapters.is_dir() else []
    disabled = os.environ.get("NCCL_IB_DISABLE", "0") not in ("", "0")
    if backend == "nccl" and found and not disabled:
        return f"NCCL over {', '.join(found)}, not measured", False
    names = {"nccl": "NCCL", "gloo": "gloo"}
    return f"{names.get(backend, backend)} over TCP", backend in names


def chosen_address(backend: str, default: str) -> str:
    """Return the address of the interface that the user has named, or the default."""
    chosen = os.environ.get(INTERFACES.get(backend, ""), "").removeprefix("=")
    family = socket.AF_INET6 if ":" in default else socket.AF_INET
    for name in filter(None, chosen.split(",")):
        for entry in psutil.net_if_addrs().get(name, ()):
            if entry.family == family:
                return str(entry.address)
    return default


# --- host's end of the checks: answers other hosts, and measures the ways to them ---

# Each probe listens on a free port, as gloo and NCCL do. Another host connects, shows the token of
# this check, and asks for one of two things: the time, again and again, which tells the latency and
# the difference of the clocks; or bytes as fast as they go, for a while. Nobody who lacks the token
# gets an answer. A measurement is of one TCP connection: a link that needs several, or that is not
# TCP, can do more.


CONNECT_S = 1.5
"""How long one host may take to accept another's connection, or to answer."""

PINGS = 10
"""Answers of which the quickest counts: the others wait for processors."""

CHUNK = bytes(256 << 10)
"""Bytes that are sent at once."""

LONGEST_S = 2.0
"""How long a host sends at most, whatever it is asked for."""

WARM_UP = 0.25
"""Share of a measurement that does not count: TCP begins slowly."""

TOKEN_BYTES = 16
TIME, BYTES = b"t", b"b"
"""The two requests; behind ``BYTES`` stand the seconds, as a double."""

DOUBLE = struct.Struct("!d")
AT_ONCE = 16
"""Hosts that one host speaks to at the same time."""


class Peer(NamedTuple):
    """Another host's probe.

    Attributes:
        host: its index.
        address: where its probe listens.
        port: on which.
    """

    host: int
    address: str
    port: int


class HostProbe:
    """Answers while it is open.

    Args:
        clock: this host's time of day, seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._listener: socket.socket | None = None
        self._token = b""

    def carry_out(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Carry out an order of host 0, and return the reply, after some seconds at most.

        An order is ``open``, ``reach``, ``receive`` or ``close``, with values of plain JSON.
        """
        peers = [Peer(*each) for each in order.get("peers", ())]
        if order["order"] == "open":
            return {"port": self.open(order["address"], order["token"])}
        if order["order"] == "reach":
            return self._reach(peers)
        if order["order"] == "receive":
            return {"rates": {peer.host: self.receive(peer, order["seconds"]) for peer in peers}}
        self.close()
        return {}

    def open(self, address: str, token: str) -> int:
        """Listen at an address, and return the free port that was found.

        Raises:
            OSError: the address is not of this host.
        """
        self.close()
        self._token = token.encode()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=256)
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Listen no longer."""
        if self._listener is not None:
            with suppress(OSError):  # wakes the thread that accepts
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None

    def ask_time(self, peer: Peer) -> tuple[float, float]:
        """Return half of the quickest round trip to another host, and how far its clock is ahead.

        Raises:
            OSError: it cannot be reached, or does not answer.
        """
        best = float("inf"), 0.0
        with self._connection(peer) as connection:
            for _ in range(PINGS):
                before, begin = self._clock(), time.perf_counter()
                connection.sendall(TIME)
                (theirs,) = DOUBLE.unpack(_exactly(connection, DOUBLE.size))
                trip = time.perf_counter() - begin
                best = min(best, (trip / 2, theirs - before - trip / 2))
        return best

    def receive(self, peer: Peer, seconds: float) -> float:
        """Return the bytes per second that come from another host; 0 if none come.

        Raises:
            OSError: it cannot be reached.
        """
        counted, buffer = 0, bytearray(len(CHUNK))
        with self._connection(peer) as connection:
            connection.sendall(BYTES + DOUBLE.pack(seconds))
            begin = time.perf_counter()
            first = last = begin
            with suppress(TimeoutError):
                while last < begin + seconds and (got := connection.recv_into(buffer)):
                    last = time.perf_counter()
                    if last < begin + WARM_UP * seconds:
                        first = last
                    else:
                        counted += got
        return counted / (last - first) if last > first else 0.0

    def _reach(self, peers: Sequence[Peer]) -> dict[str, Any]:
        """Ask all of them for the time."""
        failures, answers = {}, {}
        with ThreadPoolExecutor(AT_ONCE) as pool:
            asked = {peer.host: pool.submit(self.ask_time, peer) for peer in peers}
            for index, answer in asked.items():
                try:
                    answers[index] = answer.result()
                except OSError as error:
                    failures[index] = error.strerror or "no answer"
        return {"failures": failures, "answers": answers}

    def _connection(self, peer: Peer) -> socket.socket:
        """Return a connection that has shown the token."""
        connection = socket.create_connection((peer.address, peer.port), timeout=CONNECT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(self._token)
        return connection

    def _accept(self, listener: socket.socket) -> None:
        with ThreadPoolExecutor(AT_ONCE) as pool, suppress(OSError):
            while True:
                connection, _ = listener.accept()
                pool.submit(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.settimeout(CONNECT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            shown = _exactly(connection, len(self._token))
            if not secrets.compare_digest(shown, self._token):
                return
            while (request := connection.recv(1)) == TIME:
                connection.sendall(DOUBLE.pack(self._clock()))
            if request == BYTES:
                (seconds,) = DOUBLE.unpack(_exactly(connection, DOUBLE.size))
                end = time.perf_counter() + min(seconds, LONGEST_S)
                while time.perf_counter() < end:
                    connection.sendall(CHUNK)


def _exactly(connection: socket.socket, count: int) -> bytes:
    """Return the next bytes.

    Raises:
        OSError: the connection was closed before.
    """
    received = b""
    while len(received) < count:
        piece = connection.recv(count - len(received))
        if not piece:
            raise ConnectionResetError(None, "the connection was closed")
        received += piece
    return received


# --- host 0's side of the checks: gives each host its orders, and judges the replies ---

# The short check asks every pair of hosts for a connection, and measures all links of a ring of
# hosts at once, as a ring of ranks loads them. The full check measures every pair by itself, too.


Extent = Literal["short", "full", "none"]

INSIDE_S, RING_S, PAIR_S = 0.25, 0.5, 0.5
"""How long a measurement takes: within each host, of a ring of all hosts, of one pair."""

REPLY_S = LONGEST_S + 3.0
"""How long a host may take to reply; its own waits are shorter."""

Ask = Callable[[int, Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
"""Send an order to the host of this index, and returns the reply."""


@dataclass(kw_only=True, slots=True)
class HostCheck:
    """One check of several hosts, and its findings.

    Attributes:
        hosts: that take part, one launcher of each machine.
        ask: reaches a host's probe.
        extent: short or full.
        limit_s: how long a host may take to reply.
        failures: why one host cannot reach another, by who asked and who was asked.
        silent: why a host did not take part after all.
        latencies: seconds of one way, by who answers and who asks.
        clocks: how far a host's clock is ahead of host 0's, seconds.
        inside: bytes per second between two sockets of a host, the way from it to itself.
        ring: bytes per second when all hosts send to their neighbor at once.
        pairs: bytes per second when two hosts have the network for themselves.
        seconds: that the check took.
    """

    hosts: Sequence[CheckedHost]
    ask: Ask
    extent: Extent = "short"
    limit_s: float = REPLY_S
    failures: dict[Way, str] = field(default_factory=dict)
    silent: dict[int, str] = field(default_factory=dict)
    latencies: dict[Way, float] = field(default_factory=dict)
    clocks: dict[int, float] = field(default_factory=dict)
    inside: dict[Way, float] = field(default_factory=dict)
    ring: dict[Way, float] = field(default_factory=dict)
    pairs: dict[Way, float] = field(default_factory=dict)
    seconds: float = 0.0

    async def run(self) -> None:
        """Check."""
        begin = time.monotonic()
        order = {"order": "open", "token": secrets.token_hex(TOKEN_BYTES)}
        opened = await self._all(
            {each.index: order | {"address": each.address} for each in self.hosts}
        )
        probes = {
            each.index: (each.index, each.address, opened[each.index]["port"])
            for each in self.hosts
            if "port" in opened.get(each.index, {})
        }
        await self._reach(probes)
        if not self.failures and len(probes) == len(self.hosts):
            await self._measure(probes)
        await self._all({index: {"order": "close"} for index in probes})
        self.seconds = time.monotonic() - begin

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
                self.failures[index, int(peer)] = reason
            for peer, (latency_s, clock_s) in reply.get("answers", {}).items():
                self.latencies[int(peer), index] = latency_s
                if not index:
                    self.clocks[int(peer)] = clock_s

    async def _measure(self, probes: Mapping[int, tuple[int, str, int]]) -> None:
        places = list(probes)
        self.inside = await self._rates({i: i for i in places}, probes, INSIDE_S)
        ring = dict(zip(places, [places[-1], *places[:-1]], strict=True))
        self.ring = await self._rates(ring, probes, RING_S)
        if self.extent == "full":
            for pairs in rounds(places):
                for way in (pairs, {there: here for here, there in pairs.items()}):
                    self.pairs |= await self._rates(way, probes, PAIR_S)

    async def _rates(
        self, ways: Mapping[int, int], probes: Mapping[int, tuple[int, str, int]], seconds: float
    ) -> dict[Way, float]:
        """Measure several ways at once, by receiver and sender; return the rate of each."""
        replies = await self._all(
            {
                index: {"order": "receive", "peers": [probes[sender]], "seconds": seconds}
                for index, sender in ways.items()
            }
        )
        return {
            (ways[index], index): float(reply["rates"][str(ways[index])])
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
                self.silent[index] = "no reply" if reply is None else str(reply["error"])
        return {i: reply for i, reply in replies.items() if reply and "error" not in reply}

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
        way = (sender, receiver)
        rate = self.inside.get(way, self.pairs.get(way, 0.0))
        latency = self.latencies.get(way)  # None inside of a host
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


def rounds(places: Sequence[int]) -> Iterable[dict[int, int]]:
    """Yield rounds of disjoint pairs, so that all pairs occur once: the circle method.

    For four: 0-3 1-2, then 0-2 3-1, then 0-1 2-3.
    """
    seats: list[int | None] = [*places, *([None] if len(places) % 2 else [])]
    for _ in range(len(seats) - 1):
        pairs = zip(seats[: len(seats) // 2], reversed(seats[len(seats) // 2 :]), strict=True)
        yield {a: b for a, b in pairs if a is not None and b is not None}
        seats = [seats[0], seats[-1], *seats[1:-1]]


# --- software, which must be equal on all hosts: versions, and the script ---


SHOWN_DIGITS = 12
"""Digits of a script's SHA-256 that a message shows: enough that two scripts never look alike."""


def software_facts(arguments: Sequence[str]) -> dict[str, str]:
    """Return the facts that all hosts must share, by their names in a message.

    Args:
        arguments: the words behind the launcher's options: ``(SCRIPT, ...)`` or
            ``("-m", MODULE, ...)``, perhaps behind an option of the worker.
    """
    return {
        "drivetrain's version": __version__,
        "torch's version": torch.__version__,
        "Python's version": "{}.{}".format(*sys.version_info),
        "the script": script_digest(arguments),
    }


def script_digest(arguments: Sequence[str]) -> str:
    """Return the first digits of the SHA-256 of a script, or of a module's file; "" without one."""
    words = [word for word in arguments if word == "-m" or not word.startswith("--")]
    if not words:
        return ""
    path = _module_file(words[1]) if words[0] == "-m" else Path(words[0])
    if path is None or not path.is_file():
        return ""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:SHOWN_DIGITS]


def differences(facts: Mapping[str, Mapping[str, str]]) -> str:
    """Return a sentence about the first fact in which hosts differ; "" if they agree.

    Args:
        facts: of each host, by the host's name in the message; the first host is host 0.
    """
    for name in next(iter(facts.values()), {}):
        hosts: dict[str, list[str]] = {}
        for host, theirs in facts.items():
            hosts.setdefault(theirs.get(name, ""), []).append(host)
        if len(hosts) > 1:
            found = "; ".join(f"{value!r} on {listed(names)}" for value, names in hosts.items())
            return f"the hosts differ in {name}: {found}; {_way_out(name)}"
    return ""


def _way_out(name: str) -> str:
    if name == "the script":
        return "these are digests: copy the same file to every host, and start the run again"
    return "install the same versions on every host, and start the run again"


def _module_file(name: str) -> Path | None:
    """Return the file of a module, which is not imported; None where there is none."""
    path: list[str] = [str(Path.cwd()), *sys.path]
    origin = None
    for part in name.split("."):
        spec = PathFinder.find_spec(part, path)
        if spec is None:
            return None
        origin, path = spec.origin, list(spec.submodule_search_locations or ())
    if path:  # a package runs its __main__
        spec = PathFinder.find_spec("__main__", path)
        origin = spec.origin if spec is not None else origin
    return Path(origin) if origin else None
