"""A job as every scheduler needs it: the command of a host, the number of hosts, and the endings.

A launcher takes the hosts, and its own place among these, from the scheduler's variables. So the
same command runs on every host, and no address is written into a job file.
"""

import math
import re
from dataclasses import dataclass
from typing import Any

import yaml

from drivetrain.config import Resolved
from drivetrain.errors import ConfigError
from drivetrain_launch.hosts.surroundings import KEYS
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
