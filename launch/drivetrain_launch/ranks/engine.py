"""Runs the ranks of this host from the first attempt to the last, and leaves no process behind.

In each attempt the launcher meets the other hosts, starts its ranks, watches them, and hears what
follows. A scheduler's notice is passed to the ranks, which have time to save.

The processes of this host's ranks in one attempt, and where their output goes.
"""

import itertools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from subprocess import Popen
from typing import IO, TextIO, TypeAlias

import psutil
from torch.distributed.elastic.multiprocessing.tail_log import TailLog

from drivetrain.runtime.board import NOTICES, PREEMPTED, ask_to_stop
from drivetrain.runtime.world import LINK_VARIABLE, WORK_VARIABLE, reader_mark, saved_mark
from drivetrain_launch.console import say
from drivetrain_launch.ranks.answers import BOARD_VARIABLE, BoardReader, status_of
from drivetrain_launch.ranks.channel import SECRET_VARIABLE, shared_secret
from drivetrain_launch.ranks.failure import (
    Ending,
    RankEnd,
    Signals,
    Stopped,
    blamed,
    board_of,
    read_end,
)
from drivetrain_launch.ranks.meeting import HostMeeting, SeveralHosts, SingleHost
from drivetrain_launch.ranks.placement import (
    Assignment,
    HostJob,
    Slot,
    cores,
    interface_of,
    threads,
)
from drivetrain_launch.ranks.watch import HangWatch, WorkFiles, work_file
from drivetrain_launch.ranks.worker import LOGS_VARIABLE

# --- where the ranks' output goes: the console, and files where the user wants them ---

# Rank 0 writes to the console itself, so that its progress bars work. Of the other ranks the
# console shows the error stream, the rank in front of each line; a pipe carries it, so that a long
# run fills no disk. With a folder for logs, every stream of every rank is a file there, which the
# console follows.


LAST_LINES_S = 1.0
"""How long the end of an attempt waits for lines; a rank's child may hold the stream for ever."""

LONGEST_LINE = 65536
"""Characters after which a line is shown although it goes on."""


Streams: TypeAlias = tuple[IO[bytes] | None, IO[bytes] | None]
"""The files that a rank gets as its output stream and its error stream; None is the console."""


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

    def streams(self, rank: int) -> Streams:
        """Open the streams of a rank, before it starts."""
        if self._folder is not None:
            return self._files(rank, self._folder)
        if rank == 0:
            return None, None
        read, write = os.pipe()
        self._pipes[rank] = os.fdopen(read, encoding="utf-8", errors="replace")
        quiet = self._given.enter_context(open(os.devnull, "wb"))  # noqa: SIM115, PTH123
        return quiet, self._given.enter_context(os.fdopen(write, "wb"))

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
        stdout, stderr = (self._given.enter_context(path.open("wb")) for path in paths)
        return stdout, stderr


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


# --- processes ---


POLL_S = 0.05
"""How often the launcher looks at its ranks."""

KILLED_S = 10.0
"""How long a process may take to end after SIGKILL: a disk or a driver may hold it for ever."""


class RankProcesses:
    """The ranks of one host in one attempt.

    Args:
        command: starts one rank; each rank leads a session of its own.
        environments: of each rank, by its global rank.
        private: folder of this attempt for the ranks' error files.
        output: where their streams go.
    """

    def __init__(
        self,
        command: Sequence[str],
        environments: Mapping[int, Mapping[str, str]],
        private: Path,
        output: Output,
    ) -> None:
        private.mkdir(parents=True, exist_ok=True)
        self._private = private
        self._output = output
        self._processes: dict[int, Popen[bytes]] = {}
        self._ends: dict[int, float] = {}
        self._held: dict[int, str] = {}
        self._told: set[int] = set()
        self._stopped: set[int] = set()
        for rank, environment in environments.items():
            stdout, stderr = output.streams(rank)
            # A rank begins with a blocked signal, which waits: without a handler it would end it.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
            try:
                self._processes[rank] = Popen(  # noqa: S603 - a list of arguments
                    list(command),
                    env={**environment, "TORCHELASTIC_ERROR_FILE": str(self._error_file(rank))},
                    stdout=stdout,
                    stderr=stderr,
                    start_new_session=True,
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        output.follow()

    @property
    def pids_by_rank(self) -> dict[int, int]:
        """Process ids by global rank, which are the ids of the sessions too."""
        return {rank: process.pid for rank, process in self._processes.items()}

    @property
    def over(self) -> bool:
        """Whether no rank runs any longer."""
        return len(self._ends) == len(self._processes)

    @property
    def failed(self) -> bool:
        """Whether a rank has failed."""
        return any(self._code(rank) not in (0, PREEMPTED) for rank in self._ends)

    def poll(self) -> None:
        """Look which ranks have ended."""
        for rank in self._running():
            if self._processes[rank].poll() is not None:
                self._ends[rank] = time.time()

    def tell(self, number: int) -> None:
        """Send a signal to the ranks alone, and not to workers of their loaders."""
        for rank in self._running():
            self._told.add(rank)
            os.kill(self._processes[rank].pid, number)

    def stop(self, number: int, grace_s: float) -> None:
        """End the ranks with all processes of their sessions, by force after the grace.

        A process that the system cannot end counts as a failure.
        """
        self.poll()
        self._stopped.update(self._running())
        for rank in self._running():
            ask_to_stop(board_of(self._private, rank))
        self._signal_sessions(number)
        self._await(grace_s)
        self._signal_sessions(signal.SIGKILL)
        self._await(KILLED_S)
        for rank in self._running():
            self._ends[rank] = time.time()
            self._held[rank] = status_of(self._processes[rank].pid).get("State", "unknown")

    def ending(self, asked: int = 0) -> Ending:
        """Describe how the ranks ended; all have.

        Args:
            asked: the signal that asked this launcher to end, or 0.
        """
        self._output.finish()
        host = socket.gethostname()
        failures, ended, stopped = [], [], []
        for rank, moment in self._ends.items():
            end = self._end(rank, host, moment)
            # Processes that have no handler for SIGTERM end so.
            died_of_it = end.code in (-signal.SIGTERM, 128 + signal.SIGTERM)
            was_stopped = rank in self._stopped or (rank in self._told and died_of_it)
            if was_stopped and not end.summary:
                stopped.append(rank)
            elif end.code in (0, PREEMPTED) and rank not in self._held:
                ended.append(end)
            else:
                failures.append(end)
        return Ending(
            failures=tuple(failures), ended=tuple(ended), stopped=tuple(stopped), signal=asked
        )

    def _await(self, limit_s: float) -> None:
        """Wait until all ranks have ended, or the time is over."""
        deadline = time.monotonic() + limit_s
        while not self.over and time.monotonic() < deadline:
            time.sleep(POLL_S)
            self.poll()

    def _end(self, rank: int, host: str, moment: float) -> RankEnd:
        pid, code = self._processes[rank].pid, self._code(rank)
        end = read_end(rank, host, pid, code, moment, self._error_file(rank))
        if rank not in self._held:
            return end
        summary = (
            f"process {pid} of rank {rank} does not end after SIGKILL, state {self._held[rank]}; "
            "look for a disk or a device of this host that does not answer"
        )
        return replace(end, time=moment, summary=summary, traceback="", collateral=False)

    def _error_file(self, rank: int) -> Path:
        return self._private / f"rank-{rank}.error.json"

    def _running(self) -> list[int]:
        return [rank for rank in self._processes if rank not in self._ends]

    def _code(self, rank: int) -> int:
        """Return the exit code of a rank; 0 if its process does not end."""
        return int(self._processes[rank].returncode or 0)

    def _signal_sessions(self, number: int) -> None:
        for rank in self._running():
            try:
                os.killpg(self._processes[rank].pid, number)
            except ProcessLookupError:
                continue


# --- runs the ranks of this host from the first attempt to the last ---

STOP_S = 5.0
"""How long a rank has after Ctrl-C before it is killed."""

FAILED_STOP_S = 3.0
"""How long a rank has after another one failed; a rank that waits for the dead hears nothing."""

OWN = (SECRET_VARIABLE, LINK_VARIABLE)
"""Variables of the launcher, which ranks do not get from it as they are."""


def run_ranks(job: HostJob, signals: Signals) -> int:
    """Run a job to its end and return the exit code; none of its processes is left.

    Raises:
        ConfigError: hosts contradict each other.
        PreflightError: the hosts cannot meet.
        RunOver: the run has ended while this launcher waited for a place in it.
        Stopped: a signal came while no ranks ran.
    """
    meeting, started = _meeting(job), set[int]()
    try:
        code = _attempts(job, meeting, signals, started)
    except Stopped as stopped:
        meeting.leave(f"stopped by {signal.Signals(stopped.number).name}")
        raise
    finally:
        signals.ignore()
        _kill_leftovers(started)
        meeting.leave("its launcher failed")
    return code


def _meeting(job: HostJob) -> HostMeeting:
    """Return where this launcher meets the others; host 0 listens from now on."""
    if not job.launch.rdzv_endpoint:
        return SingleHost(job)
    together = SeveralHosts(job, shared_secret())
    try:
        together.join()
    except BaseException:
        together.leave("it could not join")
        raise
    return together


def _attempts(job: HostJob, meeting: HostMeeting, signals: Signals, started: set[int]) -> int:
    while True:
        assignment = meeting.meet()
        signals.record(True)
        attempt = f"attempt-{assignment.attempt}"
        private = job.private / attempt
        logs = Path(job.launch.log_dir) / attempt if job.launch.log_dir else None
        ranks = _start(job, assignment, private, Output(logs))
        started.update(ranks.pids_by_rank.values())
        works = WorkFiles(private, ranks.pids_by_rank, job.launch.straggler_every_s)
        watch = HangWatch(
            [BoardReader(r, pid, board_of(private, r)) for r, pid in ranks.pids_by_rank.items()],
            hosts=meeting.hosts(assignment),
            stops=job.launch.on_hang == "stop",
            folder=logs,
            say=say,
        )
        with watch:
            ending = _watch(ranks, meeting, assignment, watch, works, signals, job.launch.grace_s)
        signals.record(False)
        ending = replace(blamed(ending, watch.hang), saved=_saved(job))
        verdict = meeting.conclude(ending)
        if verdict.text:
            say(verdict.text)
        if not verdict.again:
            return verdict.code
        if ending.noticed:  # the ranks failed before they had saved, and the notice still holds
            signals.keep(signal.SIGUSR1)


BARS = ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS")
"""Variables that keep libraries from drawing bars: the first rank alone draws them."""


def _start(job: HostJob, assignment: Assignment, private: Path, output: Output) -> RankProcesses:
    # -P keeps the working directory from hiding modules of the standard library.
    worker = ("-P", "-u", "-m", "drivetrain_launch.ranks.worker", str(os.getpid()))
    return RankProcesses(
        (sys.executable, *worker, *job.arguments),
        {
            (rank := assignment.first_rank + local_rank): {
                **_environment(job, assignment, local_rank),
                LOGS_VARIABLE: "1" if job.launch.log_dir else "",
                BOARD_VARIABLE: str(board_of(private, rank)),
                WORK_VARIABLE: str(work_file(private, rank)),
            }
            for local_rank in range(assignment.size)
        },
        private,
        output,
    )


def _environment(job: HostJob, assignment: Assignment, local_rank: int) -> dict[str, str]:
    """Return the variables of a rank: torchrun's names, and no secret."""
    rank, size = str(assignment.first_rank + local_rank), str(assignment.world_size)
    variables = {name: text for name, text in os.environ.items() if name not in OWN}
    variables.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if interface := interface_of(assignment.address):
        variables.setdefault("GLOO_SOCKET_IFNAME", interface)
    if assignment.link:
        variables[LINK_VARIABLE] = str(assignment.link)
    slot = _slot(job, assignment, local_rank)
    if limit := threads(job.launch, slot.local_size, cores=cores()):
        variables["OMP_NUM_THREADS"] = limit
    for name in BARS if rank != "0" else ():
        variables.setdefault(name, "1")
    return {
        **variables,
        **job.variables,
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": str(slot.local_rank),
        "LOCAL_WORLD_SIZE": str(slot.local_size),
        "GROUP_RANK": str(assignment.node),
        "GROUP_WORLD_SIZE": str(len(set(assignment.nodes or range(len(assignment.sizes))))),
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(assignment.port),
        "TORCHELASTIC_RESTART_COUNT": str(assignment.attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(job.launch.max_restarts),
        "TORCHELASTIC_RUN_ID": "drivetrain",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _slot(job: HostJob, assignment: Assignment, local_rank: int) -> Slot:
    """Return the slot of a rank on its machine, as the scheduler or the meeting tells it."""
    if job.slot is None:
        return Slot(local_rank=local_rank, local_size=assignment.size)
    if job.slot.local_size:
        return job.slot
    neighbors = assignment.neighbors
    return Slot(local_rank=neighbors.index(assignment.index), local_size=len(neighbors))


def _saved(job: HostJob) -> int | None:
    """Return the optimizer steps in the newest checkpoint; -1 without any, None where unknown."""
    if not reader_mark(job.config).exists():
        return None
    marks = [saved_mark(job.config, memory=memory) for memory in (False, True)]
    return max((int(mark.read_text()) for mark in marks if mark.exists()), default=-1)


def _watch(
    ranks: RankProcesses,
    meeting: HostMeeting,
    assignment: Assignment,
    watch: HangWatch,
    works: WorkFiles,
    signals: Signals,
    grace_s: float,
) -> Ending:
    """Wait until all ranks have ended: by themselves, or because one failed or a signal came."""
    asked, deadline, noticed = 0, float("inf"), False
    while True:
        ranks.poll()
        for number in signals.take():
            if number in NOTICES:
                ranks.tell(number)
                noticed = True
            if number == signal.SIGUSR1:
                continue
            if asked or number != signal.SIGTERM:
                ranks.stop(number, 0 if asked else STOP_S)
            asked, deadline = number, min(deadline, time.monotonic() + grace_s)
        if meeting.notice_asked():
            ranks.tell(signal.SIGUSR1)
        if ranks.over:
            return replace(ranks.ending(asked), noticed=noticed)
        if meeting.stop_asked() or watch.hang is not None or (ranks.failed and not asked):
            ranks.stop(signal.SIGTERM, FAILED_STOP_S)
        elif time.monotonic() > deadline:
            ranks.stop(signal.SIGTERM, 0)
        else:
            meeting.tell_work(assignment, works.read())
            time.sleep(POLL_S)


def _kill_leftovers(started: set[int]) -> None:
    """Kill processes that ranks left behind: each rank leads a session of its own."""
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    for process in psutil.process_iter():
        try:
            if process.pid in children or os.getsid(process.pid) in started:
                process.kill()
        except (psutil.Error, OSError):
            continue
