"""Finds the line of the user's script that a thread is at, behind the frames of libraries."""

import sys
import threading
from pathlib import Path
from types import FrameType

_LIBRARIES = frozenset(
    {"drivetrain", "torch", "contextlib", "threading", "concurrent", "functools", "accelerate"}
)
"""Top-level modules that are not the script."""


def script_line(*, main: bool = False) -> str:
    """Return ``file:line`` of the innermost frame of the script, "" without one.

    Args:
        main: look at the main thread, whichever thread this is.
    """
    frame: FrameType | None = sys._getframe(1)
    if main:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        top = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if top not in _LIBRARIES and not top.startswith("drivetrain_"):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
