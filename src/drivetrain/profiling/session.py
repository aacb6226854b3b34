"""One profile on all ranks: torch's profiler, ranges around units, and the files at the end.

A folder gets the trace that torch wrote on each rank (``profile_RANK.json``), the merged trace of
all ranks (``trace.json.gz``), and the largest costs (``costs.txt``, ``costs.json``).
"""

import json
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

from torch import nn
from torch.profiler import record_function

from drivetrain.communication import wait_for_everyone
from drivetrain.errors import UsageError
from drivetrain.facade.options import ProfileKwargs, profiler_of
from drivetrain.facade.prepared import PreparedObjects
from drivetrain.log import get_logger
from drivetrain.profiling import modules
from drivetrain.profiling.costs import CostTally, RankCosts, largest, table
from drivetrain.profiling.trace import (
    FACTS,
    ClockComparison,
    RankPlace,
    compare_clocks,
    join_parts,
    write_part,
)
from drivetrain.ranges import BACKWARD, FORWARD, RECOMPUTE, is_profiled
from drivetrain.strategy import Run

# --- ranges around the forward and the backward of each unit of a model ---


_RANGES = {modules.FORWARD: FORWARD, modules.AGAIN: RECOMPUTE, modules.BACKWARD: BACKWARD}


class UnitRanges:
    """Follows the units of a model from now until ``close``.

    Args:
        units: by name.
    """

    def __init__(self, units: Mapping[str, nn.Module]) -> None:
        self._range = ExitStack()
        self._trail = modules.ModuleTrail(units, self._turned, inside=False)

    def close(self) -> None:
        """Take the hooks off."""
        self._trail.close()
        self._range.close()

    def _turned(self, place: modules.ModulePlace) -> None:
        self._range.close()
        if place.module and is_profiled():
            self._range.enter_context(record_function(f"{_RANGES[place.phase]}{place.module}"))


# --- the profile ---


logger = get_logger(__name__)

MERGED = "trace.json.gz"
COSTS_TEXT, COSTS_JSON = "costs.txt", "costs.json"
POLL_S = 0.05
PARTS_S = 60.0
"""How long rank 0 waits for the parts of ranks whose run has ended, too."""


class ProfileSession:
    """A profile from ``start`` to ``stop`` and ``write``.

    Args:
        options: of torch's profiler, and the folder; without a folder no file is written, and no
            rank waits for others.
        prepared: the models whose units get ranges.
        run: the ranks.

    Attributes:
        profiler: torch's own.
        steps: how many optimizer steps were taken until the end; 0 while that is not known.
    """

    def __init__(self, options: ProfileKwargs, prepared: PreparedObjects, run: Run) -> None:
        self.profiler = profiler_of(options)
        folder = options.output_trace_dir
        self.folder = None if folder is None else Path(folder)
        self._prepared = prepared
        self._run = run
        self._clock = ClockComparison(0, 0, 0)
        self._units = ExitStack()
        self.steps = 0

    @property
    def trace(self) -> Path:
        """The file of this rank's trace."""
        return self._folder / f"profile_{self._run.world.rank}.json"

    def start(self) -> None:
        """Start the profiler. Collective where there is a folder.

        Raises:
            UsageError: another profile is under way, or the folder cannot be made.
        """
        if is_profiled():
            raise UsageError(
                "expected one profile at a time, found torch's profiler at work; leave out "
                "--profile, or the profile of the script"
            )
        if self.folder is not None:
            self._make_folder(self.folder)
            self._clock = compare_clocks(self._run.world)
        for entry in self._prepared.models:
            self._units.callback(UnitRanges(entry.strategy.units(entry.module)).close)
        self.profiler.start()

    def stop(self, *, together: bool) -> None:
        """Stop the profiler, and take all ranges off.

        Args:
            together: wait for all ranks first, so that no collective is cut short.
        """
        self._units.close()
        if together and self.folder is not None:
            wait_for_everyone()
        self.profiler.stop()

    def write(self) -> bool:
        """Write this rank's trace and its part of the merged one; return whether there is any."""
        place = self._place()
        self.profiler.add_metadata_json(FACTS, json.dumps(asdict(place)))
        try:
            self.profiler.export_chrome_trace(str(self.trace))
        except (AssertionError, RuntimeError) as error:
            logger.warning(
                "the profile has no trace (%s): with schedule_option, call profiler.step() until "
                "an active step is over",
                error or type(error).__name__,
                main_process_only=False,
            )
            return False
        program = threading.main_thread().native_id
        tally = CostTally(program, self.steps)
        ranks = self._run.world.size
        shortest = write_part(self.trace, self._part(), place, ranks=ranks, see=tally.add)
        costs = replace(tally.costs(), shortest_us=shortest)
        # The costs come last, and whole: their file says that the part is complete.
        draft = self._costs().with_suffix(".draft")
        draft.write_text(json.dumps(asdict(costs)), encoding="utf-8")
        draft.replace(self._costs())
        return True

    def merge(self, *, wait_s: float = 0.0) -> None:
        """Join the parts of all ranks, write and print the costs; on rank 0.

        Args:
            wait_s: how long parts of ranks that are still writing are waited for.
        """
        ranks = self._awaited(wait_s)
        costs = [RankCosts(**json.loads(self._costs(rank).read_bytes())) for rank in ranks]
        accuracy_us = self._clock.accuracy_ns / 1e3
        facts = {"ranks": ranks, "clock_accuracy_us": accuracy_us}
        join_parts([self._part(rank) for rank in ranks], self._folder / MERGED, facts)
        for rank in ranks:
            self._costs(rank).unlink()
        self._show(costs, ranks, accuracy_us)

    def _show(self, costs: Sequence[RankCosts], ranks: Sequence[int], accuracy_us: float) -> None:
        rows = largest(costs)
        text = table(rows, costs)
        (self._folder / COSTS_TEXT).write_text(f"{text}\n", encoding="utf-8")
        plain = {"steps": costs[0].steps, "ranks": len(ranks), "rows": list(map(asdict, rows))}
        (self._folder / COSTS_JSON).write_text(json.dumps(plain, indent=1), encoding="utf-8")
        traces = [self._folder / f"profile_{rank}.json" for rank in ranks]
        size = sum(trace.stat().st_size for trace in traces if trace.exists())
        merged = (self._folder / MERGED).stat().st_size
        lines = [
            text,
            f"{self._folder / MERGED}: {_size(merged)}, {len(ranks)} ranks on one clock, which may "
            f"be {accuracy_us:.0f} us off; open it in ui.perfetto.dev. Traces of the ranks beside "
            f"it: {_size(size)}",
        ]
        if shortest := max(each.shortest_us for each in costs):
            lines.append(
                f"operations shorter than {shortest:.0f} us are left out of the merged trace, "
                "which viewers could not open; the ranks' own traces have them"
            )
        missing = sorted(set(range(self._run.world.size)) - set(ranks))
        if missing:
            lines.append(
                f"no trace of ranks {missing} in {self._folder} on the host of rank 0: the folder "
                "must be shared by all hosts"
            )
        logger.announce("\n".join(lines))

    def _awaited(self, wait_s: float) -> list[int]:
        """Return the ranks whose parts are there."""
        everyone = range(self._run.world.size)
        until = time.monotonic() + wait_s
        while True:
            here = [rank for rank in everyone if self._costs(rank).exists()]
            if len(here) == len(everyone) or time.monotonic() >= until:
                return here
            time.sleep(POLL_S)

    @property
    def _folder(self) -> Path:
        if self.folder is None:
            raise UsageError("expected output_trace_dir for a profile that is written, found none")
        return self.folder

    def _part(self, rank: int | None = None) -> Path:
        return self._folder / f".part_{self._run.world.rank if rank is None else rank}.gz"

    def _costs(self, rank: int | None = None) -> Path:
        return self._folder / f".costs_{self._run.world.rank if rank is None else rank}.json"

    def _make_folder(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"expected a folder for the profile that exists or can be made, found {folder}: "
                f"{error.strerror}; choose another one"
            ) from error
        for left in (self._part(), self._costs()):  # of a profile that was cut short
            left.unlink(missing_ok=True)

    def _place(self) -> RankPlace:
        world, mesh = self._run.world, self._run.mesh
        axes = [f"{name} {axis.rank}" for name, axis in mesh.items() if axis.size > 1]
        cell = f" ({', '.join(axes)})" if axes else ""
        where = (
            f" on {world.hosts[world.rank].partition('@')[2]}" if len(set(world.hosts)) > 1 else ""
        )
        threads = {str(t.native_id): t.name for t in threading.enumerate() if t.native_id}
        return RankPlace(
            rank=world.rank,
            name=f"rank {world.rank} of {world.size}{cell}{where}",
            ahead_ns=self._clock.ahead_ns,
            begun_ns=self._clock.begun_ns,
            accuracy_ns=self._clock.accuracy_ns,
            threads=threads,
        )


def _size(nbytes: float) -> str:
    return f"{nbytes / 2**20:.1f} MiB"
