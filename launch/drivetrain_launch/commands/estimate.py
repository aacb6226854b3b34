"""``drivetrain estimate``: the bytes that each strategy promises to hold and send for a model."""

import json
from typing import TYPE_CHECKING, Any

import click

from drivetrain.config import LaunchConfig
from drivetrain.config.resolve import Resolved
from drivetrain.errors import ConfigError
from drivetrain.hardware.description import hardware_names, load_hardware, names_a_device
from drivetrain.hardware.sizes import DEVICES, GIB, device_bytes, unit_of
from drivetrain_launch.commands.options import (
    BEFORE_SCRIPT,
    UNDERSCORES,
    ModelCommand,
    complete_file,
    grouped_option,
    json_option,
    resolve_command_line,
    rest_argument,
    source_options,
    worded_flags,
)
from drivetrain_launch.console import show_table

if TYPE_CHECKING:
    from drivetrain.cost import ModelSpec
    from drivetrain_launch.forecast import Promise

KINDS = ("parameters", "masters", "gradients", "optimizer")
"""Columns of their own; other kinds on the device are added up."""

USUAL_RANKS = 8
"""Ranks of a host where nobody says how many."""


@click.command(cls=ModelCommand, context_settings=BEFORE_SCRIPT | UNDERSCORES)
@source_options
@worded_flags(
    nproc_per_node=("N", "Ranks of a host. [default: the configuration's; 8 where that is auto]"),
    nnodes=("N", "Number of hosts. [default: the configuration's]"),
)
@click.option("--ranks", type=click.IntRange(min=1), hidden=True, help="Ranks of all hosts.")
@grouped_option(
    "Hardware",
    "--hardware",
    former=("--device",),
    metavar="NAME|GIB|FILE",
    help="Memory of a rank's device, for the column of what fits: in GiB, by name "
    f"({', '.join(DEVICES)}), or a description as of 'drivetrain plan'.",
)
@json_option
@click.argument("source", metavar="MODEL", shell_complete=complete_file)
@rest_argument()
def estimate(
    config: str | None,
    assignments: tuple[str, ...],
    ranks: int | None,
    hardware: str | None,
    as_json: bool,
    source: str,
    arguments: tuple[str, ...],
    **flags: Any,
) -> None:
    """Show the bytes that every strategy holds and sends for MODEL, on rank 0, with Adam.

    MODEL is a config.json of transformers or its folder, a script (run as one process until it
    prepares its model, with ARGS), MODULE:FUNCTION, or a number of parameters such as 7B.
    Activations are not counted.

    Example: drivetrain estimate --nproc-per-node 8 --hardware h100 7B
    """
    room = _room(hardware)
    resolved = resolve_command_line(config, assignments, flags)
    ranks = _all_ranks(resolved.run.launch, ranks)
    from drivetrain_launch.forecast import model_of, promises_for

    model = model_of(source, arguments)
    promises = list(promises_for(model, resolved, ranks))
    if as_json:
        click.echo(json.dumps([_plain(promise, room) for promise in promises]))
    else:
        _show_promises(model, promises, resolved, ranks, room)


def _room(hardware: str | None) -> int | None:
    """Return the bytes of a device.

    Raises:
        ConfigError: it is no name, no number, and no description.
    """
    if hardware is None:
        return None
    if not names_a_device(hardware) or hardware.lower() in hardware_names():
        return int(load_hardware(hardware).device.memory.gib * GIB)
    try:
        return device_bytes(hardware)
    except ConfigError as error:
        raise ConfigError(f"--hardware: {error}") from None


def _all_ranks(launch: LaunchConfig, given: int | None) -> int:
    """Return the ranks of all hosts, which every host has as many of."""
    hosts, per_host = launch.nnodes, launch.nproc_per_node
    if given is None:
        return hosts * (USUAL_RANKS if per_host == "auto" else per_host)
    if given % hosts:
        raise ConfigError(
            f"--ranks: expected a multiple of the {hosts} hosts, found {given}; every host has as "
            "many ranks, --nproc-per-node"
        )
    return given


def _plain(promise: "Promise", room: int | None) -> dict[str, Any]:
    """Return one form for JSON, in bytes: what rank 0 holds and sends, or why it cannot run."""
    if promise.refusal:
        return {"strategy": promise.form, "refusal": promise.refusal}
    return {
        "strategy": promise.form,
        "on_device": promise.cost.on_device,
        "held": dict(promise.cost.held),
        "host": promise.cost.in_host_memory,
        "disk": promise.cost.on_disk,
        "sent": promise.cost.total_sent,
        "leaves_host": promise.between_hosts,
        "not_counted": dict(promise.cost.uncounted),
        "fits": None if room is None else promise.cost.on_device <= room,
    }


def _show_promises(
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
    counted = [promise for promise in promises if not promise.refusal]
    unit, size = unit_of(max((promise.cost.on_device for promise in counted), default=0))
    rows = [_row(promise, size, hosts, room) for promise in counted]
    title = (
        f"{count:,} parameters, {where}, precision {resolved.run.precision}: {unit} that rank 0 "
        "holds between steps and sends in a step"
    )
    show_table(title, columns + (["fits"] if room else []), rows)
    for promise in promises:
        if promise.refusal:
            click.echo(f"{promise.form}: {promise.refusal}")
        elif promise.cost.uncounted:
            axes = ", ".join(f"{what} over {a}" for a, what in promise.cost.uncounted.items())
            click.echo(f"{promise.form}: sends {axes} as well, which depend on the batch")
    if hosts > 1:
        click.echo("leaves host: bytes that all ranks of a host send to other hosts in a step.")
    click.echo("Activations are not counted.")


def _row(promise: "Promise", unit: int, hosts: int, room: int | None) -> list[str]:
    cost = promise.cost
    kinds = [cost.held.get(kind, 0) for kind in KINDS]
    other = cost.on_device - sum(kinds)
    numbers = [cost.on_device, *kinds, other, cost.in_host_memory, cost.on_disk, cost.total_sent]
    numbers += [promise.between_hosts] if hosts > 1 else []
    fits = [] if room is None else ["yes" if promise.cost.on_device <= room else "no"]
    return [promise.form, *(f"{number / unit:,.2f}" for number in numbers), *fits]
