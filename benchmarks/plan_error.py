"""The error of ``drivetrain plan`` against a table of measured steps of GPT models.

The table is a CSV file with the columns gpus, global_batch, micro_batch, hidden, heads, layers,
seq, tp, dp, pp and iteration_ms, one measured layout per row, as planners publish them.

    python benchmarks/plan_error.py measured.csv --hardware a100-80gb --recompute full
"""

import argparse
import csv
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from drivetrain.hardware.catalog import load_hardware
from drivetrain.hardware.description import Hardware
from drivetrain.paper.transformer import GptShape
from drivetrain_launch.planner.layout import layout_of
from drivetrain_launch.planner.predict import Predictor, Task

AXES = ("tp", "pp", "dp", "micro_batch", "hidden")


def predicted(row: Mapping[str, str], hardware: Hardware, fixed: Mapping[str, str]) -> float:
    """Return the milliseconds of a step that are predicted for a row of the table."""
    count = {key: int(value) for key, value in row.items() if key != "iteration_ms"}
    shape = GptShape(
        layers=count["layers"], hidden=count["hidden"], heads=count["heads"], seq=count["seq"]
    )
    per_host = min(count["gpus"], hardware.host.devices)
    task = Task(shape, count["global_batch"], hardware, count["gpus"] // per_host, per_host)
    keys = {key: row[key] for key in ("tp", "pp", "dp", "micro_batch")}
    return 1e3 * Predictor(task).predict(layout_of({**keys, **fixed})).step_seconds


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the correlation of the ranks (Spearman), for values without ties."""
    ranks = [np.argsort(np.argsort(values)) for values in (one, other)]
    return float(np.corrcoef(*ranks)[0, 1])


def main() -> None:
    """Print the mean absolute error, the rank correlation, and the errors by axis."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", type=Path)
    parser.add_argument("--hardware", default="a100-80gb")
    parser.add_argument("--recompute", default="full")
    parser.add_argument("--precision", default="fp16")
    options = parser.parse_args()
    hardware = load_hardware(options.hardware)
    fixed = {"recompute": options.recompute, "precision": options.precision}
    rows = list(csv.DictReader(options.table.open(encoding="utf-8")))
    measured = [float(row["iteration_ms"]) for row in rows]
    times = [predicted(row, hardware, fixed) for row in rows]
    errors = np.array(times) / np.array(measured) - 1
    print(
        f"{len(rows)} rows: mean absolute error {abs(errors).mean():.1%}, bias "
        f"{errors.mean():+.1%}, from {errors.min():+.1%} to {errors.max():+.1%}, rank correlation "
        f"{rank_correlation(times, measured):.3f}"
    )
    for axis in AXES:
        groups = defaultdict(list)
        for row, error in zip(rows, errors, strict=True):
            groups[int(row[axis])].append(error)
        parts = (f"{value}: {np.abs(group).mean():.1%}" for value, group in sorted(groups.items()))
        print(f"{axis:12} {', '.join(parts)}")


if __name__ == "__main__":
    main()
