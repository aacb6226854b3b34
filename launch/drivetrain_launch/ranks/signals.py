"""Signals to the launcher: they end a wait at once, or reach the loop that watches ranks."""

import signal
import time
from collections.abc import Callable
from types import FrameType, TracebackType

from drivetrain.runtime.board import NOTICES, SAME_NOTICE_S, EarlyNotice

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> None:
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
