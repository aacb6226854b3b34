"""Runs the ranks of this host from the first attempt to the last, and leaves no process behind.

In each attempt the launcher meets the other hosts, starts its ranks, watches them, and hears what
follows. A scheduler's notice is passed to the ranks, which have time to save.
"""

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil

from drivetrain.runtime.notices import NOTICES
from drivetrain.runtime.world import LINK_VARIABLE, WORK_VARIABLE, reader_mark, saved_mark
from drivetrain_launch.console import say
from drivetrain_launch.ranks.channel import SECRET_VARIABLE, shared_secret
from drivetrain_launch.ranks.failure import Ending, blamed, board_of
from drivetrain_launch.ranks.meeting import HostMeeting, SeveralHosts, SingleHost
from drivetrain_launch.ranks.placement import (
    Assignment,
    HostJob,
    Slot,
    cores,
    interface_of,
    threads,
)
from drivetrain_launch.ranks.processes import POLL_S, Output, RankProcesses
from drivetrain_launch.ranks.signals import Signals, Stopped
from drivetrain_launch.ranks.worker import LOGS_VARIABLE
from drivetrain_launch.watching.answers import BOARD_VARIABLE
from drivetrain_launch.watching.watch import HangWatch, WorkFiles, work_file

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
            ranks.pids_by_rank,
            {rank: board_of(private, rank) for rank in ranks.pids_by_rank},
            hosts=meeting.hosts(assignment),
            stops=job.launch.on_hang == "stop",
            folder=logs,
            say=say,
        )
        with watch:
            grace_s = job.launch.grace_s
            ending = _watch(ranks, meeting, assignment, watch, works, signals, grace_s)
        signals.record(False)
        ending = replace(blamed(ending, watch.hang), saved=_saved(job))
        verdict = meeting.conclude(ending)
        if verdict.text:
            say(verdict.text)
        if not verdict.again:
            return verdict.code
        if ending.noticed:  # the ranks failed before they had saved, and the notice still holds
            signals.keep(signal.SIGUSR1)


def _start(job: HostJob, assignment: Assignment, private: Path, output: Output) -> RankProcesses:
    # -P keeps the working directory from hiding modules of the standard library.
    worker = ("-P", "-u", "-m", "drivetrain_launch.ranks.worker", str(os.getpid()))
    return RankProcesses(
        (sys.executable, *worker, *job.arguments),
        {
            (rank := assignment.first_rank + local_rank): {
                **_environment(job, assignment, local_rank),
                LOGS_VARIABLE: "1" if output.keeps else "",
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
    interface = interface_of(assignment.address)
    if interface:
        variables.setdefault("GLOO_SOCKET_IFNAME", interface)
    if assignment.link:
        variables[LINK_VARIABLE] = str(assignment.link)
    slot = _slot(job, assignment, local_rank)
    if limit := threads(job.launch, slot.local_size, cores=cores()):
        variables["OMP_NUM_THREADS"] = limit
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
