"""A progress bar with the methods of tqdm's that training scripts call, drawn by rich."""

import functools
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

T = TypeVar("T")
_PAUSE_S = 0.05
"""Steps nearer to each other than this are drawn together."""


class Bar(Generic[T]):
    """A bar on standard error; drawn from the first step on, and only if it is shown.

    Args:
        iterable: yields the items of the loop; None for a bar that ``update`` moves.
        total: the number of steps; None asks the iterable for its length.
        desc: text before the bar.
        disable: count, but draw nothing.
    """

    def __init__(
        self,
        iterable: Iterable[T] | None = None,
        *,
        total: float | None = None,
        desc: str | None = None,
        disable: bool = False,
    ) -> None:
        self.iterable = iterable
        self.total = total if total is not None else _length(iterable)
        self.n: float = 0
        self.desc = desc or ""
        self.disable = disable
        self._postfix = ""
        self._drawn_at = 0.0
        self._progress: Progress | None = None
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def update(self, n: float = 1) -> None:
        """Go on by ``n`` steps."""
        self.n += n
        if time.monotonic() - self._drawn_at >= _PAUSE_S:
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
        if self._stop is not None:
            self._draw()
            self._stop()
        self.disable = True

    @staticmethod
    def write(s: str, file: Any = None, end: str = "\n") -> None:
        """Print a line above the bars."""
        print(s, file=file or sys.stdout, end=end)

    def _draw(self) -> None:
        if self.disable:
            return
        if self._progress is None:
            self._progress = _started(self.total)
            # Scripts forget to close bars; an open one would leave the terminal without a cursor.
            self._stop = weakref.finalize(self, self._progress.stop)
        self._drawn_at = time.monotonic()
        self._progress.update(
            self._progress.task_ids[0],
            completed=self.n,
            description=self.desc,
            postfix=self._postfix,
        )


def _length(iterable: Iterable[Any] | None) -> int | None:
    try:
        return len(iterable)  # type: ignore[arg-type]
    except TypeError:
        return None


def _started(total: float | None) -> "Progress":
    # Imported here: a run without bars does without rich.
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    progress = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[postfix]}", markup=False),
        console=_console(),
        redirect_stdout=sys.stdout.isatty(),  # a script's redirection to a file stays
    )
    progress.add_task("", total=total, postfix="")
    progress.start()
    return progress


@functools.cache
def _console() -> "Console":
    """Return the console that all bars share: only then can one stand below another."""
    from rich.console import Console

    return Console(stderr=True)
