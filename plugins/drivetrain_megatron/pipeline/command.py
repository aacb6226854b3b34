"""``drivetrain schedule``: draws when the ranks of a pipeline compute, and when they wait.

Nothing is trained: the schedule is simulated.

Runs a simulated schedule, and has the makespans that the papers promise.

The simulation proves the schedule's end, and tells its time, idle time and memory. The generators
are unknown here: the lists of actions are read, and the data that flows between stages. Receives
wait; sends do not. Formulas: Narayanan et al. 2021 (section 2.2), Qi et al. 2023 (section 2.3).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from drivetrain.errors import ConfigError
from drivetrain.simulator.step import SimulatedStep, SimulatedTask, play
from drivetrain_megatron.pipeline.schedules import (
    SCHEDULES,
    Action,
    ActionKind,
    Schedule,
    Span,
    Timeline,
    make_schedule,
    needs,
    save_trace,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# --- runs a simulated schedule, and has the makespans that the papers promise ---

UNIT_DURATIONS: Mapping[ActionKind, float] = {
    ActionKind.FORWARD: 1.0,
    ActionKind.BACKWARD: 2.0,
    ActionKind.INPUT: 1.0,
    ActionKind.WEIGHT: 1.0,
}
"""Backward multiplies matrices twice as often as forward, once for each of its halves."""


def simulate(
    schedule: Schedule,
    durations: Mapping[ActionKind, float] = UNIT_DURATIONS,
    *,
    travel: float = 0.0,
) -> Timeline:
    """Run a simulated schedule, on stages of equal durations by kind of action.

    A message between two ranks is under way for ``travel``; none waits for another one.

    Raises:
        UsageError: the ranks wait for each other for ever.
    """
    actions = [action for actions in schedule.ranks for action in actions]
    places = {action: place for place, action in enumerate(actions)}
    tasks: list[SimulatedTask] = []
    messages: list[SimulatedTask] = []
    ranks = len(schedule.ranks)
    for action in actions:
        after = []
        for need in needs(action, schedule.stages):
            # With one rank, or for two chunks of one rank, nothing travels.
            if travel and (need.stage - action.stage) % ranks:
                after.append(len(actions) + len(messages))
                here = need.stage % ranks
                lane = f"to {action}"
                messages.append(SimulatedTask(lane, lane=lane, after=(places[need],), stage=here))
            else:
                after.append(places[need])
        rank = action.stage % ranks
        tasks.append(SimulatedTask(str(action), phase=action.kind, after=tuple(after), stage=rank))
    step = SimulatedStep([*tasks, *messages], [{} for _ in schedule.ranks])
    played = ((each.start, each.stop) for each in play(step, _Times(durations, travel)).tasks)
    return Timeline(
        tuple(
            tuple(Span(action, *next(played)) for action in actions) for actions in schedule.ranks
        )
    )


@dataclass(frozen=True)
class _Times:
    """The prices of actions by kind, and of messages, which have no phase."""

    durations: Mapping[ActionKind, float]
    travel: float
    slowdown: float = 0.0

    def seconds(self, task: SimulatedTask) -> float:
        return self.durations[ActionKind(task.phase)] if task.phase else self.travel


@dataclass(frozen=True, slots=True)
class Formula:
    """A promised makespan.

    Attributes:
        text: the formula: p ranks, m micro-batches, v chunks per rank; F and B are the durations
            of forward and backward over all chunks of a rank.
        value: the makespan, in the unit of the durations.
    """

    text: str
    value: float


def promised(schedule: Schedule, durations: Mapping[ActionKind, float]) -> Formula | None:
    """Return the makespan that is promised for a schedule, or None where no formula holds.

    Sources: GPipe and 1F1B: Narayanan et al. 2021 (arXiv 2104.04473), section 2.2.1; interleaved:
    its section 2.2.2, where p divides m; ZB-H1: Qi et al. 2023 (arXiv 2401.10241), section 2.3,
    where its three kinds take equally long and there are at least p micro-batches.
    """
    p, m = len(schedule.ranks), schedule.micro_batches
    if schedule.name not in SCHEDULES:
        return None
    forward = durations[ActionKind.FORWARD]
    if schedule.name == "zb-h1":
        equal = forward == durations[ActionKind.INPUT] == durations[ActionKind.WEIGHT]
        return Formula("(3m+p-1)F", (3 * m + p - 1) * forward) if equal and m >= p else None
    both = forward + durations[ActionKind.BACKWARD]
    if schedule.name != "interleaved":
        return Formula("(m+p-1)(F+B)", (m + p - 1) * both)
    filled = m * schedule.stages // p + p - 1
    return None if m % p else Formula("(m+(p-1)/v)(F+B)", filled * both)


# --- a Gantt chart, on the terminal, or as a PNG or SVG picture ---

# One row per rank, time from left to right, one color per kind of action with the number of the
# micro-batch in it. Where a rank has several chunks of the model, every second one is drawn
# lighter. The chart shows a ``Timeline``: it does not matter whether it was simulated or measured.


COLORS: dict[ActionKind, tuple[str, str]] = {
    ActionKind.FORWARD: ("#0072b2", "#56b4e9"),
    ActionKind.BACKWARD: ("#b35000", "#f0a35e"),
    ActionKind.INPUT: ("#9c4f7f", "#dfa9c8"),
    ActionKind.WEIGHT: ("#00795a", "#66c9ab"),
}
"""Dark and light, told apart by people who see fewer colors (after Okabe and Ito)."""

MEANINGS: dict[ActionKind, str] = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUT: "gradient of inputs",
    ActionKind.WEIGHT: "gradient of weights",
}
FORMATS = (".png", ".svg")
_INK = ("#ffffff", "#000000")
"""Of numbers on dark and on light."""
_NUMBERS = 2000
"""A picture of more actions than this has no numbers: nobody could read them."""
_FACTS = " idle kept"
_SIDE_BY_SIDE = 40
"""From so many columns on, the facts about a rank stand beside its row."""
_ROUNDING = 1e-6


class Gantt:
    """A chart of a timeline, as wide as a console.

    Without color, cells begin with the letter of their kind, ``F``, ``B``, ``I`` or ``W``, and dots
    are idle time.
    """

    def __init__(self, timeline: Timeline, console: Console) -> None:
        width = console.width
        self._timeline = timeline
        self._colored = console.color_system is not None and not console.no_color
        self._count = len(timeline.ranks)
        self._margin = len(str(max(self._count - 1, 0))) + 1
        self._beside = width >= _SIDE_BY_SIDE
        room = max(width - self._margin - (len(_FACTS) if self._beside else 0), 1)
        self._per_time = self._scale(room)
        self._columns = round(timeline.makespan * self._per_time) or room

    def lines(self) -> Iterator[Text]:
        """Yield a heading, one line per rank, the axis and the legend."""
        heading = "rank"
        if self._beside:
            heading = heading.ljust(self._margin + self._columns) + _FACTS
        yield Text(heading, no_wrap=True)
        for rank, spans in enumerate(self._timeline.ranks):
            line = Text(f"{rank:<{self._margin}}", no_wrap=True)
            line.append_text(self._row(spans))
            if self._beside:
                idle, kept = self._timeline.idle_of(rank), self._timeline.kept(rank)
                line.append(f" {idle:z4.0%} {kept:4}")
            yield line
        stop = f"{self._timeline.makespan:.4g}"
        yield Text(" " * self._margin + "0" + stop.rjust(self._columns - 1), no_wrap=True)
        yield from self._legend()

    def _legend(self) -> Iterator[Text]:
        """Yield the meanings of colors and letters, and the number of invisibly short actions."""
        spans = [span for rank in self._timeline.ranks for span in rank]
        used = {span.action.kind for span in spans}
        line = Text()
        for kind in ActionKind:
            if kind in used:
                line.append(kind.value, self._style(Action(kind, 0, 0)))
                line.append(f" {MEANINGS[kind]}  ")
        line.append("blank: idle" if self._colored else ". idle")
        if self._colored and any(_shade(self._timeline, span.action) for span in spans):
            line.append("  lighter: every second chunk")
        yield line
        if not self._beside:
            kept = ", ".join(str(self._timeline.kept(rank)) for rank in range(self._count))
            yield Text(f"idle {self._timeline.idle:z.1%}; ranks keep {kept} micro-batches")
        hidden = sum(start == stop for start, stop in map(self._edges, spans))
        if hidden:
            yield Text(f"{hidden} of {len(spans)} actions are narrower than a column")

    def _scale(self, room: int) -> float:
        """Return columns per time.

        Durations that are multiples of the shortest, as simulated ones often are, get whole
        columns, as long as a cell can show its number. Others fill the room.
        """
        if not self._timeline.makespan:
            return 0.0
        spans = [span for rank in self._timeline.ranks for span in rank]
        shortest = min(span.stop - span.start for span in spans)
        whole = int(room * shortest / self._timeline.makespan + _ROUNDING)
        if whole >= (1 if self._colored else 2):
            scale = whole / shortest
            starts = ((span.start - self._timeline.start) * scale for span in spans)
            if all(abs(start - round(start)) < _ROUNDING for start in starts):
                return scale
        return room / self._timeline.makespan

    def _row(self, spans: tuple[Span, ...]) -> Text:
        row, at = Text(), 0
        for span in spans:
            start, stop = (max(edge, at) for edge in self._edges(span))
            row.append(self._idle(start - at))
            if stop > start:
                row.append(self._cell(span.action, stop - start), self._style(span.action))
            at = stop
        row.append(self._idle(self._columns - at))
        return row

    def _edges(self, span: Span) -> tuple[int, int]:
        begin = self._timeline.start
        return (
            round((span.start - begin) * self._per_time),
            round((span.stop - begin) * self._per_time),
        )

    def _idle(self, width: int) -> str:
        return (" " if self._colored else ".") * width

    def _cell(self, action: Action, width: int) -> str:
        """Return the longest text that fits: a number that is cut would be another number."""
        number = str(action.micro_batch)
        texts = [number, ""] if self._colored else [action.kind.value + number, action.kind.value]
        text = next((text for text in texts if len(text) <= width), "")
        return text.ljust(width, " " if self._colored else "-")

    def _style(self, action: Action) -> Style:
        if not self._colored:
            return Style.null()
        light = _shade(self._timeline, action)
        return Style(color=_INK[light], bgcolor=COLORS[action.kind][light], bold=True)


def save_picture(timeline: Timeline, path: Path, *, title: str = "") -> None:
    """Write a timeline as a picture; the file's ending, ``.png`` or ``.svg``, chooses the format.

    Raises:
        ConfigError: the ending is another one, matplotlib is not installed, or the file cannot be
            written.
    """
    kind = picture_format(path)
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"a picture needs matplotlib, which cannot be imported ({error}); "
            "pip install matplotlib"
        ) from error
    # Text stays text in an SVG, and the same timeline gives the same bytes.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "drivetrain"}):
        longest = max(map(len, timeline.ranks), default=0)
        size = (min(max(8.0, 0.25 * longest), 24.0), 1.6 + 0.4 * len(timeline.ranks))
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        _paint(figure, timeline, title)
        try:
            figure.savefig(
                path, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else {}
            )
        except OSError as error:
            raise ConfigError(
                f"cannot write {str(path)!r}: {error.strerror or error}; choose another file"
            ) from error


def picture_format(path: Path) -> str:
    """Return the format of a picture by the ending of its file.

    Raises:
        ConfigError: it is none of ``FORMATS``.
    """
    ending = path.suffix.lower()
    if ending not in FORMATS:
        raise ConfigError(
            f"expected a picture that ends with {' or '.join(FORMATS)}, found {str(path)!r}"
        )
    return ending[1:]


def _paint(figure: "Figure", timeline: Timeline, title: str) -> None:
    axes = figure.add_subplot()
    count = len(timeline.ranks)
    numbered = sum(map(len, timeline.ranks)) <= _NUMBERS
    for rank, spans in enumerate(timeline.ranks):
        axes.broken_barh(
            [(span.start - timeline.start, span.stop - span.start) for span in spans],
            (rank - 0.4, 0.8),
            facecolors=[COLORS[span.action.kind][_shade(timeline, span.action)] for span in spans],
            edgecolor="white",
            linewidth=0.6,
        )
        for span in spans if numbered else ():
            _write_number(axes, timeline, rank, span)
    axes.set_yticks(
        range(count),
        [
            f"rank {rank}\nidle {timeline.idle_of(rank):z.1%}, keeps {timeline.kept(rank)}"
            for rank in range(count)
        ],
        fontsize=8,
    )
    axes.set_ylim(count - 0.5, -0.5)
    axes.set_xlim(0, timeline.makespan or 1.0)
    axes.set_xlabel("time")
    axes.set_title(title, fontsize=10)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    _paint_legend(figure, timeline)


def _write_number(axes: "Axes", timeline: Timeline, rank: int, span: Span) -> None:
    axes.text(
        (span.start + span.stop) / 2 - timeline.start,
        rank,
        str(span.action.micro_batch),
        color=_INK[_shade(timeline, span.action)],
        fontsize=6,
        ha="center",
        va="center",
        clip_on=True,
    )


def _paint_legend(figure: "Figure", timeline: Timeline) -> None:
    from matplotlib.patches import Patch

    used = {span.action.kind for rank in timeline.ranks for span in rank}
    patches = [
        Patch(color=COLORS[kind][0], label=MEANINGS[kind]) for kind in ActionKind if kind in used
    ]
    figure.legend(
        handles=patches, loc="outside lower center", ncols=max(len(patches), 1),
        fontsize=8, frameon=False,
    )  # fmt: skip


def _shade(timeline: Timeline, action: Action) -> int:
    """Return 0 for dark and 1 for light: chunks of a rank in turn."""
    return action.stage // len(timeline.ranks) % 2


# --- the command ---


ALL = "all"
MOST_ACTIONS = 1_000_000
CHUNKS = {"interleaved": 2}
"""Chunks per rank where none are asked for; 1 for other schedules."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Durations:
    """How long a rank computes for one micro-batch, over all of its chunks, in any unit.

    Attributes:
        forward: of forward.
        backward: of backward.
        weight: the part of ``backward`` for the gradients of weights; half of it by default.
        travel: how long a message between two ranks is under way.
    """

    forward: float
    backward: float
    weight: float | None
    travel: float

    def __post_init__(self) -> None:
        for name in ("forward", "backward"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"--{name}: expected a number above 0, found {value:g}")
        if self.weight is not None and not 0 < self.weight < self.backward:
            raise ConfigError(
                f"--weight: expected a part of --backward, above 0 and below {self.backward:g}, "
                f"found {self.weight:g}"
            )
        if not (math.isfinite(self.travel) and self.travel >= 0):
            raise ConfigError(f"--travel: expected 0 or more, found {self.travel:g}")

    def per_chunk(self, chunks: int) -> dict[ActionKind, float]:
        """Return the durations of a single chunk of a rank's layers."""
        weight = self.backward / 2 if self.weight is None else self.weight
        whole = {
            ActionKind.FORWARD: self.forward,
            ActionKind.BACKWARD: self.backward,
            ActionKind.INPUT: self.backward - weight,
            ActionKind.WEIGHT: weight,
        }
        return {kind: duration / chunks for kind, duration in whole.items()}


@dataclass(frozen=True, slots=True)
class ScheduleRun:
    """A schedule that was simulated, with the makespan by the paper's formula, in words."""

    schedule: Schedule
    timeline: Timeline
    promise: str

    @property
    def chunks(self) -> int:
        """Stages per rank."""
        return self.schedule.stages // len(self.schedule.ranks)

    @property
    def kept(self) -> list[int]:
        """How many micro-batches each rank keeps at most, counted per chunk."""
        return [self.timeline.kept(rank) for rank in range(len(self.timeline.ranks))]


_COUNT = partial(click.option, type=int, metavar="N")
_TIME = partial(click.option, type=float, metavar="TIME", show_default=True)
_FILE = partial(click.option, type=click.Path(path_type=Path), metavar="FILE")


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@_COUNT("--pp", required=True, help="Ranks of the pipeline.")
@_COUNT("--micro-batches", required=True, help="Micro-batches per step.")
@click.option(
    "--schedule",
    "name",
    type=click.Choice([*SCHEDULES, ALL], case_sensitive=False),
    default="1f1b",
    metavar="NAME",
    show_default=True,
    help=f"Which one to draw; {ALL} compares them.",
)
@_COUNT(
    "--chunks",
    help="Stages per rank, of interleaved only.  [default: 2 for interleaved, else 1]",
)
@_TIME("--forward", default=1.0, help="Time of one micro-batch's forward on a rank.")
@_TIME("--backward", default=2.0, help="Time of its backward.")
@_TIME(
    "--weight",
    help="Part of --backward for the gradients of weights, where backward is in halves.  "
    "[default: half of --backward]",
)
@_TIME("--travel", default=0.0, help="Time of a message between ranks.")
@_FILE("--output", help="Also draw a picture, FILE.png or FILE.svg.")
@_FILE("--trace", help="Also write a Chrome trace, as JSON; a unit of time becomes a second.")
def schedule(
    pp: int,
    micro_batches: int,
    name: str,
    chunks: int | None,
    output: Path | None,
    trace: Path | None,
    **durations: Any,
) -> None:
    """Draw when the ranks of a pipeline compute and wait; nothing is trained.

    Example: drivetrain schedule --pp 4 --micro-batches 8 --schedule all
    """
    times = Durations(**durations)
    if name == ALL:
        if output or trace:
            raise ConfigError(
                f"--schedule {ALL} prints a table and writes no file; name one of "
                f"{', '.join(SCHEDULES)} with --output and --trace"
            )
        # Only some schedules have several chunks: for the others the option says nothing.
        asked = {each: chunks if each in CHUNKS else None for each in SCHEDULES}
        compare([run(each, pp, micro_batches, asked[each], times) for each in SCHEDULES])
        return
    if output:
        picture_format(output)
    outcome = run(name, pp, micro_batches, chunks, times)
    title = f"{name}: {pp} ranks, {micro_batches} micro-batches"
    show(outcome, title)
    if output:
        save_picture(outcome.timeline, output, title=title)
        click.echo(f"wrote {output}")
    if trace:
        save_trace(outcome.timeline, trace, name=title)
        click.echo(f"wrote {trace}")


def run(
    name: str, pp: int, micro_batches: int, chunks: int | None, durations: Durations
) -> ScheduleRun:
    """Run a simulated schedule; without ``chunks`` with as many as it has by default.

    Raises:
        ConfigError: the numbers do not fit the schedule, or are too large to be drawn.
    """
    chunks = CHUNKS.get(name, 1) if chunks is None else chunks
    if min(pp, micro_batches, chunks) > 0 and pp * micro_batches * chunks > MOST_ACTIONS:
        raise ConfigError(
            f"expected at most {MOST_ACTIONS:,} forwards, found {pp} ranks x {micro_batches} "
            f"micro-batches x {chunks} chunks; lower one of them"
        )
    made = make_schedule(name, pp, micro_batches, chunks)
    times = durations.per_chunk(chunks)
    timeline = simulate(made, times, travel=durations.travel)
    formula, without = promised(made, times), " without travel" if durations.travel else ""
    promise = f"{formula.text} = {formula.value:.6g}{without}" if formula else ""
    return ScheduleRun(made, timeline, promise or "none for these numbers")


def show(outcome: ScheduleRun, title: str) -> None:
    """Print a chart of a schedule, and its numbers."""
    timeline = outcome.timeline
    click.echo(title)
    console = Console(highlight=False)
    console.print(*Gantt(timeline, console).lines(), sep="\n")
    unit = "micro-batches"
    if outcome.chunks > 1:
        unit += f" of one chunk, 1/{outcome.chunks} of a rank's layers"
    facts = {
        "makespan": f"{timeline.makespan:.6g}",
        "formula": outcome.promise,
        "idle": f"{timeline.idle:z.1%}",
        "kept": f"{', '.join(map(str, outcome.kept))} {unit}",
    }
    for fact, text in facts.items():
        click.echo(f"{fact:8}  {text}")


def compare(outcomes: Sequence[ScheduleRun]) -> None:
    """Print a table of schedules; kept is in micro-batches of all layers of a rank."""
    table = Table(
        "schedule", "chunks", "makespan", "idle", "most kept", "formula", box=None, pad_edge=False
    )
    for outcome in outcomes:
        table.add_row(
            outcome.schedule.name,
            str(outcome.chunks),
            f"{outcome.timeline.makespan:.6g}",
            f"{outcome.timeline.idle:z.1%}",
            f"{max(outcome.kept) / outcome.chunks:g}",
            outcome.promise,
        )
    Console(highlight=False).print(table)
