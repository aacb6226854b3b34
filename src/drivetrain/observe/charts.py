"""The charts of a report, of one run or of several runs over each other.

Figures are matplotlib's own objects, without its global state: a script may plot at the same time.
"""

import io
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from drivetrain.hardware.sizes import size_text
from drivetrain.observe import history
from drivetrain.observe.figures import SECTIONS, StepFigures
from drivetrain.observe.history import (
    WAITING,
    Curve,
    RunHistory,
    in_seconds,
    in_short,
    waited,
)

COLORS = ("#3366cc", "#dd6b20", "#2f855a", "#b83280", "#6b46c1", "#0987a0", "#975a16", "#4a5568")
"""One for each run, or each rank, in turn."""

SECTION_COLORS = {
    "data": "#d69e2e",
    "forward": "#63b3ed",
    "backward": "#3366cc",
    "optimizer": "#2f855a",
    "checkpoint": "#975a16",
    "evaluation": "#b794f4",
    "other": "#cbd5e0",
}
WAITING_COLORS = ("#e53e3e", "#f687b3", "#c05621", "#9b2c2c")
"""Waiting is what a reader looks for: reds."""

FEW = 60
"""Points of a curve that are drawn one by one."""

PROMISE_COLOR = "#a0aec0"

MOST_LINES = 8
"""Ranks with a line of their own; of more ranks, the lowest, the highest and the mean are shown."""

MOST_BARS = 24
"""Ranks with a bar of their own: those that waited least and most, half of each."""


def style(**more: Any) -> AbstractContextManager[None]:
    """Return a context in which matplotlib draws as reports look."""
    file = Path(__file__).with_name("report.mplstyle")
    given: Any = mpl.rc_params_from_file(file, use_default_template=False)
    return mpl.rc_context(given | more)


@dataclass(frozen=True, slots=True)
class Chart:
    """One figure of a report.

    Attributes:
        name: of its file.
        title: above it.
        text: a sentence below the title; "" for none.
        figure: matplotlib's.
    """

    name: str
    title: str
    text: str
    figure: Figure

    def svg(self) -> str:
        """Return the drawing as an element of a page, without a reference to anything else."""
        out = io.StringIO()
        with style(**{"svg.hashsalt": self.name}):
            self.figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
        drawing = out.getvalue()
        drawing = drawing[drawing.index("<svg") :]
        drawing = re.sub(r"<metadata>.*?</metadata>", "", drawing, flags=re.DOTALL)
        # Names are of one page: those of two drawings must not meet.
        drawing = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{self.name}-", drawing)
        return re.sub(r'\b(width|height)="[\d.]+pt"', "", drawing, count=2)

    def save(self, folder: Path) -> Path:
        """Write ``NAME.png`` into a folder.

        Raises:
            OSError: the file cannot be written.
        """
        path = folder / f"{self.name}.png"
        with style():
            self.figure.savefig(path, format="png", dpi=150, metadata={"Software": None})
        return path


def charts_of(runs: Sequence[RunHistory]) -> list[Chart]:
    """Return all charts that the records of these runs have values for."""
    makers: tuple[Callable[[Sequence[RunHistory]], Chart | None], ...] = (
        _loss,
        _gradient_norm,
        _throughput,
        _time_of_a_step,
        _step_time,
        _memory,
        _bytes,
        _own,
    )
    with style():
        made = [make(runs) for make in makers]
    return [chart for chart in made if chart is not None]


# --- curves by step ---


def _loss(runs: Sequence[RunHistory]) -> Chart | None:
    losses = [history.mean_curve(run, lambda each: each.loss) for run in runs]
    rates = [history.curve(run.main, lambda each: each.lr) for run in runs]
    if all(each.is_empty for each in losses):
        return None
    figure = Figure(figsize=(9.0, 4.6))
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    _lines(upper, runs, losses, "loss")
    _lines(lower, runs, rates, "learning rate", smooth=False)
    _mark(upper, runs, losses)
    lower.set_xlabel("optimizer step")
    several = max((len(run.ranks) for run in runs), default=1) > 1
    text = "Mean over the ranks' own micro-batches" if several else "Of the rank's micro-batches"
    return Chart("loss", "Loss and learning rate", f"{text}; thick: running mean.", figure)


def _gradient_norm(runs: Sequence[RunHistory]) -> Chart | None:
    norms = [history.curve(run.main, lambda each: each.grad_norm) for run in runs]
    if all(each.is_empty for each in norms):
        return None
    figure, axes = _single()
    _lines(axes, runs, norms, "global norm before clipping")
    _mark(axes, runs, norms)
    positive = [each.values[np.isfinite(each.values) & (each.values > 0)] for each in norms]
    values = np.concatenate(positive)
    if len(values) and values.max() > 50 * np.median(values):
        axes.set_yscale("log")
    return Chart("gradient-norm", "Gradient norm", "", figure)


def _throughput(runs: Sequence[RunHistory]) -> Chart | None:
    samples = [history.rate_curve(run, lambda each: each.samples) for run in runs]
    tokens = [history.rate_curve(run, lambda each: each.tokens) for run in runs]
    shown = [
        (curves, name)
        for curves, name in ((samples, "samples per second"), (tokens, "tokens per second"))
        if not all(each.is_empty for each in curves)
    ]
    if not shown:
        return None
    figure = Figure(figsize=(9.0, 2.9))
    for axes, (curves, name) in zip(_row(figure, len(shown)), shown, strict=True):
        _lines(axes, runs, curves, name)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("optimizer step")
        axes.yaxis.set_major_formatter(lambda value, _: in_short(value))
    return Chart(
        "throughput",
        "Throughput",
        "Of all ranks together; time for evaluation and checkpoints is left out.",
        figure,
    )


def _step_time(runs: Sequence[RunHistory]) -> Chart | None:
    times = [
        history.curve(run.main, lambda each: history.training_seconds(each) / each.steps)
        for run in runs
    ]
    if all(each.is_empty for each in times):
        return None
    figure, axes = _single()
    _lines(axes, runs, times, "seconds per step")
    finite = np.concatenate([each.values[np.isfinite(each.values)] for each in times])
    axes.set_ylim(0, 1.15 * float(np.percentile(finite, 99)))
    axes.yaxis.set_major_formatter(lambda value, _: in_seconds(value) if value > 0 else "0")
    return Chart("step-time", "Time of each step", "Of the lowest rank.", figure)


def _own(runs: Sequence[RunHistory]) -> Chart | None:
    names = sorted({name for run in runs for each in run.main for name in each.own})[:12]
    if not names:
        return None
    rows = -(-len(names) // 3)
    figure = Figure(figsize=(9.0, 2.4 * rows))
    grid = figure.subplots(rows, min(3, len(names)), squeeze=False).flatten()
    for axes in grid[len(names) :]:
        axes.remove()
    for axes, name in zip(grid, names, strict=False):
        value = partial(_own_figure, name)
        _lines(axes, runs, [history.mean_curve(run, value) for run in runs], name)
        axes.set_xlabel("optimizer step")
    return Chart("own-figures", "Figures of the script", "Means over ranks.", figure)


def _own_figure(name: str, each: StepFigures) -> float | None:
    return each.own.get(name)


def _lines(
    axes: Axes, runs: Sequence[RunHistory], curves: Sequence[Curve], label: str, smooth: bool = True
) -> None:
    """Draw a curve of each run: faint as it is, and its running mean over it."""
    for run, found, color in zip(runs, curves, itertools.cycle(COLORS)):
        if found.is_empty:
            continue
        found = found.known()  # noqa: PLW2901 - figures that a script gives at times are a curve too
        few = len(found.steps) <= FEW
        name = run.name if len(runs) > 1 else None
        marker = "o" if few else None
        if few or not smooth:
            axes.plot(
                found.steps, found.values, color=color, label=name, marker=marker, markersize=2.5
            )
            continue
        axes.plot(found.steps, found.values, color=color, alpha=0.25, linewidth=0.8)
        smoothed = found.smooth()
        axes.plot(smoothed.steps, smoothed.values, color=color, label=name, linewidth=1.8)
    axes.set_ylabel(label)
    if len(runs) > 1:
        axes.legend()


def _mark(axes: Axes, runs: Sequence[RunHistory], curves: Sequence[Curve]) -> None:
    """Mark restarts by dashed lines, and skipped steps by crosses on the curve."""
    for run, found, color in zip(runs, curves, itertools.cycle(COLORS)):
        for i, step in enumerate(run.restarts):
            axes.axvline(
                step,
                color=color if len(runs) > 1 else "#718096",
                linestyle="--",
                linewidth=1.0,
                label="restart" if i == 0 and len(runs) == 1 else None,
            )
        skipped = np.isin(found.steps, list(run.skipped)) & np.isfinite(found.values)
        if skipped.any():
            axes.plot(
                found.steps[skipped],
                found.values[skipped],
                "x",
                color="#e53e3e",
                markersize=5,
                label="skipped step",
            )
    if axes.get_legend_handles_labels()[1]:
        axes.legend()


# --- memory over time ---


def _memory(runs: Sequence[RunHistory]) -> Chart | None:
    kinds = [
        kind
        for kind in ("device", "resident")
        if any(each.memory.get(kind) for each in _every(runs))
    ]
    if not kinds:
        return None
    names = {"device": "allocated on the device", "resident": "resident memory"}
    figure = Figure(figsize=(9.0, 2.9))
    for axes, kind in zip(_row(figure, len(kinds)), kinds, strict=True):
        most = max(each.memory.get(kind, 0) for each in _every(runs))
        unit, size = ("GiB", 1 << 30) if most >= 1 << 30 else ("MiB", 1 << 20)
        for run, color in zip(runs, itertools.cycle(COLORS)):
            _memory_lines(axes, run, kind, size, None if len(runs) == 1 else color)
        axes.set_ylim(0, 1.25 * most / size)  # room for the legend
        axes.set_xlabel("minutes since the first step")
        axes.set_ylabel(f"{names[kind]}, {unit}")
        if axes.get_legend_handles_labels()[1]:
            axes.legend(ncols=2)
    return Chart("memory", "Memory of each rank over time", "", figure)


def _every(runs: Sequence[RunHistory]) -> Iterator[StepFigures]:
    """Yield all records of all ranks of all runs."""
    return (each for run in runs for records in run.ranks.values() for each in records)


def _memory_lines(axes: Axes, run: RunHistory, kind: str, size: int, color: str | None) -> None:
    start = run.main[0].time if run.main else 0.0
    found = []
    for rank, records in run.ranks.items():
        known = [each for each in records if each.memory.get(kind)]
        if known:
            minutes = np.array([(each.time - start) / 60 for each in known])
            found.append((rank, minutes, np.array([each.memory[kind] / size for each in known])))
    if color is not None:  # one color for a run: the rank that needs most
        found = sorted(found, key=lambda each: -each[2].max())[:1]
    elif len(found) > MOST_LINES:
        ordered = sorted(found, key=lambda each: each[2].max())
        found = [ordered[0], ordered[len(ordered) // 2], ordered[-1]]
    for (rank, minutes, values), own in zip(found, itertools.cycle(COLORS)):
        label = f"rank {rank}" if color is None else f"{run.name}, rank {rank}"
        axes.plot(minutes, values, color=color or own, label=label, linewidth=1.4)


# --- bars ---


def _time_of_a_step(runs: Sequence[RunHistory]) -> Chart | None:
    rows = [row for run in runs for row in _bars(run, several=len(runs) > 1)]
    if not rows:
        return None
    parts = [each for each in SECTIONS if any(times.get(each) for _, times in rows)]
    waits = sorted({name for _, times in rows for name in times if name.startswith(WAITING)})
    colors = SECTION_COLORS | dict(zip(waits, itertools.cycle(WAITING_COLORS)))
    figure = Figure(figsize=(9.0, 1.1 + 0.32 * len(rows)))
    axes = figure.subplots()
    left = np.zeros(len(rows))
    for name in [*parts, *waits]:
        widths = np.array([times.get(name, 0.0) for _, times in rows]) * 1e3
        label = f"waiting for {name.removeprefix(WAITING)}" if name in waits else name
        axes.barh(range(len(rows)), widths, left=left, color=colors[name], label=label, height=0.7)
        left += widths
    axes.set_yticks(range(len(rows)), [label for label, _ in rows])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("milliseconds per step, mean without the first step")
    figure.legend(loc="outside lower center", ncols=6)
    return Chart(
        "time-of-a-step",
        "Where the time of a step goes",
        "Times of the host. The others wait for a rank that waits little itself.",
        figure,
    )


def _bars(run: RunHistory, *, several: bool) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield a label and the seconds of a step for each rank that gets a bar."""
    found = history.breakdown(run)
    ranks = sorted(found)
    most = 4 if several else MOST_BARS
    if len(ranks) > most:
        by_waiting = sorted(ranks, key=lambda rank: waited(found[rank]))
        ranks = sorted(by_waiting[: most // 2] + by_waiting[-most // 2 :])
    for rank in ranks:
        yield (f"{run.name}, rank {rank}" if several else f"rank {rank}"), found[rank]


def _bytes(runs: Sequence[RunHistory]) -> Chart | None:
    sent = [history.bytes_per_step(run) for run in runs]
    promised = [history.promised_bytes(run) or {} for run in runs]
    keys = sorted({key for found in (*sent, *promised) for key in found if found[key]})
    if not keys or not any(sent):
        return None
    bars = [(run.name, found) for run, found in zip(runs, sent, strict=True)]
    if len(runs) == 1:
        bars = [("sent", sent[0]), ("promised", promised[0])]
    figure = Figure(figsize=(9.0, 1.2 + 0.3 * len(bars) * len(keys)))
    axes = figure.subplots()
    height = 0.8 / len(bars)
    for i, ((label, found), color) in enumerate(zip(bars, itertools.cycle(COLORS))):
        places = [place + i * height for place in range(len(keys))]
        values = [found.get(key, 0.0) for key in keys]
        shade = PROMISE_COLOR if len(runs) == 1 and i else color
        drawn = axes.barh(places, values, height * 0.92, color=shade, label=label)
        axes.bar_label(drawn, [size_text(each) for each in values], padding=3, fontsize=8)
    axes.set_yticks([place + 0.4 - height / 2 for place in range(len(keys))], keys)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.12)
    axes.xaxis.set_major_formatter(lambda value, _: size_text(value) if value > 0 else "0")
    axes.set_xlabel("bytes of a step")
    figure.legend(loc="outside lower center", ncols=4)
    text = (
        "Sent by the lowest rank, by mesh axis and operation; clipping and checks add a few bytes."
    )
    return Chart("bytes", "Bytes between ranks in a step", text, figure)


def _single() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(9.0, 2.9))
    axes = figure.subplots()
    axes.set_xlabel("optimizer step")
    return figure, axes


def _row(figure: Figure, count: int) -> list[Axes]:
    return list(figure.subplots(1, count, squeeze=False)[0])
