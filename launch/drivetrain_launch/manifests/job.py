"""Job files of schedulers: SLURM's batch script, Kubernetes' objects, and SkyPilot's task.

A launcher takes the hosts, and its own place among these, from the scheduler's variables. So the
same command runs on every host, and no address is written into a job file.
"""

import math
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from drivetrain.config import Resolved
from drivetrain.errors import ConfigError
from drivetrain.runtime.notices import PREEMPTED
from drivetrain_launch.hosts.surroundings import KEYS
from drivetrain_launch.ranks.channel import SECRET_VARIABLE
from drivetrain_launch.ranks.failure import CANNOT_HEAL

FUTILE = tuple(sorted(CANNOT_HEAL))
"""Exit codes of runs that would only fail again."""

OF_THE_CLUSTER = frozenset(KEYS)
"""Keys that the job file says in the scheduler's own terms."""

GRACE, ENDING_S = "launch.grace_s", 10
"""The option with the seconds for a save, and the seconds of a notice that are left for the ends of
processes and launchers."""

_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
"""A label of DNS, with room for what Kubernetes appends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerJob:
    """A job, as a scheduler is asked for it.

    Attributes:
        name: of the job: lower-case letters, digits and hyphens.
        hosts: number of hosts.
        least: number of hosts with which the run goes on when others are lost.
        devices: accelerators of each host; 0 for a run on the CPU.
        notice: seconds between the scheduler's notice and its kill, for a last checkpoint.
        command: what runs on each host.

    Raises:
        ConfigError: a name that schedulers refuse, or a number below its minimum.
    """

    name: str
    hosts: int
    least: int
    devices: int
    notice: int
    command: tuple[str, ...]

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"expected a job name of at most 40 lower-case letters, digits and hyphens that "
                f"starts with a letter, found {self.name!r}; choose one with --name"
            )
        for key, minimum in (("hosts", 1), ("devices", 0), ("notice", 1)):
            if (value := getattr(self, key)) < minimum:
                raise ConfigError(f"--{key}: expected at least {minimum}, found {value}")


def arguments_of(resolved: Resolved, notice: int) -> tuple[str, ...]:
    """Return the configuration as arguments of ``drivetrain launch``: all that is no default.

    So a container needs no configuration file. Ranks get the time of the notice for their save.
    """
    chosen: list[str] = []
    for key, value, origin in resolved.rows():
        if key == GRACE and origin.kind == "default":
            chosen += ["--set", f"{key}={max(1, notice - ENDING_S)}"]
        elif origin.kind != "default" and key not in OF_THE_CLUSTER:
            chosen += ["--set", f"{key}={_written(value)}"]
    return tuple(chosen)


def name_from(script: str) -> str:
    """Return a job name made of a script's file name or a module's name."""
    stem = script.rpartition("/")[2].removesuffix(".py")
    name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).lstrip("-0123456789")
    return name[:40].strip("-") or "train"


def _written(value: Any) -> str:
    """Return a value as YAML in one line, quoted only where YAML asks for quotes."""
    return yaml.safe_dump([value], default_flow_style=True, width=math.inf).strip()[1:-1]


# --- batch script of SLURM: one task per host, a notice before the time limit, and a requeue ---


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


# --- objects of Kubernetes ---

# Exit codes decide what happens next, as in Kubernetes' documentation of pod failure policies. A
# pod that saved because of a notice is replaced, and counts as no failure. Codes of errors that
# cannot heal end the job. Every other failure starts all pods of the job again, as often as
# allowed.


DEVICE = "nvidia.com/gpu"
"""Name of an accelerator among a pod's resources, where the user names no other."""

_NODE = "node"
"""Name of the replicated job and of its container, which Kubeflow's operator looks for."""

_TRAINER = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
"""Label of the job that Kubeflow's operator gives the number of hosts and the variables to."""

_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_PORT = 29500
"""The port of host 0 where the hosts meet: the same as Kubeflow's."""

_SECRET_KEY = "secret"  # noqa: S105 - the key of a value, not a value


@dataclass(frozen=True, kw_only=True, slots=True)
class Pods:
    """Facts of a cluster, beyond those of the job.

    Attributes:
        image: the container image, with the script, its data and drivetrain inside.
        restarts: how often all pods are started again after a failure.
        namespace: of all objects; "" for the namespace of ``kubectl``.
        device: name of an accelerator among a pod's resources.
    """

    image: str
    restarts: int
    namespace: str = ""
    device: str = DEVICE


def jobset(job: SchedulerJob, pods: Pods) -> list[dict[str, Any]]:
    """Return the objects of a JobSet, which needs the JobSet controller alone.

    The pods are told where the hosts meet by torchrun's variables ``PET_*``.
    """
    variables: list[dict[str, Any]] = [
        {"name": "PET_NNODES", "value": str(job.hosts)},
        {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}},
        {"name": "PET_MASTER_ADDR", "value": f"{job.name}-{_NODE}-0-0.{job.name}"},
        {"name": "PET_MASTER_PORT", "value": str(_PORT)},
    ]
    if job.devices:
        variables.append({"name": "PET_NPROC_PER_NODE", "value": str(job.devices)})
    return [_object("jobset.x-k8s.io/v1alpha2", "JobSet", job, pods, _jobs(job, pods, variables))]


def trainjob(job: SchedulerJob, pods: Pods) -> list[dict[str, Any]]:
    """Return a TrainJob of Kubeflow Trainer 2, after the runtime with the rules of its restarts.

    The operator itself gives the variables ``PET_*`` to the pods.
    """
    runtime = {
        "mlPolicy": {"numNodes": job.hosts, "torch": {}},
        "template": {"spec": _jobs(job, pods, [])},
    }
    trainer = {"numNodes": job.hosts} | ({"numProcPerNode": job.devices} if job.devices else {})
    train = {"runtimeRef": {"kind": "TrainingRuntime", "name": job.name}, "trainer": trainer}
    return [
        _object("trainer.kubeflow.org/v1alpha1", "TrainingRuntime", job, pods, runtime),
        _object("trainer.kubeflow.org/v1alpha1", "TrainJob", job, pods, train),
    ]


def secret_command(job: SchedulerJob, pods: Pods) -> str:
    """Return the command that makes the secret of the job's launchers, once per job name."""
    place = f" --namespace {pods.namespace}" if pods.namespace else ""
    return (
        f"kubectl create secret generic {job.name}{place} "
        f'--from-literal={_SECRET_KEY}="$(openssl rand -hex 32)"'
    )


def _object(
    version: str, kind: str, job: SchedulerJob, pods: Pods, spec: dict[str, Any]
) -> dict[str, Any]:
    metadata = {"name": job.name} | ({"namespace": pods.namespace} if pods.namespace else {})
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def _jobs(job: SchedulerJob, pods: Pods, variables: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the specification of a JobSet: one indexed job with a pod for each host."""
    indexed = {
        "completionMode": "Indexed",
        "completions": job.hosts,
        "parallelism": job.hosts,
        "backoffLimit": 0,  # a failed pod fails the job: its hosts start again together
        "podFailurePolicy": {
            "rules": [
                _on_exit("Ignore", [PREEMPTED]),
                {
                    "action": "Ignore",  # evicted or preempted by Kubernetes itself
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                },
                _on_exit("FailJob", list(FUTILE)),
            ]
        },
        "template": {
            "spec": {
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": job.notice,
                "containers": [_container(job, pods, variables)],
            },
        },
    }
    return {
        # The pods must find each other by name before all of them are ready.
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {
            "maxRestarts": pods.restarts,
            "rules": [
                {
                    "name": "futile",
                    "action": "FailJobSet",
                    "onJobFailureReasons": ["PodFailurePolicy"],
                }
            ],
        },
        "replicatedJobs": [
            {
                "name": _NODE,
                "replicas": 1,
                "template": {"metadata": {"labels": dict(_TRAINER)}, "spec": indexed},
            }
        ],
    }


def _container(job: SchedulerJob, pods: Pods, variables: list[dict[str, Any]]) -> dict[str, Any]:
    reference = {"secretKeyRef": {"name": job.name, "key": _SECRET_KEY}}
    secret = [{"name": SECRET_VARIABLE, "valueFrom": reference}] if job.hosts > 1 else []
    limits = {pods.device: job.devices} if job.devices else {}
    return {
        "name": _NODE,
        "image": pods.image,
        "command": list(job.command),
        **({"env": [*variables, *secret]} if variables or secret else {}),
        **({"resources": {"limits": limits}} if limits else {}),
    }


def _on_exit(action: str, codes: list[int]) -> dict[str, Any]:
    requirement = {"containerName": _NODE, "operator": "In", "values": codes}
    return {"action": action, "onExitCodes": requirement}


# --- task file of SkyPilot: hosts of any cloud, which may be taken away at any time ---


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
