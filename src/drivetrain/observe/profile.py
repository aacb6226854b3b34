"""Profiles: the steps of a run followed and marked, and torch's profiler on all ranks.

A step ends where the next one begins, or where the run ends; its evaluation and its checkpoint
belong to it. All ranks begin and end a profile at the same event. The work and the times of modules
are measured in the two steps after the profiled ones.

What makes a profile, and what measures modules, is loaded when a run asks for one.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.profiler import record_function
from torch.utils.data import DataLoader

from drivetrain.collectives.facts import share_facts
from drivetrain.communication import wait_for_everyone
from drivetrain.errors import CollectiveError, ConfigError
from drivetrain.facade.prepared import Observer, PreparedModel, RunState
from drivetrain.facade.settings import ProfileKwargs
from drivetrain.log import get_logger
from drivetrain.model.modules import ModelSizes
from drivetrain.runtime.ranges import STEP, is_profiled

if TYPE_CHECKING:
    from drivetrain.observe.modules import ModuleMeasurement
    from drivetrain.observe.trace import ProfileSession

logger = get_logger(__name__)

FOLDER = "profile"
"""Name of a profile's folder, unless the configuration has another."""


PARTS_S = 60.0
"""How long rank 0 waits for the parts of ranks whose run has ended, too."""

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
        state: of the run. Its profile goes into the folder of the project, or that of the process.
    """

    def __init__(self, state: RunState) -> None:
        asked, project_dir = state.config.run.profile, state.project.project_dir
        self._state = state
        self._window = StepWindow.parse(asked.steps) if asked.steps != "" else None
        self._folder = Path(asked.dir or Path(project_dir or ".") / FOLDER)
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

    def before_prepare(self, model: nn.Module) -> None:
        """Note the sizes of a model."""
        if not self._state.models:  # the first one, perhaps after free_memory
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
            self._measurement.enter(entry.model)

    def after_step(self) -> None:
        """Note that an optimizer has stepped; another one may belong to the same step."""
        self._stepped = True

    def end(self) -> None:
        """End the profile with the run, and name missing steps. May be called more than once."""
        if self._window is None and self._measurement is None and self._measured_in is None:
            return
        failed = getattr(sys, "last_value", None) is not None  # its own error is what counts
        main = self._state.world.is_main and not failed
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
        from drivetrain.observe.modules import ModuleMeasurement

        if self._measured_in is not None:
            folder, self._measured_in = self._measured_in, None
            models = [entry.model for entry in self._state.models]
            self._measurement = ModuleMeasurement(
                folder, models, self._sizes, self._state.run, self._teraflops
            )
        elif self._measurement is not None and ended and not self._measurement.next_step():
            measurement, self._measurement = self._measurement, None
            measurement.write()

    def _count(self) -> bool:
        """Count a step if it has ended; return whether it has."""
        if not self._stepped:
            return False
        self._stepped = False
        number = self._state.steps
        if number == self._counted:  # another optimizer of the same step
            return False
        self._counted = number
        self._taken += 1
        return True

    def _mark(self) -> None:
        self._step.close()
        self._step.enter_context(record_function(f"{STEP}{self._taken + 1}"))

    # --- sessions ---

    def _started(self, options: ProfileKwargs) -> "ProfileSession":
        from drivetrain.observe.trace import ProfileSession

        session = ProfileSession(options, self._state)
        session.start()
        self._count()
        self._begun_at = self._taken
        if is_profiled():
            self._mark()
        return session

    def _stop(self, session: "ProfileSession", *, together: bool) -> None:
        self._step.close()
        self._count()
        session.steps = self._taken - self._begun_at
        with suppress(CollectiveError):
            session.stop(together=together)

    def _finish(self, session: "ProfileSession") -> None:
        written = session.write()
        wait_for_everyone()
        if written and self._state.world.is_main:
            session.merge()

    def _options_here(self) -> ProfileKwargs:
        """Return the options with a new folder, the same on all ranks."""
        name = share_facts(
            str(_unused(self._folder)), str, doing="the choice of a folder for traces"
        )
        return replace(
            self._state.handlers.profile,
            schedule_option=None,
            on_trace_ready=None,
            output_trace_dir=name,
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
