"""``drivetrain manifest``: writes the job file of a scheduler for the configuration at hand."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import yaml

from drivetrain.config import Resolved
from drivetrain.errors import ConfigError
from drivetrain_launch.commands.launch import check_script
from drivetrain_launch.commands.options import (
    GroupedCommand,
    GroupedOption,
    complete_file,
    resolve_command_line,
    source_options,
)
from drivetrain_launch.manifests.job import (
    DEVICE,
    Pods,
    SchedulerJob,
    arguments_of,
    batch_script,
    jobset,
    name_from,
    secret_command,
    secret_option,
    task,
    trainjob,
)

KINDS = {"trainjob": trainjob, "jobset": jobset}


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
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
    shared = (source_options(), _NAME, *((_DEVICES,) if counted else ()), _NOTICE)

    def decorate(write: Callable[..., str]) -> click.Command:
        @functools.wraps(write)
        def function(
            config: str | None,
            assignments: tuple[str, ...],
            script: tuple[str, ...],
            output: Path | None,
            **given: Any,
        ) -> None:
            resolved = resolve_command_line(config, assignments)
            arguments = check_script(script, module=False) if local else _named_script(script)
            facts = {key: given.pop(key) for key in ("name", "notice")}
            devices = _devices(resolved, given.pop("devices")) if counted else 0
            _write(write(_job(resolved, arguments, devices, **facts), **given), output)

        for option in (_SCRIPT, _OUTPUT, *reversed(shared)):
            function = option(function)
        settings = {"allow_interspersed_args": False, "max_content_width": 100}
        return command.command(
            name, cls=GroupedCommand, options_metavar="[OPTIONS]", context_settings=settings
        )(function)

    return decorate


def _option(*names: str, group: str = "Job", **settings: Any) -> Callable[..., Any]:
    return click.option(*names, cls=GroupedOption, group=group, **settings)


_SCRIPT = click.argument(
    "script",
    nargs=-1,
    type=click.UNPROCESSED,
    metavar="SCRIPT [ARGS]...",
    shell_complete=complete_file,
)
_NAME = _option(
    "--name", metavar="NAME", default="", help="Name of the job. [default: the script's]"
)
_DEVICES = _option(
    "--devices",
    metavar="N",
    type=int,
    help="Accelerators of each host, 0 for the CPU. [default: launch.nproc_per_node]",
)
_NOTICE = _option(
    "--notice",
    metavar="SECONDS",
    type=int,
    default=120,
    show_default=True,
    help="Time between the scheduler's notice and its kill, for a last checkpoint.",
)
_OUTPUT = _option(
    "--output",
    group="Output",
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
    job: SchedulerJob, *, time: str, partition: str, account: str, sbatch: tuple[str, ...]
) -> str:
    """Write a batch script: sbatch FILE."""
    given = {"time": time, "partition": partition, "account": account}
    directives = (*(f"--{key}={value}" for key, value in given.items() if value), *sbatch)
    for directive in directives:
        _check_directive(directive)
    return batch_script(job, directives=directives)


@job_command("kubernetes", local=False)
@_option("--image", metavar="IMAGE", required=True, help="Container image with the script.")
@_option(
    "--kind",
    type=click.Choice(list(KINDS)),
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
    job: SchedulerJob, *, image: str, kind: str, namespace: str, device_name: str, restarts: int
) -> str:
    """Write the objects of a job: kubectl apply -f FILE."""
    pods = Pods(image=image, restarts=restarts, namespace=namespace, device=device_name)
    notes = [f"First, once: {secret_command(job, pods)}"] if job.hosts > 1 else []
    return _yaml(KINDS[kind](job, pods), notes)


@job_command("skypilot", counted=False)
@_option("--accelerators", metavar="KIND:N", default="", help="Of each host, such as H100:8.")
@_option("--spot", is_flag=True, help="Hosts that may be taken away, at a lower price.")
@_RESTARTS
def skypilot(job: SchedulerJob, *, accelerators: str, spot: bool, restarts: int) -> str:
    """Write a task: sky jobs launch FILE."""
    start = "Start: sky jobs launch FILE"
    notes = [f"{start} {secret_option()}" if job.hosts > 1 else start]
    return _yaml([task(job, accelerators=accelerators, restarts=restarts, spot=spot)], notes)


def _job(
    resolved: Resolved, arguments: tuple[str, ...], devices: int, *, name: str, notice: int
) -> SchedulerJob:
    return SchedulerJob(
        name=name or name_from(arguments[0]),
        hosts=resolved.run.launch.nnodes,
        least=resolved.run.launch.least_nnodes,
        devices=devices,
        notice=notice,
        command=("drivetrain", "launch", *arguments_of(resolved, notice), *arguments),
    )


def _devices(resolved: Resolved, devices: int | None) -> int:
    """Return the number of accelerators of a host: as given, or one for each of its processes.

    Raises:
        ConfigError: only the host itself can count its processes.
    """
    launch = resolved.run.launch
    found = launch.nproc_per_node if devices is None else devices
    if devices is None and launch.device == "cpu":
        return 0
    if found == "auto":
        raise ConfigError(
            "expected the number of accelerators of a host, found launch.nproc_per_node: auto, "
            "which only the host itself can count; add --devices N, 0 for the CPU"
        )
    return found


def _named_script(script: tuple[str, ...]) -> tuple[str, ...]:
    """Return the script and its arguments; the file itself lies in the container image.

    Raises:
        ConfigError: there is none.
    """
    if not script:
        raise ConfigError(
            "expected a SCRIPT to run, found none; for example: "
            "drivetrain manifest kubernetes --image IMAGE --devices 8 train.py"
        )
    return script


def _check_directive(directive: str) -> None:
    """Refuse an option of sbatch that would be no option.

    Raises:
        ConfigError: it does not begin with a hyphen, or has several lines.
    """
    if not directive.startswith("-") or "\n" in directive:
        raise ConfigError(
            f"--sbatch: expected an option of sbatch in one line, such as --exclusive, found "
            f"{directive!r}"
        )


def _yaml(documents: list[dict[str, Any]], notes: list[str]) -> str:
    text = yaml.safe_dump_all(documents, sort_keys=False, width=1000)
    return "".join(f"# {note}\n" for note in notes) + text


def _write(text: str, output: Path | None) -> None:
    """Write a job file.

    Raises:
        ConfigError: the file exists, or cannot be written.
    """
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(
            f"--output: expected a new file that can be written, found {str(output)!r}: "
            f"{error.strerror}; choose another name"
        ) from error
    click.echo(f"wrote {output}")
