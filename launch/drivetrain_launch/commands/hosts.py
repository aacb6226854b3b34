"""The options for hosts to start over ssh, of ``drivetrain launch`` and ``test``."""

import os
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from drivetrain.config import LaunchConfig
from drivetrain.errors import ConfigError, in_words
from drivetrain_launch.commands.options import (
    GIVEN_WORDS,
    HOSTS_GROUP,
    all_of,
    complete_file,
    grouped_option,
)
from drivetrain_launch.hosts.remote import RemoteHost, RemoteJob, read_hostfile, read_hosts, select

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
    ("--export", "NAME[=TEXT]", "Give hosts this variable, too; repeatable. [default: none]"),
    ("--env-file", "FILE", "Give hosts the variables of lines NAME=TEXT. [default: none]"),
)
"""Names, arguments and help of the options."""

REPEATABLE = "--export"

TOPOLOGY = "--topology"
OF_HOST_0 = (*(name for name, _, _ in OPTIONS), TOPOLOGY, "--rdzv-endpoint")
"""Options that the started hosts do not get: the machine that starts them decides."""

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?:=(.*))?", re.DOTALL)


host_options = all_of(
    [
        grouped_option(
            HOSTS_GROUP,
            name,
            metavar=metavar,
            help=text,
            multiple=name == REPEATABLE,
            shell_complete=complete_file if metavar == "FILE" else None,
        )
        for name, metavar, text in OPTIONS
    ]
)
"""Decorates a command with the options; their values are keyword arguments."""


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
    include, exclude = flags["include"], flags["exclude"]
    if hosts is not None and hostfile is not None:
        raise ConfigError("--hosts and --hostfile: expected one of them, found both")
    if hosts is None and hostfile is None:
        if (include, exclude, flags["env_file"]) != (None, None, None) or flags["export"]:
            raise ConfigError(
                "--include, --exclude, --export and --env-file are for hosts that are started over "
                "ssh; give --hostfile or --hosts, too"
            )
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


def remote_job(
    command: str,
    hosts: Sequence[RemoteHost],
    flags: Mapping[str, Any],
    *,
    launch: LaunchConfig,
    script: Sequence[str] = (),
) -> RemoteJob:
    """Return the job that runs this command, with its words, on hosts.

    Raises:
        ConfigError: a variable for the hosts is malformed, or not set.
    """
    given: Sequence[str] = click.get_current_context().meta[GIVEN_WORDS]
    head = without_hosts(given[: len(given) - len(script)])
    variables = dict(_exported(flags["export"], flags["env_file"]))
    return RemoteJob(
        hosts=hosts,
        words=(*head, *script),
        grace_s=launch.grace_s,
        endpoint=launch.rdzv_endpoint,
        command=command,
        variables=variables,
    )


def _exported(words: Sequence[str], file: str | None) -> Iterator[tuple[str, str]]:
    """Yield the variables of a file, and then those of the command line."""
    if file is not None:
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--env-file: cannot read {file!r}: {in_words(error)}; check the path"
            ) from error
        for number, line in enumerate(lines, start=1):
            if (text := line.strip()) and not text.startswith("#"):
                yield _variable(text, f"{file}:{number}")
    for word in words:
        yield _variable(word, f"--export {word}")


def _variable(text: str, where: str) -> tuple[str, str]:
    match = _ASSIGNMENT.fullmatch(text)
    if match is None:
        raise ConfigError(f"{where}: expected NAME or NAME=TEXT, found {text!r}")
    if match[2] is None and match[1] not in os.environ:
        raise ConfigError(
            f"{where}: the variable {match[1]} is not set here; set it, or give {match[1]}=TEXT"
        )
    return match[1], os.environ[match[1]] if match[2] is None else match[2]
