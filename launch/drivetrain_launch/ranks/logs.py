"""The files and the console to which each rank's output goes.

Rank 0 writes to the console itself, so that its progress bars work. The other ranks write their
errors to files, from which torch's agent copies each line to the console, the rank in front. With a
folder for logs, every stream of every rank is kept there.
"""

from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

PREFIX = "[rank${rank}]: "
"""Template of torch's agent for the lines of ranks that do not write to the console themselves."""

NOWHERE = "/dev/null"


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
        """The folder that outlives the run, or the private one."""
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
        destination.stdouts[local_rank] = NOWHERE
        destination.stderrs[local_rank] = destination.tee_stderrs[local_rank] = followed
