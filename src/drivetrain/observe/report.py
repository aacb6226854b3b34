"""The report of a run, as the script holds it: ``accelerator.report``."""

import operator
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drivetrain._version import __version__
from drivetrain.compression.methods import LinkMethods
from drivetrain.config import Resolved
from drivetrain.cost import ModelSpec
from drivetrain.errors import DrivetrainError, UsageError, in_words
from drivetrain.facade.exchange import Preemption
from drivetrain.facade.prepared import Observer, PreparedModel, RunState
from drivetrain.log import get_logger
from drivetrain.observe.figures import (
    REPORT,
    RUN,
    Journal,
    StartFolder,
    StepFigures,
    WorkFile,
    has_ended,
)
from drivetrain.observe.recorder import LinkLoad, StepRecorder
from drivetrain.runtime.board import DRAWING, board
from drivetrain.runtime.precision import DTYPES
from drivetrain.runtime.world import host_link, restarts, work_path
from drivetrain.strategy import Run, find_strategy

logger = get_logger(__name__)

DRAWING_S = 120.0
"""How long the drawing of a report may take; it is done in some seconds."""

COMPARED_STEPS = 200
"""Newest steps whose median is compared with a plan."""

LAST_LINES_S = 3.0
"""How long rank 0 waits for the last lines of other ranks before it draws."""

GIT_S = 2.0
"""The longest wait for git, which compares the whole tree with a commit."""

_SECRET = re.compile("token|secret|password|key", re.IGNORECASE)
"""In the name of an option: its value belongs into no file."""


class RunReport:
    """Keeps the figures of a run, and writes them where the run has a folder.

    A failure here never ends the training: it is said once, and recording stops.

    Args:
        state: of the run. Its configuration may switch recording off; without a folder for the
            project the newest figures are in memory alone.
        preemption: knows whether a scheduler's notice ends the run.

    Attributes:
        went_on_at: the step at which ``resume`` has found the run; None before.
        folder: this start of the script in the run's folder; None where nothing is written.
        observer: follows the steps.
    """

    def __init__(self, state: RunState, preemption: Preemption) -> None:
        self.went_on_at: int | None = None
        self._preemption, self._state = preemption, state
        config, run, project_dir = state.config, state.run, state.project.project_dir
        asked = config.run.report
        if asked and project_dir is None:
            raise UsageError(
                "expected a project_dir for the report that report: true asks for, found none; "
                "pass project_dir to the Accelerator, or leave report out"
            )
        self._config, self._run = config, run
        self._enabled = asked is not False
        self._newest: StepFigures | None = None
        self._links: list[LinkMethods] | None = None
        self._seconds: deque[float] = deque(maxlen=COMPARED_STEPS)
        self._listeners: list[Callable[[StepFigures], None]] = []
        self._finished = self._drawn = self._failed = False
        self.folder: StartFolder | None = None
        self._journal: Journal | None = None
        self._recorder = StepRecorder(state, self._take, self._stop)
        self.observer: Observer = self._recorder if self._enabled else Observer()
        # The launchers' rate is of hosts: it says nothing about links between declared islands.
        if run.world.is_main and not run.world.declared and (link := host_link()):
            self.listen(LinkLoad(run, link, logger.warning).take)
        if self._enabled and project_dir is not None:
            self.folder = StartFolder(Path(project_dir) / RUN / run.world.start)
            self._journal = Journal(self.folder.journal(run.world.rank), header_of(config, run))
        every_s = config.run.launch.straggler_every_s
        if self._enabled and every_s and (path := work_path()):
            self.listen(WorkFile(Path(path), every_s, header_of(config, run)).take)

    def __call__(self, **figures: float | Tensor) -> None:
        """Add figures of the script to the step at hand, such as ``report(accuracy=0.9)``.

        They are drawn by their names. ``samples`` and ``tokens`` take the place of the counts that
        are made of the rank's batches.

        Args:
            figures: numbers, or tensors with one element, which are read later.

        Raises:
            UsageError: a value of another kind.
        """
        for name, value in figures.items():
            number: object = value  # whatever a script gives
            fits, shape = isinstance(number, int | float), ""
            if isinstance(number, Tensor):
                fits, shape = number.numel() == 1, f" of shape {tuple(number.shape)}"
            if not fits:
                raise UsageError(
                    f"expected a number or a tensor with one element for report({name}=...), "
                    f"found {type(value).__name__}{shape}; texts go to accelerator.log()"
                )
        if self._enabled:
            self._recorder.add(figures)

    def latest(self) -> StepFigures | None:
        """Return the newest record of this rank; None before the first step has ended.

        A step ends when the next begins, and values of an accelerator come some steps later.
        """
        return self._newest

    def listen(self, listener: Callable[[StepFigures], None]) -> None:
        """Let a function have each record of this rank from now on; it must be quick."""
        self._listeners.append(listener)

    def section(self, name: str) -> AbstractContextManager[None]:
        """Context whose time counts for a section of the step, such as ``checkpoint``."""
        return self._recorder.section(name)

    def resumed(self, source: str) -> None:
        """Note that the run goes on from a checkpoint."""
        self._note("resumed", source=source)

    def close(self) -> None:
        """Finish, and draw the report on rank 0; the ranks need not do so together."""
        self.finish()
        if self.folder is None or self._drawn or self._newest is None or self._failed:
            return
        if self._preemption.agreed:  # who gave notice does not wait for a drawing
            return
        self._drawn = True
        if not self._run.world.is_main:
            return
        from drivetrain.observe.page import missing_packages

        if problem := missing_packages():
            logger.announce(f"{problem} {self.folder.path.parent}")
            return
        self._wait_for_other_ranks()
        board.enter(DRAWING)
        place = str(self.folder.path.parent)
        command = [sys.executable, "-m", "drivetrain.observe.page", place]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=DRAWING_S)  # noqa: S603 - our own program
        except (OSError, subprocess.SubprocessError) as error:
            said = str(getattr(error, "stderr", None) or error).strip().splitlines()[-1:]
            logger.warning(f"no report was made: {' '.join(said)}; try: drivetrain report {place}")
            return
        logger.announce(f"report of the run: {self.folder.path.parent / REPORT}")

    def _wait_for_other_ranks(self) -> None:
        """Give the ranks of this host a moment to write their last lines; they may have failed."""
        world, folder = self._run.world, self.folder
        mine = [rank for rank, host in enumerate(world.hosts) if host == world.hosts[world.rank]]
        until = time.monotonic() + LAST_LINES_S
        while folder is not None and time.monotonic() < until:
            if all(has_ended(folder.journal(rank)) for rank in mine):
                return
            time.sleep(0.05)

    def finish(self) -> None:
        """Write all that is known; may be called more than once."""
        if self._finished:
            return
        self._finished = True
        self._recorder.finish()
        if (plan := self._state.plan) is not None and self._seconds:
            measured = statistics.median(self._seconds)
            logger.announce(
                f"planned {plan.seconds * 1e3:,.2f} ms a step, measured {measured * 1e3:,.2f} ms "
                f"({plan.seconds / measured - 1:+.0%}){plan.hint}"
            )
        error = getattr(sys, "last_value", None)  # of the script, when it ends by an error
        if self._newest is not None or (self._journal is not None and self._journal.path.exists()):
            if error is None:
                self._note("ended", outcome="preempted" if self._preemption.agreed else "ended")
            else:
                self._note("failed", error=f"{type(error).__name__}: {error}"[:500])
        untrained = self._enabled and self._newest is None and error is None
        if untrained and self.went_on_at is not None and not self._preemption.agreed:
            logger.announce(
                f"nothing left to train: the run ended at step {self.went_on_at}; to train further "
                "raise the script's number of steps or epochs, or begin anew with "
                "launch.resume: never"
            )
        if self._journal is not None:
            self._journal.close()

    def _note(self, event: str, **facts: str) -> None:
        if self._journal is None:
            return
        try:
            self._journal.note(event, **facts)
        except OSError as error:
            self._stop(error)

    def _take(self, figures: StepFigures) -> None:
        """Keep a record, and hand it on."""
        if self._newest is not None:  # the first step also warms up
            self._seconds.append(figures.seconds / figures.steps)
        self._newest = figures
        if self.folder is not None and self._run.world.is_main:
            self._write_facts(self.folder)
        if self._journal is not None:
            self._journal.add(figures)
        for listener in self._listeners:
            listener(figures)

    def _write_facts(self, folder: StartFolder) -> None:
        """Write the facts at first, and again for other models or methods for slow links."""
        prepared = self._state.models
        links = [entry.strategy.run.links for entry in prepared]
        known = self._links
        if known is not None and len(links) <= len(known) and all(map(operator.is_, links, known)):
            return  # nothing was chosen or prepared since then; models may be forgotten at the end
        self._links = links
        folder.write_facts(facts_of(self._config, self._run, prepared))

    def _stop(self, error: Exception) -> None:
        """Write no more; the newest record is still there."""
        self._failed = True
        self._journal = None
        self._listeners.clear()
        logger.warning(
            f"the figures of the run are not recorded from here on: {in_words(error)}; report: "
            "false keeps the recorder out"
        )


# --- facts of a run besides its figures: configuration, environment, models, promised bytes ---


def facts_of(config: Resolved, run: Run, entries: Sequence[PreparedModel]) -> dict[str, Any]:
    """Return the facts of a run as JSON holds them.

    Args:
        config: the resolved configuration.
        run: the run of its strategy.
        entries: the prepared models.
    """
    return {
        "version": 1,
        "script": Path(sys.argv[0]).name,
        "started": {
            "command": shlex.join(_without_secrets(sys.argv)),
            "folder": str(Path.cwd()),
            "commit": _commit(),
        },
        "restarts": restarts(),
        "configuration": [
            {
                "key": key,
                "value": value,
                "origin": f"{origin.kind}: {origin.text}".removesuffix(": default"),
            }
            for key, value, origin in config.rows()
        ],
        "strategy": config.strategy,
        "precision": str(run.precision),
        "ranks": run.world.size,
        "mesh": {name: axis.size for name, axis in run.mesh.items()},
        "accumulation": run.accumulation,
        "hosts": list(dict.fromkeys(run.world.hosts)),
        "environment": {
            "drivetrain": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "system": platform.platform(),
            "device": run.world.device_name,
            "backend": run.world.backend or "none, one process",
            "threads of a rank": str(torch.get_num_threads()),
        },
        "models": [_described(entry) for entry in entries],
        "peak": _peak(run, [entry.given for entry in entries]),
    }


def header_of(config: Resolved, run: Run) -> dict[str, Any]:
    """Return the facts of one rank: who it is, where on the mesh, and who does the same work."""
    world = run.world
    strategy, options = find_strategy(config.strategy, config.strategy_config)
    stages = [name for name in strategy.planning().stages(options) if name in run.mesh]
    return {
        "peers": " ".join(f"{name}={run.mesh[name].rank}" for name in stages),
        "rank": world.rank,
        "host": world.hosts[world.rank],
        "device": world.device_name,
        "place": {name: axis.rank for name, axis in run.mesh.items()},
    }


def _without_secrets(words: Sequence[str]) -> Iterator[str]:
    """Yield a command line's words; those that an option of such a name takes are left out."""
    hidden = False
    for word in words:
        name, equals, _ = word.partition("=")
        secret = name.startswith("-") and _SECRET.search(name) is not None
        if hidden:
            yield "..."
        else:
            yield f"{name}=..." if secret and equals else word
        hidden = secret and not equals and not hidden


def _commit() -> str:
    """Return the commit of the folder at hand, with a mark of changes; "" outside of a checkout."""
    command = ("git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    try:
        done = subprocess.run(  # noqa: S603 - all words are our own
            command, capture_output=True, text=True, timeout=GIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):  # no git, or a tree that takes long to compare
        return ""
    return done.stdout.strip()


def _described(entry: PreparedModel) -> dict[str, Any]:
    """Return a model's size, and the bytes that its strategy promises to hold and send."""
    tensors = entry.given.parameters
    facts: dict[str, Any] = {
        "name": type(entry.model).__name__,
        "parameters": sum(each.numel for each in tensors),
        "trained": sum(each.numel for each in tensors if each.trainable),
        "strategy": type(entry.strategy).__name__,
    }
    try:
        promised = entry.promised(entry.states)
    except DrivetrainError as error:  # sizes alone may not be enough for a strategy
        return facts | {"no_promise": str(error).splitlines()[0]}
    return facts | {
        "held": dict(promised.held),
        "sent": {"/".join(key): count for key, count in promised.sent.items()},
        "uncounted": dict(promised.uncounted),
    }


def _peak(run: Run, models: Sequence[ModelSpec]) -> dict[str, Any] | None:
    """Return the published peak of this rank's device for the models' products; None without one.

    The dtype of products is that of the precision, or else that of most parameters.
    """
    if run.world.device.type == "cpu":
        return None
    from drivetrain.hardware.description import published_peak  # slow to load

    name = run.world.device_name
    elements: Counter[torch.dtype] = Counter()
    for each in (each for model in models for each in model.parameters):
        elements[each.dtype] += each.numel
    word = run.precision.compute or run.precision.param
    dtype = (
        DTYPES[word]
        if word
        else max(elements, key=lambda each: elements[each], default=torch.float32)
    )
    found = published_peak(name, dtype)
    if found is None:
        return None
    return {
        "device": name,
        "operations_per_second": found.operations_per_second,
        "of": found.precision + (", which fp8 may exceed" if run.precision.recipe else ""),
        "source": found.source,
    }
