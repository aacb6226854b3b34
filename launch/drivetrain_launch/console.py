"""Lines for the console of the launcher; a console that is gone ends no run."""

import errno
import os
import sys
from typing import IO

GONE = (errno.EPIPE, errno.EIO)
"""Errors of a console for good: its reader, such as head, or its terminal is gone."""


def show(text: str, console: IO[str]) -> None:
    """Write a line. Where it cannot be written, it is lost, and the run goes on."""
    try:
        console.write(f"{text}\n")
        console.flush()
    except OSError as error:
        if error.errno in GONE:
            _silence(console)


def say(text: str) -> None:
    """Write a line to the error stream."""
    show(text, sys.stderr)


def _silence(console: IO[str]) -> None:
    """Throw later text of the process away: writing it is no error."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, console.fileno())
    os.close(nothing)
