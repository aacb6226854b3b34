"""Host 0's side of a run over several hosts: members, attempts and verdicts.

It numbers the attempts, hears from each host how its ranks ended, tells the others to stop at the
first failure, and sends all of them the same verdict. It compares no clocks of hosts: a host is
lost when its connection closes, or when nothing came from it for a while by host 0's own clock.
"""

import asyncio
import dataclasses
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from drivetrain.errors import ConfigError, PreflightError
from drivetrain_launch.ranks.channel import Channel, NotAuthenticError, greet_client
from drivetrain_launch.ranks.failure import Ending, Verdict, judge
from drivetrain_launch.ranks.tunnel import join_store

BEAT_S = 1.0
"""How often launchers tell each other that they are there."""

LOST_S = 8.0
"""Silence after which a host is lost; with the beat before it, at most 10 seconds."""

LAST_WORDS_S = 3.0
"""How long host 0 stays after the last verdict until the others have read it."""


@dataclass(eq=False, slots=True)
class Member:
    """A launcher that takes part.

    Attributes:
        index: its place.
        name: its host's name.
        ranks: how many it runs.
        channel: the connection.
        heard: when its last message came, by this host's monotonic clock.
        ending: of its ranks in this attempt; None while they run.
    """

    index: int
    name: str
    ranks: int
    channel: Channel
    heard: float = field(default_factory=time.monotonic)
    ending: Ending | None = None


class Coordinator:
    """Lets launchers join, and decides for all of them.

    Args:
        secret: without which nobody joins.
        count: number of launchers.
        facts: values that each must share, such as the version, by their names.
        max_restarts: how often ranks start again.
        start_timeout_s: how long launchers may wait for each other.
        new_store: starts the ranks' store on loopback for an attempt, and returns its port.
        say: shows a line on this host.
    """

    def __init__(
        self,
        *,
        secret: bytes,
        count: int,
        facts: dict[str, str],
        max_restarts: int,
        start_timeout_s: float,
        new_store: Callable[[], int],
        say: Callable[[str], None],
    ) -> None:
        self._secret, self._count, self._facts = secret, count, facts
        self._restarts_left, self._limit_s = max_restarts, start_timeout_s
        self._new_store, self._say = new_store, say
        self._phase: Literal["meeting", "running", "over"] = "meeting"
        self._since = self._ticked = time.monotonic()
        self._attempt = self._port = 0
        self._address = ""
        self._members: dict[int, Member] = {}
        self._waiting: list[Member] = []
        self._lost: dict[int, str] = {}
        self._strangers: set[str] = set()
        self._everybody_left = asyncio.Event()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection to its end."""
        peer, here = (writer.get_extra_info(name)[0] for name in ("peername", "sockname"))
        try:
            channel = await greet_client(reader, writer, self._secret)
            message = await channel.receive()
            if message["kind"] == "store":
                await join_store(channel, self._port)
            elif message["kind"] == "join":
                self._address = here if message["index"] else self._address
                await self._serve(message, channel)
        except NotAuthenticError as error:
            if peer not in self._strangers:
                self._strangers.add(peer)
                self._say(f"a connection from {peer} was refused: {error}")
        except (OSError, TimeoutError):
            pass
        finally:
            writer.close()

    async def watch(self) -> None:
        """Tell everybody that host 0 is there, and notice who is not."""
        while True:
            await asyncio.sleep(BEAT_S)
            now = time.monotonic()
            # A launcher that was suspended itself has not read what came meanwhile.
            paused, self._ticked = now - self._ticked > BEAT_S + LOST_S / 2, now
            for member in [*self._members.values(), *self._waiting]:
                member.heard = now if paused else member.heard
                if now - member.heard > LOST_S:
                    self._lose(member, f"nothing was heard of it for {LOST_S:.0f} s")
                else:
                    member.channel.send("alive", missing=self._missing())
            if self._phase == "meeting" and now - self._since > self._limit_s:
                text = f"{self._missing()} did not come within {self._limit_s:g} s; "
                text += "start the same command on every host, or raise launch.start_timeout_s"
                self._dismiss(PreflightError.exit_code, text)

    async def last_words(self) -> None:
        """Stay until every other host has read the last verdict."""
        if self._phase != "over":
            self._dismiss(PreflightError.exit_code, "host 0 has left the run")
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await self._everybody_left.wait()

    async def _serve(self, message: dict[str, Any], channel: Channel) -> None:
        if self._phase == "over":
            self._refuse(channel, PreflightError.exit_code, "the run has ended")
            return
        text = self._contradiction(message)
        if text:
            self._refuse(channel, ConfigError.exit_code, text)
            return
        member = Member(message["index"], message["host"], message["ranks"], channel)
        if self._taken(member):
            return
        try:
            while True:
                self._hear(member, await channel.receive())
        except (OSError, NotAuthenticError):
            self._lose(member, "its launcher has ended, or the connection is closed")

    def _contradiction(self, message: dict[str, Any]) -> str:
        """Return how a newcomer differs from host 0; "" if it does not."""
        who = f"host {message['index']} ({message['host']})"
        if not 0 <= message["index"] < self._count:
            return f"{who}: expected an index from 0 to {self._count - 1}"
        for name, expected in self._facts.items():
            found = message["facts"].get(name, "")
            if found != expected:
                return (
                    f"{who} and host 0 differ in {name}: found {found!r} there, {expected!r} on "
                    "host 0; start the same command with the same versions on every host"
                )
        return ""

    def _taken(self, member: Member) -> bool:
        """Give a newcomer its place; whether the run ends instead, because of two with one place.

        A newcomer whose place is taken in a run that has begun waits, as a replacement.
        """
        other = self._members.get(member.index)
        if other is None and self._phase == "meeting":
            self._members[member.index] = member
            self._begin()
        elif other is not None and self._phase == "meeting" and not self._attempt:
            text = (
                f"launch.node_rank: {other.name} and {member.name} were started with --node-rank "
                f"{member.index}; give each of the {self._count} hosts its own, from 0 to "
                f"{self._count - 1}"
            )
            self._refuse(member.channel, ConfigError.exit_code, text)
            self._dismiss(ConfigError.exit_code, text)
            return True
        else:
            self._waiting.append(member)
        return False

    def _begin(self) -> None:
        """Begin an attempt as soon as every place is taken."""
        for newcomer in list(self._waiting):
            if newcomer.index not in self._members:
                self._waiting.remove(newcomer)
                self._members[newcomer.index] = newcomer
        if len(self._members) < self._count:
            return
        self._phase = "running"
        self._port = self._new_store()
        sizes = [self._members[index].ranks for index in range(self._count)]
        for member in self._members.values():
            member.channel.send(
                "meet",
                attempt=self._attempt,
                sizes=sizes,
                port=self._port,
                address=self._address,
            )

    def _hear(self, member: Member, message: dict[str, Any]) -> None:
        member.heard = time.monotonic()
        if message["kind"] == "leave":
            self._lose(member, message["reason"])
        elif message["kind"] == "ending" and self._phase == "running":
            member.ending = Ending.from_json(message["ending"])
            if not member.ending.whole or member.ending.signal:
                self._stop_all()
            self._decide()

    def _lose(self, member: Member, reason: str) -> None:
        if member in self._waiting:
            self._waiting.remove(member)
        if self._members.get(member.index) is member:
            del self._members[member.index]
            if self._phase == "running":
                sentence = f"host {member.index} ({member.name}) is lost: {reason}"
                self._lost[member.index] = sentence
                self._stop_all()
                self._decide()
        if self._phase == "over" and set(self._members) <= {0}:
            self._everybody_left.set()
        member.channel.close()

    def _stop_all(self) -> None:
        for member in self._members.values():
            if member.ending is None:
                member.channel.send("stop")

    def _decide(self) -> None:
        """Send the verdict once every host that is left has told its ending."""
        endings = {index: member.ending for index, member in self._members.items()}
        told = {index: ending for index, ending in endings.items() if ending is not None}
        if len(told) < len(endings):
            return
        verdict = judge(told, self._restarts_left, self._lost)
        self._tell(verdict)
        if not verdict.again:
            self._end()
            return
        self._restarts_left -= 1
        self._attempt += 1
        self._phase, self._since = "meeting", time.monotonic()
        self._lost.clear()
        for member in self._members.values():
            member.ending = None
        self._begin()

    def _tell(self, verdict: Verdict) -> None:
        for member in self._members.values():
            member.channel.send("verdict", **dataclasses.asdict(verdict))

    def _dismiss(self, code: int, text: str) -> None:
        for member in self._members.values():
            member.channel.send("refused", code=code, text=text)
        self._end()

    def _end(self) -> None:
        self._phase = "over"
        for member in self._waiting:
            self._refuse(member.channel, PreflightError.exit_code, "the run has ended")
        if set(self._members) <= {0}:
            self._everybody_left.set()

    def _refuse(self, channel: Channel, code: int, text: str) -> None:
        channel.send("refused", code=code, text=text)
        channel.close()

    def _missing(self) -> str:
        """Return the hosts that others wait for; "" for none."""
        absent = [str(index) for index in range(self._count) if index not in self._members]
        if self._phase != "meeting" or not absent:
            return ""
        plural = "s" if len(absent) > 1 else ""
        return f"{len(absent)} of {self._count} hosts (host{plural} {', '.join(absent)})"
