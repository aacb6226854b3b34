"""``drivetrain env``: describes the machine for a bug report, without anything secret."""

import json
import os
import platform
import re
import resource
import shutil
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import click
import psutil

from drivetrain._version import __version__
from drivetrain.hardware.sizes import size_text
from drivetrain.registry import commands, stores, strategies, trackers
from drivetrain_launch.commands.options import SETTINGS, json_option
from drivetrain_launch.ranks.placement import cores

PREFIXES = ("NCCL_", "GLOO_", "OMP_", "TORCH_", "DRIVETRAIN_")
"""Variables outside these families are never shown: they may hold tokens."""

SECRET_WORDS = ("TOKEN", "KEY", "SECRET", "PASS", "PW", "AUTH", "BEARER", "DSN", "CREDENTIAL")

LIBRARIES = ("numpy", "transformers", "accelerate", "peft")
"""Packages whose versions matter for a bug, beside torch."""

PROCESSORS = Path("/proc/cpuinfo")


@click.command(context_settings=SETTINGS)
@json_option
def command(as_json: bool) -> None:
    """Describe this machine, for a bug report; paste it as it is."""
    facts = collect()
    click.echo(json.dumps(facts, indent=2) if as_json else markdown(facts))


def collect() -> dict[str, dict[str, Any]]:
    """Return the facts by section."""
    import torch

    return {
        "versions": {
            "drivetrain": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            **{name: _version(name) for name in LIBRARIES},
        },
        "plugins": {
            registry.group: ", ".join(registry.names) or "none"
            for registry in (strategies(), stores(), trackers(), commands())
        },
        "machine": machine(),
        "accelerators": accelerator_names(),
        "limits": limits(),
        "variables": shown_variables(os.environ),
    }


def machine() -> dict[str, Any]:
    """Return system, cores, memory and disk."""
    from drivetrain.memory import host_room

    return {
        "system": platform.platform(),
        "processor": processor(PROCESSORS),
        "cores": os.cpu_count(),
        "cores for this process": cores(),
        "memory": size_text(psutil.virtual_memory().total),
        "memory available": size_text(psutil.virtual_memory().available),
        "memory for this process": size_text(host_room()),
        "disk free here": size_text(shutil.disk_usage(".").free),
    }


def processor(file: Path) -> str:
    """Return the name of the processor, as the system lists it."""
    names = re.findall(r"^model name\s*: (.*)$", file.read_text(), re.M) if file.is_file() else []
    return names[0] if names else platform.machine()


def accelerator_names() -> dict[str, Any]:
    """Return the kind and the names of the accelerators."""
    import torch

    if not torch.accelerator.is_available():
        return {"count": 0}
    kind = torch.accelerator.current_accelerator()
    device = torch.get_device_module(kind)
    count = torch.accelerator.device_count()
    names = {str(index): str(device.get_device_name(index)) for index in range(count)}
    return {"kind": str(kind), "count": count, **names}


def limits() -> dict[str, Any]:
    """Return the limits that training runs hit: open files, locked memory, processes."""
    return {
        "open files": _limit(resource.RLIMIT_NOFILE),
        "locked memory": _limit(resource.RLIMIT_MEMLOCK, " bytes"),
        "processes": _limit(resource.RLIMIT_NPROC),
        "shared memory free": size_text(shutil.disk_usage("/dev/shm").free)  # noqa: S108
        if Path("/dev/shm").is_dir()  # noqa: S108
        else "none",
    }


def shown_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the known families whose names do not sound like a secret."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith(PREFIXES) and not any(word in name for word in SECRET_WORDS)
    }


def markdown(facts: Mapping[str, Mapping[str, Any]]) -> str:
    """Write the facts as Markdown lists."""
    lines: list[str] = []
    for title, section in facts.items():
        lines += [f"### {title}", ""]
        lines += [f"- {name}: {value}" for name, value in section.items()] or ["- none"]
        lines.append("")
    return "\n".join(lines).rstrip()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _limit(kind: int, unit: str = "") -> str:
    soft, _ = resource.getrlimit(kind)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft}{unit}"
