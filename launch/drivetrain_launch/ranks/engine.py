"""Runs the ranks of this host from the first attempt to the last, and leaves no process behind.

In each attempt the launcher meets the other hosts, starts its ranks, watches them, and hears what
follows. A scheduler's notice is passed to the ranks, which have time to save.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import psutil

from drivetrain.config import LaunchConfig
from drivetrain.runtime.notices import NOTICES
from drivetrain.runtime.world import LINK_VARIABLE, WORK_VARIABLE, reader_mark, saved_mark
from drivetrain_launch.console import say
from drivetrain_launch.ranks.channel import SECRET_VARIABLE, shared_secret
from drivetrain_launch.ranks.failure import Ending, blamed, board_of, watch_over
from drivetrain_launch.ranks.meeting import HostMeeting, Place, SingleHost
from drivetrain_launch.ranks.member import Party, SeveralHosts
from drivetrain_launch.ranks.placement import Endpoint, Seat, cores, interface_of, threads
from drivetrain_launch.ranks.processes import POLL_S, Output, RankProcesses
from drivetrain_launch.ranks.signals import Signals, Stopped
from drivetrain_launch.ranks.worker import LOGS_VARIABLE
from drivetrain_launch.watching.answers import BOARD_VARIABLE
from drivetrain_launch.watching.stragglers import WorkFiles, work_file
from drivetrain_launch.watching.watch import HangWatch

STOP_S = 5.0
"""How long a rank has after Ctrl-C before it is killed."""

FAILED_STOP_S = 3.0
"""How long a rank has after another one failed; a rank that waits for the dead hears nothing."""

OWN = (SECRET_VARIABLE, LINK_VARIABLE)
"""Variables of the launcher, which ranks do not get from it as they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostJob:
    """The work of this host: a script, and the number and environment of its ranks.

    Attributes:
        arguments: ``(SCRIPT, ...)`` or ``("-m", MODULE, ...)``.
        ranks: number of processes on this host.
        launch: the launch section of the configuration.
        variables: environment variables that every rank gets besides this process's own.
        private: folder of this run, readable by this user only, removed by the caller.
        config: file of the resolved configuration, beside which ranks leave marks.
        run: a scheduler's name of the job, equal on every host, or "".
        seat: of the one rank here, where a scheduler starts each rank by itself.
        software: facts that must be equal on all hosts, by their names.
        backend: the ranks' communication library.
    """

    arguments: tuple[str, ...]
    ranks: int
    launch: LaunchConfig
    variables: Mapping[str, str]
    private: Path
    config: Path
    run: str = ""
    seat: Seat | None = None
    software: Mapping[str, str] = field(default_factory=dict)
    backend: str = "gloo"


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
    launch = job.launch
    limit_s = launch.start_s
    if not launch.rdzv_endpoint:
        return SingleHost(job.ranks, launch.max_restarts, limit_s, launch.straggler_margin)
    together = SeveralHosts(
        Party(
            endpoint=Endpoint.parse(launch.rdzv_endpoint),
            index=launch.node_rank,
            count=launch.nnodes,
            least=launch.least_nnodes,
            ranks=job.ranks,
            run=job.run,
            secret=shared_secret(),
            max_restarts=launch.max_restarts,
            start_timeout_s=limit_s,
            grace_s=launch.grace_s,
            software=job.software,
            backend=job.backend,
            alone=job.seat is not None,
            check=launch.preflight,
            straggler_margin=launch.straggler_margin,
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
        with _hang_watch(job, place, meeting, ranks) as watch:
            ending = _watch(
                ranks,
                meeting,
                lambda: watch.hang is not None,
                partial(_tell_work, _work_files(job, place), meeting, place),
                signals,
                job.launch.grace_s,
            )
        signals.record(False)
        ending = replace(blamed(ending, watch.hang), saved=_saved(job))
        verdict = meeting.conclude(ending)
        if verdict.text:
            say(verdict.text)
        if not verdict.again:
            return verdict.code
        if ending.noticed:  # the ranks failed before they had saved, and the notice still holds
            signals.keep(signal.SIGUSR1)


def _hang_watch(
    job: HostJob, place: Place, meeting: HostMeeting, ranks: RankProcesses
) -> HangWatch:
    attempt = f"attempt-{place.attempt}"
    return watch_over(
        ranks.pids_by_rank,
        job.private / attempt,
        hosts=meeting.hosts(place),
        stops=job.launch.on_hang == "stop",
        folder=Path(job.launch.log_dir) / attempt if job.launch.log_dir else None,
    )


def _start(job: HostJob, place: Place) -> RankProcesses:
    attempt = f"attempt-{place.attempt}"
    output = Output(Path(job.launch.log_dir) / attempt if job.launch.log_dir else None)
    private = job.private / attempt
    # -P keeps the working directory from hiding modules of the standard library.
    worker = ("-P", "-u", "-m", "drivetrain_launch.ranks.worker", str(os.getpid()))
    return RankProcesses(
        (sys.executable, *worker, *job.arguments),
        {
            (rank := place.first_rank + local_rank): _environment(job, place, local_rank)
            | {LOGS_VARIABLE: "1" if output.keeps else ""}
            | {BOARD_VARIABLE: str(board_of(private, rank))}
            | {WORK_VARIABLE: str(work_file(private, rank))}
            for local_rank in range(place.size)
        },
        private,
        output,
    )


def _work_files(job: HostJob, place: Place) -> WorkFiles:
    """Return the files in which the ranks of an attempt tell their times."""
    ranks = range(place.first_rank, place.first_rank + place.size)
    folder = job.private / f"attempt-{place.attempt}"
    return WorkFiles(folder, ranks, job.launch.straggler_every_s)


def _tell_work(files: WorkFiles, meeting: HostMeeting, place: Place) -> None:
    meeting.tell_work(place, files.read())


def _environment(job: HostJob, place: Place, local_rank: int) -> dict[str, str]:
    """Return the variables of a rank: torchrun's names, and no secret."""
    rank, size = str(place.first_rank + local_rank), str(place.world_size)
    variables = {name: text for name, text in os.environ.items() if name not in OWN}
    variables.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    interface = interface_of(place.address)
    if interface:
        variables.setdefault("GLOO_SOCKET_IFNAME", interface)
    if place.link:
        variables[LINK_VARIABLE] = str(place.link)
    seat = _seat(job, place, local_rank)
    if limit := threads(job.launch, seat.local_size, cores=cores()):
        variables["OMP_NUM_THREADS"] = limit
    return {
        **variables,
        **job.variables,
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": str(seat.local_rank),
        "LOCAL_WORLD_SIZE": str(seat.local_size),
        "GROUP_RANK": str(place.node),
        "GROUP_WORLD_SIZE": str(len(set(place.nodes or range(len(place.sizes))))),
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


def _seat(job: HostJob, place: Place, local_rank: int) -> Seat:
    """Return the place of a rank on its machine, as the scheduler or the meeting tells it."""
    if job.seat is None:
        return Seat(local_rank=local_rank, local_size=place.size)
    if job.seat.local_size:
        return job.seat
    neighbors = place.neighbors
    return Seat(local_rank=neighbors.index(place.index), local_size=len(neighbors))


def _saved(job: HostJob) -> int | None:
    """Return the optimizer steps in the newest checkpoint; -1 without any, None where unknown."""
    if not reader_mark(job.config).exists():
        return None
    marks = [saved_mark(job.config, memory=memory) for memory in (False, True)]
    return max((int(mark.read_text()) for mark in marks if mark.exists()), default=-1)


def _watch(
    ranks: RankProcesses,
    meeting: HostMeeting,
    hangs: Callable[[], bool],
    tell_work: Callable[[], None],
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
        if meeting.stop_asked() or hangs() or (ranks.failed and not asked):
            ranks.stop(signal.SIGTERM, FAILED_STOP_S)
        elif time.monotonic() > deadline:
            ranks.stop(signal.SIGTERM, 0)
        else:
            tell_work()
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
