"""A launcher that has joined a run over several hosts, and the checks of newcomers."""

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from drivetrain_launch.ranks.channel import Channel
from drivetrain_launch.ranks.failure import Ending


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
    def place(self) -> str:
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


def clash(one: Member, other: Member, count: int) -> str:
    """Return the error of two launchers with one index."""
    return (
        f"launch.node_rank: {one.name} and {other.name} were started with --node-rank "
        f"{other.index}; give each of the {count} hosts its own, from 0 to {count - 1}"
    )


def take_places(members: dict[int, Member], waiting: list[Member]) -> None:
    """Let launchers that wait take the places that are free."""
    for newcomer in list(waiting):
        if newcomer.index not in members:
            waiting.remove(newcomer)
            members[newcomer.index] = newcomer


def endings_of(members: Mapping[int, Member]) -> dict[int, Ending]:
    """Return the endings of the launchers that have told theirs, by index."""
    found = {index: member.ending for index, member in members.items()}
    return {index: ending for index, ending in found.items() if ending is not None}


def views_of_others(members: Mapping[int, Member]) -> dict[int, dict[str, Any]]:
    """Return the states of the ranks of other hosts than host 0, by global rank."""
    others = [member.views for index, member in list(members.items()) if index]
    return {view["rank"]: view for views in others for view in views}
