"""``drivetrain hardware``: the descriptions of hardware that plans are made for."""

from pathlib import Path
from typing import Any

import click

from drivetrain.errors import ConfigError
from drivetrain.hardware.description import SUFFIX, hardware_names, hardware_text, load_hardware
from drivetrain_launch.commands.options import (
    SETTINGS,
    UNDERSCORES,
    GroupedCommand,
    resolve_command_line,
    worded_flags,
)

MODULE = "drivetrain.hardware.measuring"
"""The program that measures, on every rank."""


@click.group(context_settings=SETTINGS)
def command() -> None:
    """Show or measure descriptions of hardware, which 'drivetrain plan' reads."""


@command.command()
@click.argument("source", metavar="[NAME|FILE]", required=False)
def show(source: str | None) -> None:
    """Print a description, or list their names.

    A description has the sources of its numbers.

    Example: drivetrain hardware show h100
    """
    if source is None:
        for name in hardware_names():
            facts = load_hardware(name)
            peak = max(facts.device.teraflops.values())
            click.echo(
                f"{name:12} {peak:g} TFLOP/s, {facts.device.memory.gib:g} GiB, "
                f"{facts.device.memory.gigabytes_per_second:g} GB/s, {facts.host.devices} per host"
            )
        return
    load_hardware(source)
    click.echo(hardware_text(source), nl=False)


@command.command(cls=GroupedCommand, context_settings=UNDERSCORES)
@click.argument("target", metavar="FILE", type=click.Path(path_type=Path))
@worded_flags(
    nproc_per_node=("N|auto", "Ranks of this host, one per device. [default: auto]"),
    cpu=("", "Leave accelerators alone."),
    nnodes=("N", "Number of hosts. [default: 1]"),
    node_rank=("N", "Index of this host, from 0. [default: 0]"),
    rdzv_endpoint=("HOST:PORT", "Where the hosts meet; needed with nnodes > 1. [default: none]"),
)
def measure(target: Path, **flags: Any) -> int:
    """Measure this hardware, and write its description.

    Devices, memory, links and disk are measured in two minutes; on a loaded machine fewer times:
    after a minute, no further round of devices begins, nor one of links. The description goes to
    FILE.

    With several hosts, run it on each of them, as `drivetrain launch`: FILE is written on host 0.
    Lines of the file say which figures scattered by more than 20%.

    Example: drivetrain hardware measure mine.yaml
    """
    from drivetrain_launch.commands.launch import launch

    if target.suffix != SUFFIX:
        raise ConfigError(f"expected a file that ends with {SUFFIX}, found {str(target)!r}")
    if not target.resolve().parent.is_dir():
        raise ConfigError(f"cannot write {str(target)!r}: there is no such folder; make it first")
    return launch(resolve_command_line(None, (), flags), ("-m", MODULE, str(target.resolve())))
