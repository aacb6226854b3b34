"""A run of a pipeline as a Chrome trace, for chrome://tracing and ui.perfetto.dev.

The format is the JSON object form of the Trace Event Format: complete events (phase ``X``) with
begin and duration in microseconds. The pipeline is one process of the trace and each rank one of
its threads, so that ranks are rows under each other.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drivetrain.errors import ConfigError
from drivetrain_megatron.pipeline.simulate import Span, Timeline

_MICROSECONDS = 1e6


def to_trace(timeline: Timeline, *, name: str = "pipeline") -> dict[str, Any]:
    """Return a timeline as a trace, begun at 0.

    Args:
        timeline: measured, in seconds; of a simulated one a unit of time becomes a second.
        name: what is shown above the ranks.
    """
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
