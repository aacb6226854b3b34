"""Authenticated connections between the launchers of a run: the secret, the proofs, the tunnel.

The secret comes from the environment, from a file that a scheduler mounts, or from the user's own
file, which the first launch over several hosts makes. Most clusters have one home folder for all
hosts. Without it no launcher joins.
"""

import asyncio
import hashlib
import hmac
import json
import os
import secrets
import tempfile
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from drivetrain.errors import ConfigError, in_words, refusing
from drivetrain_launch.ranks.placement import LOOPBACK

SECRET_VARIABLE = "DRIVETRAIN_SECRET"  # noqa: S105 - the name of a variable
"""Environment variable with the secret itself; ranks do not get it."""

FILE_VARIABLE = "DRIVETRAIN_SECRET_FILE"
"""Environment variable with the path of a file that holds the secret."""

SHORTEST = 16
"""Characters of a secret, at least: an attacker may try as many as the network carries."""

WAY_OUT = (
    f"set {SECRET_VARIABLE} to the same text on every host, for example from "
    "'openssl rand -hex 16', or name a file that holds it in "
    f"{FILE_VARIABLE} (Kubernetes: a mounted Secret)"
)


def shared_secret() -> bytes:
    """Return the secret of this user's runs.

    Raises:
        ConfigError: it is too short, others can read its file, or no file can be made.
    """
    if text := os.environ.get(SECRET_VARIABLE, ""):
        return _checked(text, SECRET_VARIABLE)
    if path := os.environ.get(FILE_VARIABLE, ""):
        with refusing(f"{FILE_VARIABLE}: cannot read {path!r}", WAY_OUT):
            text = Path(path).read_text(encoding="utf-8")
        return _checked(text, f"{FILE_VARIABLE}: {path}")
    return _own_file()


def _own_file() -> bytes:
    root = os.environ.get("XDG_CONFIG_HOME", "") or "~/.config"
    try:
        path = Path(root).expanduser() / "drivetrain" / "secret"
        if not path.exists():
            _make(path)
        status = path.stat()
        text = path.read_text(encoding="utf-8")
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"several hosts share a secret, and there is none: {in_words(error)}; {WAY_OUT}"
        ) from error
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"expected the secret in {path} to be yours and readable by you alone, found "
            f"mode {status.st_mode & 0o777:o} and owner {status.st_uid}; remove the file, and the "
            "next launch makes another one"
        )
    return _checked(text, str(path))


def _make(path: Path) -> None:
    """Write a new secret, unless another host is quicker: a link never replaces a file."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(secrets.token_hex(32) + "\n")
        os.link(draft, path)
    except FileExistsError:
        return
    finally:
        Path(draft).unlink()


def _checked(text: str, where: str) -> bytes:
    found = text.strip()
    if len(found) < SHORTEST:
        raise ConfigError(
            f"{where}: expected a secret of at least {SHORTEST} characters, found {len(found)}; "
            f"{WAY_OUT}"
        )
    return found.encode()


# --- an event loop in a thread: the launcher's main thread watches ranks and hears signals ---


R = TypeVar("R")

CLOSE_S = 0.01
"""How long connections have to send their last bytes and close."""


class LoopThread:
    """Runs coroutines in a thread until ``close``."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine and return its result; signals are heard in between."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def close(self) -> None:
        """Cancel the coroutines that still run, and end the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.run_until_complete(asyncio.sleep(CLOSE_S))
        self._loop.close()


class OwnTasks:
    """Serves each connection of ``asyncio.start_server`` in a task that may be cancelled.

    Python 3.11 reports a cancelled connection as an error if the task is the stream's own.

    Args:
        serve: serves one connection to its end.
    """

    def __init__(
        self,
        serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]],
    ) -> None:
        self._serve = serve
        self._tasks: set[asyncio.Task[None]] = set()

    def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection, beside the others."""
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)  # the loop itself holds tasks weakly
        task.add_done_callback(self._tasks.discard)


# --- a connection between two launchers: two proofs of the secret, then JSON ---

# Both sides answer the other's random challenge with an HMAC of the secret, so that the secret
# itself is never sent. Each message carries an HMAC with a key of this connection and the message's
# number: nobody can add, change, repeat or leave out one. Nothing is encrypted. No message is a
# pickle.


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


# --- the way of ranks on other hosts to the store of host 0, through such connections ---

# torch's store knows no secret, so it listens on host 0's loopback alone. On another host the ranks
# connect to a proxy on their own loopback; the launcher behind it takes each connection to host 0,
# proves that it knows the secret, and passes bytes on.


CHUNK = 65536
"""Bytes passed on at once."""


class StoreProxy:
    """A listener on this host's loopback, behind which lies the store of host 0.

    Args:
        connect: opens a channel to host 0's launcher.
    """

    def __init__(self, connect: Callable[[], Awaitable[Channel]]) -> None:
        self._connect = connect
        self._server: asyncio.Server | None = None
        self.port = 0

    async def open(self) -> None:
        """Listen on a free port."""
        self._server = await asyncio.start_server(OwnTasks(self._pass_on), LOOPBACK, 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        """Listen no longer."""
        if self._server is not None:
            self._server.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            channel = await self._connect()
        except (OSError, NotAuthenticError):
            writer.close()
            return
        channel.send("store")
        await join(reader, writer, channel.reader, channel.writer)


async def join_store(channel: Channel, port: int) -> None:
    """Pass a connection on to the store of this host."""
    try:
        reader, writer = await asyncio.open_connection(LOOPBACK, port)
    except OSError:
        channel.close()
        return
    await join(channel.reader, channel.writer, reader, writer)


async def join(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    other_reader: asyncio.StreamReader,
    other_writer: asyncio.StreamWriter,
) -> None:
    """Pass bytes on in both directions until one side closes."""
    ways = [
        asyncio.create_task(_copy(reader, other_writer)),
        asyncio.create_task(_copy(other_reader, writer)),
    ]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        writer.close()
        other_writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while chunk := await reader.read(CHUNK):
            writer.write(chunk)
            await writer.drain()
