"""A scheduler's notice that the run must end soon: SIGTERM or SIGUSR1, heard as a flag.

Schedulers send SIGTERM, or SIGUSR1 some time before a limit, and kill later. Whoever listens
finishes the step at hand and saves; a second SIGTERM, a while after the first, ends the process.
"""

import os
import signal
import threading
import time
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from drivetrain.runtime.board import board

NOTICES = (signal.SIGTERM, signal.SIGUSR1)

PREEMPTED = 75
"""Exit code of a run that has saved after a notice, and asks to be started again (EX_TEMPFAIL)."""

SAME_NOTICE_S = 2.0
"""A rank may hear one notice twice, from the scheduler and from the launcher, within this time."""


class EarlyNotice:
    """A handler with which a process begins, until a listener takes its place: SIGUSR1 ends nobody.

    The launcher's ranks begin with it, and so does a launcher on a host that ssh has reached.

    Attributes:
        came: whether a signal came, which the listener then hears.
    """

    def __init__(self) -> None:
        self.came = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Keep the signal."""
        self.came = True


@dataclass(eq=False)
class Notice:
    """The notice that this process has heard, if any.

    Attributes:
        heard: name of the signal, "" as long as there was none.
    """

    heard: str = ""
    _first: float = 0.0
    _process: int = field(default_factory=os.getpid)
    _parent: int = field(default_factory=os.getppid)
    _before: dict[signal.Signals, Any] = field(default_factory=dict)

    def listen(self) -> None:
        """Handle the signals for which the script has no handler of its own.

        Several listeners of a process hear the same signal, also one that came before them to an
        ``EarlyNotice``. Only the main thread can listen; from another one nothing changes.
        """
        if threading.current_thread() is not threading.main_thread() or self._before:
            return
        for number in NOTICES:
            before = signal.getsignal(number)
            free = before is signal.SIG_DFL or isinstance(before, EarlyNotice)
            if free or isinstance(getattr(before, "__self__", None), Notice):
                self._before[number] = before
                signal.signal(number, self._hear)
            if isinstance(before, EarlyNotice) and before.came:
                self._hear(number, None)

    def close(self) -> None:
        """Give the signals the actions back that they had."""
        for number, before in self._before.items():
            if signal.getsignal(number) == self._hear:
                signal.signal(number, before)
        self._before = {}

    def _hear(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        again = bool(self.heard) and now - self._first > SAME_NOTICE_S
        in_child = os.getpid() != self._process
        # Without its launcher a rank ends: nobody waits for its checkpoint.
        orphaned = os.getppid() != self._parent
        # After another rank's failure the launcher ends this one: that is no scheduler's notice.
        ends = again or in_child or orphaned or board.stop_asked
        if number == signal.SIGTERM and ends:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if not self.heard and not in_child:
            self.heard, self._first = signal.Signals(number).name, now
        before = self._before.get(signal.Signals(number))
        if callable(before):
            before(number, frame)
