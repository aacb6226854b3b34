"""A configuration is compared with the reference; where they differ, both are repeated in fp64."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from drivetrain.registry import strategies
from drivetrain.verify import Comparison, Difference, RecordRequest, RunRecord, compare, judge
from drivetrain_launch.verification.attempt import Attempt, Job

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
                label=label,
                result="incomparable",
                mesh=run.record.mesh,
                reason=comparison.problem,
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


def forms(ranks: int) -> list[tuple[str, dict[str, Any]]]:
    """Return label, and name with options, of every installed strategy but the reference."""
    registry = strategies()
    found = []
    for name in registry.choices:
        for options in registry.load(name).variants(ranks):
            words = [name, *(f"{key}={value}" for key, value in options.items())]
            found.append((" ".join(words), {"name": name, **options}))
    return found


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
    results: dict[str, Result] = {"refused": "failed" if prefix else "refused", "hung": "hung"}
    result: Result = results.get(attempt.ending, "failed")
    if attempt.ending == "empty":
        result = "incomparable"
    return Finding(label=label, result=result, reason=prefix + attempt.reason, attempt=attempt)
