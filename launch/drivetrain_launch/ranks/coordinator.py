"""Host 0's side of a run over several hosts: members, attempts and verdicts.

It numbers the attempts, hears from each host how its ranks ended, tells the others to stop at the
first failure, and sends all of them the same verdict. It compares no clocks of hosts: a host is
lost when its connection closes, or when nothing came from it for a while by host 0's own clock.
Before the first attempt it compares the hosts' software, and lets them check the ways between them.
"""

import asyncio
import dataclasses
import ipaddress
import itertools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from drivetrain.errors import ConfigError, PreflightError
from drivetrain.runtime.board import PREEMPTED
from drivetrain_launch.console import say, show_table
from drivetrain_launch.ranks.channel import Channel, NotAuthenticError, greet_client, join_store
from drivetrain_launch.ranks.failure import Ending, IdleAttempts, Verdict, judge
from drivetrain_launch.ranks.placement import HostJob
from drivetrain_launch.ranks.preflight import CheckedHost, Extent, HostCheck, differences
from drivetrain_launch.ranks.watch import StragglerWatch


@dataclass(eq=False, kw_only=True, slots=True)
class Member:
    """A launcher that takes part.

    Attributes:
        index: its place.
        name: its host's name.
        ranks: how many it runs.
        channel: the connection.
        software: facts that must be equal on all hosts, by their names.
        machine: equal for launchers of one machine that each start one rank; else "".
        network: address, interface and transport of its ranks, as ``CheckedHost`` has them.
        heard: when its last message came, by this host's monotonic clock.
        ending: of its ranks in this attempt; None while they run.
        views: the states of its ranks, as it showed them last.
    """

    index: int
    name: str
    ranks: int
    channel: Channel
    software: Mapping[str, str]
    machine: str
    network: Mapping[str, Any]
    heard: float = field(default_factory=time.monotonic)
    ending: Ending | None = None
    views: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, message: Mapping[str, Any], channel: Channel) -> "Member":
        """Return the launcher that sent a message to join; another version may send less."""
        return cls(
            index=message["index"],
            name=message["host"],
            ranks=message["ranks"],
            channel=channel,
            software=message.get("software", {}),
            machine=message.get("machine", ""),
            network=message.get("network", {}),
        )

    @property
    def shown(self) -> str:
        """The host in a message."""
        return f"host {self.index} ({self.name})"

    @property
    def machine_key(self) -> str:
        """The machine, or a text of this launcher's own."""
        return self.machine or f"host {self.index}"


def misfit(message: Mapping[str, Any], count: int, facts: Mapping[str, str]) -> str:
    """Return why a newcomer is not of this run; "" if it is.

    Args:
        message: with which it wants to join.
        count: number of launchers.
        facts: of the run, by their names.
    """
    who = f"host {message['index']} ({message['host']})"
    if not 0 <= message["index"] < count:
        return f"{who}: expected an index from 0 to {count - 1}"
    for name, expected in facts.items():
        found = message["facts"].get(name, "")
        if found != expected:
            return (
                f"{who} and host 0 differ in {name}: found {found!r} there, {expected!r} on "
                "host 0; start the same command on every host"
            )
    return ""


def missing(counts: tuple[int, int], present: Collection[int]) -> str:
    """Return the hosts that others wait for; "" for none.

    Args:
        counts: the fewest launchers that are needed, and the most.
        present: indices of those that are here.
    """
    least, count = counts
    absent = [str(index) for index in range(count) if index not in present]
    if absent and least < count:
        return f"further hosts ({len(present)} came; {least} to {count} are wanted)"
    if not absent:
        return ""
    plural = "s" if len(absent) > 1 else ""
    return f"{len(absent)} of {count} hosts (host{plural} {', '.join(absent)})"


def late(members: Mapping[int, Member]) -> str:
    """Return the hosts whose ranks run on although those of others have ended; "" for none."""
    running = [members[index].shown for index in sorted(members) if members[index].ending is None]
    if not running or len(running) == len(members):
        return ""
    return f"the ranks of {', '.join(running)} to end"


def overdue(members: Mapping[int, Member], grace_s: float) -> bool:
    """Whether ranks run on although a signal has ended those of another host, who had saved.

    Args:
        members: the launchers of the run.
        grace_s: how long these ranks have to save, too.
    """
    ends = [end.time for each in endings_of(members).values() if each.signal for end in each.ended]
    return bool(ends) and time.time() - max(ends) > grace_s


def endings_of(members: Mapping[int, Member]) -> dict[int, Ending]:
    """Return the endings of the launchers that have told theirs, by index."""
    found = {index: member.ending for index, member in members.items()}
    return {index: ending for index, ending in found.items() if ending is not None}


# --- its part of the preflight: it reaches the probes of all hosts through their launchers ---


class Preflight:
    """Checks the ways between hosts before the first attempt.

    Args:
        extent: of the check.

    Attributes:
        link: bytes per second between hosts; 0 where they were not measured.
    """

    def __init__(self, extent: Extent) -> None:
        self.link = 0.0
        self._extent = extent
        self._orders = itertools.count()
        self._replies: dict[int, asyncio.Future[Mapping[str, Any]]] = {}

    def hear(self, reply: Mapping[str, Any]) -> None:
        """Take the reply to an order."""
        waiting = self._replies.get(reply["number"])
        if waiting is not None and not waiting.done():
            waiting.set_result(reply)

    async def run(self, members: Sequence[Member], address: str) -> str:
        """Check; return the reason why the run cannot work, or "".

        Args:
            members: all launchers in order; the first of each machine takes part.
            address: of host 0, as the others reach it, "" if unknown.
        """
        chosen: dict[str, Member] = {}
        for each in members:
            chosen.setdefault(each.machine_key, each)
        if len(chosen) == 1:
            return ""
        hosts = [
            CheckedHost(index=each.index, name=each.name, **_reachable(each, address))
            for each in chosen.values()
        ]
        ask = partial(self._ask, {each.index: each.channel for each in chosen.values()})
        found = HostCheck(hosts=hosts, ask=ask, extent=self._extent)
        await found.run()
        for line in found.lines():
            say(line)
        if found.pairs:  # of a full check
            show_table(
                "Between hosts: bandwidth and latency of a way; inside of a host", *found.matrix()
            )
        self.link = found.link
        return found.refusal

    async def _ask(
        self, channels: Mapping[int, Channel], index: int, order: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Send an order to a host's probe, and wait for the reply."""
        number = next(self._orders)
        reply = asyncio.get_running_loop().create_future()
        self._replies[number] = reply
        try:
            channels[index].send("check", number=number, **order)
            found: Mapping[str, Any] = await reply
            return found
        finally:
            del self._replies[number]


def _reachable(member: Member, address: str) -> Mapping[str, Any]:
    """Return a launcher's network, host 0's with the address by which others reach it."""
    loopback = ipaddress.ip_address(member.network["address"]).is_loopback
    if member.index or not loopback or not address:
        return member.network
    return {**member.network, "address": address}


# --- the coordinator ---


BEAT_S = 1.0
"""How often launchers tell each other that they are there."""

LOST_S = 8.0
"""Silence after which a host is lost; with the beat before it, at most 10 seconds."""

LAST_CALL_S = 30.0
"""How long the first attempt waits for further hosts when the fewest that are needed have come."""

SETTLE_S = 10.0
"""Pause between the start of ranks and the end that a new host asks for: one that comes and goes
must not keep the others from training."""

COME = "start the same command on every host, or raise launch.start_timeout_s"

LAST_WORDS_S = 3.0
"""How long host 0 stays after the last verdict until the others have read it."""


class Coordinator:
    """Lets launchers join, and decides for all of them.

    Args:
        job: of host 0, whose settings count.
        secret: without which nobody joins.
        new_store: starts the ranks' store on loopback for an attempt, and returns its port.
    """

    def __init__(self, job: HostJob, secret: bytes, new_store: Callable[[], int]) -> None:
        self._launch, self._identity, self._secret = job.launch, job.identity, secret
        self._restarts_left, self._new_store = job.launch.max_restarts, new_store
        self._preflight = Preflight(job.launch.preflight)
        stragglers = StragglerWatch(job.launch.straggler_margin, say)
        self._listeners = {"checked": self._preflight.hear, "work": stragglers.hear}
        self._checking: asyncio.Task[None] | None = None
        self._phase: Literal["meeting", "checking", "running", "over"] = "meeting"
        self._since = self._ticked = self._joined = self._begun = time.monotonic()
        self._growing, self._idle_attempts = False, IdleAttempts()
        self._attempt = self._port = 0
        self._address = ""
        self._members: dict[int, Member] = {}
        self._waiting: list[Member] = []
        self._lost: dict[int, str] = {}
        self._strangers: set[str] = set()
        self._everybody_left = asyncio.Event()
        self._why_over = 0, ""

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
                say(f"a connection from {peer} was refused: {error}")
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
                    member.channel.send("alive", missing=self._missing(), late=late(self._members))
            self._begin()
            self._let_in(now)
            if overdue(self._members, self._launch.grace_s):
                self._stop_all()
            limit_s = self._launch.start_s
            if self._phase == "meeting" and now - self._since > limit_s:
                text = f"{self._missing()} did not come within {limit_s:g} s; {COME}"
                self._dismiss(PreflightError.exit_code, text)

    def views(self) -> dict[int, dict[str, Any]]:
        """Return the states of the ranks of other hosts, by global rank."""
        others = [member.views for index, member in list(self._members.items()) if index]
        return {view["rank"]: view for views in others for view in views}

    async def last_words(self) -> None:
        """Stay until every other host has read the last verdict."""
        if self._phase != "over":
            self._dismiss(PreflightError.exit_code, "host 0 has left the run")
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await self._everybody_left.wait()

    async def _serve(self, message: dict[str, Any], channel: Channel) -> None:
        if self._phase == "over":
            self._refuse(channel, *self._why_over)
            return
        member = Member.of(message, channel)
        text = misfit(message, self._launch.nnodes, self._identity)
        first = self._members.get(0)
        if not text and first is not None and (self._phase == "running" or self._attempt):
            # A replacement whose software differs leaves alone, and the others go on.
            text = differences({each.shown: each.software for each in (first, member)})
        if text:
            self._refuse(channel, ConfigError.exit_code, text)
        if text or self._taken(member):
            return
        try:
            while True:
                self._hear(member, await channel.receive())
        except (OSError, NotAuthenticError):
            self._lose(member, "its launcher has ended, or the connection is closed")

    def _taken(self, member: Member) -> bool:
        """Give a newcomer a place, or let it wait; whether two with one place end the run."""
        other = self._members.get(member.index)
        if other is None and self._phase == "meeting":
            self._members[member.index] = member
            self._joined = time.monotonic()
            self._begin()
        elif other is not None and self._phase == "meeting" and not self._attempt:
            count = self._launch.nnodes
            text = (
                f"launch.node_rank: {other.name} and {member.name} were started with --node-rank "
                f"{member.index}; give each of the {count} hosts its own, from 0 to {count - 1}"
            )
            self._refuse(member.channel, ConfigError.exit_code, text)
            self._dismiss(ConfigError.exit_code, text)
            return True
        else:
            self._waiting.append(member)
        return False

    def _begin(self) -> None:
        """Begin an attempt as soon as every place is taken, or enough of them are."""
        if self._phase != "meeting":
            return
        for newcomer in list(self._waiting):
            if newcomer.index not in self._members:
                self._waiting.remove(newcomer)
                self._members[newcomer.index] = newcomer
        if not self._enough():
            return
        if text := differences({each.shown: each.software for each in self._in_order()}):
            self._dismiss(ConfigError.exit_code, text)
        elif self._attempt or len(self._members) == 1 or self._launch.preflight == "none":
            self._start()
        else:
            self._phase = "checking"
            self._checking = asyncio.create_task(self._check())

    async def _check(self) -> None:
        """Check the ways between the hosts, and start, or dismiss everybody."""
        try:
            refusal = await self._preflight.run(self._in_order(), self._address)
        except Exception as error:  # nobody waits for this task: an error must not be a hang
            what = f"the check of the hosts failed: {type(error).__name__}: {error}"
            refusal = f"{what}; launch.preflight: none leaves this check out"
        if refusal:
            self._dismiss(PreflightError.exit_code, refusal)
        else:
            self._start()

    def _in_order(self) -> list[Member]:
        return [self._members[index] for index in sorted(self._members)]

    def _start(self) -> None:
        """Start an attempt with the launchers that are here."""
        self._phase, self._growing, self._begun = "running", False, time.monotonic()
        self._port = self._new_store()
        members = self._in_order()
        machines = list(dict.fromkeys(each.machine_key for each in members))
        for index, member in enumerate(members):
            member.channel.send(
                "meet",
                attempt=self._attempt,
                sizes=[each.ranks for each in members],
                index=index,
                port=self._port,
                address=self._address,
                nodes=[machines.index(each.machine_key) for each in members],
                link=self._preflight.link,
            )

    def _enough(self) -> bool:
        """Whether an attempt can begin: after a failure, hosts that are lost may stay away long."""
        here = len(self._members)
        called = self._attempt > 0 or time.monotonic() - self._joined > LAST_CALL_S
        return here == self._launch.nnodes or (here >= self._launch.least_nnodes and called)

    def _let_in(self, now: float) -> None:
        """Let the ranks save and end, so that hosts which wait can join: one rank is told."""
        newcomers = [each for each in self._waiting if each.index not in self._members]
        if self._phase != "running" or not newcomers or now - self._begun < SETTLE_S:
            return
        names = ", ".join(each.shown for each in newcomers)
        if not self._growing:
            say(f"{names} came: the ranks are asked to save, and start again then")
        self._growing, self._begun = True, now
        self._members[min(self._members)].channel.send("notice")

    def _hear(self, member: Member, message: dict[str, Any]) -> None:
        member.heard = time.monotonic()
        if message["kind"] == "leave":
            self._lose(member, message["reason"])
        elif message["kind"] == "views":
            member.views = message["views"]
        elif message["kind"] in self._listeners:
            self._listeners[message["kind"]](message)
        elif message["kind"] == "ending" and self._phase == "running":
            member.ending = Ending.from_json(message["ending"])
            if not member.ending.whole:  # after a signal and a save, the others may still save
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
            elif self._phase == "checking":
                if self._checking is not None:  # wait again for a host that has gone meanwhile
                    self._checking.cancel()
                self._phase, self._since = "meeting", time.monotonic()
        if self._phase == "over" and set(self._members) <= {0}:
            self._everybody_left.set()
        member.channel.close()

    def _stop_all(self) -> None:
        for member in self._members.values():
            if member.ending is None:
                member.channel.send("stop")

    def _decide(self) -> None:
        """Send the verdict once every host that is left has told its ending."""
        told = endings_of(self._members)
        if len(told) < len(self._members):
            return
        idle = self._idle_attempts.after(told.values())
        verdict = judge(told, self._restarts_left, self._lost, idle=idle)
        noticed = any(ending.noticed for ending in told.values())  # by a scheduler
        if self._growing and verdict.code == PREEMPTED and not noticed:
            verdict = Verdict(text="the ranks saved, and start again on more hosts", again=True)
        else:
            self._restarts_left -= verdict.again
        for member in self._members.values():
            member.channel.send("verdict", **dataclasses.asdict(verdict))
        if not verdict.again:
            self._end(verdict.code, "the run has ended")
            return
        self._attempt += 1
        self._phase, self._since = "meeting", time.monotonic()
        self._lost.clear()
        for member in self._members.values():
            member.ending, member.views = None, []
        self._begin()

    def _dismiss(self, code: int, text: str) -> None:
        for member in self._members.values():
            member.channel.send("refused", code=code, text=text)
        self._end(code, text)

    def _end(self, code: int, text: str) -> None:
        self._phase, self._why_over = "over", (code, text)  # also for hosts that come later
        for member in self._waiting:
            self._refuse(member.channel, *self._why_over)
        if set(self._members) <= {0}:
            self._everybody_left.set()

    def _refuse(self, channel: Channel, code: int, text: str) -> None:
        channel.send("refused", code=code, text=text)
        channel.close()

    def _missing(self) -> str:
        counts = self._launch.least_nnodes, self._launch.nnodes
        return missing(counts, self._members) if self._phase == "meeting" else ""
