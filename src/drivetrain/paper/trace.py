"""A played step as a Chrome trace: one process per stage, one row per lane."""

import json
from pathlib import Path
from typing import Any

from drivetrain.errors import ConfigError
from drivetrain.paper.lanes import PlayedStep

MICROSECONDS = 1e6


def trace_events(played: PlayedStep) -> list[dict[str, Any]]:
    """Return the events of a trace, which ``chrome://tracing`` and Perfetto read."""
    rows = sorted({(each.task.stage, each.task.lane) for each in played.tasks})
    numbers = {row: index for index, row in enumerate(rows)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": stage, "tid": number, "args": {"name": lane}}
        for (stage, lane), number in numbers.items()
    ]
    events += [
        {"ph": "M", "name": "process_name", "pid": stage, "args": {"name": f"stage {stage}"}}
        for stage in sorted({stage for stage, _ in rows})
    ]
    return events + [
        {
            "ph": "X",
            "name": each.task.name,
            "pid": each.task.stage,
            "tid": numbers[each.task.stage, each.task.lane],
            "ts": each.start * MICROSECONDS,
            "dur": (each.stop - each.start) * MICROSECONDS,
        }
        for each in played.tasks
        if each.stop > each.start
    ]


def write_trace(played: PlayedStep, path: Path) -> None:
    """Write a trace.

    Raises:
        ConfigError: the file cannot be written.
    """
    text = json.dumps({"traceEvents": trace_events(played), "displayTimeUnit": "ms"})
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write {str(path)!r}: {error.strerror or error}; choose another file"
        ) from error
