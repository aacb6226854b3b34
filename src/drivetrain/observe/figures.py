"""The records of a run: figures of each optimizer step and rank, and their files.

A record is a line of JSON. Records add up: a line of a long run stands for several steps. Each
start of the script has a folder, with a file for each rank::

    PROJECT/run/
        20261123-120028-417300/     a start: the time, in microseconds
            run.json                configuration with origins, environment, model, promised bytes
            rank-0.jsonl            a line for each step
            rank-1.jsonl
        20261123-130501-000211/     started again: after a failure, or by hand
        report.html                 made of all these

A rank's file is appended to, never rewritten. Its first line says which rank wrote it; events, such
as a resumed checkpoint, stand between the records. A file that ends in the middle of a line, as
after a kill, is read up to there.

The time of a rank's own work, in a file that its launcher reads, and who is slower by it.

The launcher compares the ranks of a run; ranks themselves exchange nothing for it.
"""

import itertools
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING, Any, ClassVar, TextIO

from drivetrain.errors import ConfigError, expected, replace_text

if TYPE_CHECKING:
    from pydantic import TypeAdapter

# --- the records of a run ---

SECTIONS = ("data", "forward", "backward", "optimizer", "checkpoint", "evaluation", "other")
"""Where the time of a step goes, besides waiting; ``other`` is the script's own work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFigures:
    """The figures of one rank over an optimizer step, or over several steps in a row.

    All times are of the host: where a device computes, the host waits for the device only where
    the script reads a value.

    Attributes:
        step: number of the last optimizer step, from 1; a resumed run goes on counting.
        steps: how many steps the record stands for.
        time: when it ended, in seconds since 1970.
        seconds: wall time, from the end of the step before.
        sections: seconds by name, see ``SECTIONS``; together with ``waiting`` they are ``seconds``.
        waiting: seconds that the rank stood still for collectives, by mesh axis.
        loss: mean over the rank's micro-batches, weighted as ``backward`` was told; None without a
            backward.
        lr: learning rate of the first parameter group.
        grad_norm: global norm before clipping; None where the script does not clip.
        loss_scale: of fp16; None without one.
        samples: rows of the rank's batches.
        tokens: elements of ``input_ids`` in the rank's batches, padding included; 0 where batches
            have none.
        skipped: steps that were left out because a gradient was not finite.
        memory: bytes by kind: ``resident`` of the process; on an accelerator ``device``, allocated
            now, and ``device_peak``, the most so far.
        sent: bytes that the rank sent, by ``AXIS/OPERATION``.
        own: the script's own figures.
    """

    __pydantic_config__: ClassVar[Mapping[str, str]] = {"ser_json_inf_nan": "strings"}

    step: int
    steps: int = 1
    time: float = 0.0
    seconds: float = 0.0
    sections: Mapping[str, float] = field(default_factory=dict)
    waiting: Mapping[str, float] = field(default_factory=dict)
    loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    loss_scale: float | None = None
    samples: int = 0
    tokens: int = 0
    skipped: int = 0
    memory: Mapping[str, int] = field(default_factory=dict)
    sent: Mapping[str, int] = field(default_factory=dict)
    own: Mapping[str, float] = field(default_factory=dict)

    @property
    def samples_per_second(self) -> float:
        """Rows of this rank per second of wall time."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens of this rank per second of wall time."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def to_json(self) -> str:
        """Return one line of JSON: no NaN, which JSON does not know, and nothing empty."""
        return _record_type().dump_json(self, exclude_defaults=True).decode()

    @classmethod
    def from_json(cls, line: str) -> "StepFigures":
        """Return the record of a line.

        Raises:
            ConfigError: the line is no record.
        """
        from pydantic import ValidationError

        try:
            return _record_type().validate_json(line)
        except ValidationError as error:
            reason = expected([error.errors()[0]["msg"]])
            raise ConfigError(
                f"expected a record of a step, found {line[:80]!r}: {reason}"
            ) from None


@cache
def _record_type() -> "TypeAdapter[StepFigures]":
    from pydantic import TypeAdapter  # slow to load: runs without a folder write no record

    return TypeAdapter(StepFigures)


def merged(first: StepFigures, second: StepFigures) -> StepFigures:
    """Return one record for the steps of two, the second after the first.

    Times, counts and bytes are summed, memory is the larger one, values are means over steps.
    """
    whole = first.steps + second.steps
    share = second.steps / whole
    return replace(
        second,
        steps=whole,
        seconds=first.seconds + second.seconds,
        sections=_summed(first.sections, second.sections),
        waiting=_summed(first.waiting, second.waiting),
        loss=_mean(first.loss, second.loss, share),
        grad_norm=_mean(first.grad_norm, second.grad_norm, share),
        samples=first.samples + second.samples,
        tokens=first.tokens + second.tokens,
        skipped=first.skipped + second.skipped,
        memory=_largest(first.memory, second.memory),
        sent=_summed(first.sent, second.sent),
        own={
            name: value
            for name in {**first.own, **second.own}
            if (value := _mean(first.own.get(name), second.own.get(name), share)) is not None
        },
    )


def _summed(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    return {name: first.get(name, 0) + second.get(name, 0) for name in {**first, **second}}


def _largest(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
    return {name: max(first.get(name, 0), second.get(name, 0)) for name in {**first, **second}}


def _mean(first: float | None, second: float | None, share: float) -> float | None:
    if first is None or second is None:
        return second if first is None else first
    return first * (1 - share) + second * share


@dataclass(eq=False)
class StepSums:
    """Adds up records, and hands on one for all of them whenever they are enough.

    Attributes:
        enough: whether a sum is to be handed on.
        take: gets it.
        skip: how many records at first are left out: steps that make buffers and compile kernels.
    """

    enough: Callable[[StepFigures], bool]
    take: Callable[[StepFigures], None]
    skip: int = 0
    _begun: StepFigures | None = None

    def add(self, figures: StepFigures) -> None:
        """Add the next record."""
        if self.skip:
            self.skip -= 1
            return
        self._begun = figures if self._begun is None else merged(self._begun, figures)
        if self.enough(self._begun):
            self.end()

    def end(self) -> None:
        """Hand on what is left over."""
        begun, self._begun = self._begun, None
        if begun is not None:
            self.take(begun)


# --- the file of a rank ---


FINE_LINES = 1000
"""Lines with one step each; after as many lines, each further line stands for twice as many steps.

So a million steps are eleven thousand lines. Short steps late in a long run are seen as means."""

COARSEST_S = 60.0
"""A line covers no more time than this, however many steps it may stand for."""

LAST_LINE_BYTES = 2000
"""The last line of a file is shorter than this."""

FLUSH_S = 2.0
"""Lines reach the file at least this often, while steps are taken: others may follow the run."""


class Journal:
    """Writes the records of one rank.

    Args:
        path: the file; made, with its folder, when the first line is written.
        header: facts about the rank.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.path = path
        self._header = header
        self._file: TextIO | None = None
        self._lines = 0
        self._stride = 1
        self._sums = StepSums(
            lambda each: each.steps >= self._stride or each.seconds >= COARSEST_S, self._end_line
        )
        self._unwritten: list[StepFigures] = []  # lines are made many at a time, which is cheaper
        self._flushed_at = time.monotonic()

    def add(self, figures: StepFigures) -> None:
        """Note a step.

        Raises:
            OSError: the file cannot be written.
        """
        self._sums.add(figures)
        if time.monotonic() - self._flushed_at >= FLUSH_S:
            self.flush()

    def note(self, event: str, **facts: Any) -> None:
        """Note an event, after the steps before it.

        Raises:
            OSError: the file cannot be written.
        """
        self._sums.end()
        self._write_lines()
        self._write(json.dumps({"event": event, "time": time.time(), **facts}))
        self.flush()

    def flush(self) -> None:
        """Let readers see the lines so far.

        Raises:
            OSError: the file cannot be written.
        """
        self._flushed_at = time.monotonic()
        self._write_lines()
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Write the steps left over, and close the file."""
        self._sums.end()
        self._write_lines()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _end_line(self, figures: StepFigures) -> None:
        self._unwritten.append(figures)
        self._lines += 1
        if self._lines % FINE_LINES == 0:
            self._stride *= 2

    def _write_lines(self) -> None:
        lines, self._unwritten = self._unwritten, []
        for figures in lines:
            self._write(figures.to_json())

    def _write(self, line: str) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a", encoding="utf-8")
            self._file.write(json.dumps(self._header) + "\n")
        self._file.write(line + "\n")


@dataclass(frozen=True, slots=True)
class RankJournal:
    """The contents of one rank's file.

    Attributes:
        header: facts about the rank; empty where the file has no first line.
        records: in the order of writing.
        events: each with the number of records before it.
        torn: lines that are no JSON, as the last one of a killed process.
    """

    header: Mapping[str, Any] = field(default_factory=dict)
    records: tuple[StepFigures, ...] = ()
    events: tuple[tuple[int, Mapping[str, Any]], ...] = ()
    torn: int = 0


def has_ended(path: Path) -> bool:
    """Whether a rank has written its last line."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LAST_LINE_BYTES))
            last = file.read().splitlines()[-1:]
    except OSError:
        return False
    return any(b'"event": "ended"' in line or b'"event": "failed"' in line for line in last)


def read_journal(path: Path) -> RankJournal:
    """Read a rank's file, as far as it is whole; a run may be writing it.

    Raises:
        OSError: the file cannot be read.
    """
    header: Mapping[str, Any] = {}
    records: list[StepFigures] = []
    events: list[tuple[int, Mapping[str, Any]]] = []
    torn = 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            values = json.loads(line)
            if "rank" in values:
                header = values
            elif "event" in values:
                events.append((len(records), values))
            else:
                records.append(StepFigures.from_json(line))
        except (ValueError, TypeError, ConfigError):
            torn += 1
    return RankJournal(header, tuple(records), tuple(events), torn)


# --- the folder ---


RUN = "run"
"""The folder in the project's folder."""

FACTS, REPORT = "run.json", "report.html"


@dataclass(frozen=True, slots=True)
class StartFolder:
    """The files of one start of a script.

    Attributes:
        path: the folder.
    """

    path: Path

    def journal(self, rank: int) -> Path:
        """Return the file of a rank."""
        return self.path / f"rank-{rank}.jsonl"

    def write_facts(self, facts: Mapping[str, Any]) -> None:
        """Write the facts of the run, complete or not at all.

        Raises:
            OSError: the file cannot be written.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        replace_text(self.path / FACTS, json.dumps(facts, indent=1, default=str) + "\n")

    def facts(self) -> dict[str, Any]:
        """Return the facts of the run; empty where the file is missing or torn."""
        try:
            found = json.loads((self.path / FACTS).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def journals(self) -> dict[int, RankJournal]:
        """Return the journal of each rank as written so far, by rank."""
        found = {}
        for path in self.path.glob("rank-*.jsonl"):
            number = path.stem.removeprefix("rank-")
            if number.isdecimal():
                found[int(number)] = read_journal(path)
        return dict(sorted(found.items()))


def starts_of(folder: str | Path) -> list[StartFolder]:
    """Return the starts of a run, the earliest first.

    Args:
        folder: of the project, of its run, or of one start.

    Raises:
        ConfigError: there is no such folder, or no run was recorded in it.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ConfigError(f"expected the folder of a run, found none at {path}; check the path")
    for place in (path / RUN, path):
        found = sorted(each for each in place.glob("*-*-*/") if _is_start(each))
        if found:
            return [StartFolder(each) for each in found]
    if _is_start(path):
        return [StartFolder(path)]
    raise ConfigError(
        f"expected the records of a run in {path}, or in {path / RUN}, found none; records are "
        "written where the Accelerator has a project_dir and trains at least one step"
    )


def _is_start(path: Path) -> bool:
    return path.is_dir() and ((path / FACTS).is_file() or any(path.glob("rank-*.jsonl")))


# --- the time of a rank's own work, in a file that its launcher reads ---


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTimes:
    """The time of one rank over some optimizer steps.

    Attributes:
        rank: its number.
        host: the name of its host.
        peers: ranks with the same words here do the same work: those of one pipeline stage.
        window: its number, from 1.
        steps: how many optimizer steps it took.
        seconds: wall time of these steps.
        sections: seconds by section, without waiting; see ``figures.SECTIONS``.
        waiting: seconds that the rank stood still for collectives.
    """

    rank: int
    host: str
    peers: str = ""
    window: int = 1
    steps: int
    seconds: float
    sections: Mapping[str, float]
    waiting: float = 0.0

    @classmethod
    def of(
        cls, rank: int, header: Mapping[str, Any], figures: StepFigures, window: int = 1
    ) -> "RankTimes":
        """Return the time that a record, or a sum of records, tells.

        Args:
            rank: its number.
            header: facts of the rank: ``host`` and ``peers``.
            figures: of the steps.
            window: its number.
        """
        return cls(
            rank=rank,
            host=str(header.get("host", "")),
            peers=str(header.get("peers", "")),
            window=window,
            steps=figures.steps,
            seconds=figures.seconds,
            sections=figures.sections,
            waiting=sum(figures.waiting.values()),
        )


class WorkFile:
    """Sums up the records of a rank, and writes the sum when a window is over.

    Args:
        path: the file, which is replaced as a whole.
        every_s: length of a window in seconds.
        header: the facts of the rank: ``rank``, ``host`` and ``peers``.
    """

    def __init__(self, path: Path, every_s: float, header: Mapping[str, Any]) -> None:
        self._path, self._header = path, header
        self._windows = itertools.count(1)
        self._sums = StepSums(lambda each: each.seconds >= every_s, self._write, skip=1)

    def take(self, figures: StepFigures) -> None:
        """Add a record; the first one is left out.

        Raises:
            OSError: the file cannot be written.
        """
        self._sums.add(figures)

    def _write(self, figures: StepFigures) -> None:
        header = self._header
        work = RankTimes.of(header["rank"], header, figures, next(self._windows))
        replace_text(self._path, json.dumps(asdict(work)))


def read_work(path: Path) -> RankTimes | None:
    """Return the newest work in a rank's file; None before the first window is over."""
    try:
        return RankTimes(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


# --- ranks and hosts that are slower than the others by their own work, not by their waiting ---

# All ranks take a step together, so each step is as slow as the slowest rank, and the wall time
# says nothing about who that is. The time without waiting does, section by section, as in NVIDIA's
# Resiliency Extension and in MegaScale (Jiang et al., NSDI 2024).


OWN = ("data", "forward", "backward", "optimizer")
"""Sections of a rank's own work. In ``other`` scripts wait for each other, unseen; evaluation and
checkpoints are not part of each step."""

LEAST_SHARE = 0.05
"""Of the time of a step: whoever costs the others less than this is no straggler."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Straggler:
    """A rank, or all ranks of one host, with more work in a step than the others.

    Attributes:
        ranks: their numbers, ascending.
        host: the name of their host.
        is_host: whether these are all ranks of the host.
        seconds: of own work in a step; of several ranks, the smallest.
        usual_s: that of the others, as a median.
        section: the section with most of the difference.
        section_s: seconds in that section in a step.
        usual_section_s: that of the others, as a median.
    """

    ranks: tuple[int, ...]
    host: str
    is_host: bool
    seconds: float
    usual_s: float
    section: str
    section_s: float
    usual_section_s: float

    def __str__(self) -> str:
        host = self.host.rpartition("@")[2]
        listed = f"rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}"
        who = f"host {host} ({listed})" if self.is_host else f"{listed} on host {host}"
        return (
            f"{who} is slower than the others: {_ms(self.seconds)} of work in a step against "
            f"{_ms(self.usual_s)}; most of the difference is in {self.section}, "
            f"{_ms(self.section_s)} against {_ms(self.usual_section_s)}"
        )

    @property
    def ratio(self) -> float:
        """How many times as long as that of the others its work takes."""
        return self.seconds / self.usual_s if self.usual_s else float("inf")


def stragglers(works: Iterable[RankTimes], margin: float) -> list[Straggler]:
    """Return who is slower than the others, by more than a margin.

    A rank is compared with the median of all other ranks that do the same work.

    Args:
        works: of each rank, over the same while.
        margin: 0.3 for work that takes 30 % longer.
    """
    groups: dict[str, list[RankTimes]] = {}
    hosts: dict[str, set[int]] = {}
    for work in works:
        if work.steps:
            groups.setdefault(work.peers, []).append(work)
            hosts.setdefault(work.host, set()).add(work.rank)
    found = [each for group in groups.values() for each in _in_group(group, margin)]
    found.sort(key=lambda each: each.ranks)
    together: list[Straggler] = []
    for host in dict.fromkeys(each.host for each in found):
        own = [each for each in found if each.host == host]
        whole = {rank for each in own for rank in each.ranks} == hosts[host]
        if whole and len(own) > 1:
            least = min(own, key=lambda each: each.seconds)
            ranks = tuple(rank for each in own for rank in each.ranks)
            together.append(replace(least, ranks=ranks, is_host=True))
        else:
            together += own
    return together


def _in_group(group: Sequence[RankTimes], margin: float) -> list[Straggler]:
    times = {
        work.rank: {name: work.sections.get(name, 0.0) / work.steps for name in OWN}
        for work in group
    }
    return [
        straggler
        for work in group
        if len(group) > 1 and (straggler := _compared(work, times, margin)) is not None
    ]


def _compared(
    work: RankTimes, times: Mapping[int, Mapping[str, float]], margin: float
) -> Straggler | None:
    own = times[work.rank]
    others = [found for rank, found in times.items() if rank != work.rank]
    usual_s = median_low([sum(other.values()) for other in others])
    seconds = sum(own.values())
    excess, step_s = seconds - usual_s, work.seconds / work.steps
    if seconds <= (1 + margin) * usual_s or excess < LEAST_SHARE * step_s:
        return None
    usual = {name: median_low([other[name] for other in others]) for name in OWN}
    section = max(OWN, key=lambda name: own[name] - usual[name])
    return Straggler(
        ranks=(work.rank,),
        host=work.host,
        is_host=False,
        seconds=seconds,
        usual_s=usual_s,
        section=section,
        section_s=own[section],
        usual_section_s=usual[section],
    )


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
