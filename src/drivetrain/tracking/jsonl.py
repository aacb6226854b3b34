"""The tracker that needs nothing: one JSON object a line."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, TextIO

import torch
from typing_extensions import override

from drivetrain.tracking.tracker import Tracker


class JsonlTracker(Tracker):
    """Appends to ``LOGGING_DIR/RUN_NAME.jsonl``; every line is on disk when ``log`` returns."""

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
        self._file.write(json.dumps(record, default=_plain) + "\n")
        self._file.flush()


def _plain(value: Any) -> Any:
    """Return numbers out of one-element tensors and arrays, and text for all else."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "size", 0) == 1:
        return item()
    return str(value)
