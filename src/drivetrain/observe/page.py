"""The page of a report: one file without references to others, and pictures beside it.

``python -m drivetrain.observe.page FOLDER`` writes it for a run, beside its records. A training
starts this program when it ends: the interpreter of the training may be about to end, too, and need
not load what draws.
"""

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from drivetrain._version import __version__
from drivetrain.errors import DrivetrainError, PreflightError, replace_text
from drivetrain.hardware.sizes import size_text
from drivetrain.observe import history
from drivetrain.observe.figures import REPORT
from drivetrain.observe.history import (
    RunHistory,
    differences,
    load_history,
    side_by_side,
    summary_of,
)

TEMPLATE = "page.html.jinja"
PICTURES = "figures"
"""The folder of PNGs beside the page."""

NEEDED = ("matplotlib", "jinja2")


def missing_packages() -> str:
    """Return in words which packages a page needs in vain, and their extra; "" for none."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if not missing:
        return ""
    return (
        f"a report needs {' and '.join(NEEDED)}, found no {' and no '.join(missing)}; "
        "pip install 'drivetrain[report]', then: drivetrain report"
    )


def write_report(runs: Sequence[RunHistory], folder: Path) -> Path:
    """Write ``report.html``, and its charts as PNGs into ``figures``; return the page's path.

    Args:
        runs: one run, or several to compare.
        folder: made if it is missing; an older report there is replaced.

    Raises:
        PreflightError: matplotlib or jinja2 is not installed.
        OSError: the folder cannot be written.
    """
    if problem := missing_packages():
        raise PreflightError(problem)
    # Imported here: recording and the terminal's summary do without them.
    from jinja2 import Environment, FileSystemLoader

    from drivetrain.observe.charts import charts_of

    charts = charts_of(runs)
    pictures = folder / PICTURES
    pictures.mkdir(parents=True, exist_ok=True)
    for chart in charts:
        chart.save(pictures)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True
    )
    summaries = [summary_of(run) for run in runs]
    page = environment.get_template(TEMPLATE).render(
        runs=runs,
        title=" and ".join(run.name for run in runs),
        summaries=summaries,
        numbers=side_by_side(summaries),
        charts=charts,
        differences=differences(runs) if len(runs) > 1 else [],
        bytes_rows=_bytes_rows(runs[0]) if len(runs) == 1 else [],
        version=__version__,
    )
    path = folder / REPORT
    replace_text(path, page)
    return path


def _bytes_rows(run: RunHistory) -> list[tuple[str, str, str]]:
    """Return the bytes of a step by axis and operation: sent, and promised."""
    sent, promised = history.bytes_per_step(run), history.promised_bytes(run)
    return [
        (
            key,
            size_text(sent.get(key, 0)),
            "no promise" if promised is None else size_text(promised.get(key, 0)),
        )
        for key in sorted({*sent, *(promised or {})})
    ]


if __name__ == "__main__":
    try:
        recorded = load_history(sys.argv[1])
        sys.stdout.write(f"{write_report([recorded], recorded.folder)}\n")
    except (DrivetrainError, OSError) as failure:
        sys.exit(str(failure))
