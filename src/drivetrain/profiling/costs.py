"""The largest costs of a profile: where the time of a step went, by operation and by wait.

The program's own thread is cut into the operations that it ran, each without the operations inside,
its waits for other ranks, and the rest, which is Python. Kernels of devices and collectives in the
background go on beside it; their rows say so.
"""

import re
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from drivetrain.profiling.trace import Event
from drivetrain.ranges import COLLECTIVE, WAIT

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
