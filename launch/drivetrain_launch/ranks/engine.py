"""Runs the ranks of this host from the first attempt to the last, and leaves no process behind.

In each attempt the launcher meets the other hosts, starts its ranks, watches them, and hears what
follows. A scheduler's notice is passed to the ranks, which have time to save.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from drivetrain.config import LaunchConfig
from drivetrain.runtime.notices import NOTICES
from drivetrain_launch.ranks.failure import Ending
from drivetrain_launch.ranks.meeting import HostMeeting, Place, SingleHost
from drivetrain_launch.ranks.member import Party, SeveralHosts
from drivetrain_launch.ranks.output import Output
from drivetrain_launch.ranks.placement import Endpoint, Seat, interface_of
from drivetrain_launch.ranks.processes import POLL_S, RankProcesses
from drivetrain_launch.ranks.secret import SECRET_VARIABLE, shared_secret
from drivetrain_launch.ranks.signals import Signals, Stopped
from drivetrain_launch.ranks.worker import LOGS_VARIABLE

STOP_S = 5.0
"""How long a rank has after Ctrl-C before it is killed."""

FAILED_STOP_S = 3.0
"""How long a rank has after another one failed; a rank that waits for the dead hears nothing."""

GRACE_S = 30.0
"""How long a rank has after SIGTERM, a scheduler's notice, to save a checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostJob:
    """The work of this host: a script, and the number and environment of its ranks.

    Attributes:
        arguments: ``(SCRIPT, ...)`` or ``("-m", MODULE, ...)``.
        ranks: number of processes on this host.
        launch: the launch section of the configuration.
        variables: environment variables that every rank gets besides this process's own.
        private: folder of this run, readable by this user only, removed by the caller.
        run: a scheduler's name of the job, equal on every host, or "".
        seat: of the one rank here, where a scheduler starts each rank by itself.
    """

    arguments: tuple[str, ...]
    ranks: int
    launch: LaunchConfig
    variables: Mapping[str, str]
    private: Path
    run: str = ""
    seat: Seat | None = None


def run_ranks(job: HostJob, signals: Signals) -> int:
    """Run a job to its end and return the exit code; none of its processes is left.

    Raises:
        ConfigError: hosts contradict each other.
        PreflightError: the hosts cannot meet.
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
    launch = job.launch
    limit_s = launch.start_s
    if not launch.rdzv_endpoint:
        return SingleHost(job.ranks, launch.max_restarts, limit_s)
    together = SeveralHosts(
        Party(
            endpoint=Endpoint.parse(launch.rdzv_endpoint),
            index=launch.node_rank,
            count=launch.nnodes,
            ranks=job.ranks,
            run=job.run,
            secret=shared_secret(),
            max_restarts=launch.max_restarts,
            start_timeout_s=limit_s,
        )
    )
    try:
        together.join()
    except BaseException:
        together.leave("it could not join")
        raise
    return together


def _attempts(job: HostJob, meeting: HostMeeting, signals: Signals, started: set[int]) -> int:
    while True:
        place = meeting.meet()
        signals.record(True)
        ranks = _start(job, place)
        started |= ranks.pids
        ending = _watch(ranks, meeting.stop_asked, signals)
        signals.record(False)
        verdict = meeting.conclude(ending)
        if verdict.text:
            print(verdict.text, file=sys.stderr, flush=True)
        if not verdict.again:
            return verdict.code


def _start(job: HostJob, place: Place) -> RankProcesses:
    attempt = f"attempt-{place.attempt}"
    output = Output(Path(job.launch.log_dir) / attempt if job.launch.log_dir else None)
    # -P keeps the working directory from hiding modules of the standard library.
    worker = ("-P", "-u", "-m", "drivetrain_launch.ranks.worker", str(os.getpid()))
    return RankProcesses(
        (sys.executable, *worker, *job.arguments),
        {
            place.first_rank + local_rank: _environment(job, place, local_rank)
            | {LOGS_VARIABLE: "1" if output.keeps else ""}
            for local_rank in range(place.size)
        },
        job.private / attempt,
        output,
    )


def _environment(job: HostJob, place: Place, local_rank: int) -> dict[str, str]:
    """Return the variables of a rank: torchrun's names, and no secret."""
    rank, size = str(place.first_rank + local_rank), str(place.world_size)
    variables = {name: text for name, text in os.environ.items() if name != SECRET_VARIABLE}
    variables.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    interface = interface_of(place.address)
    if interface:
        variables.setdefault("GLOO_SOCKET_IFNAME", interface)
    seat = job.seat or Seat(local_rank=local_rank, local_size=place.size, node=place.index)
    return {
        **variables,
        **job.variables,
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": str(seat.local_rank),
        "LOCAL_WORLD_SIZE": str(seat.local_size),
        "GROUP_RANK": str(seat.node),
        "GROUP_WORLD_SIZE": str(len(place.sizes)),
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(place.port),
        "TORCHELASTIC_RESTART_COUNT": str(place.attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(job.launch.max_restarts),
        "TORCHELASTIC_RUN_ID": "drivetrain",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _watch(ranks: RankProcesses, stop_asked: Callable[[], bool], signals: Signals) -> Ending:
    """Wait until all ranks have ended: by themselves, or because one failed or a signal came."""
    asked, deadline = 0, float("inf")
    while True:
        ranks.poll()
        for number in signals.take():
            if number in NOTICES:
                ranks.tell(number)
            if number == signal.SIGUSR1:
                continue
            if asked or number != signal.SIGTERM:
                ranks.stop(number, 0 if asked else STOP_S)
            asked, deadline = number, min(deadline, time.monotonic() + GRACE_S)
        if ranks.over:
            return ranks.ending(asked)
        if stop_asked() or (ranks.failed and not asked):
            ranks.stop(signal.SIGTERM, FAILED_STOP_S)
        elif time.monotonic() > deadline:
            ranks.stop(signal.SIGTERM, 0)
        else:
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
