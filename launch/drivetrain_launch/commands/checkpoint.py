"""``drivetrain checkpoint``: looks into a checkpoint, checks it, and exports its weights."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from drivetrain.errors import CheckpointError
from drivetrain.hardware.sizes import size_text
from drivetrain_launch.tables import show_table

if TYPE_CHECKING:
    from drivetrain.checkpoint import Description
    from drivetrain.checkpoint.manifest import SavedTensor

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

directory_argument = click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))


@click.group(context_settings=SETTINGS)
def command() -> None:
    """Look into a checkpoint, check it, or export its weights; one process, no accelerator."""


@command.command("inspect", context_settings=SETTINGS)
@directory_argument
@click.option("--all", "every", is_flag=True, help="Show every tensor and every file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def inspect(directory: Path, every: bool, as_json: bool) -> None:
    """Show the contents of a checkpoint, layers that repeat in one row; no tensor is read."""
    from drivetrain.checkpoint import describe

    found = describe(directory)
    if as_json:
        click.echo(json.dumps(found.to_json(), indent=2))
    else:
        show(found, every=every)


@command.command("verify", context_settings=SETTINGS)
@directory_argument
def verify(directory: Path) -> int:
    """Check every file and every tensor: print 'ok', or all that is wrong and exit with 4."""
    from drivetrain.checkpoint import describe, find_problems

    problems = find_problems(directory)
    for problem in problems:
        click.echo(f"error: {problem}", err=True)
    if problems:
        return CheckpointError.exit_code
    found = describe(directory)
    tensors = sum(map(len, found.manifest.models))
    click.echo(
        f"ok: {len(found.manifest.files)} files of {size_text(found.file_bytes)}, "
        f"{tensors} tensors, each element once"
    )
    return 0


@command.command("export", context_settings=SETTINGS)
@directory_argument
@click.option(
    "--output", required=True, type=click.Path(path_type=Path), help="Folder for the files."
)
@click.option("--model", default=0, metavar="INDEX", help="Which prepared model. [default: 0]")
@click.option(
    "--dtype", type=click.Choice(list(DTYPES)), help="Of the weights. [default: as saved]"
)
@click.option(
    "--max-shard-size", default="10GB", metavar="SIZE", help="Bytes per file. [default: 10GB]"
)
@click.option(
    "--verify",
    type=click.Choice(["full", "size"]),
    default="full",
    help="Check checksums first, or sizes only. [default: full]",
)
def export(directory: Path, output: Path, dtype: str | None, **options: Any) -> None:
    """Write the weights as Hugging Face style safetensors, one tensor in memory at a time."""
    import torch

    from drivetrain.checkpoint import export_checkpoint

    wanted = None if dtype is None else getattr(torch, DTYPES[dtype])
    plan = export_checkpoint(directory, output, dtype=wanted, **options)
    for alias, name in plan.aliases.items():
        click.echo(f"{alias} is tied to {name} and written once")
    click.echo(f"wrote {size_text(plan.total_bytes)} to {', '.join(plan.files)} in {output}")


def show(found: "Description", *, every: bool) -> None:
    """Print a checkpoint as tables for people."""
    from drivetrain_launch.commands.contents import COLUMNS, summary

    manifest = found.manifest
    steps = "unknown" if found.steps is None else ", ".join(map(str, found.steps)) or "none"
    facts = [
        ("format version", str(manifest.version)),
        ("ranks that wrote it", str(manifest.world_size)),
        ("steps of the optimizers", steps),
        ("models", str(len(manifest.models))),
        ("bytes of all files", size_text(found.file_bytes)),
        *((f"version of {name}", version) for name, version in manifest.libraries.items()),
    ]
    show_table(f"Checkpoint {found.directory}", ("what", "value"), facts)
    for index, (tensors, aliases) in enumerate(zip(manifest.models, manifest.aliases, strict=True)):
        if every:
            _show_tensors(f"Model {index}", tensors)
        else:
            show_table(f"Model {index}", COLUMNS, summary(tensors))
        if aliases:
            show_table(f"Tied in model {index}", ("name", "is"), list(aliases.items()))
    if every:
        files = [(name, size_text(record.size)) for name, record in manifest.files.items()]
        show_table("Files", ("file", "size"), files)


def _show_tensors(title: str, tensors: "Sequence[SavedTensor]") -> None:
    from drivetrain.checkpoint.loading import tensor_bytes
    from drivetrain_launch.commands.contents import shape_text

    columns = ("name", "optimizer state", "dtype", "shape", "size", "parts")
    rows = [
        (
            t.name,
            t.state,
            t.dtype,
            shape_text(t.shape),
            size_text(tensor_bytes(t)),
            str(len(t.parts)),
        )
        for t in tensors
    ]
    show_table(title, columns, rows)
