"""The processes of this host's ranks in one attempt: started, watched, told, stopped."""

import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import Popen

from drivetrain.runtime.board import ask_to_stop
from drivetrain.runtime.notices import PREEMPTED
from drivetrain_launch.ranks.failure import EarlyEnd, Ending, Failure, read_failure
from drivetrain_launch.ranks.hangs import board_of
from drivetrain_launch.ranks.output import Output

POLL_S = 0.05
"""How often the launcher looks at its ranks."""


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
        self._told: set[int] = set()
        self._stopped: set[int] = set()
        for rank, environment in environments.items():
            streams = output.streams(rank)
            self._processes[rank] = Popen(  # noqa: S603 - a list of arguments
                list(command),
                env={**environment, "TORCHELASTIC_ERROR_FILE": str(self._error_file(rank))},
                stdout=streams.stdout,
                stderr=streams.stderr,
                start_new_session=True,
            )
        output.follow()

    @property
    def pids(self) -> set[int]:
        """Process ids, which are the ids of the sessions too."""
        return {process.pid for process in self._processes.values()}

    @property
    def pids_by_rank(self) -> dict[int, int]:
        """Process ids by global rank."""
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
        """End the ranks with all processes of their sessions, by force after the grace."""
        self.poll()
        self._stopped.update(self._running())
        for rank in self._running():
            ask_to_stop(board_of(self._private, rank))
        self._signal_sessions(number)
        deadline = time.monotonic() + grace_s
        while not self.over and time.monotonic() < deadline:
            time.sleep(POLL_S)
            self.poll()
        self._signal_sessions(signal.SIGKILL)
        while not self.over:
            time.sleep(POLL_S)
            self.poll()

    def ending(self, asked: int = 0) -> Ending:
        """Describe how the ranks ended; all have.

        Args:
            asked: the signal that asked this launcher to end, or 0.
        """
        self._output.finish()
        host = socket.gethostname()
        failures, ended, stopped = [], [], []
        for rank, moment in self._ends.items():
            code = self._code(rank)
            failure = self._failure(rank, host, code, moment)
            was_stopped = rank in self._stopped or (rank in self._told and _died_of_it(code))
            if was_stopped and not failure.summary:
                stopped.append(rank)
            elif code in (0, PREEMPTED):
                ended.append(EarlyEnd(rank=rank, host=host, code=code, time=moment))
            else:
                failures.append(failure)
        return Ending(
            failures=tuple(failures), ended=tuple(ended), stopped=tuple(stopped), signal=asked
        )

    def _failure(self, rank: int, host: str, code: int, moment: float) -> Failure:
        process, path = self._processes[rank], self._error_file(rank)
        return read_failure(rank, host, process.pid, code, moment, path)

    def _error_file(self, rank: int) -> Path:
        return self._private / f"rank-{rank}.error.json"

    def _running(self) -> list[int]:
        return [rank for rank in self._processes if rank not in self._ends]

    def _code(self, rank: int) -> int:
        return int(self._processes[rank].returncode)

    def _signal_sessions(self, number: int) -> None:
        for rank in self._running():
            try:
                os.killpg(self._processes[rank].pid, number)
            except ProcessLookupError:
                continue


def _died_of_it(code: int) -> bool:
    """Whether a rank ended as processes do that have no handler for SIGTERM."""
    return code in (-signal.SIGTERM, 128 + signal.SIGTERM)
