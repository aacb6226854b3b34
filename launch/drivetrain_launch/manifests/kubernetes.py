"""Objects of Kubernetes: a JobSet, or Kubeflow Trainer's TrainJob with a runtime of its own.

Exit codes decide what happens next, as in Kubernetes' documentation of pod failure policies. A pod
that saved because of a notice is replaced, and counts as no failure. Codes of errors that cannot
heal end the job. Every other failure starts all pods of the job again, as often as allowed.
"""

from dataclasses import dataclass
from typing import Any

from drivetrain.runtime.notices import PREEMPTED
from drivetrain_launch.manifests.job import FUTILE, SchedulerJob
from drivetrain_launch.ranks.channel import SECRET_VARIABLE

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
