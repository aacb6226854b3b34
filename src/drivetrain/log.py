"""Logging and progress that know the rank: one voice by default, all of them when asked.

The bar has the methods of tqdm's that training scripts call, and is drawn by rich.
"""

import functools
import logging
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import torch.distributed as dist

from drivetrain.availability import is_tqdm_available

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

T = TypeVar("T")
_PAUSE_S = 0.5
"""Steps of a bar nearer to each other than this are drawn together."""
_SCREENS_PER_S = 1
"""How often a terminal shows the bars anew: each time takes processor time."""
_BAR_WIDTH = 20
"""Characters of a bar, at most: an eighth of the line."""
_LINE_S = 30.0
"""Seconds between the lines of a bar that is written to a file, such as a batch job's log."""


def rank() -> int:
    """Return this process's rank; 0 before the ranks have joined."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def size() -> int:
    """Return the number of ranks; 1 before they have joined."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank_prefix() -> str:
    """Return ``[r3] `` on rank 3 of several, and nothing where there is only one."""
    return f"[r{rank()}] " if size() > 1 else ""


class RankLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose methods take ``main_process_only`` and ``in_order``.

    ``main_process_only=True`` (the default) logs on rank 0; False logs on every rank. ``in_order``
    logs on every rank, one after another, whatever ``main_process_only`` says; all ranks must take
    part, whatever their levels.
    """

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logger, {})
        self._said: set[str] = set()

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a message where ``main_process_only`` and ``in_order`` say."""
        main_only = kwargs.pop("main_process_only", True)
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1  # the caller's line, not this one
        if kwargs.pop("in_order", False):
            for turn in range(size()):
                if turn == rank():
                    super().log(level, msg, *args, **kwargs)
                if size() > 1:
                    dist.barrier()
        elif rank() == 0 or not main_only:
            super().log(level, msg, *args, **kwargs)

    def announce(self, msg: str) -> None:
        """Log at INFO on rank 0, or write to stderr where no handler shows lines of that level.

        So a handler alone hides no line: some libraries add one when they are imported (absl does,
        and TensorBoard imports absl). ``logging.getLogger("drivetrain").setLevel(logging.WARNING)``
        silences all of it.
        """
        if self.logger.hasHandlers() and self.logger.isEnabledFor(logging.INFO):
            self.info(msg, stacklevel=2)
        elif rank() == 0 and not self._is_silenced():
            print(f"{rank_prefix()}{msg}", file=sys.stderr, flush=True)  # noqa: T201

    def _is_silenced(self) -> bool:
        """Whether a script has chosen a level above INFO for this logger, or one around it.

        The root logger has one from the start.
        """
        logger: logging.Logger | None = self.logger
        while logger is not None and logger is not logging.root:
            if logger.level:
                return logger.level > logging.INFO
            logger = logger.parent
        return False

    def warning_once(self, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a warning the first time that this logger is given this message."""
        if str(msg) not in self._said:
            self._said.add(str(msg))
            kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
            self.warning(msg, *args, **kwargs)

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        """Put the rank before the message when there are several."""
        prefix = rank_prefix()
        return (f"{prefix}{msg}" if prefix else msg), kwargs


def get_logger(name: str, log_level: str | None = None) -> RankLogger:
    """Return a rank-aware logger.

    Args:
        name: usually ``__name__``.
        log_level: name of a level such as ``INFO``; None leaves the level alone.
    """
    logger = logging.getLogger(name)
    if log_level is not None:
        logger.setLevel(log_level.upper())
    return RankLogger(logger)


class Bar(Generic[T]):
    """A bar on standard error, from the first step on; where that is no terminal, a line at times.

    Args:
        iterable: yields the items of the loop; None for a bar that ``update`` moves.
        total: the number of steps; None asks the iterable for its length.
        desc: text before the bar.
        disable: count, but draw nothing.
        every: steps from line to line where there is no terminal; 0 writes a line at times.
        figures: gives a text for each drawing, which stands before that of ``set_postfix``.
    """

    def __init__(
        self,
        iterable: Iterable[T] | None = None,
        *,
        total: float | None = None,
        desc: str | None = None,
        disable: bool = False,
        every: int = 0,
        figures: Callable[[], str] = str,
    ) -> None:
        self.iterable = iterable
        self.total = total if total is not None else _length(iterable)
        self.n: float = 0
        self.desc = desc or ""
        self.disable = disable
        self._every = every
        self._figures = figures
        self._postfix = ""
        self._said_at: float = 0
        self._begun_at: float | None = None
        self._drawn_at = 0.0
        self._shown_line: _BarLine | None = None
        self._stop: Callable[[], object] | None = None

    def __iter__(self) -> Iterator[T]:
        try:
            self._draw()
            for item in self.iterable or ():
                yield item
                self.update()
        finally:
            self.close()

    def __len__(self) -> int:
        return int(self.total or 0)

    def __bool__(self) -> bool:
        # Without a known length it would be false, as an empty list is.
        return True

    def __enter__(self) -> Self:
        self._draw()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def update(self, n: float = 1) -> None:
        """Go on by ``n`` steps."""
        before, self.n = self.n, self.n + n
        if self._every and self.n // self._every > before // self._every:
            self._draw(due=True)
        elif time.monotonic() - self._drawn_at >= _PAUSE_S:
            self._draw()

    def set_description(self, desc: str | None = None, refresh: bool = True) -> None:
        """Set the text before the bar."""
        self.desc = desc or ""
        if refresh:
            self._draw()

    def set_postfix(self, ordered_dict: Any = None, refresh: bool = True, **values: object) -> None:
        """Set names and values after the bar; numbers to four digits."""
        shown = {**dict(ordered_dict or {}), **values}
        texts = (f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in shown.items())
        self.set_postfix_str(", ".join(texts), refresh)

    def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
        """Set the text after the bar."""
        self._postfix = s
        if refresh:
            self._draw()

    def refresh(self) -> None:
        """Draw the bar."""
        self._draw()

    def close(self) -> None:
        """Leave the bar on the screen, and draw no more."""
        if self._begun_at is not None:
            self._draw(last=True)
        if self._stop is not None:
            self._stop()
        self.disable = True

    @staticmethod
    def write(s: str, file: Any = None, end: str = "\n") -> None:
        """Print a line above the bars."""
        print(s, file=file or sys.stdout, end=end)

    def _draw(self, *, last: bool = False, due: bool = False) -> None:
        if self.disable:
            return
        now = time.monotonic()
        if self._begun_at is None:
            self._begun_at = self._drawn_at = now
        elapsed = now - self._begun_at
        if _console().is_terminal:
            self._drawn_at = now
            self._draw_bar(elapsed)
        elif self._writes_line(now, last=last, due=due):
            self._drawn_at, self._said_at = now, self.n
            print(self._line(elapsed), file=sys.stderr, flush=True)  # noqa: T201

    def _writes_line(self, now: float, *, last: bool, due: bool) -> bool:
        if self._every:
            return (last or due) and (self.n != self._said_at or not self.n)
        return last or now - self._drawn_at >= _LINE_S

    def _draw_bar(self, elapsed: float) -> None:
        if self._shown_line is None:
            self._shown_line = _BarLine(self.total, time.monotonic() - elapsed, self.desc)
            # Scripts forget to close bars; an open one would leave the terminal without a cursor.
            self._stop = weakref.finalize(self, _started(self._shown_line).stop)
        self._shown_line.done, self._shown_line.text = self.n, self._shown()
        self._shown_line.desc, self._shown_line.rate = self.desc, _rate(self.n, elapsed)

    def _shown(self) -> str:
        """Return the run's figures and the script's."""
        return ", ".join(filter(None, (self._figures(), self._postfix)))

    def _line(self, elapsed: float) -> str:
        """Return ``epoch 0: 120/1000, 3.2 it/s, 0:00:37 of 0:05:12, loss=0.03``."""
        count = f"{self.n:g}" if self.total is None else f"{self.n:g}/{self.total:g}"
        clock = _clock(elapsed)
        if self.total and 0 < self.n < self.total:
            clock += f" of {_clock(elapsed * self.total / self.n)}"
        rest = ", ".join(filter(None, (count, _rate(self.n, elapsed), clock, self._shown())))
        return f"{self.desc}: {rest}" if self.desc else rest


def _length(iterable: Iterable[Any] | None) -> int | None:
    try:
        return len(iterable)  # type: ignore[arg-type]
    except TypeError:
        return None


def _rate(count: float, seconds: float) -> str:
    """Return steps per second, or seconds per step where these are the larger number."""
    if not count or not seconds:
        return ""
    rate = count / seconds
    return f"{rate:.3g} it/s" if rate >= 1 else f"{1 / rate:.3g} s/it"


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


@dataclass(slots=True)
class _BarLine:
    """The line of a bar on a terminal, which rich asks for.

    A table of rich's columns would take four times the processor time.

    Attributes:
        total: steps; None: not known.
        begun: when the bar began, on the monotonic clock.
        desc: before the bar; cut where the line has no room for it beside the text.
        done: steps so far.
        rate: steps per second, as text.
        text: after the bar, the count and the times; cut at the end of the line.
    """

    total: float | None
    begun: float
    desc: str
    done: float = 0
    rate: str = ""
    text: str = ""

    def __rich__(self) -> "Text":
        from rich.text import Text

        elapsed = time.monotonic() - self.begun
        clock, count, full = _clock(elapsed), f"{self.done:g}", 0
        wide = _console().width
        bar = max(5, min(_BAR_WIDTH, wide // 8))
        if self.total:
            count += f"/{self.total:g}"
            full = round(bar * min(1.0, self.done / self.total))
            if 0 < self.done < self.total:
                clock += f" of {_clock(elapsed * self.total / self.done)}"
        mark = "-" if _console().options.ascii_only else "━"
        rate = f" {self.rate}" if self.rate else ""
        room = wide - bar - len(f"  {count}{rate} {clock} ")
        desc = Text(self.desc)  # at least half of the room is left to the text
        desc.truncate(max(1, room // 2, room - len(self.text)), overflow="ellipsis")
        return Text.assemble(
            desc,
            " " if self.desc else "",
            (mark * full, "bar.complete"),
            (mark * (bar - full), "bar.back"),
            (f" {count}", "progress.download"),
            rate,
            (f" {clock} ", "progress.elapsed"),
            self.text,
            no_wrap=True,
            overflow="ellipsis",
        )


def _started(line: _BarLine) -> "Live":
    # Imported here: a run without bars does without rich.
    from rich.live import Live

    live = Live(
        line,
        console=_console(),
        refresh_per_second=_SCREENS_PER_S,
        redirect_stdout=sys.stdout.isatty(),  # a script's redirection to a file stays
    )
    live.start(refresh=True)
    return live


@functools.cache
def _console() -> "Console":
    """Return the console that all bars share: only then can one stand below another."""
    from rich.console import Console

    return Console(stderr=True)


def progress(
    iterable: Iterable[T], *, total: float | None = None, desc: str = "", disable: bool = False
) -> Bar[T]:
    """Return the iterable with a progress bar on the main process.

    Args:
        iterable: yields the items of the loop.
        total: its length, when it does not know it.
        desc: text before the bar.
        disable: iterate without a bar.
    """
    return Bar(iterable, total=total, desc=desc, disable=disable or rank() != 0)


def tqdm(
    iterable: Iterable[Any] | None = None,
    *args: Any,
    main_process_only: bool = True,
    **kwargs: Any,
) -> Any:
    """Return tqdm's bar when tqdm is installed, else ours, which has the same common methods.

    Args:
        iterable: yields the items of the loop; None for a bar that ``update`` moves.
        args: arguments of tqdm: desc, total, leave.
        main_process_only: show the bar on rank 0 only.
        kwargs: keyword arguments of tqdm; ours knows desc, total and disable, and lets the rest be.
    """
    hidden = bool(kwargs.pop("disable", False)) or (main_process_only and rank() != 0)
    if is_tqdm_available():
        from tqdm.auto import tqdm as real  # type: ignore[import-untyped, unused-ignore]

        return real(iterable, *args, disable=hidden, **kwargs)
    named = {**dict(zip(("desc", "total"), args, strict=False)), **kwargs}
    return Bar(iterable, total=named.get("total"), desc=named.get("desc"), disable=hidden)
