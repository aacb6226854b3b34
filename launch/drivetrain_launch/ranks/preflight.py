"""Host 0's part of the preflight: it reaches the probes of all hosts through their launchers."""

import asyncio
import ipaddress
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from drivetrain_launch.preflight.check import Extent, HostCheck
from drivetrain_launch.preflight.findings import CheckedHost, Findings
from drivetrain_launch.ranks.channel import Channel
from drivetrain_launch.ranks.joined import Member
from drivetrain_launch.tables import show_table

SKIP = "launch.preflight: none leaves this check out"


class Preflight:
    """Checks the ways between hosts before the first attempt.

    Args:
        extent: of the check.
        report: shows the findings.

    Attributes:
        link: bytes per second between hosts; 0 where they were not measured.
    """

    def __init__(self, extent: Extent, report: Callable[[Findings], None]) -> None:
        self.link = 0.0
        self.wanted = extent != "none"
        self._extent, self._report = extent, report
        self._orders = itertools.count()
        self._replies: dict[int, asyncio.Future[Mapping[str, Any]]] = {}

    async def run(self, members: Sequence[Member], address: str) -> str:
        """Check; return the reason why the run cannot work, or "".

        Args:
            members: all launchers in order; the first of each machine takes part.
            address: of host 0, as the others reach it, "" if unknown.
        """
        try:
            return await self._checked(members, address)
        except Exception as error:  # nobody waits for this task: an error must not be a hang
            return f"the check of the hosts failed: {type(error).__name__}: {error}; {SKIP}"

    def hear(self, reply: Mapping[str, Any]) -> None:
        """Take the reply to an order."""
        waiting = self._replies.get(reply["number"])
        if waiting is not None and not waiting.done():
            waiting.set_result(reply)

    async def _checked(self, members: Sequence[Member], address: str) -> str:
        chosen: dict[str, Member] = {}
        for each in members:
            chosen.setdefault(each.place, each)
        if len(chosen) == 1:
            return ""
        channels = {each.index: each.channel for each in chosen.values()}
        hosts = [
            CheckedHost(index=each.index, name=each.name, **_reachable(each, address))
            for each in chosen.values()
        ]

        async def ask(index: int, order: Mapping[str, Any]) -> Mapping[str, Any]:
            return await self._ask(channels[index], order)

        found = await HostCheck(hosts=hosts, ask=ask, extent=self._extent).run()
        self._report(found)
        self.link = found.link
        return found.refusal

    async def _ask(self, channel: Channel, order: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send an order to a host's probe, and wait for the reply."""
        number = next(self._orders)
        reply = asyncio.get_running_loop().create_future()
        self._replies[number] = reply
        try:
            channel.send("check", number=number, **order)
            found: Mapping[str, Any] = await reply
            return found
        finally:
            del self._replies[number]


def machines(members: Sequence[Member]) -> list[int]:
    """Return the index of each launcher's machine, in order of their first launchers."""
    places = list(dict.fromkeys(each.place for each in members))
    return [places.index(each.place) for each in members]


def _reachable(member: Member, address: str) -> Mapping[str, Any]:
    """Return a launcher's network, host 0's with the address by which others reach it."""
    loopback = ipaddress.ip_address(member.network["address"]).is_loopback
    if member.index or not loopback or not address:
        return member.network
    return {**member.network, "address": address}


def show(found: Findings, say: Callable[[str], None]) -> None:
    """Show the findings of a check, and of a full one the table of all pairs."""
    for line in found.lines():
        say(line)
    if found.pairs:
        columns, rows = found.matrix()
        show_table("Between hosts: bandwidth and latency of a way; inside of a host", columns, rows)
