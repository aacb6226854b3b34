"""The report of ``drivetrain verify``: one configuration in full, several as a table, or JSON."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from drivetrain.verify import Comparison, Difference
from drivetrain_launch.tables import show_table
from drivetrain_launch.verification import Finding

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


def show_json(script: str, findings: Sequence[Finding]) -> None:
    """Print all findings as JSON."""
    print(json.dumps({"script": script, "findings": list(map(_plain, findings))}, indent=2))


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
        count = comparison.compared.get(kind, 0)  # type: ignore[call-overload]
        if count:
            unequal = sum(each.kind == kind for each in comparison.differences)
            fp64 = f"{repeated.largest(kind):.1e}" if repeated else ""  # type: ignore[arg-type]
            largest = comparison.largest(kind)  # type: ignore[arg-type]
            yield word, str(count), str(unequal), f"{largest:.1e}", fp64


def _mesh(finding: Finding) -> str:
    return ", ".join(f"{name}={size}" for name, size in finding.mesh.items())


def _ranks(count: int) -> str:
    return "one rank" if count == 1 else f"{count} ranks"


def _plain(finding: Finding) -> dict[str, Any]:
    def sizes(comparison: Comparison | None) -> dict[str, float] | None:
        if comparison is None:
            return None
        return {kind: comparison.largest(kind) for kind in comparison.compared}

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
