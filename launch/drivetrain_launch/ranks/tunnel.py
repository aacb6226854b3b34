"""The way of ranks on other hosts to the store of host 0, through authenticated connections.

torch's store knows no secret, so it listens on host 0's loopback alone. On another host the ranks
connect to a door on their own loopback; the launcher behind the door takes each connection to
host 0, proves that it knows the secret, and passes bytes on.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from drivetrain.runtime.world import LOOPBACK
from drivetrain_launch.ranks.channel import Channel, NotAuthenticError, OwnTasks

CHUNK = 65536
"""Bytes passed on at once."""


class Door:
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
