"""Where the ranks' output goes: the console, and files where the user wants them.

Rank 0 writes to the console itself, so that its progress bars work. Of the other ranks the console
shows the error stream, the rank in front of each line; a pipe carries it, so that a long run fills
no disk. With a folder for logs, every stream of every rank is a file there, which the console
follows.
"""

import itertools
import os
import sys
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TextIO

from torch.distributed.elastic.multiprocessing.tail_log import TailLog

from drivetrain_launch.console import say

LAST_LINES_S = 1.0
"""How long the end of an attempt waits for lines; a rank's child may hold the stream for ever."""

LONGEST_LINE = 65536
"""Characters after which a line is shown although it goes on."""


@dataclass(frozen=True, slots=True)
class Streams:
    """The files that a rank gets as its output; None is the console.

    Attributes:
        stdout: the output stream.
        stderr: the error stream.
    """

    stdout: IO[bytes] | None
    stderr: IO[bytes] | None


class Output:
    """The output of the ranks of one attempt.

    Args:
        folder: for one file per rank and stream, or None.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._given = ExitStack()
        self._pipes: dict[int, TextIO] = {}
        self._threads: list[threading.Thread] = []
        self._followed: dict[TextIO, dict[int, str]] = {sys.stdout: {}, sys.stderr: {}}
        self._tails: list[TailLog] = []
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    @property
    def keeps(self) -> bool:
        """Whether the output is kept in files."""
        return self._folder is not None

    def streams(self, rank: int) -> Streams:
        """Open the streams of a rank, before it starts."""
        if self._folder is not None:
            return self._files(rank, self._folder)
        if rank == 0:
            return Streams(None, None)
        read, write = os.pipe()
        self._pipes[rank] = os.fdopen(read, encoding="utf-8", errors="replace")
        quiet = self._given.enter_context(open(os.devnull, "wb"))  # noqa: SIM115, PTH123
        return Streams(quiet, self._given.enter_context(os.fdopen(write, "wb")))

    def follow(self) -> None:
        """Show lines from now on: all ranks have started, and have their streams."""
        self._given.close()
        for rank, pipe in self._pipes.items():
            thread = threading.Thread(target=_copy, args=(pipe, _prefix(rank)), daemon=True)
            thread.start()
            self._threads.append(thread)
        for console, files in self._followed.items():
            prefixes = {rank: _prefix(rank) for rank in files}
            self._tails.append(TailLog("rank", files, console, prefixes).start())

    def finish(self) -> None:
        """Show the last lines of ranks that have ended."""
        self._given.close()
        for thread in self._threads:
            thread.join(LAST_LINES_S)
        for tail in self._tails:
            tail.stop()

    def _files(self, rank: int, folder: Path) -> Streams:
        paths = [folder / f"rank-{rank}.{stream}.log" for stream in ("stdout", "stderr")]
        for path in paths:
            keep_earlier(path)
        if rank == 0:
            self._followed[sys.stdout][rank] = str(paths[0])
        self._followed[sys.stderr][rank] = str(paths[1])
        return Streams(*(self._given.enter_context(path.open("wb")) for path in paths))


def keep_earlier(path: Path) -> None:
    """Give a file of an earlier run another name: ``x.log`` becomes ``x.1.log``, then ``x.2.log``.

    Only this launcher writes the file, so that nobody else renames it.
    """
    if not path.exists():
        return
    names = (path.with_suffix(f".{number}{path.suffix}") for number in itertools.count(1))
    path.rename(next(name for name in names if not name.exists()))


def _prefix(rank: int) -> str:
    return f"[rank{rank}]: "


def _copy(pipe: TextIO, prefix: str) -> None:
    with pipe:
        while line := pipe.readline(LONGEST_LINE):
            say(prefix + line.removesuffix("\n"))
