"""A stranger's command, and something that is none."""

import click

from drivetrain.errors import PreflightError

SLICES = 3


@click.command()
@click.option("--slices", type=int, default=SLICES)
def toast(slices: int) -> int:
    """Toast a few slices."""
    if slices > 9:
        raise PreflightError(f"expected at most 9 slices, found {slices}; toast twice")
    click.echo(f"{slices} slices")
    return 0 if slices else 7
