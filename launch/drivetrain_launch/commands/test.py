"""``drivetrain test``: checks in seconds that this machine trains correctly on several ranks."""

from typing import Any

import click

from drivetrain_launch.commands.launch import launch
from drivetrain_launch.commands.options import GroupedCommand, GroupedOption, resolve_command_line

MODULE = "drivetrain_launch.commands.selfcheck"


@click.command(
    cls=GroupedCommand,
    context_settings={
        "token_normalize_func": lambda name: name.replace("_", "-"),
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
    },
)
@click.option(
    "--nproc-per-node",
    cls=GroupedOption,
    group="Processes",
    default="2",
    metavar="N|auto",
    help="Processes to compare with one. [default: 2]",
)
@click.option(
    "--cpu", cls=GroupedOption, group="Processes", is_flag=True, help="Leave accelerators alone."
)
@click.option(
    "--strategy",
    cls=GroupedOption,
    group="Training",
    metavar="NAME",
    help="Strategy to check. [default: the installed default]",
)
@click.option(
    "--set",
    "assignments",
    cls=GroupedOption,
    group="Training",
    metavar="KEY=VALUE",
    multiple=True,
    help="Set any knob, for example strategy.KEY=VALUE; repeatable.",
)
def command(assignments: tuple[str, ...], **flags: Any) -> int:
    """Train a small model on several ranks and compare it with one process.

    Exits with 0 when losses and weights agree, with 1 when they do not.
    """
    return launch(resolve_command_line(None, assignments, flags), ("-m", MODULE))
