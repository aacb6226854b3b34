"""``drivetrain verify``: a script's numbers under its strategy, compared with the right ones."""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from drivetrain.config.resolve import Resolved
from drivetrain.errors import ConfigError
from drivetrain_launch.commands.launch import check_script
from drivetrain_launch.commands.options import (
    GroupedCommand,
    GroupedOption,
    complete_file,
    resolve_command_line,
    source_options,
)
from drivetrain_launch.ranks.placement import accelerators, cores, local_ranks, threads
from drivetrain_launch.ranks.worker import as_accelerate_words

ALL = "all"
"""In the place of a strategy's name: every installed one."""

DIFFERENT = 1
"""Exit code when numbers differ, and, of all strategies, one fails."""

INCOMPARABLE = 8
"""Exit code when there is nothing to compare: other batches, or no step."""


@click.command(
    cls=GroupedCommand,
    options_metavar="[OPTIONS]",
    context_settings={
        "allow_interspersed_args": False,
        "token_normalize_func": lambda name: name.replace("_", "-"),
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
    },
)
@source_options()
@click.option(
    "--strategy",
    cls=GroupedOption,
    group="Training",
    metavar=f"NAME|{ALL}",
    help="Strategy to verify, or every installed one. [default: the configuration's]",
)
@click.option(
    "--precision",
    "--mixed-precision",
    "precision",
    cls=GroupedOption,
    group="Training",
    metavar="no|bf16|fp16",
    help="Precision of the runs; differences are repeated in fp64. [default: the configuration's]",
)
@click.option(
    "--nproc-per-node",
    cls=GroupedOption,
    group="Processes",
    metavar="N|auto",
    help="Processes of the verified run. [default: the configuration's]",
)
@click.option(
    "--cpu", cls=GroupedOption, group="Processes", is_flag=True, help="Leave accelerators alone."
)
@click.option(
    "--steps",
    cls=GroupedOption,
    group="Comparison",
    type=click.IntRange(min=1),
    default=3,
    metavar="N",
    help="Optimizer steps to compare; then the script is ended. [default: 3]",
)
@click.option(
    "--limit",
    cls=GroupedOption,
    group="Comparison",
    type=click.FloatRange(min=1),
    default=600.0,
    metavar="SECONDS",
    help="Time that one run of the script may take. [default: 600]",
)
@click.option(
    "--keep",
    cls=GroupedOption,
    group="Output",
    metavar="DIR",
    help="New folder in which records and output of all runs stay. [default: removed]",
)
@click.option(
    "--json", "as_json", cls=GroupedOption, group="Output", is_flag=True, help="Print JSON."
)
@click.option(
    "-m",
    "module",
    cls=GroupedOption,
    group="Script",
    is_flag=True,
    help="SCRIPT is the name of a module, as in 'python -m'.",
)
@click.option(
    "--as-accelerate",
    cls=GroupedOption,
    group="Script",
    may_lack_value=True,
    metavar="[=PACKAGE,...]",
    help="The script's 'import accelerate', and that of the packages, finds drivetrain, in every "
    "run.",
)
@click.argument(
    "script",
    nargs=-1,
    type=click.UNPROCESSED,
    metavar="SCRIPT [ARGS]...",
    shell_complete=complete_file,
)
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
    from drivetrain_launch.commands.findings import show_finding, show_findings, show_json
    from drivetrain_launch.verification import Examination, Job, forms

    with _folder(flags["keep"]) as folder:
        job = Job(
            resolved=resolved,
            arguments=(*as_accelerate_words(as_accelerate), *arguments),
            steps=flags["steps"],
            limit_s=flags["limit"],
            folder=folder,
            announce=partial(click.echo, err=True),
        )
        examination = Examination(job, ranks)
        if everything:
            findings = [examination.finding(label, form) for label, form in forms(ranks)]
        else:
            findings = [examination.finding("")]
            _show_output(findings)
    if as_json:
        show_json(" ".join(arguments), findings)
    elif everything:
        show_findings(findings)
    else:
        show_finding(findings[0])
    return _code(findings, everything)


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
def _folder(keep: str | None) -> Iterator[Path]:
    """Return a new folder, which is removed at the end unless it is to be kept.

    Raises:
        ConfigError: the folder to keep exists or cannot be made.
    """
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="drivetrain-verify-") as name:
            yield Path(name)
        return
    folder = Path(keep)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"--keep: expected a folder that can be made, found {keep!r}: {error.strerror}; name a "
            "new one"
        ) from error
    yield folder


def _show_output(findings: Sequence[Any]) -> None:
    """Print the traceback of a script that failed, before anything of ours."""
    for finding in findings:
        if finding.attempt is not None and finding.attempt.code:
            print(finding.attempt.output, file=sys.stderr, end="", flush=True)


def _code(findings: Sequence[Any], everything: bool) -> int:
    results = {finding.result for finding in findings}
    if not everything and findings[0].attempt is not None and findings[0].attempt.code:
        code: int = findings[0].attempt.code
        return code
    if results & {"error", "failed", "hung"}:
        return DIFFERENT
    return INCOMPARABLE if "incomparable" in results else 0
