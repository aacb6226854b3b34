"""The batch script of SLURM: one task per host, a notice before the time limit, and a requeue."""

import shlex
from collections.abc import Iterator

from drivetrain.runtime.notices import PREEMPTED
from drivetrain_launch.manifests.job import SchedulerJob
from drivetrain_launch.ranks.channel import SECRET_VARIABLE


def batch_script(job: SchedulerJob, *, directives: tuple[str, ...] = ()) -> str:
    """Return the text of a batch script for ``sbatch``.

    Args:
        job: what to run, and where.
        directives: further options of sbatch, such as ``--time=12:00:00``.
    """
    return "\n".join((*_head(job, directives), *_body(job), ""))


def _head(job: SchedulerJob, directives: tuple[str, ...]) -> Iterator[str]:
    yield "#!/bin/bash"
    for option in (
        f"--job-name={job.name}",
        f"--nodes={job.hosts}",
        "--ntasks-per-node=1",  # one launcher per host starts the ranks of that host
        *((f"--gpus-per-node={job.devices}",) if job.devices else ()),
        # Without B: the notice reaches the launchers; with it, the batch shell alone.
        f"--signal=USR1@{job.notice}",
        "--requeue",
        *(("--no-kill",) if job.least < job.hosts else ()),  # of a job that loses a node
        "--open-mode=append",  # a requeued job goes on writing the same file
        "--output=%x-%j.out",
        *directives,
    ):
        yield f"#SBATCH {option}"


def _body(job: SchedulerJob) -> Iterator[str]:
    stay = "--no-kill " if job.least < job.hosts else ""
    yield from (
        "",
        "# The secret that the launchers of this job share; srun hands it to every host.",
        f"{SECRET_VARIABLE}=$(od -An -tx1 -N32 /dev/urandom | tr -d ' \\n')",
        f"export {SECRET_VARIABLE}",
        "",
        "# The other launchers save and end by themselves when one of them ends.",
        f"srun {stay}--kill-on-bad-exit=0 {shlex.join(job.command)}",
        "code=$?",
        "",
        f"if [ $code -eq {PREEMPTED} ]; then  # a checkpoint was saved because of the notice",
        '  scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        "exit $code",
    )
