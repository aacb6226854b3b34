"""What a rank and its launcher tell each other: a board in shared memory, and a notice to end.

The rank writes without a system call and waits for nobody; a launcher that maps the same file sees
where the rank is even while the rank is stopped. Without a launcher the board is private memory.

Schedulers send SIGTERM, or SIGUSR1 some time before a limit, and kill later. Whoever listens
finishes the step at hand and saves; a second SIGTERM, a while after the first, ends the process.
"""

import itertools
import mmap
import os
import signal
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

ROWS = 24
"""Orders of operations that a board shows; a rank with more shows the first ones."""

_HEAD = struct.Struct("<IId24s")
_ENTERED = struct.Struct("<d24s")
_ENTERED_AT = struct.calcsize("<II")
_STOP = struct.Struct("<I")
_STOP_AT = _HEAD.size
_ROWS_AT = _STOP_AT + _STOP.size
_ROW = struct.Struct("<64siiiQQIdQ16s12s64s")
_NUMBER = struct.Struct("<Q")
_SUBMITTED_AT = struct.calcsize("<64siii")
_RUNNING_AT = struct.calcsize("<64siiiQ")
_TEXTS = struct.Struct("<16s12s64s")
_BEGUN = struct.Struct(f"<QIdQ{_TEXTS.size}s")
SIZE = _ROWS_AT + ROWS * _ROW.size
"""Bytes of a board."""

NATIVE = "native"
"""End of the place of operations on a device: the host does not know when they are over, so that
the last one submitted is shown as under way."""

DRAWING = "report"
"""The section of a rank that draws the report of a run, which has a time limit of its own."""

_VERSION = 2
_NOBODY = (-1, 0, 0)
_NOTHING = (0, 0, 0, 0.0, 0, b"", b"", b"")


@dataclass(frozen=True, kw_only=True, slots=True)
class OperationView:
    """One order of operations of a rank, as a launcher reads it.

    Attributes:
        place: name of the order, the same on all its ranks.
        ranks: the global ranks that take part; empty where they are not evenly spaced.
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


class BoardView(NamedTuple):
    """A board as a launcher reads it.

    Attributes:
        section: the part of a step that the rank is in, "" before the first one.
        rows: the rank's orders of operations.
    """

    section: str
    rows: Sequence[OperationView]


class BoardRow:
    """One order of operations on the board.

    Args:
        memory: of the row; others may read it at any time.
        place: name of the order, the same on all ranks.
        ranks: the global ranks that take part.
        free: gives the memory back.
    """

    def __init__(
        self, memory: memoryview, place: str, ranks: Sequence[int], free: Any = None
    ) -> None:
        self._memory, self._free = memory, free
        _ROW.pack_into(memory, 0, place.encode()[-64:], *_spaced(ranks), *_NOTHING)

    def submit(self, number: int) -> None:
        """Show how many operations were handed over."""
        _NUMBER.pack_into(self._memory, _SUBMITTED_AT, number)

    def begin(
        self, number: int, checksum: int, operation: str, elements: int, dtype: str, label: str
    ) -> None:
        """Show the operation under way."""
        # No number while the rest is written: a reader never takes one's checksum for another's.
        memory, texts = self._memory, _texts(operation, dtype, label)
        _BEGUN.pack_into(memory, _RUNNING_AT, 0, checksum, time.monotonic(), elements, texts)
        _NUMBER.pack_into(memory, _RUNNING_AT, number)

    def end(self) -> None:
        """Show that no operation is under way."""
        _NUMBER.pack_into(self._memory, _RUNNING_AT, 0)

    def close(self) -> None:
        """Take the row off the board."""
        _ROW.pack_into(self._memory, 0, b"", *_NOBODY, *_NOTHING)
        if self._free is not None:
            self._free()
            self._free = None


class Board:
    """The board of this process; of no effect on the process itself."""

    def __init__(self) -> None:
        self._memory = memoryview(bytearray(SIZE))
        self._lock = threading.Lock()
        self._unused = list(range(ROWS))

    def attach(self, path: str | Path) -> None:
        """Write to a file from now on, where a launcher reads it; before any row is opened.

        Raises:
            OSError: the file cannot be mapped.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, SIZE)
            self._memory = memoryview(mmap.mmap(descriptor, SIZE))
        finally:
            os.close(descriptor)
        _HEAD.pack_into(self._memory, 0, _VERSION, os.getpid(), time.monotonic(), b"")

    @property
    def stop_asked(self) -> bool:
        """Whether the launcher ends this rank: a signal that comes now is no notice."""
        return bool(_STOP.unpack_from(self._memory, _STOP_AT)[0])

    def enter(self, section: str) -> None:
        """Show the part of a step that the rank is in."""
        _ENTERED.pack_into(self._memory, _ENTERED_AT, time.monotonic(), section.encode()[:24])

    def open(self, place: str, ranks: Sequence[int]) -> BoardRow:
        """Return a new row; where the board is full, nobody reads the row."""
        with self._lock:
            if not self._unused:
                return BoardRow(memoryview(bytearray(_ROW.size)), place, ranks)
            index = self._unused.pop(0)
        start = _ROWS_AT + index * _ROW.size
        memory = self._memory[start : start + _ROW.size]
        return BoardRow(memory, place, ranks, lambda: self._unused.append(index))


def ask_to_stop(path: str | Path) -> None:
    """Let a rank know that its launcher ends the run; nothing where there is no board."""
    with suppress(OSError), open(path, "r+b", buffering=0) as file:  # noqa: PTH123 - unbuffered
        if os.fstat(file.fileno()).st_size >= SIZE:
            file.seek(_STOP_AT)
            file.write(_STOP.pack(1))


def read_board(memory: Any, now: float) -> BoardView | None:
    """Return the contents of a board, None before the rank has begun to write.

    Args:
        memory: the board's bytes.
        now: the moment, in seconds of the system's monotonic clock.
    """
    version, _, _, section = _HEAD.unpack_from(memory, 0)
    if version != _VERSION:
        return None
    starts = range(_ROWS_AT, SIZE, _ROW.size)
    rows = [_read_row(memory, at, now) for at in starts if memory[at]]  # open ones have names
    return BoardView(_text(section), rows)


def _read_row(memory: Any, start: int, now: float) -> OperationView:
    """Return the contents of a row."""
    place, *spaced, submitted, running, checksum, since, elements, operation, dtype, label = (
        _ROW.unpack_from(memory, start)
    )
    first, count, stride = spaced
    ranks = range(first, first + count * stride, stride) if stride else [first] * count
    name, kind, dtype = _text(label), _text(operation), _text(dtype)
    name = name.rsplit("/", 1)[-1] if name.startswith("/") else name  # a file of the script
    return OperationView(
        place=_text(place),
        ranks=list(ranks),
        submitted=submitted,
        running=running,
        running_s=max(0.0, now - since) if running else 0.0,
        checksum=checksum,
        name=f"{kind} {running:,} {name!r}" if kind else name,
        size=f"{elements:,} {dtype}" if dtype else "",
    )


def _spaced(ranks: Sequence[int]) -> tuple[int, int, int]:
    """Return the first of evenly spaced ranks, their count and their distance."""
    steps = {after - before for before, after in itertools.pairwise(ranks)}
    if not ranks or len(steps) > 1 or min(steps, default=1) < 1:
        return _NOBODY
    return ranks[0], len(ranks), next(iter(steps), 1)


@lru_cache(maxsize=1 << 12)
def _texts(operation: str, dtype: str, label: str) -> bytes:
    """Return an operation's texts as they lie in a row; steps bring the same ones again."""
    end = label.encode(errors="backslashreplace")[-64:]  # names and lines of code differ at the end
    return _TEXTS.pack(operation.encode(), dtype.encode(), end)


def _text(data: bytes) -> str:
    return data.rstrip(b"\0").decode(errors="ignore")


board = Board()
"""The board of this process: like its process id, it has no more than one."""


NOTICES = (signal.SIGTERM, signal.SIGUSR1)

PREEMPTED = 75
"""Exit code of a run that has saved after a notice, and asks to be started again (EX_TEMPFAIL)."""

SAME_NOTICE_S = 2.0
"""A rank may hear one notice twice, from the scheduler and from the launcher, within this time."""


class EarlyNotice:
    """A handler with which a process begins, until a listener takes its place: SIGUSR1 ends nobody.

    The launcher's ranks begin with it, and so does a launcher on a host that ssh has reached.

    Attributes:
        came: whether a signal came, which the listener then hears.
    """

    def __init__(self) -> None:
        self.came = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Keep the signal."""
        self.came = True


@dataclass(eq=False)
class Notice:
    """The notice that this process has heard, if any.

    Attributes:
        heard: name of the signal, "" as long as there was none.
    """

    heard: str = ""
    _first: float = 0.0
    _process: int = field(default_factory=os.getpid)
    _parent: int = field(default_factory=os.getppid)
    _before: dict[signal.Signals, Any] = field(default_factory=dict)

    def listen(self) -> None:
        """Handle the signals for which the script has no handler of its own.

        Several listeners of a process hear the same signal, also one that came before them to an
        ``EarlyNotice``. Only the main thread can listen; from another one nothing changes.
        """
        if threading.current_thread() is not threading.main_thread() or self._before:
            return
        for number in NOTICES:
            before = signal.getsignal(number)
            free = before is signal.SIG_DFL or isinstance(before, EarlyNotice)
            if free or isinstance(getattr(before, "__self__", None), Notice):
                self._before[number] = before
                signal.signal(number, self._hear)
            if isinstance(before, EarlyNotice) and before.came:
                self._hear(number, None)

    def close(self) -> None:
        """Give the signals the actions back that they had."""
        for number, before in self._before.items():
            if signal.getsignal(number) == self._hear:
                signal.signal(number, before)
        self._before = {}

    def _hear(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        again = bool(self.heard) and now - self._first > SAME_NOTICE_S
        in_child = os.getpid() != self._process
        # Without its launcher a rank ends: nobody waits for its checkpoint.
        orphaned = os.getppid() != self._parent
        # After another rank's failure the launcher ends this one: that is no scheduler's notice.
        ends = again or in_child or orphaned or board.stop_asked
        if number == signal.SIGTERM and ends:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if not self.heard and not in_child:
            self.heard, self._first = signal.Signals(number).name, now
        before = self._before.get(signal.Signals(number))
        if callable(before):
            before(number, frame)
