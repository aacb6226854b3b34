"""The work and the time of modules, over ranks: sums, the table of a step, and the tree of modules.

A rank notes for each module what its own code did, without the modules inside of it. Rows of the
tree are sums over everything inside; rows of the table are sums over modules at like places.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from drivetrain.hardware.peaks import Peak
from drivetrain.profiling.trail import AGAIN, BACKWARD, FORWARD, OUTSIDE
from drivetrain.reporting.words import in_short

SHOWN = 10
"""Rows of the table."""

_PHASES = (FORWARD, AGAIN, BACKWARD)
_OUTSIDE_WORDS = "outside of modules"
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(slots=True)
class ModuleWork:
    """The work of a module, in a step.

    Attributes:
        flops: operations by phase.
        seconds: by phase.
        ranks: which computed it.
    """

    flops: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    ranks: set[int] = field(default_factory=set)

    @property
    def total(self) -> int:
        """Operations of all phases."""
        return sum(self.flops.values())

    @property
    def rate(self) -> float | None:
        """Operations per second of a rank, while it computed this; None without a time."""
        passed = sum(self.seconds.values())
        return self.total / passed if passed > 0 else None

    def add(self, other: "ModuleWork") -> None:
        """Add the work of another module, or of another rank."""
        for phase, count in other.flops.items():
            self.flops[phase] = self.flops.get(phase, 0) + count
        for phase, passed in other.seconds.items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + passed
        self.ranks |= other.ranks


@dataclass(frozen=True, slots=True)
class RankWork:
    """The work of one rank in a step.

    Attributes:
        rank: its number.
        device: the name of its device.
        seconds: the wall time of the step that was timed.
        modules: by name, the work of each module's own code.
        dtypes: operations by the dtype of their factors, as ``torch.bfloat16``.
        unknown: operations that torch's formulas failed on.
    """

    rank: int
    device: str
    seconds: float
    modules: Mapping[str, ModuleWork]
    dtypes: Mapping[str, int]
    unknown: Sequence[str] = ()

    def plain(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        modules = {
            name: {"flops": work.flops, "seconds": work.seconds}
            for name, work in sorted(self.modules.items())
        }
        return {
            "rank": self.rank,
            "device": self.device,
            "seconds": self.seconds,
            "dtypes": self.dtypes,
            "unknown": self.unknown,
            "own": modules,
        }

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> "RankWork":
        """Undo ``plain``."""
        rank = int(plain["rank"])
        modules = {
            name: ModuleWork(work["flops"], work["seconds"], {rank})
            for name, work in plain["own"].items()
        }
        return cls(
            rank, plain["device"], plain["seconds"], modules, plain["dtypes"], plain["unknown"]
        )


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of all ranks in a step.

    Args:
        ranks: the work of each.
        parameters: elements of each module's parameters, with those inside, by name.
        peak: of a device; None where none is known.
        peak_words: where it comes from, or why there is none.
    """

    ranks: Sequence[RankWork]
    parameters: Mapping[str, int]
    peak: Peak | None
    peak_words: str

    def own(self) -> dict[str, ModuleWork]:
        """Return the work of each module's own code on all ranks."""
        return _summed((name, work) for rank in self.ranks for name, work in rank.modules.items())

    def whole(self) -> dict[str, ModuleWork]:
        """Return the work of each module on all ranks, with the modules inside of it."""
        return _summed(
            (around, work) for name, work in self.own().items() for around in _around(name)
        )

    def plain(self) -> dict[str, Any]:
        """Return the tree as JSON has it."""
        peak = None if self.peak is None else self.peak._asdict()
        rows = {
            name: {
                "parameters": self.parameters.get(name),
                "flops": work.flops,
                "seconds": work.seconds,
                "ranks": sorted(work.ranks),
                "flops_per_second": work.rate,
                "share_of_peak": self._share_of_peak(work),
            }
            for name, work in sorted(self.whole().items(), key=_by_place)
        }
        return {"ranks": len(self.ranks), "seconds": self._seconds, "peak": peak, "modules": rows}

    def table(self) -> str:
        """Return a line about the step, and the ten kinds of modules with the most work."""
        kinds = _summed((_NUMBER.sub("*", name), work) for name, work in self.own().items())
        largest = sorted(kinds.items(), key=lambda item: -item[1].total)
        rows = [(name, None, work) for name, work in largest[:SHOWN] if work.total]
        return "\n".join([self._headline(), *self._rows(rows)])

    def tree(self) -> str:
        """Return a line about the step, and a row for each module, with everything inside of it."""
        rows = [
            (_indented(name), self.parameters.get(name), work)
            for name, work in sorted(self.whole().items(), key=_by_place)
        ]
        return "\n".join([self._headline(), *self._rows(rows)])

    @property
    def _seconds(self) -> float:
        return sum(rank.seconds for rank in self.ranks) / len(self.ranks)

    def _headline(self) -> str:
        whole = ModuleWork()
        for work in self.own().values():
            whole.add(work)
        parts = [f"{in_short(whole.flops[p])} {p}" for p in _PHASES if whole.flops.get(p)]
        rate = whole.total / (self._seconds * len(self.ranks)) if self._seconds else 0.0
        line = (
            f"a step has {in_short(whole.total)} floating point operations on {len(self.ranks)} "
            f"ranks ({', '.join(parts)}) and takes {1e3 * self._seconds:.1f} ms: "
            f"{in_short(rate)}FLOP/s of a rank"
        )
        if self.peak is not None:
            line += f", {rate / self.peak.operations_per_second:.1%} of the peak"
        lines = [line, self.peak_words]
        unknown = sorted({name for rank in self.ranks for name in rank.unknown})
        if unknown:
            lines.append(f"not counted, since torch's formula fails: {', '.join(unknown)}")
        return "\n".join(lines)

    def _rows(self, rows: Iterable[tuple[str, int | None, ModuleWork]]) -> list[str]:
        """Return the heading and the rows of a table."""
        total = sum(work.total for work in self.own().values()) or 1
        lines = [
            f"{'share':>6} {'forward':>8} {'again':>8} {'backward':>8} {'ms/rank':>8} "
            f"{'FLOP/s':>8} {'of peak':>7} {'parameters':>10}  module"
        ]
        for name, parameters, work in rows:
            flops = [in_short(work.flops[p]) if work.flops.get(p) else "-" for p in _PHASES]
            ms = 1e3 * sum(work.seconds.values()) / max(1, len(work.ranks))
            peak = self._share_of_peak(work)
            cells = [
                f"{work.total / total:>6.1%}",
                *(f"{each:>8}" for each in flops),
                f"{ms:>8.2f}",
                f"{in_short(work.rate) if work.rate else '-':>8}",
                f"{'-' if peak is None else f'{peak:.1%}':>7}",
                f"{'' if parameters is None else in_short(parameters):>10}",
            ]
            lines.append(f"{' '.join(cells)}  {name or _OUTSIDE_WORDS}")
        return lines

    def _share_of_peak(self, work: ModuleWork) -> float | None:
        if self.peak is None or not work.rate:
            return None
        return work.rate / self.peak.operations_per_second


def module_sizes(parameters: Iterable[tuple[str, int, int]]) -> dict[str, int]:
    """Return the elements of each module's parameters; a shared parameter counts once in each.

    Args:
        parameters: (name, number of the parameter, its elements).
    """
    inside: defaultdict[str, dict[int, int]] = defaultdict(dict)
    for name, number, elements in parameters:
        for around in _around(name.rpartition(".")[0]):
            inside[around][number] = elements
    return {name: sum(found.values()) for name, found in inside.items()}


def _summed(items: Iterable[tuple[str, ModuleWork]]) -> dict[str, ModuleWork]:
    sums: defaultdict[str, ModuleWork] = defaultdict(ModuleWork)
    for name, work in items:
        sums[name].add(work)
    return dict(sums)


def _around(name: str) -> list[str]:
    """Return a module's name, and the names of all modules around it."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def _by_place(item: tuple[str, Any]) -> tuple[Any, ...]:
    """Return the order of a tree: numbers by size, and the rest of the step last."""
    parts = item[0].split(".")
    keys = [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]
    return (item[0] == OUTSIDE, *keys)


def _indented(name: str) -> str:
    parts = name.split(".")
    return f"{'  ' * (len(parts) - 1)}{parts[-1]}"
