"""``drivetrain verify``: the numbers of the user's script, compared with the right ones."""

import json
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from drivetrain_launch.console import show_table
from drivetrain_launch.ranks.failure import Signals, Stopped
from drivetrain_launch.ranks.placement import accelerators, cores, local_ranks, threads
from drivetrain_launch.ranks.worker import as_accelerate_words

if TYPE_CHECKING:
    from drivetrain.verify import Comparison, Difference
    from drivetrain_launch.verification import Finding

ALL = "all"
"""In the place of a strategy's name: every installed one."""

DIFFERENT = 1
"""Exit code when numbers differ, and, of all strategies, one fails."""

INCOMPARABLE = 8
"""Exit code when there is nothing to compare: other batches, or no step."""


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
    from drivetrain_launch.verification import Examination, Job, forms

    try:
        with Signals(), _folder(flags["keep"]) as folder:
            job = Job(
                resolved=resolved,
                arguments=(*as_accelerate_words(as_accelerate), *arguments),
                steps=flags["steps"],
                limit_s=flags["limit"],
                folder=folder,
            )
            examination = Examination(job, ranks)
            if everything:
                findings = [examination.finding(label, form) for label, form in forms(ranks)]
            else:
                findings = [examination.finding("")]
                attempt = findings[0].attempt
                if attempt is not None and attempt.code:  # a traceback first
                    print(attempt.output, file=sys.stderr, end="", flush=True)
    except Stopped as stopped:
        click.echo(f"stopped by {signal.Signals(stopped.number).name}", err=True)
        return stopped.code
    if as_json:
        plain = {"script": " ".join(arguments), "findings": list(map(_plain, findings))}
        print(json.dumps(plain, indent=2))
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
    with refusing(f"--keep: expected a folder that can be made, found {keep!r}", "name a new one"):
        folder.mkdir(parents=True)
    yield folder


def _code(findings: "Sequence[Finding]", everything: bool) -> int:
    results = {finding.result for finding in findings}
    if not everything and findings[0].attempt is not None and findings[0].attempt.code:
        return findings[0].attempt.code
    if results & {"error", "failed", "hung"}:
        return DIFFERENT
    return INCOMPARABLE if "incomparable" in results else 0


# --- the report: one configuration in full, several as a table, or JSON ---


KINDS = {
    "start": "first weights",
    "loss": "losses",
    "gradient norm": "gradient norms",
    "stepped gradient": "stepped gradients",
    "optimizer state": "optimizer states",
    "weight": "weights",
    "note": "notes",
}
"""What is compared, and the word for it in tables."""

LARGE = 1e-3
"""A relative difference that does not look like rounding."""

VERDICTS = {
    "equal": "equal to the last bit",
    "rounding": "equal but for rounding",
    "error": "error",
    "incomparable": "not compared",
    "refused": "refused",
    "failed": "failed",
    "hung": "hung",
}


def show_finding(finding: "Finding") -> None:
    """Print the report about one configuration."""
    comparison = finding.comparison
    if comparison is not None:
        show_table(
            f"{finding.label} on {_mesh(finding)}, {comparison.steps} steps, against whole models "
            f"on {_ranks(finding.mesh['dp'])}",
            ("compared", "numbers", "not equal", "largest difference", "in fp64"),
            list(_rows(comparison, finding.repeated)),
        )
    for remark in finding.remarks:
        print(remark)
    large = comparison and any(comparison.largest(kind) > LARGE for kind in comparison.compared)
    if finding.result == "rounding" and finding.repeated and large:
        print("repeated in fp64 the large differences vanish: they come of rounding, no mistake")
    verdict = VERDICTS[finding.result]
    print(f"{verdict}: {finding.reason}" if finding.reason else verdict)
    if finding.errors:
        first, worst = finding.errors[0], max(finding.errors, key=lambda each: each.relative)
        print(f"  first: {describe(first)}")
        if worst is not first:
            print(f"  worst: {describe(worst)}")
        names = {each.name for each in finding.errors if each.name}
        print(f"  {len(finding.errors)} numbers, {len(names)} parameters and buffers differ")


def show_findings(findings: "Sequence[Finding]") -> None:
    """Print a table with a line for each configuration."""
    kinds = ("loss", "gradient norm", "weight")
    rows = []
    for finding in findings:
        used = finding.repeated or finding.comparison
        largest = [f"{used.largest(kind):.0e}" if used else "" for kind in kinds]  # type: ignore[arg-type]
        said = describe(finding.errors[0]) if finding.errors else finding.reason
        said = "; ".join([*([said] if said else []), *finding.remarks])
        rows.append((finding.label, VERDICTS[finding.result], *largest, said))
    show_table(
        "Largest relative differences, in fp64 where there is any",
        ("strategy", "verdict", *(KINDS[kind] for kind in kinds), "remark"),
        rows,
    )


def describe(difference: "Difference") -> str:
    """Return one line about a difference: where it is, and how large."""
    place = f" ({difference.where})" if difference.where else ""
    name = f" of {difference.name}" if difference.name else ""
    size = f"{difference.absolute:.1e} apart, {difference.relative:.1e} of its scale"
    if difference.of_change is not None:
        size = f"{difference.absolute:.1e} apart, {difference.of_change:.1%} of the step's change"
    return (
        f"step {difference.step}, {difference.kind}{name}{place}: found {difference.found:.9g}, "
        f"expected {difference.expected:.9g}; {size}"
    )


def _rows(comparison: "Comparison", repeated: "Comparison | None") -> Iterator[tuple[str, ...]]:
    for kind, word in KINDS.items():
        count = comparison.compared.get(kind, 0)  # type: ignore[call-overload]
        if count:
            unequal = sum(each.kind == kind for each in comparison.differences)
            fp64 = f"{repeated.largest(kind):.1e}" if repeated else ""  # type: ignore[arg-type]
            largest = comparison.largest(kind)  # type: ignore[arg-type]
            yield word, str(count), str(unequal), f"{largest:.1e}", fp64


def _mesh(finding: "Finding") -> str:
    return ", ".join(f"{name}={size}" for name, size in finding.mesh.items())


def _ranks(count: int) -> str:
    return "one rank" if count == 1 else f"{count} ranks"


def _plain(finding: "Finding") -> dict[str, Any]:
    def sizes(one: "Comparison | None") -> dict[str, float] | None:
        return None if one is None else {kind: one.largest(kind) for kind in one.compared}

    return {
        "label": finding.label,
        "result": finding.result,
        "mesh": dict(finding.mesh),
        "steps": finding.comparison.steps if finding.comparison else 0,
        "largest": sizes(finding.comparison),
        "largest_in_fp64": sizes(finding.repeated),
        "errors": len(finding.errors),
        "first": asdict(finding.errors[0]) if finding.errors else None,
        "reason": finding.reason,
        "remarks": list(finding.remarks),
    }
