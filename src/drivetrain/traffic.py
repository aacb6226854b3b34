"""The traffic ledger: every collective writes down the bytes it sent, by axis and operation."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class Entry:
    """Sums over the collectives of one kind.

    Attributes:
        calls: how many collectives were submitted.
        bytes: payload bytes that this rank sent.
        seconds: time between start and end of the transfers, summed; overlapped time included.
    """

    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0


class Traffic:
    """A ledger of collectives by (axis, operation); safe to write from several threads."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], Entry] = {}
        self._lock = threading.Lock()

    def add(self, axis: str, operation: str, nbytes: int) -> None:
        """Record a collective at its submission: the payload bytes that this rank sends.

        At submission, so that the sums at one place of a program are the same in every run,
        whatever is still on its way.
        """
        with self._lock:
            entry = self._entries.setdefault((axis, operation), Entry())
            entry.calls += 1
            entry.bytes += nbytes

    def took(self, axis: str, operation: str, seconds: float) -> None:
        """Write down how long one collective took, when it is over."""
        with self._lock:
            self._entries.setdefault((axis, operation), Entry()).seconds += seconds

    def entries(self) -> Mapping[tuple[str, str], Entry]:
        """Return a copy of the sums so far."""
        with self._lock:
            return {
                key: Entry(entry.calls, entry.bytes, entry.seconds)
                for key, entry in self._entries.items()
            }

    def sent(self) -> dict[tuple[str, str], int]:
        """Return the bytes sent so far by (axis, operation), without the zeros."""
        return {key: entry.bytes for key, entry in self.entries().items() if entry.bytes}

    def total(self) -> int:
        """Return all bytes sent so far."""
        return sum(entry.bytes for entry in self.entries().values())

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()
