"""The state of each rank in the eyes of a launcher: plain values, which travel between hosts."""

import dataclasses
import mmap
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from drivetrain.runtime.board import SIZE, RowView, read_board
from drivetrain_launch.watching.answers import Flight, state_of

STEADY_S = 0.002
"""A row that is the same twice, so many seconds apart, was not written in between."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OperationView:
    """One order of operations of a rank.

    Attributes:
        place: name of the order, the same on all its ranks.
        ranks: the global ranks that take part; empty where unknown.
        submitted: how many operations the rank has handed over.
        running: number of the operation under way, 0 for none.
        running_s: for how many seconds it has been under way.
        checksum: of the operation's header, 0 where it has none, or just changes.
        name: the operation in words, such as ``all_reduce 1,204 'blocks.7'``.
        size: its elements and dtype in words, "" where unknown.
    """

    place: str
    ranks: Sequence[int]
    submitted: int
    running: int
    running_s: float
    checksum: int
    name: str
    size: str

    @classmethod
    def of(cls, row: RowView, now: float, *, steady: bool) -> "OperationView":
        """Return the contents of a row of a board, with durations until now.

        Args:
            row: of the board.
            now: the moment.
            steady: whether the rank wrote nothing while the row was read.
        """
        label = row.label.rsplit("/", 1)[-1] if row.label.startswith("/") else row.label
        numbered = f"{row.operation} {row.running:,} {label!r}"
        return cls(
            place=row.place,
            ranks=row.ranks,
            submitted=row.submitted,
            running=row.running,
            running_s=max(0.0, now - row.since) if row.running else 0.0,
            checksum=row.checksum if steady else 0,
            name=numbered if row.operation else label,
            size=f"{row.elements:,} {row.dtype}" if row.dtype else "",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RankView:
    """One rank.

    Attributes:
        rank: its global rank.
        host: name of its host.
        pid: its process id there.
        section: the part of a step that it is in, "" before the first one.
        still_s: for how many seconds nothing on its board has changed.
        operations: its orders of operations.
        state: "stopped" by a signal, "ended", or "" for a process that runs or sleeps.
        stack: the stacks of its threads, "" where nobody has asked.
        flight: the last collectives of its device; empty where nobody has asked, or nothing is
            recorded.
    """

    rank: int
    host: str
    pid: int
    section: str = ""
    still_s: float = 0.0
    operations: tuple[OperationView, ...] = ()
    state: str = ""
    stack: str = ""
    flight: Flight = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "RankView":
        """Read the values of ``to_json``."""
        return _RANK_VIEW.validate_python(values)

    def at(self, place: str) -> OperationView | None:
        """Return the order of a place, None where the rank has none."""
        return next((each for each in self.operations if each.place == place), None)

    def longest(self) -> OperationView | None:
        """Return the operation that has been under way for the longest time, if any."""
        running = [each for each in self.operations if each.running]
        return max(running, key=lambda each: each.running_s, default=None)


_RANK_VIEW = TypeAdapter(RankView)


class BoardReader:
    """Reads the board of one rank of this host.

    Args:
        rank: its global rank.
        pid: its process id.
        path: the board; the rank makes it.
    """

    def __init__(self, rank: int, pid: int, path: Path) -> None:
        self.rank, self.pid, self.path = rank, pid, path
        self._memory: mmap.mmap | None = None
        self._last = b""
        self._changed = time.monotonic()

    def read(self) -> RankView | None:
        """Return the rank's state, None before it has made its board."""
        memory = self._map()
        if memory is None:
            return None
        earlier = memory[:]
        time.sleep(STEADY_S)
        shown = memory[:]
        board = read_board(shown)
        before = board if earlier == shown else read_board(earlier)
        if before is None or board is None:
            return None
        now = time.monotonic()
        if shown != self._last:
            self._last, self._changed = shown, now
        return RankView(
            rank=self.rank,
            host=socket.gethostname(),
            pid=self.pid,
            section=board.section,
            still_s=now - self._changed,
            operations=tuple(
                OperationView.of(row, now, steady=row in before.rows) for row in board.rows
            ),
            state=state_of(self.pid),
        )

    def close(self) -> None:
        """Unmap the board."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _map(self) -> mmap.mmap | None:
        if self._memory is None:
            try:
                descriptor = os.open(self.path, os.O_RDONLY)
            except OSError:
                return None
            try:
                if os.fstat(descriptor).st_size >= SIZE:
                    self._memory = mmap.mmap(descriptor, SIZE, prot=mmap.PROT_READ)
            finally:
                os.close(descriptor)
        return self._memory
