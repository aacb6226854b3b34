"""Worker processes of a loader live through a scheduler's notice: the rank still needs batches.

Schedulers signal all processes of a job. A worker that died of it would fail the rank before the
rank has saved.
"""

import signal
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import TypeAlias

WorkerStart: TypeAlias = Callable[[int], None] | None
"""A loader's ``worker_init_fn``."""


def outliving_notices(start: WorkerStart) -> Callable[[int], None]:
    """Return a ``worker_init_fn`` whose workers live through a notice.

    A second SIGTERM ends a worker: python sends one more to a worker that does not end.
    """
    return partial(_start, start)


def _start(start: WorkerStart, worker: int) -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _ignore_once)
    if start is not None:
        start(worker)


def _ignore_once(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
