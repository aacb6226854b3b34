"""One Chrome trace of all ranks, and the largest costs in it.

Traces are JSON objects with a list ``traceEvents``, in the Trace Event Format of Chrome; torch's
profiler writes the facts of the run before the list. Every rank rewrites its own trace
(``write_part``), and rank 0 joins the parts (``join_parts``). A part is a gzip member, and members
one after another are a gzip file: nothing is decompressed to join, and no rank holds more of a
trace in memory than a megabyte of text.

The largest costs of a profile: where the time of a step went, by operation and by wait.

The program's own thread is cut into the operations that it ran, each without the operations inside,
its waits for other ranks, and the rest, which is Python. Kernels of devices and collectives in the
background go on beside it; their rows say so.

One profile on all ranks: torch's profiler, ranges around units, and the files at the end.

A folder gets the trace that torch wrote on each rank (``profile_RANK.json``), the merged trace of
all ranks (``trace.json.gz``), and the largest costs (``costs.txt``, ``costs.json``).
"""

import gzip
import itertools
import json
import math
import re
import shutil
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function

from drivetrain.communication import wait_for_everyone
from drivetrain.errors import UsageError, in_words, replace_text
from drivetrain.facade.prepared import RunState
from drivetrain.facade.settings import ProfileKwargs, profiler_of
from drivetrain.hardware.sizes import size_text
from drivetrain.log import get_logger
from drivetrain.model.modules import model_units
from drivetrain.observe import modules
from drivetrain.runtime.ranges import BACKWARD, COLLECTIVE, FORWARD, RECOMPUTE, WAIT, is_profiled
from drivetrain.runtime.world import World

logger = get_logger(__name__)

# --- one Chrome trace of all ranks ---

Event = dict[str, Any]

_CHUNK = 1 << 20
_LIST = re.compile(r'"traceEvents"\s*:\s*\[')
_DECODER = json.JSONDecoder()
_SPACE = " \t\r\n,"


class TraceReader:
    """One trace, open for reading: iterate over its events, once.

    Args:
        path: the file.

    Attributes:
        facts: the entries of the object before the list of events.

    Raises:
        UsageError: the file is no trace.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._parts = self._read()
        self.facts: dict[str, Any] = next(self._parts)

    def __iter__(self) -> Iterator[Event]:
        return self._parts

    def _read(self) -> Iterator[dict[str, Any]]:
        """Yield the facts, then the events; the decoded text is forgotten."""
        with self._path.open(encoding="utf-8") as file:
            text, at = "", 0
            while (list_begins := _LIST.search(text)) is None:
                if not (more := file.read(_CHUNK)):
                    raise self._torn("no list of events")
                text += more
            try:
                yield dict(json.loads(text[: list_begins.start()].rstrip(_SPACE) + "}"))
            except ValueError as error:
                raise self._torn(in_words(error)) from error
            text = text[list_begins.end() :].lstrip(_SPACE)
            while not text.startswith("]", at):
                try:
                    event, at = _DECODER.raw_decode(text, at)
                except ValueError as error:
                    if not (more := file.read(_CHUNK)):
                        raise self._torn(in_words(error)) from error
                    text, at = (text[at:] + more).lstrip(_SPACE), 0
                else:
                    yield dict(event)
                    while at < len(text) and text[at] in _SPACE:
                        at += 1

    def _torn(self, reason: str) -> UsageError:
        return UsageError(
            f"expected a whole trace of torch's profiler, found {self._path} of "
            f"{self._path.stat().st_size:,} bytes: {reason}; profile again"
        )


# --- the clocks of the ranks, compared by messages: how far one is ahead of rank 0's at most ---

# No message arrives before it was sent. In one all-gather, rank r gets rank 0's message after rank
# 0 sent it, and rank 0 gets r's. Both note when they began and when they had everything; so::
#
#     r had everything - 0 began  >=  how far r's clock is ahead  >=  r began - 0 had everything
#
# Some rounds of this narrow the bounds to about the time of the quickest all-gather.


ROUNDS = 24
"""All-gathers of a comparison: they take a few milliseconds together."""


class ClockComparison(NamedTuple):
    """A rank's clock beside that of rank 0.

    Attributes:
        begun_ns: when the comparison ended, by the clock of rank 0; the same on all ranks.
        ahead_ns: how far this rank's clock is ahead; 0 where the bounds allow 0, as they do on the
            same host.
        accuracy_ns: the error of that at most, over all ranks.
    """

    begun_ns: int
    ahead_ns: int
    accuracy_ns: int


def compare_clocks(world: World, clock: Callable[[], int] = time.time_ns) -> ClockComparison:
    """Compare the clocks of all ranks. Collective.

    Args:
        world: the ranks.
        clock: reads this rank's clock, in nanoseconds.
    """
    if world.size == 1:
        return ClockComparison(clock(), 0, 0)
    rounds = torch.zeros(ROUNDS, 2, dtype=torch.int64, device=world.device)
    rows = [torch.zeros(2, dtype=torch.int64, device=world.device) for _ in range(world.size)]
    for index in range(ROUNDS):
        began = clock()
        dist.all_gather(rows, torch.tensor([began, 0], device=world.device))
        rows[0].tolist()  # on an accelerator, this waits for the messages
        rounds[index] = torch.tensor([began, clock()], device=world.device)
    every = [torch.zeros_like(rounds) for _ in range(world.size)]
    dist.all_gather(every, rounds)
    times = torch.stack(every).cpu()  # (rank, round, began or had everything)
    ends = times[:, :, 1] - times[0, :, 0]  # r had everything - 0 began
    starts = times[:, :, 0] - times[0, :, 1]
    ahead = [bounds(low, high) for low, high in zip(starts.max(1)[0], ends.min(1)[0], strict=True)]
    accuracy = max(error for _, error in ahead[1:])
    return ClockComparison(int(times[0, -1, 1]), ahead[world.rank][0], accuracy)


def bounds(low: torch.Tensor, high: torch.Tensor) -> tuple[int, int]:
    """Return the likely value between two bounds, and its error at most."""
    least, most = int(low), int(high)
    if least <= 0 <= most:
        return 0, max(-least, most)
    return (least + most) // 2, -(-(most - least) // 2)


# --- the parts and the whole ---


FACTS = "drivetrain"
"""Key under which a rank's trace has the facts of ``RankPlace``."""

MERGED_BYTES = 1 << 30
"""Text of a merged trace at most, about as much as viewers open; the shortest operations of ranks
that would exceed their part of it are left out."""

_ROWS_OF_A_RANK = 100
"""Numbers of processes of a merged trace that a rank has: one for itself, and for each device."""

_UNITS_ROW = 1
"""Number of the row of units in backward: they begin and end inside of autograd's own ranges."""

_TRIMMED = {"cpu_op", "python_function", "cuda_runtime", "cuda_driver"}
_FLOWS = {"s", "t", "f"}
_LEAST_US = 1e-3
_LEVEL = 4
"""gzip's effort: a trace shrinks to a tenth, at a fifth of the time that the parser takes."""

_MESSAGES = "gloo:"
_MICRO = 1000.0
_FOREIGN = {"Spans", "Traces", ""}
"""Processes of a trace that are none: marks of the profiler itself."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Facts about a rank, which its trace lacks.

    Attributes:
        rank: its number.
        name: the name of its row.
        ahead_ns: how far its clock is ahead of rank 0's.
        begun_ns: time 0 of the merged trace, on the clock of rank 0.
        accuracy_ns: by how much clocks may differ after all.
        threads: names of threads by the numbers of the system.
    """

    rank: int
    name: str
    ahead_ns: int
    begun_ns: int
    accuracy_ns: int
    threads: Mapping[str, str] = field(default_factory=dict)


def write_part(
    trace: Path,
    part: Path,
    place: RankPlace,
    *,
    ranks: int,
    most: int = MERGED_BYTES,
    see: Callable[[Event], None] | None = None,
) -> float:
    """Rewrite a rank's trace as its part of the merged one.

    Args:
        trace: as torch's profiler wrote it.
        part: the file to write.
        place: of the rank.
        ranks: how many there are.
        most: bytes of text of the merged trace at most.
        see: is shown each event as it was.

    Returns:
        Below which duration, in microseconds, operations were left out; 0 for none.
    """
    sizes: Counter[float] = Counter()
    written = _write(trace, part, _Rewriting(place, ranks, 0.0, see), sizes)
    limit = most // ranks
    if written <= limit:
        return 0.0
    shortest = shortest_kept(sizes, limit - (written - sizes.total()))
    _write(trace, part, _Rewriting(place, ranks, shortest), Counter())
    return shortest


def join_parts(parts: Sequence[Path], path: Path, facts: Mapping[str, Any]) -> None:
    """Join the parts of ranks to one trace.

    Args:
        parts: the files of ``write_part``; removed.
        path: of the merged trace, a gzip file.
        facts: further entries of the trace.
    """
    whole = path.with_name(f".{path.name}")
    with whole.open("wb") as file:
        file.write(gzip.compress(b'{"displayTimeUnit": "ms", "traceEvents": [\n'))
        for part in parts:
            with part.open("rb") as source:
                shutil.copyfileobj(source, file)
        # The list must not end with a comma: an event without a row ends it.
        last = {"ph": "M", "name": "end", "pid": 0, "tid": 0, "args": {}}
        end = f'{json.dumps(last)}\n], "{FACTS}": {json.dumps(facts)}}}\n'
        file.write(gzip.compress(end.encode()))
    whole.replace(path)
    for part in parts:
        part.unlink()


def shortest_kept(sizes: Mapping[float, int], most: int) -> float:
    """Return below which duration, in microseconds, events have to go so that the others fit.

    Args:
        sizes: bytes of text by duration; a key stands for all durations up to twice as long.
        most: bytes of all at most.
    """
    left = most
    for duration in sorted(sizes, reverse=True):
        left -= sizes[duration]
        if left < 0:
            return 2 * duration
    return 0.0


@dataclass(slots=True)
class _Rewriting:
    """How the events of one rank are rewritten; see ``write_part``.

    Its rows are its processes and threads; only rows with events get a name.
    """

    place: RankPlace
    ranks: int
    shortest_us: float
    see: Callable[[Event], None] | None = None
    _messages: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _named: dict[tuple[Any, Any], str] = field(default_factory=dict)
    _used: set[tuple[Any, Any]] = field(default_factory=set)
    _own: Any = None

    def events(self, reader: TraceReader) -> Iterator[Event]:
        """Yield the events of a trace with the merged trace's numbers and times."""
        place = self.place
        base_ns = reader.facts.get("baseTimeNanoseconds", 0)
        moved_us = (base_ns - place.ahead_ns - place.begun_ns) / _MICRO
        for event in reader:
            if self.see is not None:
                self.see(event)
            if event["ph"] == "M":
                self._learn(event)
            elif self._keeps(event):
                moved = self._moved(event, moved_us)
                if str(event["name"]).startswith(_MESSAGES):
                    yield from self._apart(moved)
                else:
                    yield moved
        yield from self._names()

    def _apart(self, event: Event) -> Iterator[Event]:
        """Yield the begin and the end of a message: it outlasts its call."""
        number = next(self._messages) * self.ranks + self.place.rank
        both = {**event, "cat": "message", "id": number}
        end = both["ts"] + both.pop("dur")
        yield {**both, "ph": "b"}
        yield {**both, "ph": "e", "ts": end}

    def _keeps(self, event: Event) -> bool:
        if event["pid"] in _FOREIGN:
            return False
        if self.shortest_us and event["ph"] in _FLOWS:
            return False
        return event.get("cat") not in _TRIMMED or event.get("dur", 0.0) >= self.shortest_us

    def _moved(self, event: Event, moved_us: float) -> Event:
        if str(event["name"]).startswith(BACKWARD):
            event["tid"] = _UNITS_ROW
        self._used.add((event["pid"], event["tid"]))
        event["pid"] = self._number(event["pid"])
        event["ts"] = round(event["ts"] + moved_us, 3)
        if event["ph"] in _FLOWS:
            event["id"] = int(event["id"]) * self.ranks + self.place.rank
        return event

    def _learn(self, event: Event) -> None:
        """Take a row's name."""
        if event["name"] == "thread_name":
            self._named[event["pid"], event["tid"]] = event["args"]["name"]
        if event["name"] == "process_labels" and event["args"].get("labels") == "CPU":
            self._own = event["pid"]

    def _number(self, pid: Any) -> int:
        """Return the number of a process: the rank itself, or one of its devices."""
        first = self.place.rank * _ROWS_OF_A_RANK
        return first if pid == self._own else first + 1 + int(pid) % (_ROWS_OF_A_RANK - 1)

    def _names(self) -> Iterator[Event]:
        """Yield the names of rows with events, the rank's own row first."""
        for pid in dict.fromkeys(pid for pid, _ in sorted(self._used, key=str)):
            device = "" if pid == self._own else f", device {pid}"
            yield self._fact("process_name", pid, 0, {"name": f"{self.place.name}{device}"})
            yield self._fact("process_sort_index", pid, 0, {"sort_index": self._number(pid)})
        for pid, tid in sorted(self._used, key=str):
            name, order = self._name(pid, tid)
            yield self._fact("thread_name", pid, tid, {"name": name})
            yield self._fact("thread_sort_index", pid, tid, {"sort_index": order})

    def _name(self, pid: Any, tid: Any) -> tuple[str, int]:
        """Return the name of a row, and its place: units, then the program, then the others."""
        if tid == _UNITS_ROW:
            return "units in backward", -2
        if pid == self._own == tid:
            return "program", -1
        return self.place.threads.get(str(tid), self._named.get((pid, tid), f"thread {tid}")), 0

    def _fact(self, name: str, pid: Any, tid: Any, args: Mapping[str, Any]) -> Event:
        return {"ph": "M", "name": name, "pid": self._number(pid), "tid": tid, "args": args}


def _write(trace: Path, part: Path, rewriting: _Rewriting, sizes: Counter[float]) -> int:
    """Write a part; count the bytes of events that might be left out, by duration."""
    written = 0
    with gzip.open(part, "wt", encoding="utf-8", compresslevel=_LEVEL) as file:
        for event in rewriting.events(TraceReader(trace)):
            line = json.dumps(event, separators=(",", ":")) + ",\n"
            written += len(line)
            if event.get("cat") in _TRIMMED:
                sizes[2.0 ** math.floor(math.log2(max(event["dur"], _LEAST_US)))] += len(line)
            file.write(line)
    return written


# --- the largest costs of a profile ---

SHOWN = 10
"""Rows of the table."""

_NUMBER = re.compile(r" #\d+")
_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_PYTHON = "Python, and what no operation tells"


@dataclass(frozen=True, slots=True)
class CostRow:
    """One cost, per step.

    Attributes:
        kind: ``operation``, ``wait``, ``python``, ``device`` or ``background``.
        name: of the operation, the collective or the kernel.
        calls: how often, the mean over ranks.
        ms: milliseconds, the mean over ranks.
        least_ms: on the rank that spent least.
        most_ms: on the rank that spent most.
        share: of the step, from 0 to 1; rows beside the program's thread overlap with others.
    """

    kind: str
    name: str
    calls: float
    ms: float
    least_ms: float
    most_ms: float
    share: float


@dataclass(slots=True)
class RankCosts:
    """The sums over one rank's trace.

    Attributes:
        steps: how many steps it has; 0 where that is not known, and it counts as one.
        seconds: from the first event of the program's thread to its last, or of all steps.
        sums: calls and seconds by kind and name.
        shortest_us: below which duration, in microseconds, the merged trace lacks operations.
    """

    steps: int = 0
    seconds: float = 0.0
    sums: dict[str, dict[str, tuple[int, float]]] = field(default_factory=dict)
    shortest_us: float = 0.0

    @property
    def step_ms(self) -> float:
        """Milliseconds of a step."""
        return self.per_step(1e3 * self.seconds)

    def per_step(self, value: float) -> float:
        """Return the part of a sum that is one step's."""
        return value / max(self.steps, 1)

    def add(self, kind: str, name: str, calls: int, seconds: float) -> None:
        """Add to a sum; the numbers of collectives do not count."""
        named = self.sums.setdefault(kind, {})
        before, passed = named.get(name := _NUMBER.sub("", name), (0, 0.0))
        named[name] = (before + calls, passed + seconds)


class CostTally:
    """Collects the events of one rank's trace, 32 bytes for each.

    Args:
        program: number of the program's own thread; None where the trace does not tell.
        steps: how many steps the trace has; 0 where that is not known.
    """

    def __init__(self, program: int | None, steps: int = 0) -> None:
        self._program = program
        self._found = RankCosts(steps)
        self._starts, self._ends = array("d"), array("d")
        self._names: dict[str, int] = {}
        self._kinds = array("l")
        self._span = [float("inf"), float("-inf")]

    def add(self, event: Event) -> None:
        """Look at an event."""
        if event["ph"] != "X":
            return
        name, seconds = str(event["name"]), event.get("dur", 0.0) / 1e6
        if event.get("cat") in _DEVICE:
            self._found.add("device", name, 1, seconds)
        elif event["tid"] == self._program:
            self._add_own(name, event.get("cat"), event["ts"], event.get("dur", 0.0))
        elif name.startswith(COLLECTIVE):
            self._found.add("background", name.removeprefix(COLLECTIVE), 1, seconds)

    def costs(self) -> RankCosts:
        """Return the sums."""
        found, names = self._found, list(self._names)
        if self._span[1] > self._span[0]:
            found.seconds = (self._span[1] - self._span[0]) / 1e6
        covered = 0.0
        for index, microseconds in self._own_times():
            kind = "wait" if names[index].startswith(WAIT) else "operation"
            found.add(kind, names[index], 1, microseconds / 1e6)
            covered += microseconds / 1e6
        found.add("python", _PYTHON, max(found.steps, 1), max(0.0, found.seconds - covered))
        return found

    def _add_own(self, name: str, category: Any, start: float, duration: float) -> None:
        if category not in ("cpu_op", "user_annotation"):
            return
        self._span = [min(self._span[0], start), max(self._span[1], start + duration)]
        if category == "cpu_op" or name.startswith(WAIT):  # other ranges only name a time
            self._starts.append(start)
            self._ends.append(start + duration)
            self._kinds.append(self._names.setdefault(name, len(self._names)))

    def _own_times(self) -> Iterable[tuple[int, float]]:
        """Yield each operation with its time without that of the operations inside."""
        order = sorted(range(len(self._starts)), key=lambda i: (self._starts[i], -self._ends[i]))
        inside: list[tuple[int, float]] = []  # the operations around, and their own time so far
        for index in order:
            start, end = self._starts[index], self._ends[index]
            while inside and self._ends[inside[-1][0]] <= start:
                done, own = inside.pop()
                yield self._kinds[done], own
            if inside:
                around, own = inside[-1]
                inside[-1] = (around, own - (min(end, self._ends[around]) - start))
            inside.append((index, end - start))
        for done, own in inside:
            yield self._kinds[done], own


def largest(ranks: Sequence[RankCosts], most: int = SHOWN) -> list[CostRow]:
    """Return the largest costs per step, over ranks."""
    keys = dict.fromkeys(
        (kind, name) for rank in ranks for kind, names in rank.sums.items() for name in names
    )
    step_ms = sum(rank.step_ms for rank in ranks) / len(ranks)
    rows = []
    for kind, name in keys:
        found = [rank.sums.get(kind, {}).get(name, (0, 0.0)) for rank in ranks]
        ms = [rank.per_step(1e3 * s) for (_, s), rank in zip(found, ranks, strict=True)]
        calls = [rank.per_step(count) for (count, _), rank in zip(found, ranks, strict=True)]
        mean = sum(ms) / len(ranks)
        share = mean / step_ms if step_ms else 0.0
        rows.append(CostRow(kind, name, sum(calls) / len(ranks), mean, min(ms), max(ms), share))
    return sorted(rows, key=lambda row: row.ms, reverse=True)[:most]


def table(rows: Sequence[CostRow], ranks: Sequence[RankCosts]) -> str:
    """Return the costs as a table of text."""
    step_ms = sum(rank.step_ms for rank in ranks) / len(ranks)
    steps = ranks[0].steps
    what = f"a step, the mean of {steps}," if steps else "the part that was profiled"
    lines = [
        f"{what} takes {step_ms:.1f} ms on {len(ranks)} ranks, with the profiler's own work; the "
        "largest costs:",
        f"{'ms/step':>9} {'share':>6} {'calls':>8} {'least..most over ranks':>22}  what",
    ]
    for row in rows:
        span = f"{row.least_ms:.1f}..{row.most_ms:.1f} ms"
        lines.append(
            f"{row.ms:>9.2f} {row.share:>6.1%} {row.calls:>8.1f} {span:>22}  "
            f"{_WORDS[row.kind]}{row.name}"
        )
    return "\n".join(lines)


_WORDS = {
    "operation": "",
    "wait": "",
    "python": "",
    "device": "on the device: ",
    "background": "in the background: ",
}


# --- ranges around the forward and the backward of each unit of a model ---


_RANGES = {modules.FORWARD: FORWARD, modules.AGAIN: RECOMPUTE, modules.BACKWARD: BACKWARD}


def add_ranges(units: Mapping[str, nn.Module], until: ExitStack) -> None:
    """Follow the units of a model, by name, until a stack closes."""
    current = until.enter_context(ExitStack())

    def turned(place: modules.ModulePlace) -> None:
        current.close()
        if place.module and is_profiled():
            current.enter_context(record_function(f"{_RANGES[place.phase]}{place.module}"))

    until.callback(modules.ModuleTracker(units, turned, inside=False).close)


# --- the profile ---


MERGED = "trace.json.gz"
COSTS_TEXT, COSTS_JSON = "costs.txt", "costs.json"
POLL_S = 0.05


class ProfileSession:
    """A profile from ``start`` to ``stop`` and ``write``.

    Args:
        options: of torch's profiler, and the folder; without a folder no file is written, and no
            rank waits for others.
        state: of the run, with the models whose units get ranges.

    Attributes:
        profiler: torch's own.
        steps: how many optimizer steps were taken until the end; 0 while that is not known.
    """

    def __init__(self, options: ProfileKwargs, state: RunState) -> None:
        self.profiler = profiler_of(options)
        folder = options.output_trace_dir
        self.folder = None if folder is None else Path(folder)
        self._folder = Path(folder or "")  # of what is written, which nothing is without one
        self._state = state
        self._clock = ClockComparison(0, 0, 0)
        self._units = ExitStack()
        self.steps = 0

    @property
    def trace(self) -> Path:
        """The file of this rank's trace."""
        return self._folder / f"profile_{self._state.world.rank}.json"

    def start(self) -> None:
        """Start the profiler. Collective where there is a folder.

        Raises:
            UsageError: another profile is under way, or the folder cannot be made.
        """
        if is_profiled():
            raise UsageError(
                "expected one profile at a time, found torch's profiler at work; leave out "
                "--profile, or the profile of the script"
            )
        if self.folder is not None:
            self._make_folder(self.folder)
            self._clock = compare_clocks(self._state.world)
        for entry in self._state.models:
            stages = entry.strategy.pipeline
            units = model_units(entry.model) if stages is None else stages.units
            add_ranges(units, self._units)
        self.profiler.start()

    def stop(self, *, together: bool) -> None:
        """Stop the profiler, and take all ranges off.

        Args:
            together: wait for all ranks first, so that no collective is cut short.
        """
        self._units.close()
        if together and self.folder is not None:
            wait_for_everyone()
        self.profiler.stop()

    def write(self) -> bool:
        """Write this rank's trace and its part of the merged one; return whether there is any."""
        place = self._place()
        self.profiler.add_metadata_json(FACTS, json.dumps(asdict(place)))
        try:
            self.profiler.export_chrome_trace(str(self.trace))
        except (AssertionError, RuntimeError) as error:
            logger.warning(
                "the profile has no trace (%s): with schedule_option, call profiler.step() until "
                "an active step is over",
                error or type(error).__name__,
                main_process_only=False,
            )
            return False
        program = threading.main_thread().native_id
        tally = CostTally(program, self.steps)
        ranks = self._state.world.size
        shortest = write_part(self.trace, self._part(), place, ranks=ranks, see=tally.add)
        costs = replace(tally.costs(), shortest_us=shortest)
        # The costs come last, and whole: their file says that the part is complete.
        replace_text(self._costs(), json.dumps(asdict(costs)))
        return True

    def merge(self, *, wait_s: float = 0.0) -> None:
        """Join the parts of all ranks, write and print the costs; on rank 0.

        Args:
            wait_s: how long parts of ranks that are still writing are waited for.
        """
        ranks = self._awaited(wait_s)
        costs = [RankCosts(**json.loads(self._costs(rank).read_bytes())) for rank in ranks]
        accuracy_us = self._clock.accuracy_ns / 1e3
        facts = {"ranks": ranks, "clock_accuracy_us": accuracy_us}
        join_parts([self._part(rank) for rank in ranks], self._folder / MERGED, facts)
        for rank in ranks:
            self._costs(rank).unlink()
        self._show(costs, ranks, accuracy_us)

    def _show(self, costs: Sequence[RankCosts], ranks: Sequence[int], accuracy_us: float) -> None:
        rows = largest(costs)
        text = table(rows, costs)
        (self._folder / COSTS_TEXT).write_text(f"{text}\n", encoding="utf-8")
        plain = {"steps": costs[0].steps, "ranks": len(ranks), "rows": list(map(asdict, rows))}
        (self._folder / COSTS_JSON).write_text(json.dumps(plain, indent=1), encoding="utf-8")
        traces = [self._folder / f"profile_{rank}.json" for rank in ranks]
        size = sum(trace.stat().st_size for trace in traces if trace.exists())
        merged = (self._folder / MERGED).stat().st_size
        lines = [
            text,
            f"{self._folder / MERGED}: {size_text(merged)}, {len(ranks)} ranks on one clock, which "
            f"may be {accuracy_us:.0f} us off; open it in ui.perfetto.dev. Traces of the ranks "
            f"beside it: {size_text(size)}",
        ]
        if shortest := max(each.shortest_us for each in costs):
            lines.append(
                f"operations shorter than {shortest:.0f} us are left out of the merged trace, "
                "which viewers could not open; the ranks' own traces have them"
            )
        missing = sorted(set(range(self._state.world.size)) - set(ranks))
        if missing:
            lines.append(
                f"no trace of ranks {missing} in {self._folder} on the host of rank 0: the folder "
                "must be shared by all hosts"
            )
        logger.announce("\n".join(lines))

    def _awaited(self, wait_s: float) -> list[int]:
        """Return the ranks whose parts are there."""
        everyone = range(self._state.world.size)
        until = time.monotonic() + wait_s
        while True:
            here = [rank for rank in everyone if self._costs(rank).exists()]
            if len(here) == len(everyone) or time.monotonic() >= until:
                return here
            time.sleep(POLL_S)

    def _part(self, rank: int | None = None) -> Path:
        return self._folder / f".part_{self._state.world.rank if rank is None else rank}.gz"

    def _costs(self, rank: int | None = None) -> Path:
        return self._folder / f".costs_{self._state.world.rank if rank is None else rank}.json"

    def _make_folder(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"expected a folder for the profile that exists or can be made, found {folder}: "
                f"{error.strerror}; choose another one"
            ) from error
        for left in (self._part(), self._costs()):  # of a profile that was cut short
            left.unlink(missing_ok=True)

    def _place(self) -> RankPlace:
        world, mesh = self._state.world, self._state.run.mesh
        axes = [f"{name} {axis.rank}" for name, axis in mesh.items() if axis.size > 1]
        cell = f" ({', '.join(axes)})" if axes else ""
        where = (
            f" on {world.hosts[world.rank].partition('@')[2]}" if len(set(world.hosts)) > 1 else ""
        )
        threads = {str(t.native_id): t.name for t in threading.enumerate() if t.native_id}
        return RankPlace(
            rank=world.rank,
            name=f"rank {world.rank} of {world.size}{cell}{where}",
            threads=threads,
            **self._clock._asdict(),
        )
