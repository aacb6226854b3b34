"""Every host's side of a run over several hosts: joins at host 0, and hears the verdicts."""

import asyncio
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from drivetrain import __version__
from drivetrain.errors import CollectiveError, ConfigError, DrivetrainError, PreflightError
from drivetrain.runtime.world import loopback_store
from drivetrain_launch.ranks.channel import (
    LONGEST_MESSAGE,
    Channel,
    NotAuthenticError,
    greet_server,
)
from drivetrain_launch.ranks.coordinator import BEAT_S, LOST_S, Coordinator
from drivetrain_launch.ranks.failure import Ending, Verdict
from drivetrain_launch.ranks.loop_thread import LoopThread
from drivetrain_launch.ranks.meeting import Place
from drivetrain_launch.ranks.placement import Endpoint, listening_address
from drivetrain_launch.ranks.secret import WAY_OUT
from drivetrain_launch.ranks.tunnel import Door

FIRST_REMINDER_S = 3.0
"""How long a host waits before it says so; the pauses between further lines double."""

LONGEST_PAUSE_S = 60.0
AGAIN_S = 0.2
"""Pause between two tries to reach host 0, which may come later."""

TRY_S = 5.0
"""How long one try may take: a host that is off answers nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Party:
    """The facts about a launcher in a run over several hosts.

    Attributes:
        endpoint: of host 0.
        index: of this launcher.
        count: number of launchers.
        ranks: number of ranks here.
        run: what tells this run from others at the same endpoint: a scheduler's job, or "".
        secret: that all launchers of the run share.
        max_restarts: how often ranks start again; host 0's counts.
        start_timeout_s: how long launchers and ranks wait for each other.
    """

    endpoint: Endpoint
    index: int
    count: int
    ranks: int
    run: str
    secret: bytes
    max_restarts: int
    start_timeout_s: float

    @property
    def facts(self) -> dict[str, str]:
        """Values that all launchers must share."""
        return {
            "drivetrain's version": __version__,
            "torch's version": torch.__version__,
            "the number of hosts": str(self.count),
            "the job": self.run,
        }


class SeveralHosts:
    """Several launchers agree through host 0.

    Args:
        party: what this launcher brings.
    """

    def __init__(self, party: Party) -> None:
        self._party = party
        self._inbox: queue.Queue[dict[str, Any]] = queue.Queue()
        self._stop = threading.Event()
        self._over = False
        self._missing = ""
        self._heard = time.monotonic()
        self._store: TCPStore | None = None
        self._coordinator: Coordinator | None = None
        self._channel: Channel | None = None
        self._server: asyncio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._left = False
        self._door = Door(self._connect)
        self._background = LoopThread()

    def join(self) -> None:
        """Reach host 0, or be host 0.

        Raises:
            ConfigError: host 0 has another secret.
            PreflightError: host 0 cannot be reached, or its port cannot be opened.
        """
        endpoint, index = self._party.endpoint, self._party.index
        try:
            if index == 0:
                self._background.call(self._serve())
            with reminding(lambda: f"host 0 of {self._party.count} at {endpoint}"):
                self._background.call(self._reach())
        except NotAuthenticError as error:
            raise ConfigError(
                f"this host's secret is not the secret of host 0 at {endpoint}; {WAY_OUT}"
            ) from error
        except OSError as error:
            raise PreflightError(
                f"cannot reach host 0 at {endpoint}: {error}; check that host 0 was started with "
                "--node-rank 0 and that the port is open between the hosts"
            ) from error

    def meet(self) -> Place:
        """Wait for every host.

        Raises:
            ConfigError: hosts contradict each other.
            PreflightError: a host did not come in time.
        """
        with reminding(lambda: self._missing and f"{self._missing} at {self._party.endpoint}"):
            message = self._next("meet")
        self._stop.clear()
        channel = self._open_channel()
        address = str(channel.writer.get_extra_info("sockname")[0])
        return Place(
            attempt=message["attempt"],
            sizes=tuple(message["sizes"]),
            index=self._party.index,
            port=self._door.port if self._party.index else message["port"],
            address=address if self._party.index else message["address"] or address,
        )

    def stop_asked(self) -> bool:
        """Whether another host's ranks have failed, or host 0 is gone."""
        return self._stop.is_set()

    def conclude(self, ending: Ending) -> Verdict:
        """Tell the ending of the ranks here, and wait for the verdict of all hosts."""
        self._send("ending", ending=ending.to_json())
        try:
            message = self._next("verdict")
        except CollectiveError as error:
            return Verdict(text=str(error), code=error.exit_code)
        self._over = not message["again"]
        return Verdict(text=message["text"], code=message["code"], again=message["again"])

    def leave(self, reason: str) -> None:
        """Leave the run; host 0 stays until the others have heard the last verdict."""
        if self._left:
            return
        self._left = True
        if not self._over and self._channel is not None:
            self._send("leave", reason=reason)
        self._background.call(self._part())
        self._background.close()
        self._store = None

    def _next(self, kind: str) -> dict[str, Any]:
        """Return the next message of a kind.

        Raises:
            CollectiveError: host 0 is lost.
            DrivetrainError: host 0 ends the run.
        """
        while True:
            message = self._inbox.get()
            if message["kind"] == "refused":
                self._over = True
                errors: tuple[type[DrivetrainError], ...] = (ConfigError, PreflightError)
                raise next(e for e in errors if e.exit_code == message["code"])(message["text"])
            if message["kind"] == "lost":
                self._over = True
                raise CollectiveError(
                    f"host 0 at {self._party.endpoint} is lost: {message['reason']}; "
                    "start the run again on every host"
                )
            if message["kind"] == kind:
                return message

    def _open_channel(self) -> Channel:
        if self._channel is None:
            raise PreflightError("expected a launcher that has joined, found none; call join()")
        return self._channel

    def _send(self, kind: str, **values: Any) -> None:
        async def send() -> None:
            self._open_channel().send(kind, **values)

        self._background.call(send())

    async def _serve(self) -> None:
        """Listen at the endpoint, and coordinate."""
        party = self._party
        self._coordinator = Coordinator(
            secret=party.secret,
            count=party.count,
            facts=party.facts,
            max_restarts=party.max_restarts,
            start_timeout_s=party.start_timeout_s,
            new_store=self._new_store,
            say=_say,
        )
        self._server = await asyncio.start_server(
            self._coordinator.accept,
            listening_address(party.endpoint),
            party.endpoint.port,
            limit=LONGEST_MESSAGE,
        )
        self._tasks.append(asyncio.create_task(self._coordinator.watch()))

    def _new_store(self) -> int:
        self._store = loopback_store(timedelta(seconds=self._party.start_timeout_s))
        return int(self._store.port)

    async def _connect(self) -> Channel:
        endpoint = self._party.endpoint
        async with asyncio.timeout(TRY_S):
            reader, writer = await asyncio.open_connection(
                endpoint.host, endpoint.port, limit=LONGEST_MESSAGE
            )
        try:
            return await greet_server(reader, writer, self._party.secret)
        except BaseException:
            writer.close()
            raise

    async def _reach(self) -> None:
        """Connect to host 0, which may come later, and join."""
        deadline = time.monotonic() + self._party.start_timeout_s
        while True:
            try:
                self._channel = await self._connect()
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise PreflightError(
                        f"cannot reach host 0 at {self._party.endpoint} within "
                        f"{self._party.start_timeout_s:g} s: {error or 'no answer'}; check that "
                        "host 0 was started with --node-rank 0 and that the port is open"
                    ) from error
                await asyncio.sleep(AGAIN_S)
        if self._party.index:
            await self._door.open()
        self._channel.send(
            "join",
            index=self._party.index,
            host=socket.gethostname(),
            ranks=self._party.ranks,
            facts=self._party.facts,
        )
        self._heard = time.monotonic()
        self._tasks.append(asyncio.create_task(self._listen(self._channel)))
        self._tasks.append(asyncio.create_task(self._beat(self._channel)))

    async def _listen(self, channel: Channel) -> None:
        reason = "its launcher has ended, or the connection is closed"
        try:
            while True:
                message = await channel.receive()
                self._heard = time.monotonic()
                if message["kind"] == "alive":
                    self._missing = message["missing"]
                    continue
                if message["kind"] in ("stop", "refused"):
                    self._stop.set()
                self._inbox.put(message)
        except (OSError, NotAuthenticError):
            self._lose(reason)

    async def _beat(self, channel: Channel) -> None:
        ticked = time.monotonic()
        while True:
            await asyncio.sleep(BEAT_S)
            now = time.monotonic()
            if now - ticked > BEAT_S + LOST_S / 2:  # this launcher was suspended
                self._heard = now
            ticked = now
            if now - self._heard > LOST_S:
                self._lose(f"nothing was heard of it for {LOST_S:.0f} s")
                return
            channel.send("alive")

    def _lose(self, reason: str) -> None:
        self._inbox.put({"kind": "lost", "reason": reason})
        self._stop.set()

    async def _part(self) -> None:
        if self._channel is not None:
            self._channel.close()
        if self._coordinator is not None:
            await self._coordinator.last_words()
        self._door.close()
        if self._server is not None:
            self._server.close()


@contextmanager
def reminding(missing: Callable[[], str]) -> Iterator[None]:
    """Say on the error stream now and then for whom the block waits, if for any, and how long."""
    over, begin = threading.Event(), time.monotonic()

    def remind() -> None:
        pause = FIRST_REMINDER_S
        while not over.wait(pause):
            waited = time.monotonic() - begin
            if whom := missing():
                _say(f"waiting for {whom} ({waited:.0f} s)")
            pause = min(2 * pause, LONGEST_PAUSE_S)

    thread = threading.Thread(target=remind, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
