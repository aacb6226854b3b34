"""What ranks answer when their launcher asks, and their states as launchers see them.

A rank answers a real-time signal with the stacks of its threads, in a file. Python's faulthandler
writes them in the signal handler itself, also while another thread holds the interpreter's lock. A
rank that gives no answer is looked at with py-spy, where that is installed.

The flight recorder knows which collectives of a device each rank has enqueued, and finished. A rank
answers a line in a named pipe, on a thread that sleeps until then, with the recorder's own JSON in
a file. On NCCL this tells ranks apart whose hosts have all gone on. Entries are compared by process
group and sequence number, by ``retired`` and not by ``state``, which gloo leaves alone.

The state of each rank in the eyes of a launcher: plain values, which travel between hosts.
"""

import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from pydantic import TypeAdapter

import drivetrain
import drivetrain_launch
from drivetrain.runtime.board import OperationView, read_board

# --- what a rank answers when its launcher asks ---

STACK_SIGNAL = signal.SIGRTMIN + 5
"""The signal that asks a rank for its stacks; scripts hardly use real-time signals."""

BOARD_VARIABLE = "DRIVETRAIN_BOARD"
"""Environment variable of a rank: the file in which it shows where it is."""

STACKS = ".stacks"
"""Suffix of the file of a rank's stacks, beside its board."""

STACKS_S, LOOK_S = 1.0, 0.02
"""How long a rank may take to write its stacks, and the pause between looks into the file."""

PY_SPY_S = 5.0
LONGEST_STACK = 20_000
"""Characters of stacks that are kept."""

_FRAME = re.compile(r'^\s+File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$')
_PYTHON = tuple(
    str(Path(sysconfig.get_paths()[name])) for name in ("stdlib", "platstdlib", "purelib")
)
_OURS = tuple(str(Path(each.__file__ or "").parent) for each in (drivetrain, drivetrain_launch))


class Frame(NamedTuple):
    """One call on a stack.

    Attributes:
        file: path of the code.
        line: its line.
        function: its name.
    """

    file: str
    line: int
    function: str

    @property
    def is_script(self) -> bool:
        """Whether the code belongs to the user's script, and not to a library."""
        parts = Path(self.file).parts
        return not (
            self.file.startswith((*_PYTHON, *_OURS, "<"))
            or "site-packages" in parts
            or any(part.startswith("drivetrain_") for part in parts)
        )


def ask(pid: int, path: Path) -> str:
    """Return the stacks of a process's threads, "" where it gives none.

    Args:
        pid: of the rank.
        path: the file that the rank writes its stacks to.
    """
    if state_of(pid):
        return ""
    caught = int(status_of(pid).get("SigCgt", "0"), 16)
    if not caught >> (STACK_SIGNAL - 1) & 1:  # the signal would end the process
        return _seen_from_outside(pid)
    before = _size(path)
    try:
        os.kill(pid, STACK_SIGNAL)
    except ProcessLookupError:
        return ""
    deadline, size = time.monotonic() + STACKS_S, before
    while time.monotonic() < deadline:
        time.sleep(LOOK_S)
        size, last = _size(path), size
        if size > before and size == last:
            break
    if size == before:
        return _seen_from_outside(pid)
    with path.open("rb") as file:
        file.seek(before)
        return file.read(LONGEST_STACK).decode(errors="replace")


def main_thread(stacks: str) -> Sequence[Frame]:
    """Return the calls of the main thread, the innermost first.

    The main thread is the one that runs the rank's program; without such a thread, the last one.
    """
    threads: list[list[Frame]] = [[]]
    for line in stacks.splitlines():
        if found := _FRAME.match(line):
            threads[-1].append(Frame(found["file"], int(found["line"]), found["function"]))
        elif threads[-1]:
            threads.append([])
    program = str(Path(drivetrain_launch.__file__ or "").parent / "ranks" / "worker.py")
    for frames in threads:
        if any(frame.file == program and frame.function == "main" for frame in frames):
            return frames
    return next((frames for frames in reversed(threads) if frames), [])


def script_site(stacks: str) -> str:
    """Return ``file:line`` where the main thread is in the user's script, "" where unknown."""
    frame = next((frame for frame in main_thread(stacks) if frame.is_script), None)
    return f"{Path(frame.file).name}:{frame.line}" if frame is not None else ""


def _seen_from_outside(pid: int) -> str:
    program = shutil.which("py-spy")
    if program is None:
        return ""
    words = [program, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=PY_SPY_S, check=True)  # noqa: S603 - a list of arguments
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout[:LONGEST_STACK]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def state_of(pid: int) -> str:
    """Return "stopped" for a process that a signal or a debugger has stopped, "ended", or ""."""
    letter = status_of(pid).get("State", "Z")[:1]
    return {"T": "stopped", "t": "stopped", "Z": "ended", "X": "ended"}.get(letter, "")


def status_of(pid: int) -> dict[str, str]:
    """Return the fields of ``/proc/PID/status``, nothing where there is no such file."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.splitlines())
    return {name: value.strip() for name, _, value in pairs}


# --- torch's flight recorder ---


RECORDER_VARIABLE = "TORCH_FR_BUFFER_SIZE"
VARIABLES = {RECORDER_VARIABLE: "2000", "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}
"""Environment variables that switch the recorder on, by its newer and its older name."""

ASK, FLIGHT = ".ask", ".flight.json"
"""Suffixes of the pipe and of the answer, beside a rank's board."""

NEWEST = 20
"""Collectives of each process group that a launcher tells host 0."""

FLIGHT_S = 2.0
"""How long ranks may take to write what the recorder knows."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One collective of one rank.

    Attributes:
        what: the backend and the operation, as in ``nccl:all_reduce``, and shapes of its inputs.
        over: whether the rank's device has finished it.
    """

    what: str
    over: bool


Flight: TypeAlias = Mapping[str, Mapping[int, Recorded]]
"""The collectives of one rank by process group and sequence number."""


def read_flight(text: str | bytes) -> Flight:
    """Read the JSON of one rank's recorder.

    Raises:
        ValueError: the text is no such JSON.
    """
    flight: dict[str, dict[int, Recorded]] = {}
    try:
        for entry in json.loads(text)["entries"]:
            if not entry["is_p2p"]:
                group = " ".join(dict.fromkeys(entry["process_group"]))
                flight.setdefault(group, {})[int(entry["collective_seq_id"])] = _recorded(entry)
    except (KeyError, TypeError) as error:
        raise ValueError(f"expected the JSON of torch's flight recorder: {error!r}") from error
    return flight


def _recorded(entry: Mapping[str, Any]) -> Recorded:
    sizes = " and ".join(str(tuple(map(int, size))) for size in entry["input_sizes"]) or "nothing"
    over = bool(entry["retired"]) or entry["state"] == "completed"
    return Recorded(f"{entry['profiling_name']} of {sizes}", over)


def newest(flight: Flight) -> Flight:
    """Return the last collectives of each group."""
    return {group: dict(sorted(entries.items())[-NEWEST:]) for group, entries in flight.items()}


def compare(flights: Mapping[int, Flight]) -> list[str]:
    """Return a sentence about each process group in which ranks differ, or do not get on.

    Args:
        flights: by global rank.
    """
    groups = dict.fromkeys(group for flight in flights.values() for group in flight)
    sentences = (_compared(group, flights) for group in groups)
    return [sentence for sentence in sentences if sentence]


def _compared(group: str, flights: Mapping[int, Flight]) -> str:
    ranks = {rank: flight[group] for rank, flight in flights.items() if group in flight}
    open_numbers = [
        number for each in ranks.values() for number, found in each.items() if not found.over
    ]
    if not open_numbers:
        return ""
    number = min(open_numbers)
    there = {rank: each[number] for rank, each in ranks.items() if number in each}
    absent = [rank for rank, each in ranks.items() if max(each) < number]
    expected = next(found for found in there.values() if not found.over)
    what = f"collective {number} of group {group!r}, {expected.what}"
    if absent:
        return f"{_listed(absent)} did not enqueue {what}"
    odd = [rank for rank, found in there.items() if found.what != expected.what]
    if odd:
        return f"{_listed(odd)} enqueued {there[odd[0]].what} where others enqueued {what}"
    late = [rank for rank, found in there.items() if not found.over]
    return f"{_listed(late)}: the device has not finished {what}"


def _listed(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def ask_flights(boards: Mapping[int, Path]) -> dict[int, Flight]:
    """Return the records of the ranks of this host that answer.

    Args:
        boards: path of each rank's board, by global rank.
    """
    answers = {rank: board.with_suffix(FLIGHT) for rank, board in boards.items()}
    asked = set()
    for rank, board in boards.items():
        answers[rank].unlink(missing_ok=True)
        with suppress(OSError):  # no pipe, or nobody reads it
            descriptor = os.open(board.with_suffix(ASK), os.O_WRONLY | os.O_NONBLOCK)
            os.write(descriptor, b"flight\n")
            os.close(descriptor)
            asked.add(rank)
    deadline = time.monotonic() + FLIGHT_S
    while asked and time.monotonic() < deadline:
        if all(answers[rank].exists() for rank in asked):
            break
        time.sleep(LOOK_S)
    found = {}
    for rank in sorted(asked):
        with suppress(OSError, ValueError):
            found[rank] = read_flight(answers[rank].read_bytes())
    return found


def answer(board: Path, record: Any) -> None:
    """Write the record into a file each time a launcher asks; does not return.

    Args:
        board: path of this rank's board.
        record: returns the recorder's JSON, b"" where there is none.
    """
    pipe = board.with_suffix(ASK)
    os.mkfifo(pipe, 0o600)
    while True:
        with pipe.open("rb") as questions:
            questions.readline()
        text = record()
        if text:
            draft = board.with_suffix(f"{FLIGHT}.draft")
            draft.write_bytes(text)
            draft.replace(board.with_suffix(FLIGHT))


# --- the state of each rank in the eyes of a launcher ---

STEADY_S = 0.002
"""A row that is the same twice, so many seconds apart, was not written in between."""


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

    def longest(self, limit_s: Callable[[str], float] = lambda place: 0.0) -> OperationView | None:
        """Return the operation that has been under way for the longest time, if any.

        Args:
            limit_s: returns the seconds from which on those in an order of operations count.
        """
        running = [each for each in self.operations if each.running]
        late = [each for each in running if each.running_s >= limit_s(each.place)]
        return max(late, key=lambda each: each.running_s, default=None)


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
        self._last = b""
        self._changed = time.monotonic()

    def read(self) -> RankView | None:
        """Return the rank's state, None before it has made its board."""
        try:
            earlier = self.path.read_bytes()
            time.sleep(STEADY_S)
            shown = self.path.read_bytes()
        except FileNotFoundError:
            return None
        now = time.monotonic()
        before, board = (read_board(each, now) if each else None for each in (earlier, shown))
        if before is None or board is None:
            return None
        if shown != self._last:
            self._last, self._changed = shown, now
        return RankView(
            rank=self.rank,
            host=socket.gethostname(),
            pid=self.pid,
            section=board.section,
            still_s=now - self._changed,
            operations=tuple(
                row if row in before.rows else replace(row, checksum=0) for row in board.rows
            ),
            state=state_of(self.pid),
        )
