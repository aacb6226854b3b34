"""Starts the ranks of this host with torch's elastic agent, watches them, and ends them all.

The agent runs in this process. This module adds a private rendezvous, quick stops, a report of the
first failure of every attempt, and the promise that no process is left at the end.

Rank 0 writes to the console itself, so that its progress bars work. The other ranks write their
errors to files, from which the agent copies each line to the console, the rank in front. With a
folder for logs, every stream of every rank is kept there.
"""

import functools
import logging
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousError

from drivetrain.config import LaunchConfig
from drivetrain.errors import PreflightError
from drivetrain_launch.ranks.failure import report
from drivetrain_launch.ranks.placement import LOOPBACK, Endpoint, address_towards, interface_of
from drivetrain_launch.ranks.rendezvous import rendezvous
from drivetrain_launch.ranks.worker import LOGS_VARIABLE

PREFIX = "[rank${rank}]: "
"""Template of torch's agent for the lines of ranks that do not write to the console themselves."""

STOP_S = 5
"""How long a rank has after another one failed, or after Ctrl-C, before it is killed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostJob:
    """The work of this host: a script, and the number and environment of its ranks.

    Attributes:
        arguments: ``(SCRIPT, ...)`` or ``("-m", MODULE, ...)``.
        ranks: number of processes on this host.
        launch: the launch section of the configuration.
        variables: environment variables that every rank gets besides this process's own.
        private: folder of this run, readable by this user only, removed by the caller.
    """

    arguments: tuple[str, ...]
    ranks: int
    launch: LaunchConfig
    variables: Mapping[str, str]
    private: Path


def run_ranks(job: HostJob) -> int:
    """Run a job to its end and return the exit code; none of its processes is left.

    Raises:
        PreflightError: the hosts cannot meet.
    """
    _quiet_agent()
    address = _set_environment(job)
    log_dir = Path(job.launch.log_dir) if job.launch.log_dir else None
    agent = Agent(_spec(job, address), RankLogs(job.private, log_dir))
    try:
        result = agent.run()
    except SignalException as error:
        _say(f"stopped by {error.sigval.name}")
        return 128 + int(error.sigval)
    except RendezvousError as error:
        raise PreflightError(
            f"the {job.launch.nnodes} hosts did not meet at {job.launch.rdzv_endpoint}: {error}; "
            "start the same command on every host, each with its own --node-rank"
        ) from error
    finally:
        _ignore_signals()
        _kill_leftovers(agent.started)
        agent.leave()
    if result is None or not result.is_failed():
        return 0
    text, code = report(result.failures)
    _say(text)
    return code


class Agent(LocalElasticAgent):
    """torch's agent, with quick stops and a report of each failed attempt.

    Args:
        spec: the ranks, and the rendezvous where they meet.
        logs: the files of their output.
    """

    def __init__(self, spec: WorkerSpec, logs: LogsSpecs) -> None:
        super().__init__(spec, logs, log_line_prefix_template=PREFIX)
        self.started: set[int] = set()

    def leave(self) -> None:
        """Leave the rendezvous: other hosts need not wait for this host any longer."""
        self._worker_group.spec.rdzv_handler.shutdown()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        pids: dict[int, Any] = super()._start_workers(worker_group)
        self.started.update(pids.values())
        # The agent gives a rank 30 s to end after another rank failed: too long for a user to wait.
        context = self._pcontext
        if context is not None:
            context.close = functools.partial(_close, context.close)  # type: ignore[method-assign]
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed() and self._remaining_restarts > 0:
            text, _ = report(result.failures)
            left = self._remaining_restarts - 1
            _say(f"{text}\nstarting all ranks again; {left} restarts left after this one")
        return result


class RankLogs(LogsSpecs):
    """Chooses the files of each attempt.

    Args:
        private: folder of this run that is removed at its end.
        log_dir: folder in which to keep one file per rank and stream, or None.
    """

    def __init__(self, private: Path, log_dir: Path | None) -> None:
        super().__init__(str(log_dir) if log_dir else None)
        self._private = private
        self._log_dir = log_dir

    @property
    def root_log_dir(self) -> str:
        """The folder of the logs that outlive the run, or the private folder."""
        return str(self._log_dir or self._private)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Make the folders of one attempt and tell each rank where to write its error file."""
        attempt = f"attempt-{envs[0]['TORCHELASTIC_RESTART_COUNT']}" if envs else "attempt-0"
        private = self._private / attempt
        private.mkdir(parents=True, exist_ok=True)
        kept = self._log_dir / attempt if self._log_dir else None
        if kept:
            kept.mkdir(parents=True, exist_ok=True)
        destination = LogsDest()
        for local_rank, env in envs.items():
            rank = int(env["RANK"])
            error_file = str(private / f"rank-{rank}.error.json")
            env["TORCHELASTIC_ERROR_FILE"] = error_file
            destination.error_files[local_rank] = error_file
            env[LOGS_VARIABLE] = "1" if kept else ""
            if kept:
                _keep(destination, local_rank, rank, kept)
            else:
                _console(destination, local_rank, rank, private)
        return destination


def _keep(destination: LogsDest, local_rank: int, rank: int, folder: Path) -> None:
    """Write both streams to files, and copy to the console as ``_console`` does."""
    out, err = (str(folder / f"rank-{rank}.{stream}.log") for stream in ("stdout", "stderr"))
    destination.stdouts[local_rank], destination.stderrs[local_rank] = out, err
    destination.tee_stderrs[local_rank] = err
    if rank == 0:
        destination.tee_stdouts[local_rank] = out


def _console(destination: LogsDest, local_rank: int, rank: int, folder: Path) -> None:
    """Let rank 0 write to the console, and follow the error stream of the others."""
    destination.stdouts[local_rank] = destination.stderrs[local_rank] = ""
    if rank != 0:
        followed = str(folder / f"rank-{rank}.stderr.log")
        destination.stdouts[local_rank] = os.devnull
        destination.stderrs[local_rank] = destination.tee_stderrs[local_rank] = followed


def _close(close: Any, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
    """Close the ranks; only SIGTERM, a scheduler's notice, leaves time to write a checkpoint."""
    patient = death_sig is signal.SIGTERM
    close(death_sig, timeout if patient else min(timeout, STOP_S))


def _spec(job: HostJob, address: str) -> WorkerSpec:
    # "$" is doubled because the agent substitutes ${local_rank} and the like in arguments; -P keeps
    # the working directory from hiding modules of the standard library.
    script = (argument.replace("$", "$$") for argument in job.arguments)
    return WorkerSpec(
        role="default",
        local_world_size=job.ranks,
        entrypoint=sys.executable,
        args=("-P", "-u", "-m", "drivetrain_launch.ranks.worker", str(os.getpid()), *script),
        rdzv_handler=rendezvous(job.launch, address),
        max_restarts=job.launch.max_restarts,
        monitor_interval=0.1,
        local_addr=address,
    )


def _set_environment(job: HostJob) -> str:
    """Set the variables of agent and ranks; return this host's address for the other hosts."""
    os.environ.update(job.variables)
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    address = LOOPBACK
    if job.launch.nnodes > 1:
        address = address_towards(Endpoint.parse(job.launch.rdzv_endpoint))
    interface = interface_of(address)
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    return address


def _quiet_agent() -> None:
    """Silence the agent's own log: this module reports a failure, once."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _ignore_signals() -> None:
    """Let nothing interrupt the last clean-up, which takes a moment and starts nothing."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)


def _kill_leftovers(started: set[int]) -> None:
    """Kill processes that ranks left behind: each rank leads a session of its own."""
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    for process in psutil.process_iter():
        try:
            if process.pid in children or os.getsid(process.pid) in started:
                process.kill()
        except (psutil.Error, OSError):
            continue


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
