"""A configuration is compared with the reference, in runs of the user's script of their own.

Where they differ, both are repeated in fp64. A run has processes of its own and a time limit.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from drivetrain.config.resolve import Resolved
from drivetrain.errors import CollectiveError
from drivetrain.registry import strategies
from drivetrain.verify import Comparison, Difference, Kind, RecordRequest, RunRecord, compare, judge
from drivetrain_launch.console import say, show_table

Ending = Literal["recorded", "refused", "failed", "hung", "empty"]

STOP_S = 15.0
"""How long the launcher has to end its ranks after the time limit."""

_FAILED_FIRST = re.compile(r"^rank \d+ failed first .*$", re.MULTILINE)
_OWN_ERROR = re.compile(r"^ *(?:error: |drivetrain[\w.]*\.(\w+): )", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """How a recorded run ended.

    Attributes:
        ending: ``recorded``; ``refused`` with an error of the library that names the way out;
            ``failed`` with any other error; ``hung`` beyond the time limit; ``empty`` without a
            step.
        record: the numbers of a run that was recorded.
        reason: one line, for every other ending.
        output: the error stream; the traceback of the rank that failed first stands at its end.
        code: the exit code of the launcher.
    """

    ending: Ending
    record: RunRecord | None = None
    reason: str = ""
    output: str = ""
    code: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The script, and how it is run.

    Attributes:
        resolved: the configuration.
        arguments: of the launcher: ``(SCRIPT, ...)`` or ``("-m", MODULE, ...)``, perhaps behind
            ``--as-accelerate``.
        steps: optimizer steps to record.
        limit_s: seconds that one run may take.
        folder: for the records.
    """

    resolved: Resolved
    arguments: Sequence[str]
    steps: int
    limit_s: float
    folder: Path

    def run(self, name: str, ranks: int, request: RecordRequest) -> Attempt:
        """Run the script on so many ranks, with the record in a folder of this name."""
        from drivetrain.runtime.world import RECORD_VARIABLE

        say(f"{name}, on {ranks} ranks" if ranks > 1 else f"{name}, in one process")
        folder = self.folder / name
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(_on(self.resolved, ranks, request), encoding="utf-8")
        replace(request, steps=self.steps, folder=str(folder)).write(folder / "request.json")
        launch = ("-m", "drivetrain_launch", "launch", "--config", str(folder / "config.yaml"))
        with (
            (folder / "stdout.log").open("wb") as out,
            (folder / "stderr.log").open("wb") as err,
            subprocess.Popen(  # noqa: S603 - the user's own script
                [sys.executable, *launch, *self.arguments],
                env=os.environ | {RECORD_VARIABLE: str(folder / "request.json")},
                stdout=out,
                stderr=err,
            ) as process,
        ):
            code = _wait(process, self.limit_s)
        output = (folder / "stderr.log").read_text(encoding="utf-8", errors="replace")
        if code is None:
            reason = f"no end after {self.limit_s:g} s; raise --limit if a step takes so long"
            return Attempt(ending="hung", reason=reason, output=output, code=_HUNG)
        return _failed(output, code) if code else _ended(folder, output)


_HUNG = CollectiveError.exit_code


def _on(resolved: Resolved, ranks: int, request: RecordRequest) -> str:
    """Return the configuration file of a run on so many ranks of this host.

    The launcher, too, must find the strategy that the request puts in the place of the script's.
    """
    launch = replace(resolved.run.launch, nproc_per_node=ranks, max_restarts=0, log_dir="")
    given = replace(resolved, run=replace(resolved.run, launch=launch))
    applied = request.applied(given)
    before = {key: value for key, value, _ in given.rows()}
    kept = {key for key, value, _ in applied.rows() if key in before and before[key] == value}
    origins = {key: origin for key, origin in given.origins.items() if key in kept}
    return replace(applied, origins=origins).to_yaml(with_origins=True)


def _wait(process: "subprocess.Popen[bytes]", limit_s: float) -> int | None:
    """Return the exit code, None after the time limit; no process is left in either case."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()  # its ranks end with it


def _ended(folder: Path, output: str) -> Attempt:
    try:
        record = RunRecord.read(folder)
    except FileNotFoundError:
        lacking = "an Accelerator()"
    else:
        if record.steps:
            return Attempt(ending="recorded", record=record, output=output)
        lacking = "an optimizer step through accelerator.prepare()"
        lacking = lacking if record.models else "accelerator.prepare(model)"
    return Attempt(ending="empty", output=output, reason=f"the script ended without {lacking}")


def _failed(output: str, code: int) -> Attempt:
    """Tell a refusal, which is an error of the library, from any other failure."""
    reports = list(_FAILED_FIRST.finditer(output))
    said = output[reports[-1].start() :] if reports else output
    text = said.partition("\nstopped with it")[0]  # then other ranks may say why they stopped
    own = list(_OWN_ERROR.finditer(text))
    if own and own[-1][1] != CollectiveError.__name__:
        reason = " ".join(text[own[-1].end() :].split())
        return Attempt(ending="refused", reason=reason, output=output, code=code)
    lines = [line for line in text.splitlines() if line.strip()]
    reason = lines[-1].strip() if lines else f"exit code {code}"
    return Attempt(ending="failed", reason=reason, output=output, code=code)


# --- configuration is compared with the reference ---


Result = Literal["equal", "rounding", "error", "incomparable", "refused", "failed", "hung"]


_NOT_IN_DOUBLES = "right in fp64, but further apart here than low dtypes and such steps explain"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The result for one configuration.

    Attributes:
        label: strategy and options.
        result: the verdict, or how a run ended instead.
        mesh: sizes of the axes.
        comparison: of the runs; None where there is none.
        repeated: of the runs in fp64; None where they were not repeated.
        errors: the differences that are no rounding, in the order of the step.
        reason: why there is no verdict.
        remarks: about the comparison.
        attempt: the run that ended without a record.
    """

    label: str
    result: Result
    mesh: Mapping[str, int] = field(default_factory=dict)
    comparison: Comparison | None = None
    repeated: Comparison | None = None
    errors: Sequence[Difference] = ()
    reason: str = ""
    remarks: Sequence[str] = ()
    attempt: Attempt | None = None


class Examination:
    """Examines configurations of one script; runs of the reference serve all of them.

    Args:
        job: the script, and how it is run.
        ranks: processes of each run of a configuration.
    """

    def __init__(self, job: Job, ranks: int) -> None:
        self._job = job
        self._ranks = ranks
        self._references: dict[tuple[int, bool, bool], Attempt] = {}

    def finding(self, label: str, strategy: Mapping[str, Any] | None = None) -> Finding:
        """Examine the job's own strategy, or another one by name and options."""
        run = self._run(label, RecordRequest(strategy=strategy))
        if run.record is None:
            return _without_record(label, run)
        label = label or run.record.strategy
        reference = self._reference(run.record, doubles=False, dropout=True)
        if reference.record is None:
            return _without_record(label, reference, "the run of the reference: ")
        comparison = compare(run.record, reference.record)
        if comparison.problem:
            return Finding(
                label=label, result="incomparable", mesh=run.record.mesh, reason=comparison.problem
            )
        repeated, remarks = None, list(_cleared(reference.record))
        if comparison.differences:
            repeated, remark = self._repeat(label, strategy, run.record)
            remarks += [remark] if remark else []
        verdict, errors = judge(comparison, repeated)
        if repeated is not None and errors and errors[0] not in repeated.differences:
            remarks.append(_NOT_IN_DOUBLES)
        return Finding(
            label=label,
            result=verdict,
            mesh=run.record.mesh,
            comparison=comparison,
            repeated=repeated,
            errors=errors,
            remarks=remarks,
        )

    def _run(self, label: str, request: RecordRequest) -> Attempt:
        name = "-".join(["run", *label.split(), *(["fp64"] if request.doubles else [])])
        return self._job.run(name, self._ranks, request)

    def _repeat(
        self, label: str, strategy: Mapping[str, Any] | None, record: RunRecord
    ) -> tuple[Comparison | None, str]:
        """Return the comparison in fp64, and a remark about it; None where it cannot be had."""
        dropout = not record.draws_masks
        request = RecordRequest(strategy=strategy, doubles=True, dropout=dropout)
        reference = self._reference(record, doubles=True, dropout=dropout)
        run = self._run(label, request) if reference.record is not None else reference
        if run.record is None or reference.record is None:
            return None, f"not repeated in fp64: {run.reason}; judged by size alone"
        comparison = compare(run.record, reference.record)
        if comparison.problem:
            return None, f"not repeated in fp64: {comparison.problem}; judged by size alone"
        silenced = run.record.silenced
        remark = (
            f"repeated without its {silenced} dropouts, whose masks are this strategy's own"
            if silenced
            else ""
        )
        return comparison, remark

    def _reference(self, record: RunRecord, *, doubles: bool, dropout: bool) -> Attempt:
        """Return the run of the reference on as many ranks as a run has replicas of the model."""
        ranks = record.mesh["dp"]
        key = (ranks, doubles, dropout)
        if key not in self._references:
            request = RecordRequest(
                strategy={"name": strategies().reference()},
                reference=True,
                doubles=doubles,
                dropout=dropout,
            )
            words = ["reference", f"dp{ranks}", *(["fp64"] if doubles else [])]
            name = "-".join([*words, *([] if dropout else ["no-dropout"])])
            self._references[key] = self._job.run(name, ranks, request)
        return self._references[key]


def forms(ranks: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield label, and name with options, of every installed strategy but the reference."""
    registry = strategies()
    for name in registry.choices:
        for options in registry.load(name).planning().variants(ranks):
            words = [name, *(f"{key}={value}" for key, value in options.items())]
            yield " ".join(words), {"name": name, **options}


def _cleared(reference: RunRecord) -> Iterator[str]:
    """Say where the script throws gradients away: the reference does the same, so none differs."""
    for number, step in enumerate(reference.steps, 1):
        if step.cleared:
            yield (
                f"step {number}: gradients of {step.cleared} of "
                f"{sum(map(len, step.losses))} backwards were cleared inside of their window, in "
                "the reference, too; the step is without them"
            )
            return


def _without_record(label: str, attempt: Attempt, prefix: str = "") -> Finding:
    """Return the finding about a run that recorded nothing; a reference must not refuse."""
    results: dict[str, Result] = {"hung": "hung", "empty": "incomparable"}
    results["refused"] = "failed" if prefix else "refused"
    result = results.get(attempt.ending, "failed")
    return Finding(label=label, result=result, reason=prefix + attempt.reason, attempt=attempt)


# --- the report: one configuration in full, several as a table, or JSON ---


DIFFERENT = 1
"""Exit code when numbers differ, and, of all strategies, one fails."""

INCOMPARABLE = 8
"""Exit code when there is nothing to compare: other batches, or no step."""

KINDS: Mapping[Kind, str] = {
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


def show_finding(finding: Finding) -> None:
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


def show_findings(findings: Sequence[Finding]) -> None:
    """Print a table with a line for each configuration."""
    kinds: Sequence[Kind] = ("loss", "gradient norm", "weight")
    rows = []
    for finding in findings:
        used = finding.repeated or finding.comparison
        largest = [f"{used.largest(kind):.0e}" if used else "" for kind in kinds]
        said = describe(finding.errors[0]) if finding.errors else finding.reason
        said = "; ".join([*([said] if said else []), *finding.remarks])
        rows.append((finding.label, VERDICTS[finding.result], *largest, said))
    show_table(
        "Largest relative differences, in fp64 where there is any",
        ("strategy", "verdict", *(KINDS[kind] for kind in kinds), "remark"),
        rows,
    )


def describe(difference: Difference) -> str:
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


def _rows(comparison: Comparison, repeated: Comparison | None) -> Iterator[tuple[str, ...]]:
    for kind, word in KINDS.items():
        count = comparison.compared.get(kind, 0)
        if count:
            unequal = sum(each.kind == kind for each in comparison.differences)
            fp64 = f"{repeated.largest(kind):.1e}" if repeated else ""
            largest = comparison.largest(kind)
            yield word, str(count), str(unequal), f"{largest:.1e}", fp64


def _mesh(finding: Finding) -> str:
    return ", ".join(f"{name}={size}" for name, size in finding.mesh.items())


def _ranks(count: int) -> str:
    return "one rank" if count == 1 else f"{count} ranks"


def plain(finding: Finding) -> dict[str, Any]:
    """Return a finding as values of JSON."""

    def sizes(one: Comparison | None) -> dict[str, float] | None:
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


def exit_code_of(findings: Sequence[Finding], everything: bool) -> int:
    """Return the exit code of a verification: of one configuration, or of every strategy."""
    results = {finding.result for finding in findings}
    if not everything and findings[0].attempt is not None and findings[0].attempt.code:
        return findings[0].attempt.code
    if results & {"error", "failed", "hung"}:
        return DIFFERENT
    return INCOMPARABLE if "incomparable" in results else 0
