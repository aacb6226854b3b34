"""``drivetrain test``: checks in seconds that machines train correctly, and how fast links are."""

import os
from typing import Any

import click

from drivetrain_launch.commands.launch import check_slot, launch
from drivetrain_launch.commands.options import (
    HOSTS_GROUP,
    SETTINGS,
    UNDERSCORES,
    GroupedCommand,
    chosen_hosts,
    command_line_layer,
    host_options,
    knob_flags,
    remote_job,
    resolve_command_line,
    source_options,
    worded_flags,
)
from drivetrain_launch.ranks.placement import KEYS, recognise
from drivetrain_launch.ranks.remote import run_hosts

MODULE = "drivetrain_launch.commands.selfcheck"
RANKS_KEY = "launch.nproc_per_node"
USUAL_RANKS = "2"
"""Processes on one host, where nobody says how many."""


@click.command(cls=GroupedCommand, context_settings=SETTINGS | UNDERSCORES)
@source_options
@worded_flags(
    nproc_per_node=(
        "N|auto",
        "Ranks to compare with one. [default: the configuration's; 2 where that is auto, on "
        "several hosts auto]",
    ),
    cpu=("", "Leave accelerators alone."),
    strategy=("NAME", "Strategy to check. [default: the installed default]"),
)
@knob_flags(HOSTS_GROUP)
@host_options
def command(config: str | None, assignments: tuple[str, ...], **flags: Any) -> int:
    """Train a small model on several ranks and compare it with one process.

    On several hosts, measure the bandwidth and latency between all pairs of them first. Exits with
    0 when losses and weights agree, with 1 when they do not.

    Example: drivetrain test --nproc-per-node 2 --strategy fsdp
    """
    chosen = command_line_layer(flags, assignments).origins
    listed = chosen_hosts(flags, chosen, standalone=False)
    explicit = bool(listed) or any(key in chosen for key in KEYS)
    surroundings = None if explicit else recognise(os.environ)
    if "launch.preflight" not in chosen:
        flags["preflight"] = "full"
    resolved = resolve_command_line(config, assignments, flags, surroundings)
    settings = resolved.run.launch
    alone = surroundings is None and not explicit and settings.nnodes == 1
    if alone and settings.nproc_per_node == "auto" and RANKS_KEY not in chosen:
        flags["nproc_per_node"] = USUAL_RANKS
        resolved = resolve_command_line(config, assignments, flags)
    check_slot(resolved, surroundings)
    from drivetrain_launch.commands.options import check_run

    check_run(resolved)
    if listed:
        return run_hosts(remote_job("test", listed, flags, launch=resolved.run.launch))
    return launch(resolved, ("-m", MODULE), surroundings)
