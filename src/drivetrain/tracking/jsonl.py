"""The tracker that needs nothing: one JSON object a line."""

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, TextIO

from typing_extensions import override

from drivetrain.tracking.tracker import Tracker, as_number


class JsonlTracker(Tracker):
    """Appends to ``LOGGING_DIR/RUN_NAME.jsonl``; whoever reads it sees each line at once."""

    name: ClassVar[str] = "jsonl"
    requires_logging_directory: ClassVar[bool] = True

    def __init__(self, run_name: str, logging_dir: str | Path) -> None:
        folder = Path(logging_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{run_name.replace('/', '_')}.jsonl"
        self._file: TextIO = self.path.open("a", encoding="utf-8")

    @property
    @override
    def tracker(self) -> TextIO:
        """The open file."""
        return self._file

    @override
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Write a line with the settings under ``config``."""
        self._write({"time": time.time(), "config": dict(values)})

    @override
    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Write a line with time, step and the values."""
        self._write({"time": time.time(), "step": step, **values, **options})

    @override
    def finish(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(_plain(record), allow_nan=False) + "\n")
        self._file.flush()


def _plain(value: Any) -> Any:
    """Return a value of JSON; NaN, infinity, and objects unknown to JSON become text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | str):
        return value
    number = as_number(value)
    if number is None:
        return str(value)
    return number if math.isfinite(number) else str(number)
