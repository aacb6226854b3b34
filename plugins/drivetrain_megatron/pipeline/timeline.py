"""The times of a pipeline's actions on every rank, also as a Chrome trace.

Traces are for chrome://tracing and ui.perfetto.dev. The format is the JSON object form of the Trace
Event Format: complete events (phase ``X``) with begin and duration in microseconds. The pipeline is
a process of the trace and each rank a thread, so that ranks are rows under each other.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.errors import ConfigError
from drivetrain_megatron.pipeline.schedules import Action, ActionKind


@dataclass(frozen=True, slots=True)
class Span:
    """When an action ran, in seconds or units of time since the step began."""

    action: Action
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The spans of every rank's actions, in order: worked out by ``simulate``, or measured."""

    ranks: tuple[tuple[Span, ...], ...]

    @property
    def start(self) -> float:
        """When the first action of all ranks begins; 0 without any."""
        return min((span.start for rank in self.ranks for span in rank), default=0.0)

    @property
    def makespan(self) -> float:
        """Time from the first begin to the last end over all ranks; 0 without any action."""
        stop = max((span.stop for rank in self.ranks for span in rank), default=0.0)
        return stop - self.start

    @property
    def idle(self) -> float:
        """The share of all ranks' time in which they wait, from 0 to 1."""
        return self._idle(self.ranks)

    def idle_of(self, rank: int) -> float:
        """Return the share of the makespan in which a rank waits, from 0 to 1."""
        return self._idle(self.ranks[rank : rank + 1])

    def kept(self, rank: int) -> int:
        """Return how many micro-batches of its stages a rank keeps at most."""
        kept = most = 0
        for span in self.ranks[rank]:
            kept += span.action.kind is ActionKind.FORWARD
            most = max(most, kept)
            kept -= span.action.kind.frees
        return most

    def _idle(self, ranks: tuple[tuple[Span, ...], ...]) -> float:
        time = self.makespan * len(ranks)
        busy = sum(span.stop - span.start for rank in ranks for span in rank)
        return 1.0 - busy / time if time else 0.0


_MICROSECONDS = 1e6


def to_trace(timeline: Timeline, *, name: str = "pipeline") -> dict[str, Any]:
    """Return a timeline with a title as a trace; a simulated unit of time is a second."""
    return {"traceEvents": list(_events(timeline, name)), "displayTimeUnit": "ms"}


def save_trace(timeline: Timeline, path: Path, *, name: str = "pipeline") -> None:
    """Write a timeline as a trace; arguments as in ``to_trace``.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.write_text(json.dumps(to_trace(timeline, name=name), allow_nan=False) + "\n", "utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write {str(path)!r}: {error.strerror or error}; choose another file"
        ) from error


def _events(timeline: Timeline, name: str) -> Iterator[dict[str, Any]]:
    yield _metadata("process_name", 0, {"name": name})
    for rank, spans in enumerate(timeline.ranks):
        yield _metadata("thread_name", rank, {"name": f"rank {rank}"})
        yield _metadata("thread_sort_index", rank, {"sort_index": rank})
        for span in spans:
            yield _event(span, rank, timeline.start)


def _metadata(name: str, rank: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": 0, "tid": rank, "args": arguments}


def _event(span: Span, rank: int, begin: float) -> dict[str, Any]:
    action = span.action
    return {
        "ph": "X",
        "name": f"{action.kind.value}{action.micro_batch}",
        "cat": action.kind.name.lower(),
        "pid": 0,
        "tid": rank,
        "ts": (span.start - begin) * _MICROSECONDS,
        "dur": (span.stop - span.start) * _MICROSECONDS,
        "args": {"stage": action.stage, "micro_batch": action.micro_batch},
    }
