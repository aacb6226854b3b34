"""The options of ``drivetrain launch`` that name hosts to start over ssh."""

from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from drivetrain.errors import ConfigError
from drivetrain_launch.commands.options import GroupedOption, complete_file
from drivetrain_launch.hosts.hostfile import RemoteHost, read_hostfile, read_hosts, select

SELECTION = "HOST:0,1@HOST"
OPTIONS = (
    ("--hosts", "HOST:N,...", "Start N ranks on each of these hosts over ssh. [default: none]"),
    (
        "--hostfile",
        "FILE",
        "Start on the hosts of a file with lines such as 'n1 slots=8'. [default: none]",
    ),
    (
        "--include",
        SELECTION,
        "Of the hosts, take these alone, with these devices. [default: all]",
    ),
    ("--exclude", SELECTION, "Of the hosts, leave out these, or these devices. [default: none]"),
)
"""Names, arguments and help of the options."""

OF_HOST_0 = (*(name for name, _, _ in OPTIONS), "--rdzv-endpoint")
"""Options that the started hosts do not get: the machine that starts them decides."""


def host_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command with the options; their values are keyword arguments."""
    for name, metavar, text in reversed(OPTIONS):
        function = click.option(
            name,
            cls=GroupedOption,
            group="Several hosts",
            metavar=metavar,
            help=text,
            shell_complete=complete_file if metavar == "FILE" else None,
        )(function)
    return function


def chosen_hosts(
    flags: Mapping[str, Any], chosen: Container[str], *, standalone: bool
) -> list[RemoteHost]:
    """Return the hosts to start over ssh; none without ``--hosts`` and ``--hostfile``.

    Args:
        flags: values of the options.
        chosen: keys of the configuration that the command line sets.
        standalone: whether one host was asked for.

    Raises:
        ConfigError: the options contradict each other, or a host is malformed.
    """
    hosts, hostfile = flags["hosts"], flags["hostfile"]
    include, exclude = flags["include"] or "", flags["exclude"] or ""
    if hosts is not None and hostfile is not None:
        raise ConfigError("--hosts and --hostfile: expected one of them, found both")
    if hosts is None and hostfile is None:
        if include or exclude:
            raise ConfigError("--include and --exclude choose among hosts; give --hostfile, too")
        return []
    if standalone or "launch.nnodes" in chosen or "launch.node_rank" in chosen:
        raise ConfigError(
            "--hosts and --hostfile start the run on every host: leave out --nnodes, --node-rank "
            "and --standalone"
        )
    found = read_hostfile(Path(hostfile)) if hostfile is not None else read_hosts(hosts)
    return select(found, include, exclude)


def without_hosts(words: Sequence[str]) -> list[str]:
    """Leave the options about hosts out of a command line."""
    kept, rest = [], iter(words)
    for word in rest:
        name, equals, _ = word.partition("=")
        if name.replace("_", "-") not in OF_HOST_0:
            kept.append(word)
        elif not equals:
            next(rest, None)
    return kept
