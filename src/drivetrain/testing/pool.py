"""The processes that run ranks: started once, fed through a pipe, replaced after a failure.

Closing the pipe ends a process at once: no rank outlives the pytest process, even a killed one.
"""

import faulthandler
import gc
import multiprocessing
import os
import queue
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from drivetrain.runtime.world import loopback_store
from drivetrain.testing.messages import PRELOADED, RankOutcome, RankTest, Ready, Release

# --- the life of one process ---

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


def _serve(connection: Connection, files: Files) -> None:
    """Serve jobs until the pipe is closed."""
    _redirect(files)
    _set_environment()
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(
        target=_listen, args=(connection, inbox), name="drivetrain-testing-pipe", daemon=True
    ).start()
    # Imported here: the environment above is set before, and the pytest process does without.
    from drivetrain.testing.body import execute

    gc.freeze()  # what the server of copies has imported: no collection needs to walk through it
    connection.send(Ready())
    while True:
        job: RankTest = inbox.get()
        for outcome in execute(job):
            sys.stdout.flush()
            sys.stderr.flush()
            connection.send(outcome)
            inbox.get()


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


# --- the processes of this pytest ---

START_TIMEOUT_S = 300.0
GRACE_S = 5.0
"""How long the others may still run after a rank has failed."""

_POLL_S = 0.1
_STACK_S = 10.0


class RankProcess:
    """One process; it holds the same rank in every test.

    Args:
        rank: its rank.
        folder: where its output goes.
        preload: modules that it has imported when it starts, beside those that every rank needs.
    """

    def __init__(self, rank: int, folder: Path, preload: Sequence[str]) -> None:
        # Forked from one process that has imported torch and does nothing else: it has no threads,
        # and no state of any test.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*PRELOADED, *preload])
        self.rank = rank
        self.files = Files.within(folder)
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, self.files), name=f"rank{rank}"
        )
        self._process.start()
        theirs.close()

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.is_alive()

    def received(self) -> RankOutcome | Ready | None:
        """Return the process's message, a ``died`` outcome if it is dead, or None."""
        alive = self._process.is_alive()
        try:
            if self.pipe.poll():
                message: RankOutcome | Ready = self.pipe.recv()
                return message
        except (EOFError, OSError):
            self._process.join(_POLL_S)
            alive = self._process.is_alive()
        return None if alive else RankOutcome(self.rank, "died", self._cause(), self.stacks())

    def show_stacks(self) -> None:
        """Ask the process to write its Python stacks."""
        if self._process.pid is not None and self._process.is_alive():
            os.kill(self._process.pid, STACK_SIGNAL)

    def stacks(self) -> str:
        """Return the stacks written so far."""
        return _readable(self.files.stacks.read_text(errors="replace"))

    def stop(self) -> None:
        """End the process, now."""
        self.pipe.close()
        self._process.kill()
        self._process.join()
        self._process.close()

    def _cause(self) -> str:
        code = self._process.exitcode or 0
        cause = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"the process ended with {cause}"


class RankPool:
    """As many processes as the widest test so far has ranks.

    Args:
        preload: modules that they have imported when they start.
    """

    def __init__(self, preload: Sequence[str] = ()) -> None:
        self._preload = preload
        self._folder = tempfile.TemporaryDirectory(prefix="drivetrain-ranks-")
        self._workers: list[RankProcess] = []
        self._runs = 0
        self._store = loopback_store(timedelta(seconds=START_TIMEOUT_S))

    @property
    def store_port(self) -> int:
        """The port of the store through which the ranks of every test find each other."""
        return int(self._store.port)

    def rendezvous(self) -> str:
        """Return a prefix of keys that no other test uses."""
        self._runs += 1
        return f"test{self._runs}"

    def run(self, jobs: Sequence[RankTest], timeout_s: float) -> list[RankOutcome]:
        """Run one test, a job per rank in rank order.

        Returns:
            One outcome per rank; failures come first, the dead and then the first in time first.
        """
        workers = self._ready(len(jobs))
        going_on: set[int] = set()
        try:
            outcomes = self._round(dict(zip(workers, jobs, strict=True)), timeout_s)
            if not any(outcome.is_failure for outcome in outcomes):
                left = self._round(dict.fromkeys(workers, Release()), GRACE_S + timeout_s)
                failed = [outcome for outcome in left if outcome.is_failure]
                outcomes = failed or outcomes
                if not failed:
                    going_on = {outcome.rank for outcome in left if not outcome.worn}
            return sorted(outcomes, key=_gravity)
        finally:
            for worker in workers:
                if worker.rank in going_on:
                    worker.pipe.send(Release())
                else:
                    self._workers.remove(worker)
                    worker.stop()

    def output(self) -> Mapping[str, str]:
        """Return the output of the last test's ranks, by a title of stream and rank."""
        folder = Path(self._folder.name)
        found = {}
        for path in sorted(folder.glob("rank*/std*")):
            if text := path.read_text(errors="replace"):
                found[f"{path.name} {path.parent.name}"] = text
        return found

    def close(self) -> None:
        """End all processes and their store, and remove their files."""
        while self._workers:
            self._workers.pop().stop()
        del self._store
        self._folder.cleanup()

    def _ready(self, size: int) -> list[RankProcess]:
        """Return workers for ranks 0 to size - 1, and start missing workers."""
        for worker in [worker for worker in self._workers if not worker.is_alive]:
            self._workers.remove(worker)
            worker.stop()
        held = {worker.rank for worker in self._workers}
        folder = Path(self._folder.name)
        started = [
            RankProcess(rank, folder / f"rank{rank}", self._preload)
            for rank in range(size)
            if rank not in held
        ]
        self._workers = sorted([*self._workers, *started], key=lambda worker: worker.rank)
        for worker in started:
            _await_start(worker)
        for worker in self._workers:
            worker.files.clear()
        return self._workers[:size]

    def _round(
        self, messages: Mapping[RankProcess, RankTest | Release], timeout_s: float
    ) -> list[RankOutcome]:
        """Send each worker its message and collect an outcome from each."""
        deadline = time.monotonic() + timeout_s
        for worker, message in messages.items():
            worker.pipe.send(message)
        waiting = list(messages)
        outcomes: list[RankOutcome] = []
        while waiting and time.monotonic() < deadline:
            connection.wait([worker.pipe for worker in waiting], _POLL_S)
            for worker in list(waiting):
                outcome = worker.received()
                if isinstance(outcome, RankOutcome):
                    waiting.remove(worker)
                    outcomes.append(outcome)
                    if outcome.is_failure:
                        deadline = min(deadline, time.monotonic() + GRACE_S)
        failed = any(outcome.is_failure for outcome in outcomes)
        since = f"{GRACE_S:g} s after another rank failed" if failed else f"after {timeout_s:g} s"
        return outcomes + _hung(waiting, since)


def _await_start(worker: RankProcess) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        connection.wait([worker.pipe], _POLL_S)
        message = worker.received()
        if isinstance(message, Ready):
            return
        if message is not None:
            stderr = worker.files.stderr.read_text(errors="replace")
            raise RuntimeError(f"rank {worker.rank} did not start: {message.headline}\n{stderr}")
    raise RuntimeError(
        f"rank {worker.rank} did not start within {START_TIMEOUT_S:g} s; its stacks:\n"
        + _hung([worker], "")[0].details
    )


def _hung(workers: Sequence[RankProcess], since: str) -> list[RankOutcome]:
    """Describe ranks that did not answer, with the Python stack of each."""
    for worker in workers:
        worker.show_stacks()
    deadline = time.monotonic() + _STACK_S
    while time.monotonic() < deadline and not all(worker.stacks() for worker in workers):
        time.sleep(_POLL_S)
    nothing = "no stack: the process does not react to signals"
    return [
        RankOutcome(worker.rank, "hung", f"still running {since}", worker.stacks() or nothing)
        for worker in workers
    ]


def _readable(stacks: str) -> str:
    """Leave out of a stack dump the frames and the thread of this kit."""
    kit = f'File "{Path(__file__).with_name("body.py")}'
    threads = []
    for thread in stacks.split("\n\n"):
        above, found, _ = thread.partition(f"  {kit}")
        if "in _listen" not in thread:
            threads.append(above.rstrip() if found else thread.rstrip())
    return "\n\n".join(threads)


def _gravity(outcome: RankOutcome) -> tuple[int, float]:
    order = {"died": 0, "failed": 1, "hung": 2}
    return order.get(outcome.kind, 3), outcome.when
