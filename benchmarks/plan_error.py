"""The error of ``drivetrain plan`` against a table of measured steps of GPT models.

The table is a CSV file with the columns gpus, global_batch, micro_batch, hidden, heads, layers,
seq, tp, dp, pp and iteration_ms, one measured layout per row, as planners publish them.

    python benchmarks/plan_error.py measured.csv --hardware a100-80gb --recompute full

``--figure FILE`` draws the rows (needs matplotlib): docs/pictures/planned.png is made so.
"""

import argparse
import csv
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from drivetrain.hardware.catalog import load_hardware
from drivetrain.hardware.description import Hardware
from drivetrain.paper.transformer import GptShape
from drivetrain.planner.layout import layout_of
from drivetrain.planner.predict import Predictor, Task

FloatArray: TypeAlias = NDArray[np.float64]
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
    predictor = Predictor(task)
    planned = layout_of({**keys, **fixed}, predictor.installed)
    return 1e3 * predictor.predict(planned).step_seconds


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the correlation of the ranks (Spearman), for values without ties."""
    ranks = [np.argsort(np.argsort(values)) for values in (one, other)]
    return float(np.corrcoef(*ranks)[0, 1])


def draw(rows: Sequence[Mapping[str, str]], measured: FloatArray, planned: FloatArray,
         file: Path) -> None:  # fmt: skip
    """Draw predicted over measured steps, colored by tensor parallelism, with a band of 10%."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5.5, 5.2), layout="constrained")
    ends = np.array([min(measured.min(), planned.min()), max(measured.max(), planned.max())]) / 1e3
    axes.fill_between(ends, ends * 0.9, ends * 1.1, color="0.9", label="within 10%", linewidth=0)
    axes.plot(ends, ends, color="0.4", linewidth=0.8)
    ranks = np.array([int(row["tp"]) for row in rows])
    for tp, marker in zip(sorted(set(ranks)), "os^D", strict=False):
        of = ranks == tp
        axes.scatter(measured[of] / 1e3, planned[of] / 1e3, s=9, marker=marker, label=f"tp={tp}",
                     alpha=0.6, linewidth=0)  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="measured step, seconds",
             ylabel="predicted step, seconds", title=f"{len(rows)} published steps")  # fmt: skip
    axes.legend(frameon=False)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def main() -> None:
    """Print the mean absolute error, the rank correlation, and the errors by axis."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", type=Path)
    parser.add_argument("--hardware", default="a100-80gb")
    parser.add_argument("--recompute", default="full")
    parser.add_argument("--precision", default="fp16")
    parser.add_argument("--figure", type=Path, help="a PNG or SVG file to draw the rows to")
    options = parser.parse_args()
    hardware = load_hardware(options.hardware)
    fixed = {"recompute": options.recompute, "precision": options.precision}
    rows = list(csv.DictReader(options.table.open(encoding="utf-8")))
    measured = [float(row["iteration_ms"]) for row in rows]
    times = [predicted(row, hardware, fixed) for row in rows]
    errors = np.array(times) / np.array(measured) - 1
    if options.figure:
        draw(rows, np.array(measured), np.array(times), options.figure)
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
