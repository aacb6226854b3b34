"""Each rank leaves a status in the store where the ranks met: its wait for others, or its end.

A rank speaks on slow paths alone: when it has waited for a while, and when it ends. Others read the
status when their own wait fails or takes long, and learn who is missing, and why.
"""

import atexit
import json
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

_SHOWN_CHARACTERS = 200
"""Characters of an exception in a status."""

_meetings: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""How many meetings this process has begun on each of torch's process groups, while they live."""


class CountingThread(threading.Thread):
    """A thread that runs operations of all ranks in one order.

    Attributes:
        place: name of the operations' order, the same on all ranks.
        submitted: how many operations this rank has handed over.
        current: the facts of the operation under way, by name; None between two operations.
    """

    place: str = ""
    submitted: int = 0
    current: Callable[[], Mapping[str, Any]] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStatus:
    """The status of a rank: its wait for others, or its end.

    Attributes:
        doing: the wait in words, "" for a rank that has ended.
        place: where the rank waits: an order of meetings or operations that ranks share.
        number: which one of that order, from 1.
        ranks: the ranks that the wait needs.
        reached: how many meetings or operations the rank has begun, by place.
        running: the facts of the operations under way, by place.
        site: the line of the script where the rank waits, "" where there is none.
        at: time of the status, in seconds since the epoch.
        error: the exception that ended the rank, "" without one.
    """

    doing: str = ""
    place: str = ""
    number: int = 0
    ranks: Sequence[int] = ()
    reached: Mapping[str, int] = field(default_factory=dict)
    running: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    site: str = ""
    at: float = field(default_factory=time.time)
    error: str = ""

    def lacks(self, place: str, number: int) -> bool:
        """Whether the rank had not begun a meeting or operation when it spoke."""
        return self.reached.get(place, 0) < number

    def __str__(self) -> str:
        ago = f"{max(0.0, time.time() - self.at):.1f} s"
        if self.doing:
            return f"waits in {self.doing}" + (f" at {self.site}" if self.site else "")
        return f"failed {ago} ago with {self.error}" if self.error else f"ended {ago} ago"


def begin_meeting(group: dist.ProcessGroup) -> int:
    """Count a meeting of a group's ranks, and return its number, from 1."""
    _meetings[group] = _meetings.get(group, 0) + 1
    return _meetings[group]


def reached() -> dict[str, int]:
    """Return how many meetings and operations this process has begun, by place."""
    groups = [(group, count) for group, count in list(_meetings.items()) if _is_open(group)]
    counts = {str(group.group_name): count for group, count in groups}
    return counts | {thread.place: thread.submitted for thread in _counting_threads()}


def running() -> dict[str, Mapping[str, Any]]:
    """Return the facts of the operations that this process has under way, by place."""
    current = ((thread.place, thread.current) for thread in _counting_threads())
    return {place: facts() for place, facts in current if facts is not None}


def set_status(status: RankStatus | None) -> None:
    """Replace this rank's status; None takes it back. A store that is gone hears nothing."""
    with suppress(RuntimeError, ValueError):
        text = "" if status is None else json.dumps(asdict(status))
        _store().set(_key(dist.get_rank()), text)


def status_of(rank: int) -> RankStatus | None:
    """Return a rank's status, None without one.

    Raises:
        RuntimeError: the store is gone, or this process has left the others.
    """
    store, key = _store(), _key(rank)
    text = store.get(key).decode() if store.check([key]) else ""
    return RankStatus(**json.loads(text)) if text else None


def leave_status() -> None:
    """Leave the status of a rank that ends, with the exception that ended the rank."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    error = getattr(sys, "last_value", None)  # python, or the launcher, has printed it
    said = "" if error is None else f"{type(error).__name__}: {error}"
    set_status(RankStatus(reached=reached(), error=said[:_SHOWN_CHARACTERS]))


def leave() -> None:
    """Leave the process group of the other ranks, which may still wait for this one."""
    leave_status()
    dist.destroy_process_group()


def begin() -> None:
    """Take back the status of an earlier life of this rank, and promise a farewell at the end."""
    set_status(None)
    atexit.unregister(leave_status)
    atexit.register(leave_status)


def _counting_threads() -> list[CountingThread]:
    return [thread for thread in threading.enumerate() if isinstance(thread, CountingThread)]


def _is_open(group: dist.ProcessGroup) -> bool:
    """Whether a group was not destroyed: torch gives the names of such groups to new ones."""
    try:
        return bool(dist.get_process_group_ranks(group))
    except KeyError:
        return False


def _store() -> Any:
    try:
        return dist.distributed_c10d._get_default_store()
    except ValueError as error:
        raise RuntimeError(str(error)) from None


def _key(rank: int) -> str:
    return f"drivetrain/status/{rank}"
