"""Profiles: the steps of a run followed and marked, and torch's profiler on all ranks.

A step ends where the next one begins, or where the run ends; its evaluation and its checkpoint
belong to it. All ranks begin and end a profile at the same event. The work and the times of modules
are measured in the two steps after the profiled ones.

One profile on all ranks: torch's profiler, ranges around units, and the files at the end.

A folder gets the trace that torch wrote on each rank (``profile_RANK.json``), the merged trace of
all ranks (``trace.json.gz``), and the largest costs (``costs.txt``, ``costs.json``).
"""

import json
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function
from torch.utils.data import DataLoader

from drivetrain.collectives.facts import share_facts
from drivetrain.communication import wait_for_everyone
from drivetrain.config import Resolved
from drivetrain.errors import CollectiveError, ConfigError, UsageError
from drivetrain.facade.observer import Observer
from drivetrain.facade.prepared import PreparedModel, PreparedObjects, WholeWeights
from drivetrain.facade.settings import ProfileKwargs, Runs, profiler_of
from drivetrain.hardware.sizes import size_text
from drivetrain.log import get_logger
from drivetrain.observe import modules
from drivetrain.observe.modules import ModelSizes, ModuleMeasurement
from drivetrain.observe.trace import (
    FACTS,
    ClockComparison,
    CostTally,
    RankCosts,
    RankPlace,
    compare_clocks,
    join_parts,
    largest,
    table,
    write_part,
)
from drivetrain.runtime.ranges import BACKWARD, FORWARD, RECOMPUTE, STEP, is_profiled
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
            f"{self._folder / MERGED}: {size_text(merged)}, {len(ranks)} ranks on one clock, which "
            f"may be {accuracy_us:.0f} us off; open it in ui.perfetto.dev. Traces of the ranks "
            f"beside it: {size_text(size)}",
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


# --- follows the steps of a run, marks them in profiles, and profiles the configured ones ---

logger = get_logger(__name__)

FOLDER = "profile"
"""Name of a profile's folder, unless the configuration has another."""


WARM_UP = 2
"""Steps left out before the profile where only a number is given: they allocate and tune."""

_FORM = re.compile(r"(\d+)|(\d*):(\d+)")


@dataclass(frozen=True, slots=True)
class StepWindow:
    """The profile begins after ``skipped`` optimizer steps and ends after step ``last``."""

    skipped: int
    last: int

    @classmethod
    def parse(cls, text: int | str) -> "StepWindow":
        """Read ``5``, which profiles five steps after two that warm up, or ``10:15``.

        ``10:15`` skips ten steps and profiles the next five, as a slice of Python does.

        Raises:
            ConfigError: another text, or no step.
        """
        found = _FORM.fullmatch(str(text).strip())
        if found is not None:
            count, first, last = found.groups()
            window = (
                cls(WARM_UP, WARM_UP + int(count))
                if count is not None
                else cls(int(first or 0), int(last))
            )
            if window.last > window.skipped:
                return window
        raise ConfigError(
            f"profile.steps: expected a number of steps, such as 5, or the begin and end of some, "
            f"such as 10:15, found {text!r}; 5 profiles five steps after two that warm up, 10:15 "
            "skips ten steps and profiles the next five"
        )

    @property
    def count(self) -> int:
        """How many steps are profiled."""
        return self.last - self.skipped

    def __str__(self) -> str:
        first = self.skipped + 1
        return f"steps {first} to {self.last}" if self.count > 1 else f"step {first}"


class StepProfiler(Observer):
    """Marks the steps of profiles, and makes the profile that the configuration asks for.

    Args:
        config: the resolved configuration.
        options: of torch's profiler, for the profile of the configuration.
        project_dir: where its folder goes; None for the working directory.
    """

    def __init__(
        self, config: Resolved, options: ProfileKwargs, project_dir: str | Path | None
    ) -> None:
        asked = config.run.profile
        self._window = StepWindow.parse(asked.steps) if asked.steps != "" else None
        self._folder = Path(asked.dir or Path(project_dir or ".") / FOLDER)
        self._options = options
        self._modules, self._teraflops = asked.modules, asked.peak_teraflops
        self._sizes = ModelSizes()
        self._measured_in: Path | None = None  # the folder of the next measurement
        self._measurement: ModuleMeasurement | None = None
        self._taken = self._counted = 0
        self._stepped = False
        self._session: ProfileSession | None = None  # of the configuration's profile
        self._begun_at = 0
        self._step = ExitStack()  # the range of the step at hand

    # --- a profile of the script's ---

    @contextmanager
    def profiled(self, options: ProfileKwargs) -> Iterator[torch.profiler.profile]:
        """Context of a profile; see ``Accelerator.profile``."""
        session = self._started(options)
        try:
            yield session.profiler
        except BaseException:
            self._stop(session, together=False)
            raise
        self._stop(session, together=True)
        if session.folder is not None:
            self._finish(session)
            self._measured_in = session.folder if options.with_flops else None

    # --- the events of the run ---

    def attach(self, prepared: PreparedObjects, weights: WholeWeights, runs: Runs) -> None:
        """Take the objects of the run."""
        self._prepared, self._run = prepared, runs.default

    def before_prepare(self, model: nn.Module) -> None:
        """Note the sizes of a model."""
        if not self._prepared.models:  # the first one, perhaps after free_memory
            self._sizes = ModelSizes()
        self._sizes.add(model)

    def fetching(self, loader: DataLoader[Any]) -> None:
        """See that a batch is asked for."""
        self._turn()

    def handed_over(self, args: Any, kwargs: Mapping[str, Any], targets: Any) -> None:
        """See that a strategy is about to compute."""
        self._turn()

    def before_forward(self, entry: PreparedModel) -> None:
        """See that a model is about to compute."""
        self._turn()
        if self._measurement is not None:
            self._measurement.enter(entry.module)

    def after_step(self) -> None:
        """Note that an optimizer has stepped; another one may belong to the same step."""
        self._stepped = True

    def end(self) -> None:
        """End the profile with the run, and name missing steps. May be called more than once."""
        if self._window is None and self._measurement is None and self._measured_in is None:
            return
        failed = getattr(sys, "last_value", None) is not None  # its own error is what counts
        main = self._run.world.is_main and not failed
        if self._window is not None:
            self._end_window(main=main, failed=failed)
        if self._measurement is not None:
            self._measurement.close()
        if main and (self._measurement or self._measured_in):
            logger.warning(_NOT_MEASURED)
        self._measurement = self._measured_in = None

    def _end_window(self, *, main: bool, failed: bool) -> None:
        """End the configuration's profile, which the run did not finish."""
        self._count()
        window, self._window = self._window, None
        session, self._session = self._session, None
        if window is None or failed:
            return
        if session is None:
            if main:
                logger.warning(f"{_NOTHING.format(window=window, taken=self._taken)}")
            return
        self._stop(session, together=False)
        # Other ranks may have ended: nobody is waited for but by looking at their files.
        if session.write() and main:
            session.merge(wait_s=PARTS_S)
        if self._taken < window.last:
            if main:
                logger.warning(
                    f"the run ended after {self._taken} steps, and {window} were to be profiled: "
                    f"the profile has the first {self._taken - window.skipped} of them"
                )
        elif self._modules:
            self._measured_in = session.folder

    # --- turns ---

    def _turn(self) -> None:
        """Begin a step, if the last event ended the one before."""
        ended = self._count()
        window = self._window
        if window is not None:
            if self._session is None and self._taken >= window.skipped:
                self._session = self._started(self._options_here())
                return
            if self._session is not None and self._taken >= window.last:
                session, self._session, self._window = self._session, None, None
                self._stop(session, together=True)
                self._finish(session)
                self._measured_in = session.folder if self._modules else None
        if ended and is_profiled():
            self._mark()
        if self._measured_in is not None or self._measurement is not None:
            self._measure(ended=ended)

    def _measure(self, *, ended: bool) -> None:
        """Begin a measurement of modules, or go on with it where a step has ended."""
        if self._measured_in is not None:
            folder, self._measured_in = self._measured_in, None
            models = [entry.module for entry in self._prepared.models]
            self._measurement = ModuleMeasurement(
                folder, models, self._sizes, self._run, self._teraflops
            )
        elif self._measurement is not None and ended and not self._measurement.next_step():
            measurement, self._measurement = self._measurement, None
            measurement.write()
            wait_for_everyone()
            if self._run.world.is_main:
                measurement.merge()

    def _count(self) -> bool:
        """Count a step if it has ended; return whether it has."""
        if not self._stepped:
            return False
        self._stepped = False
        number = max((each.steps for each in self._prepared.optimizers), default=0)
        if number == self._counted:  # another optimizer of the same step
            return False
        self._counted = number
        self._taken += 1
        return True

    def _mark(self) -> None:
        self._step.close()
        self._step.enter_context(record_function(f"{STEP}{self._taken + 1}"))

    # --- sessions ---

    def _started(self, options: ProfileKwargs) -> ProfileSession:
        session = ProfileSession(options, self._prepared, self._run)
        session.start()
        self._count()
        self._begun_at = self._taken
        if is_profiled():
            self._mark()
        return session

    def _stop(self, session: ProfileSession, *, together: bool) -> None:
        self._step.close()
        self._count()
        session.steps = self._taken - self._begun_at
        with suppress(CollectiveError):
            session.stop(together=together)

    def _finish(self, session: ProfileSession) -> None:
        written = session.write()
        wait_for_everyone()
        if written and self._run.world.is_main:
            session.merge()

    def _options_here(self) -> ProfileKwargs:
        """Return the options with a new folder, the same on all ranks."""
        name = share_facts(
            str(_unused(self._folder)), str, doing="the choice of a folder for traces"
        )
        return replace(
            self._options, schedule_option=None, on_trace_ready=None, output_trace_dir=name
        )


_NOTHING = (
    "nothing was profiled: {window} were asked for, and the run ended after {taken}; ask for "
    "earlier steps, such as --profile 0:1"
)

_NOT_MEASURED = (
    "the work of modules was not measured: that takes the two steps after the profiled ones, and "
    "the run ended before"
)


def _unused(folder: Path) -> Path:
    """Return a folder, or the first of its name and a number, that holds nothing."""
    number, found = 1, folder
    while found.exists() and (not found.is_dir() or any(found.iterdir())):
        number += 1
        found = folder.with_name(f"{folder.name}-{number}")
    return found
