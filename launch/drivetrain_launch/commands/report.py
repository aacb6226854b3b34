"""``drivetrain report``: shows recorded runs, and makes or compares their reports."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from drivetrain.errors import ConfigError
from drivetrain.observe import history
from drivetrain.observe.history import RunHistory, differences, in_seconds, load_history, summary_of
from drivetrain.observe.page import missing_packages, write_report
from drivetrain_launch.commands.options import SETTINGS
from drivetrain_launch.console import show_table

COMPARISON = Path("comparison")
"""Where the report of several runs goes, in the working directory."""

MOST_RANKS = 16
"""Ranks with a column in the table of the time of a step."""


@click.command(context_settings=SETTINGS)
@click.argument("folders", nargs=-1, required=True, metavar="DIR...")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where report.html and its pictures go.  [default: beside the run's records; several "
    "runs: ./comparison]",
)
@click.option("--no-page", is_flag=True, help="Print the summary alone.")
def command(folders: tuple[str, ...], output: Path | None, no_page: bool) -> None:
    """Show recorded runs, and make the report of a run or of a comparison.

    DIR is the project_dir of a run, the folder run in it, or the folder of a single start.

    Example: drivetrain report runs/mine runs/other
    """
    chosen = list(dict.fromkeys(folders))
    runs = _told_apart([load_history(folder) for folder in chosen], chosen)
    for run in runs:
        _show(run)
    if len(runs) > 1:
        _compare(runs)
    if no_page:
        return
    if problem := missing_packages():
        click.echo(f"no page: {problem}", err=True)
        return
    target = output or (runs[0].folder if len(runs) == 1 else COMPARISON)
    try:
        click.echo(f"wrote {write_report(runs, target)}")
    except OSError as error:
        raise ConfigError(
            f"cannot write the report into {target}: {error.strerror}; name another folder with "
            "--output"
        ) from error


def _told_apart(runs: Sequence[RunHistory], folders: Sequence[str]) -> list[RunHistory]:
    """Return runs of different names: of one name, each is called as the command line has it."""
    names = [run.name for run in runs]
    return [
        replace(run, name=folder) if names.count(run.name) > 1 else run
        for run, folder in zip(runs, folders, strict=True)
    ]


def _compare(runs: Sequence[RunHistory]) -> None:
    rows = [[key, *values] for key, values in differences(runs)]
    if rows:
        show_table(
            "Differences of command and configuration", ["key", *(run.name for run in runs)], rows
        )
    else:
        click.echo("Commands, configurations and environments are the same.")


def _show(run: RunHistory) -> None:
    numbers = [[number.name, number.value, number.note] for number in summary_of(run)]
    show_table(
        f"{run.name}: {run.starts[-1].outcome}", ("number", "value", "note"), numbers, folds=True
    )
    times = dict(list(history.breakdown(run).items())[:MOST_RANKS])
    if times:
        parts = list(dict.fromkeys(part for each in times.values() for part in each))
        rows = [
            [part, *(in_seconds(each.get(part, 0.0)) for each in times.values())]
            for part in parts
            if any(each.get(part) for each in times.values())
        ]
        show_table("Time of a step", ["part", *(f"rank {rank}" for rank in times)], rows)
    for remark in run.remarks:
        click.echo(f"note: {remark}")
