"""``drivetrain manifest``: writes the job file of a scheduler for the configuration at hand.

SLURM's batch script, Kubernetes' objects, and SkyPilot's task: a launcher takes the hosts, and its
own place among these, from the scheduler's variables. So the same command runs on every host, and
no address is written into a job file.
"""

import functools
import math
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import yaml

from drivetrain.config import LaunchConfig, Resolved
from drivetrain.errors import ConfigError
from drivetrain.runtime.board import PREEMPTED
from drivetrain_launch.commands.config import print_or_write
from drivetrain_launch.commands.launch import check_script
from drivetrain_launch.commands.options import (
    SETTINGS,
    GroupedCommand,
    grouped_option,
    module_option,
    resolve_command_line,
    script_argument,
    source_options,
    worded_flags,
)
from drivetrain_launch.ranks.channel import SECRET_VARIABLE
from drivetrain_launch.ranks.failure import CANNOT_HEAL
from drivetrain_launch.ranks.placement import KEYS

DEVICE = "nvidia.com/gpu"
"""Name of an accelerator among a pod's resources, where the user names no other."""


@click.group(context_settings=SETTINGS)
def command() -> None:
    """Write the job file of a scheduler: slurm, kubernetes or skypilot.

    The file starts 'drivetrain launch' on every host, without an address: the launcher takes hosts
    and ranks from the scheduler's variables.
    """


def job_command(
    name: str, *, local: bool = True, counted: bool = True
) -> Callable[[Callable[..., str]], click.Command]:
    """Return a decorator that makes a command of a function from a job to a file's text.

    Args:
        name: of the command.
        local: whether the script is started from the folder at hand, and can be looked for.
        counted: whether the file says how many accelerators a host has.
    """
    devices = (_DEVICES,) if counted else ()
    shared = (source_options, module_option, _RANKS, _NAME, *devices, _NOTICE)

    def decorate(write: Callable[..., str]) -> click.Command:
        @functools.wraps(write)
        def function(
            config: str | None,
            assignments: tuple[str, ...],
            script: tuple[str, ...],
            module: bool,
            output: Path | None,
            **given: Any,
        ) -> None:
            flags = {key: given.pop(key) for key in ("nnodes", "nproc_per_node")}
            resolved = resolve_command_line(config, assignments, flags)
            arguments = (check_script if local else _named_script)(script, module=module)
            launch, notice = resolved.run.launch, given.pop("notice")
            job = SchedulerJob(
                name=given.pop("name") or name_from(script[0]),
                hosts=launch.nnodes,
                least=launch.least_nnodes,
                devices=_devices(launch, given.pop("devices")) if counted else 0,
                notice=notice,
                command=("drivetrain", "launch", *arguments_of(resolved, notice), *arguments),
            )
            print_or_write(write(job, **given), output)

        for option in (script_argument, _OUTPUT, *reversed(shared)):
            function = option(function)
        return command.command(name, cls=GroupedCommand)(function)

    return decorate


_RANKS = worded_flags(
    nproc_per_node=("N|auto", "Ranks of a host. [default: the configuration's]"),
    nnodes=("N|MIN:MAX", "Number of hosts. [default: the configuration's]"),
)
_option = functools.partial(grouped_option, "Job")

_NAME = _option(
    "--name", metavar="NAME", default="", help="Name of the job. [default: the script's]"
)
_DEVICES = _option(
    "--devices",
    metavar="N",
    type=click.IntRange(min=0),
    help="Accelerators of each host, 0 for the CPU. [default: one per rank]",
)
_NOTICE = _option(
    "--notice",
    metavar="SECONDS",
    type=click.IntRange(min=1),
    default=120,
    show_default=True,
    help="Time between the scheduler's notice and its kill, for a last checkpoint.",
)
_OUTPUT = grouped_option(
    "Output",
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="File to write, which must not exist. [default: standard output]",
)
_RESTARTS = _option(
    "--restarts",
    metavar="N",
    type=click.IntRange(min=0),
    default=3,
    show_default=True,
    help="How often the scheduler starts the job again after a failure.",
)


@job_command("slurm")
@_option("--time", metavar="LIMIT", default="", help="Time limit, such as 12:00:00.")
@_option("--partition", metavar="NAME", default="", help="Partition of the cluster.")
@_option("--account", metavar="NAME", default="", help="Account that pays.")
@_option(
    "--sbatch",
    metavar="OPTION",
    multiple=True,
    help="Any further option of sbatch, such as --sbatch=--exclusive; repeatable.",
)
def slurm(
    job: "SchedulerJob", *, time: str, partition: str, account: str, sbatch: tuple[str, ...]
) -> str:
    """Write a batch script: sbatch FILE.

    Example: drivetrain manifest slurm --nnodes 4 --nproc-per-node 8 --output job.sbatch train.py
    """
    given = {"time": time, "partition": partition, "account": account}
    directives = (*(f"--{key}={value}" for key, value in given.items() if value), *sbatch)
    for directive in directives:
        if not directive.startswith("-") or "\n" in directive:
            raise ConfigError(
                "--sbatch: expected an option of sbatch in one line, such as --exclusive, found "
                f"{directive!r}"
            )
    return batch_script(job, directives=directives)


@job_command("kubernetes", local=False)
@_option("--image", metavar="IMAGE", required=True, help="Container image with the script.")
@_option(
    "--kind",
    type=click.Choice(["trainjob", "jobset"]),
    default="trainjob",
    show_default=True,
    help="trainjob needs Kubeflow Trainer 2, jobset the JobSet controller alone.",
)
@_option("--namespace", metavar="NAME", default="", help="Namespace. [default: that of kubectl]")
@_option(
    "--device-name",
    metavar="NAME",
    default=DEVICE,
    show_default=True,
    help="Name of an accelerator among the resources of a pod.",
)
@_RESTARTS
def kubernetes(
    job: "SchedulerJob", *, image: str, kind: str, namespace: str, device_name: str, restarts: int
) -> str:
    """Write the objects of a job: kubectl apply -f FILE.

    Example: drivetrain manifest kubernetes --image IMAGE --nnodes 4 --nproc-per-node 8 train.py
    """
    place = {"name": job.name} | ({"namespace": namespace} if namespace else {})
    container: dict[str, Any] = {"name": _NODE, "image": image, "command": list(job.command)}
    variables = pet_variables(job) if kind == "jobset" else []
    notes = []
    if job.hosts > 1:
        reference = {"secretKeyRef": {"name": job.name, "key": _SECRET_KEY}}
        variables.append({"name": SECRET_VARIABLE, "valueFrom": reference})
        where = f" --namespace {namespace}" if namespace else ""
        notes.append(
            f"First, once: kubectl create secret generic {job.name}{where} "
            f'--from-literal={_SECRET_KEY}="$(openssl rand -hex 32)"'
        )
    if variables:
        container["env"] = variables
    if job.devices:
        container["resources"] = {"limits": {device_name: job.devices}}
    documents = [
        {"apiVersion": version, "kind": name, "metadata": dict(place), "spec": spec}
        for version, name, spec in specifications(job, kind, container, restarts)
    ]
    return _yaml(documents, notes)


@job_command("skypilot", counted=False)
@_option("--accelerators", metavar="KIND:N", default="", help="Of each host, such as H100:8.")
@_option("--spot", is_flag=True, help="Hosts that may be taken away, at a lower price.")
@_option(
    "--install",
    metavar="WHEEL|URL",
    default="",
    help="Where each host gets drivetrain from: a wheel in this folder, or an address for pip. "
    "[default: nowhere, it is there]",
)
@_RESTARTS
def skypilot(
    job: "SchedulerJob", *, accelerators: str, spot: bool, install: str, restarts: int
) -> str:
    """Write a task: sky jobs launch FILE.

    Example: drivetrain manifest skypilot --nnodes 4 --accelerators H100:8 train.py
    """
    start = "Start: sky jobs launch FILE"
    secret = f'--secret {SECRET_VARIABLE}="$(openssl rand -hex 32)"'
    notes = [f"{start} {secret}" if job.hosts > 1 else start]
    if not install:  # no public index has our name
        notes.append(
            "The hosts' image must have drivetrain; else write it with --install WHEEL|URL."
        )
    resources: dict[str, Any] = {"accelerators": accelerators} if accelerators else {}
    if spot:
        resources["use_spot"] = True
    resources["job_recovery"] = {
        "max_restarts_on_errors": restarts,
        "recover_on_exit_codes": [PREEMPTED],  # saved because of a notice: no failure
    }
    task = {
        "name": job.name,
        "num_nodes": job.hosts,
        "workdir": ".",
        "resources": resources,
        # A null is asked for at the start: sky jobs launch --secret NAME=VALUE.
        **({"secrets": {SECRET_VARIABLE: None}} if job.hosts > 1 else {}),
        **({"setup": shlex.join(["pip", "install", install])} if install else {}),
        "run": shlex.join(job.command),
    }
    return _yaml([task], notes)


def _devices(launch: LaunchConfig, devices: int | None) -> int:
    """Return the number of accelerators of a host: as given, or one for each of its processes.

    Raises:
        ConfigError: only the host itself can count its processes.
    """
    found = launch.nproc_per_node if devices is None else devices
    if devices is None and launch.device == "cpu":
        return 0
    if found == "auto":
        raise ConfigError(
            "expected the number of accelerators of a host, found launch.nproc_per_node: auto, "
            "which only the host itself can count; add --nproc-per-node N, or --devices 0 for the "
            "CPU"
        )
    return found


def _named_script(script: tuple[str, ...], *, module: bool) -> tuple[str, ...]:
    """Return the arguments of a rank; the file itself lies in the container image.

    Raises:
        ConfigError: there is none.
    """
    if not script:
        raise ConfigError(
            "expected a SCRIPT to run, found none; for example: "
            "drivetrain manifest kubernetes --image IMAGE --nproc-per-node 8 train.py"
        )
    return ("-m", *script) if module else script


def _yaml(documents: list[dict[str, Any]], notes: list[str]) -> str:
    text = yaml.safe_dump_all(documents, sort_keys=False, width=1000)
    return "".join(f"# {note}\n" for note in notes) + text


# --- the job ---


FUTILE = tuple(sorted(CANNOT_HEAL))
"""Exit codes of runs that would only fail again."""

OF_THE_CLUSTER = frozenset(KEYS)
"""Keys that the job file says in the scheduler's own terms."""

GRACE, ENDING_S = "launch.grace_s", 10
"""The option with the seconds for a save, and the seconds of a notice that are left for the ends of
processes and launchers."""

_JOB_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
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
        ConfigError: schedulers refuse the name.
    """

    name: str
    hosts: int
    least: int
    devices: int
    notice: int
    command: tuple[str, ...]

    def __post_init__(self) -> None:
        if not _JOB_NAME.fullmatch(self.name):
            raise ConfigError(
                f"expected a job name of at most 40 lower-case letters, digits and hyphens that "
                f"starts with a letter, found {self.name!r}; choose one with --name"
            )


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
    spare = job.least < job.hosts  # of a job that may lose a node
    options = (
        f"--job-name={job.name}",
        f"--nodes={job.hosts}",
        "--ntasks-per-node=1",  # one launcher per host starts the ranks of that host
        *((f"--gpus-per-node={job.devices}",) if job.devices else ()),
        # Without B: the notice reaches the launchers; with it, the batch shell alone.
        f"--signal=USR1@{job.notice}",
        "--requeue",
        *(("--no-kill",) if spare else ()),
        "--open-mode=append",  # a requeued job goes on writing the same file
        "--output=%x-%j.out",
        *directives,
    )
    head = "".join(f"#SBATCH {option}\n" for option in options)
    return f"""#!/bin/bash
{head}
# The secret that the launchers of this job share; srun hands it to every host.
{SECRET_VARIABLE}=$(od -An -tx1 -N32 /dev/urandom | tr -d ' \\n')
export {SECRET_VARIABLE}

# The other launchers save and end by themselves when one of them ends.
srun {"--no-kill " if spare else ""}--kill-on-bad-exit=0 {shlex.join(job.command)}
code=$?

if [ $code -eq {PREEMPTED} ]; then  # a checkpoint was saved because of the notice
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
"""


# --- objects of Kubernetes ---

# Exit codes decide what happens next, as in Kubernetes' documentation of pod failure policies. A
# pod that saved because of a notice is replaced, and counts as no failure. Codes of errors that
# cannot heal end the job. Every other failure starts all pods of the job again, as often as
# allowed.


_NODE = "node"
"""Name of the replicated job and of its container, which Kubeflow's operator looks for."""

_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_PORT = 29500
"""The port of host 0 where the hosts meet: the same as Kubeflow's."""

_SECRET_KEY = "secret"  # noqa: S105 - the key of a value, not a value


def pet_variables(job: SchedulerJob) -> list[dict[str, Any]]:
    """Return torchrun's variables, which tell the pods of a JobSet where the hosts meet."""
    variables: list[dict[str, Any]] = [
        {"name": "PET_NNODES", "value": str(job.hosts)},
        {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}},
        {"name": "PET_MASTER_ADDR", "value": f"{job.name}-{_NODE}-0-0.{job.name}"},
        {"name": "PET_MASTER_PORT", "value": str(_PORT)},
    ]
    if job.devices:
        variables.append({"name": "PET_NPROC_PER_NODE", "value": str(job.devices)})
    return variables


def specifications(
    job: SchedulerJob, kind: str, container: dict[str, Any], restarts: int
) -> list[tuple[str, str, dict[str, Any]]]:
    """Return interface, kind and specification of each object: a JobSet, or a TrainJob.

    A JobSet is one indexed job with a pod for each host. A TrainJob of Kubeflow Trainer 2 stands
    after the runtime with the rules of its restarts; the operator gives torchrun's variables.
    """
    spec: dict[str, Any] = yaml.safe_load(f"""
# The pods must find each other by name before all of them are ready.
network: {{enableDNSHostnames: true, publishNotReadyAddresses: true}}
failurePolicy:
  maxRestarts: {restarts}
  rules: [{{name: futile, action: FailJobSet, onJobFailureReasons: [PodFailurePolicy]}}]
replicatedJobs:
- name: {_NODE}
  replicas: 1
  template:
    metadata: {{labels: {{trainer.kubeflow.org/trainjob-ancestor-step: trainer}}}}
    spec:
      completionMode: Indexed
      completions: {job.hosts}
      parallelism: {job.hosts}
      backoffLimit: 0  # a failed pod fails the job: its hosts start again together
      podFailurePolicy:
        rules:
        - action: Ignore
          onExitCodes: {{containerName: {_NODE}, operator: In, values: [{PREEMPTED}]}}
        - action: Ignore  # evicted or preempted by Kubernetes itself
          onPodConditions: [{{type: DisruptionTarget, status: 'True'}}]
        - action: FailJob
          onExitCodes: {{containerName: {_NODE}, operator: In, values: {[*FUTILE]}}}
      template:
        spec:
          restartPolicy: Never
          terminationGracePeriodSeconds: {job.notice}
""")
    pods = spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    pods["containers"] = [container]
    if kind == "jobset":
        return [("jobset.x-k8s.io/v1alpha2", "JobSet", spec)]
    interface = "trainer.kubeflow.org/v1alpha1"
    policy = {"numNodes": job.hosts, "torch": {}}
    trainer = {"numNodes": job.hosts} | ({"numProcPerNode": job.devices} if job.devices else {})
    train = {"runtimeRef": {"kind": "TrainingRuntime", "name": job.name}, "trainer": trainer}
    return [
        (interface, "TrainingRuntime", {"mlPolicy": policy, "template": {"spec": spec}}),
        (interface, "TrainJob", train),
    ]
