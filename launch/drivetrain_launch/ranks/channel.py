"""An authenticated connection between two launchers: two proofs of the secret, then JSON.

Both sides answer the other's random challenge with an HMAC of the secret, so that the secret itself
is never sent. Each message carries an HMAC with a key of this connection and the message's number:
nobody can add, change, repeat or leave out one. Nothing is encrypted. No message is a pickle.
"""

import asyncio
import hashlib
import hmac
import json
import secrets
from typing import Any

GREETING = b"drivetrain-launch 1"
"""First word of the server: the protocol and its version."""

GREET_S = 10.0
"""How long the other side may take to prove that it knows the secret."""

LONGEST_MESSAGE = 4 << 20
"""Bytes of one line; a message with the tracebacks of all ranks of a host is far below."""

REFUSED = b"refused"
"""The server's answer to a wrong proof."""


class NotAuthenticError(Exception):
    """The other side does not know the secret, or somebody changed a message."""


class Channel:
    """An authenticated connection.

    Args:
        reader: the connection's incoming side.
        writer: the connection's outgoing side.
        key: of this connection.
        name: of this side, which enters the HMAC: a message cannot be sent back to its sender.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, name: bytes
    ) -> None:
        self.reader, self.writer = reader, writer
        self._key = key
        self._mine, self._theirs = name, CLIENT if name == SERVER else SERVER
        self._sent = self._received = 0

    def send(self, kind: str, **values: Any) -> None:
        """Send a message; the connection keeps it until the other side takes it."""
        body = json.dumps({"kind": kind, **values}).encode()
        self.writer.write(self._mark(self._mine, self._sent, body) + b" " + body + b"\n")
        self._sent += 1

    async def receive(self) -> dict[str, Any]:
        """Wait for the next message.

        Raises:
            ConnectionError: the other side has closed the connection.
            NotAuthenticError: the line is no message of the other side.
        """
        mark, _, body = (await _line(self.reader)).partition(b" ")
        if not hmac.compare_digest(mark, self._mark(self._theirs, self._received, body)):
            raise NotAuthenticError("a message was changed on its way")
        self._received += 1
        message: dict[str, Any] = json.loads(body)
        return message

    def close(self) -> None:
        """Send the last messages, and close the connection."""
        self.writer.close()

    def _mark(self, name: bytes, number: int, body: bytes) -> bytes:
        return _proof(self._key, name, str(number).encode(), body)


SERVER, CLIENT = b"server", b"client"


async def greet_client(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes
) -> Channel:
    """Return the channel to a client that knows the secret.

    Raises:
        ConnectionError: the client has gone.
        NotAuthenticError: it does not know the secret.
        TimeoutError: it proves nothing.
    """
    ours = secrets.token_hex(32).encode()
    writer.write(GREETING + b" " + ours + b"\n")
    async with asyncio.timeout(GREET_S):
        theirs, _, proof = (await _line(reader)).partition(b" ")
    if not hmac.compare_digest(proof, _proof(secret, CLIENT, ours, theirs)):
        writer.write(REFUSED + b"\n")
        raise NotAuthenticError("wrong secret")
    writer.write(_proof(secret, SERVER, ours, theirs) + b"\n")
    return Channel(reader, writer, _key(secret, ours, theirs), SERVER)


async def greet_server(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes
) -> Channel:
    """Return the channel to a server that knows the secret.

    Raises:
        ConnectionError: the server has gone, or is no launcher.
        NotAuthenticError: it has another secret.
        TimeoutError: it answers nothing.
    """
    async with asyncio.timeout(GREET_S):
        greeting, _, theirs = (await _line(reader)).rpartition(b" ")
        if greeting != GREETING:
            raise ConnectionError("another program listens there")
        ours = secrets.token_hex(32).encode()
        writer.write(ours + b" " + _proof(secret, CLIENT, theirs, ours) + b"\n")
        answer = await _line(reader)
    if not hmac.compare_digest(answer, _proof(secret, SERVER, theirs, ours)):
        raise NotAuthenticError("wrong secret")
    return Channel(reader, writer, _key(secret, theirs, ours), CLIENT)


async def _line(reader: asyncio.StreamReader) -> bytes:
    try:
        line = await reader.readline()
    except ValueError as error:
        raise NotAuthenticError(f"a line of more than {LONGEST_MESSAGE} bytes") from error
    if not line.endswith(b"\n"):
        raise ConnectionError("the connection is closed")
    return line[:-1]


def _key(secret: bytes, server: bytes, client: bytes) -> bytes:
    return _proof(secret, b"key", server, client)


def _proof(key: bytes, *parts: bytes) -> bytes:
    return hmac.new(key, b"\n".join(parts), hashlib.sha256).hexdigest().encode()
