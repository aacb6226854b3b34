"""How the launchers of a run agree on each attempt: one host with itself, several through host 0.

A launcher meets the others, starts its ranks, and tells how they ended. It then hears the verdict,
which is the same for every host: the run is over, or all ranks start again.
"""

import asyncio
import math
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from typing import Any, TypeAlias

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from drivetrain.errors import (
    CollectiveError,
    ConfigError,
    DrivetrainError,
    PreflightError,
    in_words,
)
from drivetrain.observe.figures import RankTimes
from drivetrain.runtime.world import loopback_store
from drivetrain_launch.console import say
from drivetrain_launch.ranks.channel import (
    LONGEST_MESSAGE,
    WAY_OUT,
    Channel,
    LoopThread,
    NotAuthenticError,
    OwnTasks,
    StoreProxy,
    greet_server,
)
from drivetrain_launch.ranks.coordinator import BEAT_S, LOST_S, Coordinator
from drivetrain_launch.ranks.failure import Ending, IdleAttempts, RunOver, Verdict, judge
from drivetrain_launch.ranks.placement import (
    Assignment,
    Endpoint,
    HostJob,
    interface_of,
    listening_address,
)
from drivetrain_launch.ranks.preflight import HostProbe, chosen_address, machine_id, transport_of
from drivetrain_launch.ranks.watch import Hosts, StragglerWatch


class SingleHost:
    """The only host agrees with itself, and listens on loopback alone.

    torch's agent keeps one store for all attempts, so that restarted ranks read the addresses of
    dead ranks. Here each attempt has a store of its own.

    Args:
        job: the work of this host.
    """

    def __init__(self, job: HostJob) -> None:
        self._ranks, self._launch = job.ranks, job.launch
        self._attempt = 0
        self._stragglers = StragglerWatch(job.launch.straggler_margin, say)
        self._store: TCPStore | None = None
        self._idle_attempts = IdleAttempts()

    def meet(self) -> Assignment:
        """Start the store of a new attempt."""
        self._store = loopback_store(timedelta(seconds=self._launch.start_s))
        return Assignment(
            attempt=self._attempt, sizes=(self._ranks,), index=0, port=self._store.port
        )

    def stop_asked(self) -> bool:
        """Return False: there is no other host."""
        return False

    def hosts(self, assignment: Assignment) -> Hosts | None:
        """Return None: there is no other host."""
        return None

    def tell_work(self, assignment: Assignment, works: Sequence[RankTimes]) -> None:
        """Name stragglers on the error stream."""
        self._stragglers.take(works, assignment.world_size, assignment.attempt)

    def notice_asked(self) -> bool:
        """Return False: no host can join."""
        return False

    def conclude(self, ending: Ending) -> Verdict:
        """Return the verdict on the ending."""
        idle = self._idle_attempts.after([ending])
        verdict = judge({0: ending}, self._launch.max_restarts - self._attempt, idle=idle)
        self._attempt += verdict.again
        return verdict

    def leave(self, reason: str) -> None:
        """Close the store."""
        self._store = None


# --- several hosts: the way to host 0 ---


AGAIN_S = 0.2
"""Pause between two tries to reach host 0, which may come later."""

AGAIN_LIMIT_S = 60.0
"""How long a host tries to reach host 0 again after it was lost: a link may come back."""

TRY_S = 5.0
"""How long one try may take: a host that is off answers nothing."""


class Leader:
    """The launcher of host 0, to which the others connect.

    Args:
        endpoint: where it listens.
        secret: that all launchers of the run share.
    """

    def __init__(self, endpoint: Endpoint, secret: bytes) -> None:
        self.endpoint, self._secret = endpoint, secret

    async def connect(self) -> Channel:
        """Open a channel.

        Raises:
            NotAuthenticError: host 0 has another secret.
            OSError: it does not answer.
        """
        async with asyncio.timeout(TRY_S):
            reader, writer = await asyncio.open_connection(
                self.endpoint.host, self.endpoint.port, limit=LONGEST_MESSAGE
            )
        try:
            return await greet_server(reader, writer, self._secret)
        except BaseException:
            writer.close()
            raise

    async def connect_within(self, limit_s: float, *, was_there: bool = False) -> Channel:
        """Open a channel to a host 0 that may come later, or come back.

        Args:
            limit_s: how long to wait for it.
            was_there: whether it was lost: then an answer that nobody listens there is the last.

        Raises:
            NotAuthenticError: host 0 has another secret.
            OSError: it did not come in time.
        """
        deadline = time.monotonic() + limit_s
        while True:
            try:
                return await self.connect()
            except OSError as error:
                gone = was_there and isinstance(error, ConnectionRefusedError)
                if gone or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(AGAIN_S)


# --- the member ---


FIRST_REMINDER_S = 3.0
"""How long a host waits before it says so; the pauses between further lines double."""

LONGEST_PAUSE_S = 60.0
"""Between two lines about hosts that do not come. Ranks of another host may train on for hours."""

AGAIN = (
    "no other host can lead the run: start the run again on every host, perhaps with another "
    "machine as host 0; 'accelerator.resume()' in the script goes on from the newest checkpoint"
)


class SeveralHosts:
    """Several launchers agree through host 0.

    Args:
        job: the work of this host.
        secret: that all launchers of the run share.
    """

    def __init__(self, job: HostJob, secret: bytes) -> None:
        self._job, self._secret = job, secret
        self._is_leader = job.launch.node_rank == 0
        self._may_join_again = not self._is_leader and job.launch.max_restarts > 0
        self._inbox: queue.Queue[dict[str, Any]] = queue.Queue()
        self._stop = threading.Event()
        self._notice = threading.Event()
        self._over = self._left = False
        self._lost = self._missing = self._late = ""
        self._heard = time.monotonic()
        self._store: TCPStore | None = None
        self._coordinator: Coordinator | None = None
        self._channel: Channel | None = None
        self._server: asyncio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._leader = Leader(Endpoint.parse(job.launch.rdzv_endpoint), secret)
        self._proxy = StoreProxy(self._leader.connect)
        self._probe = HostProbe()
        self._background = LoopThread()

    def join(self) -> None:
        """Reach host 0, or be host 0.

        Raises:
            ConfigError: host 0 has another secret.
            PreflightError: host 0 cannot be reached, or its port cannot be opened.
        """
        endpoint = self._leader.endpoint
        try:
            if self._is_leader:
                self._background.call(self._serve())
            with reminding(self._whom_to_reach):
                self._background.call(self._reach())
        except NotAuthenticError as error:
            raise ConfigError(
                f"this host's secret is not the secret of host 0 at {endpoint}; {WAY_OUT}"
            ) from error
        except OSError as error:
            within = "" if self._is_leader else f" within {self._job.launch.start_s:g} s"
            raise PreflightError(
                f"cannot reach host 0 at {endpoint}{within}: {in_words(error)}; check that host 0 "
                "was started with --node-rank 0 and that the port is open between the hosts"
            ) from error

    def meet(self) -> Assignment:
        """Wait for every host, and first for host 0 if it was lost.

        Raises:
            CollectiveError: host 0 stays lost.
            ConfigError: hosts contradict each other.
            PreflightError: a host did not come in time.
            RunOver: the run has ended while this launcher waited for a place.
        """
        if self._lost:
            self._join_again()
        with reminding(lambda: self._missing and f"{self._missing} at {self._leader.endpoint}"):
            message = self._next("meet")
        if not self._is_leader:
            message["port"] = self._proxy.port
        if not (self._is_leader and message["address"]):
            channel = self._open_channel()
            message["address"] = str(channel.writer.get_extra_info("sockname")[0])
        return Assignment(**message | {key: tuple(message[key]) for key in ("sizes", "nodes")})

    def stop_asked(self) -> bool:
        """Whether another host's ranks have failed, or host 0 is gone."""
        return self._stop.is_set()

    def hosts(self, assignment: Assignment) -> Hosts | None:
        """Return the connection of the watch over hanging ranks: host 0 judges."""
        return Hosts(
            show=lambda views: self._send("views", views=list(views)),
            others=lambda: {} if self._coordinator is None else self._coordinator.views(),
            judges=assignment.index == 0,
        )

    def tell_work(self, assignment: Assignment, works: Sequence[RankTimes]) -> None:
        """Send the times of ranks here to host 0, which names stragglers."""
        told = [asdict(work) for work in works]
        if told:
            self._send("work", works=told, size=assignment.world_size, attempt=assignment.attempt)

    def notice_asked(self) -> bool:
        """Whether the ranks here must be told, once, to save and end: a host wants to join."""
        asked = self._notice.is_set()
        self._notice.clear()
        return asked

    def conclude(self, ending: Ending) -> Verdict:
        """Tell the ending of the ranks here, and wait for the verdict of all hosts.

        If host 0 is lost, the hosts may meet again.
        """
        self._send("ending", ending=ending.to_json())
        try:
            with reminding(lambda: self._late, longest_s=math.inf):
                message = self._next("verdict")
        except CollectiveError as error:
            again = self._may_join_again and not ending.signal
            self._over = not again
            text = f"{self._lost}; trying to reach it again" if again else str(error)
            return Verdict(text=text, code=error.exit_code, again=again)
        self._over = not message["again"]
        return Verdict(**message)

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
        """Return the values of the next message of a kind.

        Raises:
            CollectiveError: host 0 is lost.
            DrivetrainError: host 0 ends the run.
            RunOver: the run has ended while this launcher waited.
        """
        while True:
            message = self._inbox.get()
            found = message.pop("kind")
            if found == "refused":
                self._over = True
                raise _refusal(message)
            if found == "lost":
                self._over = True
                self._lost = f"host 0 at {self._leader.endpoint} is lost: {message['reason']}"
                raise CollectiveError(f"{self._lost}; {AGAIN}")
            if found == kind:
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
        endpoint = self._leader.endpoint
        self._coordinator = Coordinator(self._job, self._secret, self._new_store)
        self._server = await asyncio.start_server(
            OwnTasks(self._coordinator.accept),
            listening_address(endpoint),
            endpoint.port,
            limit=LONGEST_MESSAGE,
        )
        self._tasks.append(asyncio.create_task(self._coordinator.watch()))

    def _new_store(self) -> int:
        self._store = loopback_store(timedelta(seconds=self._job.launch.start_s))
        return int(self._store.port)

    def _join_again(self) -> None:
        """Reach host 0 after it was lost, or raise a CollectiveError."""
        lost, self._lost = self._lost, ""
        try:
            with reminding(self._whom_to_reach):
                self._background.call(self._reach_again())
        except (OSError, NotAuthenticError, PreflightError) as error:
            self._over = True
            raise CollectiveError(f"{lost}; {AGAIN}") from error

    def _whom_to_reach(self) -> str:
        return f"host 0 of {self._job.launch.nnodes} at {self._leader.endpoint}"

    async def _reach_again(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()
        self._open_channel().writer.transport.abort()
        self._inbox = queue.Queue()
        self._channel = await self._leader.connect_within(AGAIN_LIMIT_S, was_there=True)
        self._join_over(self._channel)

    async def _reach(self) -> None:
        """Connect to host 0, which may come later, and join."""
        self._channel = await self._leader.connect_within(self._job.launch.start_s)
        if not self._is_leader:
            await self._proxy.open()
        self._join_over(self._channel)

    def _join_over(self, channel: Channel) -> None:
        """Ask for this launcher's place, and listen from now on."""
        channel.send("join", **_join_request(self._job, channel))
        self._heard = time.monotonic()
        self._tasks.append(asyncio.create_task(self._listen(channel)))
        self._tasks.append(asyncio.create_task(self._beat(channel)))

    async def _listen(self, channel: Channel) -> None:
        try:
            while True:
                message = await channel.receive()
                kind, self._heard = message["kind"], time.monotonic()
                if kind == "alive":
                    self._missing, self._late = message["missing"], message["late"]
                elif kind == "check":
                    answer = _answer(self._probe, channel, message)
                    self._tasks.append(asyncio.create_task(answer))
                elif kind == "notice":
                    self._notice.set()
                else:
                    if kind == "meet":  # later messages are about the new attempt
                        self._stop.clear()
                        self._notice.clear()
                    if kind in ("stop", "refused"):
                        self._stop.set()
                    self._inbox.put(message)
        except (OSError, NotAuthenticError):
            self._lose("its launcher has ended, or the connection is closed")

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
        self._proxy.close()
        self._probe.close()
        if self._server is not None:
            self._server.close()


def _join_request(job: HostJob, channel: Channel) -> dict[str, Any]:
    """Return the facts of a launcher for host 0."""
    seen = str(channel.writer.get_extra_info("sockname")[0])
    address, (transport, measured) = chosen_address(job.backend, seen), transport_of(job.backend)
    return {
        "index": job.launch.node_rank,
        "host": socket.gethostname(),
        "ranks": job.ranks,
        "facts": job.identity,
        "software": dict(job.software),
        "machine": machine_id() if job.slot is not None else "",
        "network": {
            "address": address,
            "interface": interface_of(address) or "",
            "transport": transport,
            "measured": measured,
        },
    }


async def _answer(probe: HostProbe, channel: Channel, order: dict[str, Any]) -> None:
    """Carry out an order of the check, beside the beats."""
    try:
        reply = await asyncio.to_thread(probe.carry_out, order)
    except OSError as error:
        reply = {"error": in_words(error)}
    channel.send("checked", number=order["number"], **reply)


def _refusal(message: dict[str, Any]) -> DrivetrainError | RunOver:
    """Return the error of host 0, which refuses this launcher or ends the run."""
    text, code = message["text"], message["code"]
    errors: tuple[type[DrivetrainError], ...] = (ConfigError, PreflightError)
    return next((kind(text) for kind in errors if kind.exit_code == code), RunOver(text, code))


@contextmanager
def reminding(missing: Callable[[], str], longest_s: float = LONGEST_PAUSE_S) -> Iterator[None]:
    """Say on the error stream now and then for whom the block waits, if for any, and how long.

    Args:
        missing: returns for whom, "" for nobody.
        longest_s: the longest pause between two lines.
    """
    over, begin = threading.Event(), time.monotonic()

    def remind() -> None:
        pause = FIRST_REMINDER_S
        while not over.wait(pause):
            waited = time.monotonic() - begin
            if whom := missing():
                say(f"waiting for {whom} ({waited:.0f} s)")
            pause = min(2 * pause, longest_s)

    thread = threading.Thread(target=remind, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


HostMeeting: TypeAlias = SingleHost | SeveralHosts
"""Where the launchers of a run agree."""
