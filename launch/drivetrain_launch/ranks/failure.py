"""Which rank failed first, and how the user is told.

When one rank fails, its neighbors lose their connections and fail too, and the agent stops the
rest: only the first failure is worth reading.
"""

import signal
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from drivetrain.errors import CollectiveError

KILLED = 6
"""Exit code of the launcher when a signal killed the first failing rank."""

SAME_MOMENT_S = 5.0
"""Errors this close together may have one cause; a lost connection is never taken for the cause."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """How one rank ended.

    Attributes:
        rank: its global rank.
        pid: its process id.
        code: its exit code; -N when signal N killed it.
        time: of the rank's error, or else of the moment when its end was noticed; seconds since the
            epoch.
        summary: the last line of the traceback, or "".
        traceback: the traceback, or "".
        collateral: whether it failed because another rank failed.
    """

    rank: int
    pid: int
    code: int
    time: float
    summary: str = ""
    traceback: str = ""
    collateral: bool = False

    @classmethod
    def of(cls, rank: int, record: Any) -> "Failure":
        """Read the agent's record of a failed process (torch's ``ProcessFailure``)."""
        message = record.message if isinstance(record.message, Mapping) else {}
        details = message.get("extraInfo", {})
        stopped_by_agent = not message and record.exitcode in (
            -signal.SIGTERM,
            128 + signal.SIGTERM,
        )
        return cls(
            rank=rank,
            pid=record.pid,
            code=record.exitcode,
            time=float(details.get("time", record.timestamp)),
            summary=str(message.get("message", "")),
            traceback=str(details.get("py_callstack", "")),
            collateral=bool(details.get("collateral", False)) or stopped_by_agent,
        )

    @property
    def exit_code(self) -> int:
        """Exit code of the launcher for this failure."""
        return self.code if self.code > 0 else KILLED

    @property
    def ending(self) -> str:
        """Exit code or signal, in words."""
        if self.code >= 0:
            return f"exit code {self.code}"
        try:
            name = signal.Signals(-self.code).name
        except ValueError:
            name = f"signal {-self.code}"
        if -self.code == signal.SIGKILL:
            name += "; the system kills a process like this when it is out of memory"
        return f"killed by {name}"


def first(failures: Iterable[Failure]) -> Failure:
    """Return the failure that caused the others.

    The earliest failure counts; but a rank that lost its peers gives way to a rank that failed for
    another reason at about the same time.
    """
    ordered = sorted(failures, key=lambda failure: (failure.time, failure.rank))
    earliest = ordered[0]
    if earliest.collateral:
        for failure in ordered:
            if not failure.collateral and failure.time - earliest.time <= SAME_MOMENT_S:
                return failure
    return earliest


def report(failures: Mapping[int, Any]) -> tuple[str, int]:
    """Describe the failures of an attempt.

    Args:
        failures: torch's ``ProcessFailure`` by global rank; at least one.

    Returns:
        The text for the user, the first failure in front, and the launcher's exit code.
    """
    found = [Failure.of(rank, record) for rank, record in failures.items()]
    root = first(found)
    lines = [
        f"rank {root.rank} failed first (host {socket.gethostname()}, pid {root.pid}, "
        f"{root.ending})"
    ]
    lines += ["  " + line for line in (root.traceback or root.summary).rstrip().splitlines()]
    if root.collateral and not root.summary.startswith(CollectiveError.__name__):
        lines.append("  This rank lost another one: see the output of the other hosts, if any.")
    rest = sorted((failure for failure in found if failure is not root), key=lambda f: f.rank)
    lines += [
        f"rank {failure.rank} failed, too: {failure.summary}"
        for failure in rest
        if failure.summary and not failure.collateral and failure.summary != root.summary
    ]
    if rest:
        plural = "s" if len(rest) > 1 else ""
        ranks = ", ".join(str(failure.rank) for failure in rest)
        lines.append(f"stopped with it: rank{plural} {ranks}")
    return "\n".join(lines), root.exit_code
