"""Reads the events of a trace one by one, however large the file is.

Traces are JSON objects with a list ``traceEvents``, in the Trace Event Format of Chrome; torch's
profiler writes the facts of the run before the list.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from drivetrain.errors import UsageError

Event = dict[str, Any]

_CHUNK = 1 << 20
_LIST = '"traceEvents"'
_SPACE = " \t\r\n,"


class TraceReader:
    """One trace, open for reading.

    Args:
        path: the file.

    Attributes:
        facts: the entries of the object before the list of events.

    Raises:
        UsageError: the file is no trace.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO = path.open(encoding="utf-8")
        self._text = ""
        self._at = 0
        self._decoder = json.JSONDecoder()
        try:
            self.facts = self._read_facts()
        except BaseException:
            self._file.close()
            raise

    def __iter__(self) -> Iterator[Event]:
        try:
            while True:
                self._skip()
                if self._text[self._at] == "]":
                    return
                yield self._next()
        finally:
            self._file.close()

    def _read_facts(self) -> dict[str, Any]:
        while (found := self._text.find(_LIST)) < 0:
            if not self._read():
                raise self._torn(f"no {_LIST}")
        before = self._text[:found].rstrip(_SPACE)
        self._at = found + len(_LIST)
        while (begin := self._text.find("[", self._at)) < 0:
            if not self._read():
                raise self._torn("no list of events")
        self._at = begin + 1
        try:
            facts: dict[str, Any] = json.loads(before + "}")
        except ValueError as error:
            raise self._torn(str(error)) from error
        return facts

    def _next(self) -> Event:
        while True:
            try:
                event, self._at = self._decoder.raw_decode(self._text, self._at)
            except ValueError as error:
                if not self._read():
                    raise self._torn(str(error)) from error
            else:
                return dict(event)

    def _skip(self) -> None:
        while True:
            while self._at < len(self._text) and self._text[self._at] in _SPACE:
                self._at += 1
            if self._at < len(self._text):
                return
            if not self._read():
                raise self._torn("the list of events has no end")

    def _read(self) -> bool:
        """Read on, and forget the decoded text."""
        more = self._file.read(_CHUNK)
        self._text, self._at = self._text[self._at :] + more, 0
        return bool(more)

    def _torn(self, reason: str) -> UsageError:
        return UsageError(
            f"expected a whole trace of torch's profiler, found {self._path} of "
            f"{self._path.stat().st_size:,} bytes: {reason}; profile again"
        )
