"""``drivetrain estimate``: the bytes that each strategy promises to hold and send for a model."""

from dataclasses import replace
from typing import TYPE_CHECKING

import click

from drivetrain.config.resolve import Resolved
from drivetrain.errors import ConfigError
from drivetrain.hardware.sizes import DEVICES, device_bytes, unit_of
from drivetrain_launch.commands.options import (
    BEFORE_SCRIPT,
    ModelCommand,
    complete_file,
    resolve_command_line,
    rest_argument,
    source_options,
)
from drivetrain_launch.console import show_table

if TYPE_CHECKING:
    from drivetrain.cost import ModelSpec
    from drivetrain_launch.forecast.planning import Promise

KINDS = ("parameters", "masters", "gradients", "optimizer")
"""Columns of their own; other kinds on the device are added up."""


@click.command(cls=ModelCommand, context_settings=BEFORE_SCRIPT)
@source_options
@click.option(
    "--ranks", type=click.IntRange(min=1), default=8, help="Ranks of all hosts. [default: 8]"
)
@click.option(
    "--nnodes",
    type=click.IntRange(min=1),
    help="Hosts, each with as many ranks. [default: the configuration's, which is 1]",
)
@click.option(
    "--device",
    metavar="NAME|GIB",
    help=f"Memory of a rank's device, in GiB or by name: {', '.join(DEVICES)}.",
)
@click.argument("source", metavar="MODEL", shell_complete=complete_file)
@rest_argument()
def command(
    config: str | None,
    assignments: tuple[str, ...],
    ranks: int,
    nnodes: int | None,
    device: str | None,
    source: str,
    arguments: tuple[str, ...],
) -> None:
    """Show the bytes that every strategy holds and sends for MODEL, on rank 0, with Adam.

    MODEL is a config.json of transformers or its folder, a script (run as one process until it
    prepares its model, with ARGS), MODULE:FUNCTION, or a number of parameters such as 7B.
    Activations are not counted.
    """
    room = _room(device)
    resolved = _on_hosts(resolve_command_line(config, assignments), ranks, nnodes)
    from drivetrain_launch.forecast.models import model_of
    from drivetrain_launch.forecast.planning import promises_for

    model = model_of(source, arguments)
    show(model, list(promises_for(model, resolved, ranks)), resolved, ranks, room)


def _room(device: str | None) -> int | None:
    if device is None:
        return None
    try:
        return device_bytes(device)
    except ConfigError as error:
        raise ConfigError(f"--device: {error}") from None


def _on_hosts(resolved: Resolved, ranks: int, hosts: int | None) -> Resolved:
    """Return the configuration on so many hosts, which must divide the ranks."""
    launch = resolved.run.launch
    hosts = hosts or launch.nnodes
    if ranks % hosts:
        raise ConfigError(
            f"--ranks: expected a multiple of the {hosts} hosts, found {ranks}; every host has as "
            "many ranks"
        )
    launch = replace(launch, nnodes=hosts)
    return replace(resolved, run=replace(resolved.run, launch=launch))


def show(
    model: "ModelSpec",
    promises: "list[Promise]",
    resolved: Resolved,
    ranks: int,
    room: int | None,
) -> None:
    """Print one table over all forms, and the reasons of refusals."""
    hosts = resolved.run.launch.nnodes
    where = f"{ranks} ranks" if hosts == 1 else f"{ranks} ranks on {hosts} hosts"
    count = sum(spec.numel for spec in model.parameters)
    columns = ["strategy", "on device", *KINDS, "other", "host", "disk", "sent"]
    columns += ["leaves host"] if hosts > 1 else []
    counted = [promise for promise in promises if promise.cost is not None]
    unit, size = unit_of(max((promise.on_device for promise in counted), default=0))
    rows = [_row(promise, size, hosts, room) for promise in counted]
    title = (
        f"{count:,} parameters, {where}, precision {resolved.run.precision}: {unit} that rank 0 "
        "holds between steps and sends in a step"
    )
    show_table(title, columns + (["fits"] if room else []), rows)
    for promise in promises:
        if promise.cost is None:
            click.echo(f"{promise.form}: {promise.refusal}")
        elif promise.cost.uncounted:
            axes = ", ".join(f"{what} over {a}" for a, what in promise.cost.uncounted.items())
            click.echo(f"{promise.form}: sends {axes} as well, which depend on the batch")
    if hosts > 1:
        click.echo("leaves host: bytes that all ranks of a host send to other hosts in a step.")
    click.echo("Activations are not counted.")


def _row(promise: "Promise", unit: int, hosts: int, room: int | None) -> list[str]:
    held = promise.cost.held if promise.cost else {}
    kinds = [held.get(kind, 0) for kind in KINDS]
    other = promise.on_device - sum(kinds)
    sent = promise.cost.total_sent if promise.cost else 0
    numbers = [promise.on_device, *kinds, other, promise.in_host_memory, promise.on_disk, sent]
    numbers += [promise.between_hosts] if hosts > 1 else []
    fits = [] if room is None else ["yes" if promise.on_device <= room else "no"]
    return [promise.form, *(f"{number / unit:,.2f}" for number in numbers), *fits]
