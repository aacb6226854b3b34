"""``drivetrain disk-bench``: measures a disk, and suggests options and the time of a step."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from drivetrain.errors import ConfigError, PreflightError

if TYPE_CHECKING:
    from drivetrain_offload.nvme import Speed

GB = 1e9
BILLION = 1e9


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.argument("path", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--mib",
    type=click.IntRange(min=1),
    default=256,
    metavar="N",
    show_default=True,
    help="MiB that are written and read; less where less is free.",
)
@click.option(
    "--request-mib",
    "requests",
    type=float,
    multiple=True,
    default=(1, 4, 16),
    metavar="N",
    show_default=True,
    help="MiB of one request to try; may be repeated.",
)
@click.option(
    "--threads",
    type=int,
    multiple=True,
    default=(2, 8, 16),
    metavar="N",
    show_default=True,
    help="Requests in flight to try, of reads and of writes each; may be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def disk_bench(
    path: Path, mib: int, requests: Sequence[float], threads: Sequence[int], as_json: bool
) -> None:
    """Measure a disk with the code of the store nvme; the file is gone afterwards.

    An Adam step reads 12 bytes and writes 12 bytes per parameter and rank.

    Example: drivetrain disk-bench /mnt/nvme
    """
    from drivetrain.hardware.sizes import MIB
    from drivetrain.log import progress
    from drivetrain_offload.nvme import (
        DiskFile,
        check_directory,
        file_system,
        measure,
        suggest,
        usable_bytes,
    )
    from drivetrain_offload.options import NvmeConfig

    ways = [
        NvmeConfig(path=str(path), request_mib=request, threads=count)
        for request in requests
        for count in threads
    ]
    try:
        directory = check_directory(path)
    except PreflightError as error:
        raise ConfigError(str(error)) from None
    nbytes = usable_bytes(mib * MIB, shutil.disk_usage(directory).free)
    if max(way.request_bytes for way in ways) > nbytes:
        raise ConfigError(
            f"--request-mib: expected requests of at most the {nbytes / MIB:g} MiB that are "
            f"measured, found {max(requests):g}; lower it, raise --mib, or make room"
        )
    speeds = [
        measure(directory, nbytes, way.request_mib, way.threads)
        for way in progress(ways, total=len(ways), desc=str(directory), disable=as_json)
    ]
    file = DiskFile(directory, request_bytes=4096, threads=1)
    file.close()
    facts = {
        "path": str(directory),
        "file_system": file_system(directory),
        "direct": file.direct,
        "bytes": nbytes,
    }
    if as_json:
        click.echo(json.dumps(_report(facts, speeds, suggest(speeds)), indent=2))
    else:
        _show(facts, speeds, suggest(speeds))


def _report(facts: dict[str, Any], speeds: "Sequence[Speed]", best: "Speed") -> dict[str, Any]:
    return {
        **facts,
        "measured": [_numbers(speed) for speed in speeds],
        "suggested": {"request_mib": best.request_mib, "threads": best.threads},
        "step_s_per_billion_parameters": best.step_s(BILLION),
    }


def _numbers(speed: "Speed") -> dict[str, float]:
    unit = {"read": "read_bytes_per_s", "write": "write_bytes_per_s", "both": "both_bytes_per_s"}
    return {unit.get(name, name): value for name, value in asdict(speed).items()}


def _show(facts: dict[str, Any], speeds: "Sequence[Speed]", best: "Speed") -> None:
    way = "O_DIRECT" if facts["direct"] else "through the page cache, synced"
    click.echo(
        f"{facts['path']} ({facts['file_system'] or 'unknown file system'}), {way}, "
        f"{facts['bytes'] / 2**20:g} MiB"
    )
    table = Table(box=None, pad_edge=False)
    for name in ("request MiB", "threads", "read GB/s", "write GB/s", "both GB/s", ""):
        table.add_column(name, justify="right")
    for speed in speeds:
        table.add_row(
            f"{speed.request_mib:g}",
            str(speed.threads),
            *(f"{value / GB:.2f}" for value in (speed.read, speed.write, speed.both)),
            "<" if speed is best else "",
        )
    Console(highlight=False).print(table)
    click.echo(
        f"suggested  request_mib: {best.request_mib:g}, threads: {best.threads} (as many reads and "
        f"as many writes in flight)\n"
        f"step       {best.step_s(BILLION):.2f} s per billion parameters and rank at least: 12 GB "
        f"read and 12 GB written at {best.both / GB:.2f} GB/s each"
    )
