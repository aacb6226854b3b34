"""The traffic ledger: every collective writes down the bytes it sent, by axis and operation."""

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


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


class Page(NamedTuple):
    """The place in training to which collectives belong: equal on all ranks at each collective.

    Attributes:
        steps: optimizer steps that this rank has taken.
        backwards: backwards that this rank has begun.
        rates: learning rates of the groups of its last step.
    """

    steps: int = 0
    backwards: int = 0
    rates: tuple[float, ...] = ()


@dataclass(eq=False, repr=False)
class Traffic:
    """A ledger of collectives by (axis, operation); safe to write from several threads.

    Attributes:
        page: where training is.
        waited_s: seconds that threads of the program have waited for collectives, on all axes.
    """

    page: Page = Page()
    waited_s: float = 0.0
    _entries: dict[tuple[str, str], Entry] = field(default_factory=dict)
    _waits: dict[str, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin_backward(self) -> None:
        """Turn the page: a backward begins."""
        self.page = self.page._replace(backwards=self.page.backwards + 1)

    def begin_step(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Write down the learning rates of the groups that an optimizer is about to step."""
        rates = (group.get("lr") for group in groups)
        # Those in tensors may be on a device, and reading them would wait for it.
        known = tuple(float(rate) for rate in rates if isinstance(rate, float | int))
        self.page = self.page._replace(rates=known)

    def end_step(self) -> None:
        """Turn the page: an optimizer has stepped, or left out a step."""
        self.page = self.page._replace(steps=self.page.steps + 1)

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

    def waited(self, axis: str, seconds: float) -> None:
        """Record how long the program stood still for a collective of an axis.

        A collective that is over when the program asks for its result costs no waiting. Where a
        device's stream waits instead of the program, the time is not seen here.
        """
        with self._lock:
            self._waits[axis] = self._waits.get(axis, 0.0) + seconds
            self.waited_s += seconds

    def waits(self) -> dict[str, float]:
        """Return the seconds waited so far by axis."""
        with self._lock:
            return dict(self._waits)

    def entries(self) -> Mapping[tuple[str, str], Entry]:
        """Return a copy of the sums so far."""
        with self._lock:
            return {
                key: Entry(entry.calls, entry.bytes, entry.seconds)
                for key, entry in self._entries.items()
            }

    def sent(self) -> dict[tuple[str, str], int]:
        """Return the bytes sent so far by (axis, operation), without the zeros."""
        with self._lock:
            return {key: entry.bytes for key, entry in self._entries.items() if entry.bytes}

    def total(self) -> int:
        """Return all bytes sent so far."""
        return sum(entry.bytes for entry in self.entries().values())

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()
            self._waits.clear()
            self.waited_s = 0.0

    def __repr__(self) -> str:
        entries = sorted(self.entries().items())
        if not entries:
            return "Traffic: nothing sent yet"
        waits = self.waits()
        rows = [("axis", "operation", "calls", "bytes sent", "seconds")]
        rows += [
            (axis, name, f"{each.calls:,}", f"{each.bytes:,}", f"{each.seconds:.3f}")
            for (axis, name), each in entries
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        lines += [f"waited {seconds:.3f} s on axis {axis}" for axis, seconds in waits.items()]
        return "\n".join(lines)
