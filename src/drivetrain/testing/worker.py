"""The life of one process that runs the ranks of tests: started once, fed through a pipe.

Closing the pipe ends the process at once: no rank outlives the pytest process, even a killed one.
"""

import faulthandler
import gc
import os
import queue
import signal
import sys
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from drivetrain.testing.messages import RankTest, Ready

STACK_SIGNAL = signal.SIGUSR2
"""Makes a process write the Python stack of every thread to its ``stacks`` file."""

_LAUNCHER_PREFIXES = ("MASTER_", "TORCHELASTIC_", "GROUP_", "ROLE_", "DRIVETRAIN_")


@dataclass(frozen=True, slots=True)
class Files:
    """Files for output that must outlive the process."""

    stdout: Path
    stderr: Path
    stacks: Path

    @classmethod
    def within(cls, folder: Path) -> "Files":
        """Return the files of a process, empty."""
        folder.mkdir(parents=True, exist_ok=True)
        files = cls(folder / "stdout", folder / "stderr", folder / "stacks")
        files.clear()
        return files

    def clear(self) -> None:
        """Empty all files."""
        for path in (self.stdout, self.stderr, self.stacks):
            path.write_bytes(b"")


def main(connection: Connection, files: Files) -> None:
    """Serve jobs until the pipe is closed."""
    _redirect(files)
    _set_environment()
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(
        target=_listen, args=(connection, inbox), name="drivetrain-testing-pipe", daemon=True
    ).start()
    # Imported here: the environment above must be set before torch reads it.
    from drivetrain.testing.body import execute

    connection.send(Ready())
    modules = 0
    while True:
        job: RankTest = inbox.get()
        modules = _freeze_modules(modules)
        for outcome in execute(job):
            sys.stdout.flush()
            sys.stderr.flush()
            connection.send(outcome)
            inbox.get()


def _freeze_modules(before: int) -> int:
    """Take the objects of new modules out of garbage collections: they live as long as the process.

    Otherwise every collection in a test walks through all of torch, a fifth of a second.
    """
    if len(sys.modules) != before:
        gc.collect()
        gc.freeze()
    return len(sys.modules)


def _redirect(files: Files) -> None:
    """Send both streams and the stacks of crashes to files, below Python so that C++ is heard."""
    for stream, path in ((sys.stdout, files.stdout), (sys.stderr, files.stderr)):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, stream.fileno())
        os.close(descriptor)
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    stacks = files.stacks.open("a", encoding="utf-8")
    faulthandler.enable(stacks)
    faulthandler.register(STACK_SIGNAL, stacks)
    # Ctrl-C reaches the whole foreground group; the pytest process alone decides what it means.
    # A handler and not SIG_IGN, which programs started by a test would inherit.
    signal.signal(signal.SIGINT, lambda *_: None)


def _set_environment() -> None:
    for name in [name for name in os.environ if name.startswith(_LAUNCHER_PREFIXES)]:
        del os.environ[name]
    os.environ.update(
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo0" if sys.platform == "darwin" else "lo",
        CUDA_VISIBLE_DEVICES="",
    )


def _listen(connection: Connection, inbox: "queue.SimpleQueue[Any]") -> None:
    try:
        while True:
            inbox.put(connection.recv())
    except (EOFError, OSError):
        os._exit(0)
