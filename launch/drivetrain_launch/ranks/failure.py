"""How a run ends: which rank failed first and how the user is told, or the launcher's signals.

When one rank fails, its neighbors lose their connections and fail too, and the launcher stops the
rest: only the first failure is worth reading. One host's launcher judges alone; of several hosts,
host 0 judges from what all of them report.

Signals to the launcher end a wait at once, or reach the loop that watches ranks.
"""

import dataclasses
import json
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from pydantic import TypeAdapter

from drivetrain.errors import CheckpointError, CollectiveError, ConfigError, NonFiniteError
from drivetrain.runtime.board import NOTICES, PREEMPTED, SAME_NOTICE_S, EarlyNotice
from drivetrain_launch.ranks.watch import Hang

# --- ranks that fail ---

KILLED = 6
"""Exit code of the launcher when a signal killed the first failing rank."""

NO_PROGRESS = 93
"""Exit code of a run that failed again and again and saved nothing new: do not start it again."""

CANNOT_HEAL = frozenset(
    {ConfigError.exit_code, CheckpointError.exit_code, NonFiniteError.exit_code, NO_PROGRESS}
)
"""Exit codes of errors that a restart would only repeat."""

MOST_IDLE = 3
"""As many attempts in a row may fail without a newer checkpoint."""

SAME_MOMENT_S = 5.0
"""Errors this close together may have one cause; a lost connection is never taken for the cause."""

LONGEST_TEXT = 20_000
"""Characters of a traceback, its end, that one host sends to the others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEnd:
    """How one rank ended.

    Attributes:
        rank: its global rank.
        host: the name of its host.
        pid: its process id.
        code: its exit code; -N when signal N killed it; of a failure 0 for a process that does not
            end.
        time: of the rank's error, or else of the moment when its end was noticed; seconds since the
            epoch, by the clock of the host that judges.
        summary: the last line of the traceback, or "".
        traceback: the traceback, or "".
        collateral: whether it failed because another rank failed.
    """

    rank: int
    host: str
    pid: int
    code: int
    time: float
    summary: str = ""
    traceback: str = ""
    collateral: bool = False

    @property
    def exit_code(self) -> int:
        """Exit code of the launcher where this is the first failure."""
        return self.code if self.code > 0 else KILLED

    @property
    def ending(self) -> str:
        """Exit code or signal, in words."""
        if not self.code:
            return "the process does not end"
        if self.code > 0:
            return f"exit code {self.code}"
        try:
            name = signal.Signals(-self.code).name
        except ValueError:
            name = f"signal {-self.code}"
        if -self.code == signal.SIGKILL:
            name += "; the system kills a process like this when it is out of memory"
        return f"killed by {name}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How the ranks of one host ended in one attempt.

    Attributes:
        failures: ranks that failed.
        ended: ranks that ended by themselves with 0 or ``PREEMPTED``.
        stopped: ranks that the launcher stopped, because another rank had failed or a signal came.
        signal: number of the signal that asked this launcher to end; 0 without any.
        noticed: whether a scheduler's notice came to this launcher.
        saved: optimizer steps in the newest checkpoint that ranks of this launcher have saved, -1
            without any; None where no rank tells, since rank 0 is elsewhere or the script made no
            Accelerator.
    """

    failures: tuple[RankEnd, ...] = ()
    ended: tuple[RankEnd, ...] = ()
    stopped: tuple[int, ...] = ()
    signal: int = 0
    noticed: bool = False
    saved: int | None = None

    @property
    def whole(self) -> bool:
        """Whether each rank ended by itself, without a failure."""
        return not self.failures and not self.stopped

    def to_json(self) -> dict[str, Any]:
        """Return plain values for another host: moments as ages, since clocks of hosts differ."""
        failures = (replace(one, traceback=one.traceback[-LONGEST_TEXT:]) for one in self.failures)
        return dataclasses.asdict(replace(self, failures=tuple(failures))._by_age())

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Ending":
        """Read the values of ``to_json``, with moments by this host's clock."""
        return TypeAdapter(cls).validate_python(dict(values))._by_age()

    def _by_age(self) -> "Ending":
        """Return the ending with ages for moments, or with moments for ages."""
        now = time.time()
        return replace(
            self,
            failures=tuple(replace(one, time=now - one.time) for one in self.failures),
            ended=tuple(replace(one, time=now - one.time) for one in self.ended),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The consequence of an attempt, for every host alike.

    Attributes:
        text: for the user; "" when there is nothing to say.
        code: exit code of the launcher, unless the ranks start again.
        again: whether all ranks start again.
    """

    text: str = ""
    code: int = 0
    again: bool = False


class RunOver(Exception):  # noqa: N818 - no error: a run may end well
    """The run has ended while this launcher waited for a place in it.

    Attributes:
        code: exit code of the run.
    """

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


def judge(
    endings: Mapping[int, Ending],
    restarts_left: int,
    lost: Mapping[int, str] | None = None,
    *,
    idle: int = 0,
) -> Verdict:
    """Return the verdict on an attempt from the endings of its hosts.

    Args:
        endings: by the host's index, of all hosts that still answer.
        restarts_left: how often the ranks may start again.
        lost: a sentence on each host that does not answer, by its index.
        idle: attempts in a row, this one included, that have saved nothing new.
    """
    failures = [failure for ending in endings.values() for failure in ending.failures]
    ended = [end for ending in endings.values() for end in ending.ended]
    codes = {end.code for end in ended}
    asked = next((ending.signal for ending in endings.values() if ending.signal), 0)
    whole = not lost and all(ending.whole for ending in endings.values())
    if whole and PREEMPTED in codes and (codes == {PREEMPTED} or not asked):
        return Verdict(text=f"the ranks ended with exit code {PREEMPTED}: saved", code=PREEMPTED)
    if asked:
        text = f"stopped by {signal.Signals(asked).name}"
        causes = [failure for failure in failures if not failure.collateral]
        text = f"{text}\n{report(failures, ended)[0]}" if causes else text
        return Verdict(text=text, code=128 + asked)
    if whole:
        return Verdict()
    stopped = [rank for ending in endings.values() for rank in ending.stopped]
    if lost and all(failure.collateral for failure in failures):
        text, code = "\n".join(lost.values()), CollectiveError.exit_code
    else:
        text, code = report(failures, ended, stopped)
    if idle >= MOST_IDLE and code not in CANNOT_HEAL:
        text += f"\nno restart: {idle} attempts in a row have failed and saved no newer checkpoint"
        return Verdict(text=text, code=NO_PROGRESS)
    again = restarts_left > 0 and code not in CANNOT_HEAL
    if again:
        text += f"\nstarting all ranks again; {restarts_left - 1} restarts left after this one"
    elif restarts_left > 0:
        text += f"\nno restart: an error with exit code {code} would only come again"
    return Verdict(text=text, code=code, again=again)


class IdleAttempts:
    """Counts the attempts of a run that have failed and saved nothing new.

    A checkpoint is newer than another one if it holds more optimizer steps. A run whose script
    makes no Accelerator tells nothing, and never counts as idle.
    """

    def __init__(self) -> None:
        self._newest = -1
        self._idle = 0

    def after(self, endings: Iterable[Ending]) -> int:
        """Return how many attempts in a row were idle, the one with these endings included."""
        told = [ending.saved for ending in endings if ending.saved is not None]
        newest = max(told, default=-1)
        self._idle = 0 if newest > self._newest or not told else self._idle + 1
        self._newest = max(self._newest, newest)
        return self._idle


def read_end(rank: int, host: str, pid: int, code: int, noticed: float, path: Path) -> RankEnd:
    """Describe the end of a rank, with the error in the rank's file, if any."""
    try:
        message = json.loads(path.read_text(encoding="utf-8"))["message"]
    except (OSError, ValueError, KeyError):
        message = {}
    details = message.get("extraInfo", {})
    return RankEnd(
        rank=rank,
        host=host,
        pid=pid,
        code=code,
        time=float(details.get("time", noticed)),
        summary=str(message.get("message", "")),
        traceback=str(details.get("py_callstack", "")),
        collateral=bool(details.get("collateral", False)),
    )


def first(failures: Iterable[RankEnd]) -> RankEnd:
    """Return the failure that caused the others.

    The earliest failure counts; but a rank that lost its peers gives way to a rank that failed for
    another reason at about the same time.
    """
    ordered = sorted(failures, key=lambda failure: (failure.time, failure.rank))
    earliest = ordered[0]
    if earliest.collateral:
        for failure in ordered:
            if not failure.collateral and failure.time - earliest.time <= SAME_MOMENT_S:
                return failure
    return earliest


def report(
    failures: Iterable[RankEnd], ended: Iterable[RankEnd] = (), stopped: Iterable[int] = ()
) -> tuple[str, int]:
    """Describe the failures of an attempt.

    Args:
        failures: at least one.
        ended: ranks that ended without a failure.
        stopped: ranks that the launchers stopped.

    Returns:
        The text for the user, the first failure in front, and the launcher's exit code.
    """
    found = list(failures)
    root = first(found)
    lines = [_headline(root, ended)]
    lines += ["  " + line for line in (root.traceback or root.summary).rstrip().splitlines()]
    rest = sorted((failure for failure in found if failure is not root), key=lambda f: f.rank)
    lines += [
        f"rank {failure.rank} failed, too: {failure.summary}"
        for failure in rest
        if failure.summary and not failure.collateral and failure.summary != root.summary
    ]
    others = sorted({failure.rank for failure in rest} | set(stopped))
    if others:
        plural = "s" if len(others) > 1 else ""
        lines.append(f"stopped with it: rank{plural} {', '.join(map(str, others))}")
    return "\n".join(lines), root.exit_code


def _headline(root: RankEnd, ended: Iterable[RankEnd]) -> str:
    """Name the rank that failed first, or the rank that left early and made another one fail."""
    left = sorted(ended, key=lambda end: (end.time, end.rank))
    where = f"host {root.host}, pid {root.pid}, {root.ending}"
    if not root.collateral or not left:
        return f"rank {root.rank} failed first ({where})"
    gone = left[0]
    return (
        f"rank {gone.rank} ended too early (host {gone.host}, exit code {gone.code}): rank "
        f"{root.rank} waited for it and failed ({where}); each rank must make as many steps: look "
        f"for a loader that is shorter on rank {gone.rank}, or for a condition on the rank"
    )


# --- a hang that ends the run is a failure ---


def board_of(private: Path, rank: int) -> Path:
    """Return the file in which a rank shows where it is."""
    return private / f"rank-{rank}.board"


def blamed(ending: Ending, hang: Hang | None) -> Ending:
    """Return the ending with a hang as its failure, if a hang ended the run."""
    if hang is None:
        return ending
    rank = (hang.culprits or hang.waiting)[0]
    view = hang.views[rank]
    failure = RankEnd(
        rank=rank,
        host=view.host,
        pid=view.pid,
        code=CollectiveError.exit_code,
        time=time.time() - hang.waited_s,
        summary=hang.sentence(),
    )
    stopped = tuple(each for each in ending.stopped if each != rank)
    return replace(ending, failures=(failure, *ending.failures), stopped=stopped)


# --- signals to the launcher ---

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals after which the launcher ends."""


class Stopped(BaseException):
    """A signal asked the launcher to end while no ranks ran."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
        self.code = 128 + number


class Signals:
    """The launcher's handlers, from its start to its end.

    While the launcher does not record signals, one that ends the launcher raises ``Stopped``.
    SIGUSR1 is kept until ranks are there to hear it.
    """

    def __init__(self) -> None:
        self._recording = False
        self._deaf = False
        self._pending: list[int] = []
        self._last: dict[int, float] = {}
        self._before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def __enter__(self) -> "Signals":
        for number in {*NOTICES, *ENDING}:
            before = self._before[number] = signal.signal(number, self._come)
            if isinstance(before, EarlyNotice) and before.came:
                self.keep(number)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def record(self, recording: bool) -> None:
        """Keep all signals for ``take``, or raise ``Stopped`` again at the signals of ``ENDING``.

        Raises:
            Stopped: such a signal was kept, and nobody took it.
        """
        self._recording = recording
        self.check()

    def check(self) -> None:
        """Raise Stopped if a signal is kept that ends the launcher."""
        for number in self._pending:
            if number in ENDING:
                raise Stopped(number)

    def keep(self, number: int) -> None:
        """Let the next ``take`` return a signal, although none came."""
        self._pending.append(number)

    def ignore(self) -> None:
        """Let nothing interrupt the last clean-up, which takes a moment and starts nothing."""
        self._deaf = True

    def take(self) -> list[int]:
        """Return the signals that came since the last call."""
        taken, self._pending = self._pending, []
        return taken

    def _come(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        repeated = now - self._last.get(number, -SAME_NOTICE_S) < SAME_NOTICE_S
        self._last[number] = now
        if self._deaf or (repeated and number in NOTICES):
            return
        if number in ENDING and not self._recording:
            raise Stopped(number)
        self.keep(number)
