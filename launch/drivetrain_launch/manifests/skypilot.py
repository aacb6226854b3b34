"""The task file of SkyPilot: hosts of any cloud, which may be taken away at any time."""

import shlex
from typing import Any

from drivetrain.runtime.notices import PREEMPTED
from drivetrain_launch.manifests.job import SchedulerJob
from drivetrain_launch.ranks.channel import SECRET_VARIABLE


def task(job: SchedulerJob, *, accelerators: str, restarts: int, spot: bool) -> dict[str, Any]:
    """Return a task for ``sky jobs launch``.

    Args:
        job: what to run, and where.
        accelerators: of each host in SkyPilot's words, such as ``H100:8``; "" for none.
        restarts: how often the task is started again after a failure of its own.
        spot: whether the hosts may be taken away, at a lower price.
    """
    resources: dict[str, Any] = {"accelerators": accelerators} if accelerators else {}
    if spot:
        resources["use_spot"] = True
    resources["job_recovery"] = {
        "max_restarts_on_errors": restarts,
        "recover_on_exit_codes": [PREEMPTED],  # saved because of a notice: no failure
    }
    return {
        "name": job.name,
        "num_nodes": job.hosts,
        "workdir": ".",
        "resources": resources,
        # A null is asked for at the start: sky jobs launch --secret NAME=VALUE.
        **({"secrets": {SECRET_VARIABLE: None}} if job.hosts > 1 else {}),
        "setup": "pip install drivetrain",
        "run": shlex.join(job.command),
    }


def secret_option() -> str:
    """Return the option of ``sky jobs launch`` that hands over the launchers' secret."""
    return f'--secret {SECRET_VARIABLE}="$(openssl rand -hex 32)"'
