"""A host's end of the checks: answers other hosts, and measures the ways to them.

Each probe listens on a free port, as gloo and NCCL do. Another host connects, shows the token of
this check, and asks for one of two things: the time, again and again, which tells the latency and
the difference of the clocks; or bytes as fast as they go, for a while. Nobody who lacks the token
gets an answer. A measurement is of one TCP connection: a link that needs several, or that is not
TCP, can do more.
"""

import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

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


class Answer(NamedTuple):
    """The answer of a host that was asked for the time.

    Attributes:
        latency_s: half of the quickest round trip.
        clock_s: how far its clock is ahead of this host's.
    """

    latency_s: float
    clock_s: float


def new_token() -> str:
    """Return the token of one check."""
    return secrets.token_hex(TOKEN_BYTES)


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

    def ask_time(self, peer: Peer) -> Answer:
        """Return the latency to another host, and how far its clock is ahead.

        Raises:
            OSError: it cannot be reached, or does not answer.
        """
        best = Answer(float("inf"), 0.0)
        with self._connection(peer) as connection:
            for _ in range(PINGS):
                before, begin = self._clock(), time.perf_counter()
                connection.sendall(TIME)
                (theirs,) = DOUBLE.unpack(_exactly(connection, DOUBLE.size))
                trip = time.perf_counter() - begin
                best = min(best, Answer(trip / 2, theirs - before - trip / 2))
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
                    answers[index] = tuple(answer.result())
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
