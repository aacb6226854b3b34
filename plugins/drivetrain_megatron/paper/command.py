"""``drivetrain schedule``: draws when the ranks of a pipeline compute, and when they wait.

Nothing is trained: the schedule is run on paper.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from drivetrain.errors import ConfigError
from drivetrain_megatron.paper.draw import Gantt, picture_format, save_picture
from drivetrain_megatron.paper.simulate import Formula, promised, simulate
from drivetrain_megatron.pipeline.schedules import (
    SCHEDULES,
    ActionKind,
    Schedule,
    Timeline,
    make_schedule,
    save_trace,
)

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
class SimulatedRun:
    """A schedule that was run on paper, with the makespan by the paper's formula, in words."""

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


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--pp", type=int, required=True, metavar="N", help="Ranks of the pipeline.")
@click.option(
    "--micro-batches", type=int, required=True, metavar="N", help="Micro-batches per step."
)
@click.option(
    "--schedule",
    "name",
    type=click.Choice([*SCHEDULES, ALL], case_sensitive=False),
    default="1f1b",
    metavar="NAME",
    show_default=True,
    help=f"Which one to draw; {ALL} compares them.",
)
@click.option(
    "--chunks",
    type=int,
    metavar="N",
    help="Stages per rank, of interleaved only.  [default: 2 for interleaved, else 1]",
)
@click.option(
    "--forward",
    type=float,
    metavar="TIME",
    default=1.0,
    show_default=True,
    help="Time of one micro-batch's forward on a rank.",
)
@click.option(
    "--backward",
    type=float,
    metavar="TIME",
    default=2.0,
    show_default=True,
    help="Time of its backward.",
)
@click.option(
    "--weight",
    type=float,
    metavar="TIME",
    help="Part of --backward for the gradients of weights, where backward is in halves.  "
    "[default: half of --backward]",
)
@click.option(
    "--travel",
    type=float,
    metavar="TIME",
    default=0.0,
    show_default=True,
    help="Time of a message between ranks.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Also draw a picture, FILE.png or FILE.svg.",
)
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Also write a Chrome trace, as JSON; a unit of time becomes a second.",
)
def schedule(
    pp: int,
    micro_batches: int,
    name: str,
    chunks: int | None,
    output: Path | None,
    trace: Path | None,
    **durations: Any,
) -> None:
    """Draw when the ranks of a pipeline compute and wait; nothing is trained."""
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
) -> SimulatedRun:
    """Run a schedule on paper; without ``chunks`` with as many as it has by default.

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
    return SimulatedRun(made, timeline, _promise(promised(made, times), travel=durations.travel))


def show(outcome: SimulatedRun, title: str) -> None:
    """Print a chart of a schedule, and its numbers."""
    timeline = outcome.timeline
    click.echo(title)
    Console(highlight=False).print(Gantt(timeline))
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


def compare(outcomes: Sequence[SimulatedRun]) -> None:
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


def _promise(formula: Formula | None, *, travel: float) -> str:
    if formula is None:
        return "none for these numbers"
    without = " without travel" if travel else ""
    return f"{formula.text} = {formula.value:.6g}{without}"
