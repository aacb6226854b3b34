"""``drivetrain verify``: a script under its strategy, compared step by step with the reference."""

import json
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from drivetrain.config.resolve import Resolved
from drivetrain.errors import ConfigError, refusing
from drivetrain_launch.commands.launch import as_accelerate_option, check_script
from drivetrain_launch.commands.options import (
    GroupedCommand,
    grouped_option,
    json_option,
    module_option,
    resolve_command_line,
    script_argument,
    source_options,
    worded_flags,
)
from drivetrain_launch.ranks.failure import Signals, Stopped
from drivetrain_launch.ranks.placement import accelerators, cores, local_ranks, threads
from drivetrain_launch.ranks.worker import as_accelerate_words

ALL = "all"
"""In the place of a strategy's name: every installed one."""


@click.command(cls=GroupedCommand)
@source_options
@worded_flags(
    strategy=(
        f"NAME|{ALL}",
        "Strategy to verify, or every installed one. [default: the configuration's]",
    ),
    precision=(
        "no|bf16|fp16",
        "Precision of the runs; differences are repeated in fp64. [default: the configuration's]",
    ),
    nproc_per_node=("N|auto", "Ranks of the verified run. [default: the configuration's]"),
    cpu=("", "Leave accelerators alone."),
)
@grouped_option(
    "Comparison",
    "--steps",
    type=click.IntRange(min=1),
    default=3,
    metavar="N",
    help="Optimizer steps to compare; then the script is ended. [default: 3]",
)
@grouped_option(
    "Comparison",
    "--limit",
    type=click.FloatRange(min=1),
    default=600.0,
    metavar="SECONDS",
    help="Time that one run of the script may take. [default: 600]",
)
@grouped_option(
    "Output",
    "--keep",
    metavar="DIR",
    help="New folder in which records and output of all runs stay. [default: removed]",
)
@json_option
@module_option
@as_accelerate_option
@script_argument
def command(
    config: str | None,
    assignments: tuple[str, ...],
    as_json: bool,
    module: bool,
    as_accelerate: str | None,
    script: tuple[str, ...],
    **flags: Any,
) -> int:
    """Run SCRIPT for a few steps, and again with the definition of data parallelism; compare.

    The script stays as it is. Exits with 0 when both runs agree but for rounding, with 1 when they
    do not, with 8 when there is nothing to compare, and else as 'drivetrain launch' does.

    Example: drivetrain verify --strategy fsdp --nproc-per-node 2 train.py
    """
    everything = flags["strategy"] == ALL
    if everything:
        flags["strategy"] = None
    resolved = resolve_command_line(config, assignments, flags)
    if resolved.run.launch.nnodes > 1:
        raise ConfigError(
            f"launch.nnodes: expected 1 with drivetrain verify, found {resolved.run.launch.nnodes};"
            " verify on the ranks of one host"
        )
    arguments = check_script(script, module=module)
    ranks, resolved = _placed(resolved)
    from drivetrain_launch import verification

    try:
        with Signals(), _record_folder(flags["keep"]) as folder:
            job = verification.Job(
                resolved=resolved,
                arguments=(*as_accelerate_words(as_accelerate), *arguments),
                steps=flags["steps"],
                limit_s=flags["limit"],
                folder=folder,
            )
            examination = verification.Examination(job, ranks)
            if everything:
                findings = [examination.finding(*form) for form in verification.forms(ranks)]
            else:
                findings = [examination.finding("")]
                attempt = findings[0].attempt
                if attempt is not None and attempt.code:  # a traceback first
                    print(attempt.output, file=sys.stderr, end="", flush=True)
    except Stopped as stopped:
        click.echo(f"stopped by {signal.Signals(stopped.number).name}", err=True)
        return stopped.code
    if as_json:
        plain = {"script": " ".join(arguments), "findings": list(map(verification.plain, findings))}
        print(json.dumps(plain, indent=2))
    elif everything:
        verification.show_findings(findings)
    else:
        verification.show_finding(findings[0])
    return verification.exit_code_of(findings, everything)


def _placed(resolved: Resolved) -> tuple[int, Resolved]:
    """Return the ranks, and the configuration with as many threads for each, in every run.

    The reference may have fewer ranks; more threads would add its sums in another order.
    """
    launch = resolved.run.launch
    available = 0 if launch.device == "cpu" else accelerators()
    ranks = local_ranks(launch, accelerators=available, cores=cores())
    limit = threads(launch, ranks, cores=cores())
    if limit is not None:
        launch = replace(launch, threads_per_rank=int(limit))
    return ranks, replace(resolved, run=replace(resolved.run, launch=launch))


@contextmanager
def _record_folder(keep: str | None) -> Iterator[Path]:
    """Return a new folder, which is removed at the end unless it is to be kept.

    Raises:
        ConfigError: the folder to keep exists or cannot be made.
    """
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="drivetrain-verify-") as name:
            yield Path(name)
        return
    folder = Path(keep)
    with refusing(f"--keep: expected a folder that can be made, found {keep!r}", "name a new one"):
        folder.mkdir(parents=True)
    yield folder
