"""``drivetrain checkpoint``: looks into a checkpoint, checks it, and exports its weights."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from drivetrain.checkpoint.manifest import Description, SavedTensor, absent, describe, tensor_bytes
from drivetrain.errors import CheckpointError, ConfigError
from drivetrain.hardware.sizes import size_text
from drivetrain_launch.commands.options import FOLDER, SETTINGS, json_option
from drivetrain_launch.console import runs, show_table

CONFIG_FILE = "config.json"
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


directory_argument = click.argument("directory", metavar=FOLDER, type=click.Path(path_type=Path))


def _existing(directory: Path) -> Path:
    if not directory.exists():
        raise ConfigError(absent(directory))
    return directory


@click.group(context_settings=SETTINGS)
def command() -> None:
    """Look into a checkpoint, check it, or export its weights; one process, no accelerator."""


@command.command()
@directory_argument
@click.option("--all", "every", is_flag=True, help="Show every tensor and every file.")
@json_option
def inspect(directory: Path, every: bool, as_json: bool) -> None:
    """Show the contents of a checkpoint.

    Layers that repeat are in one row; no tensor is read.

    Example: drivetrain checkpoint inspect runs/mine/checkpoints/checkpoint_0
    """
    found = describe(_existing(directory))
    if as_json:
        click.echo(json.dumps(found.to_json(), indent=2))
    else:
        show(found, every=every)


@command.command()
@directory_argument
def verify(directory: Path) -> int:
    """Check every file and every tensor.

    Print 'ok', or all that is wrong and exit with 4.

    Example: drivetrain checkpoint verify runs/mine/checkpoints/checkpoint_0
    """
    from drivetrain.checkpoint.loading import find_problems

    problems = find_problems(_existing(directory))
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


@command.command()
@directory_argument
@click.option(
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    metavar=FOLDER,
    help="Folder for the files.",
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
@click.option("--overwrite", is_flag=True, help="Replace an export in the folder.")
def export(
    directory: Path, output: Path, dtype: str | None, overwrite: bool, **options: Any
) -> None:
    """Write the weights as Hugging Face style safetensors.

    One tensor is in memory at a time.

    Example: drivetrain checkpoint export runs/mine/checkpoints/checkpoint_0 --output weights
    """
    import torch

    from drivetrain.checkpoint.export import export_checkpoint, exported_in

    if not overwrite and (found := exported_in(output)):
        raise ConfigError(
            f"--output: expected a folder without an export, found {found[0]} in {output}; choose "
            "another folder, or replace the export with --overwrite"
        )
    wanted = None if dtype is None else getattr(torch, DTYPES[dtype])
    plan = export_checkpoint(_existing(directory), output, dtype=wanted, **options)
    for alias, name in plan.aliases.items():
        click.echo(f"{alias} is tied to {name} and written once")
    click.echo(f"wrote {size_text(plan.total_bytes)} to {', '.join(plan.files)} in {output}")
    if not (output / CONFIG_FILE).exists():
        click.echo(
            f"{CONFIG_FILE} and the tokenizer's files were not copied, as a checkpoint has none: "
            f"copy them from the model's folder into {output}"
        )


def show(found: Description, *, every: bool) -> None:
    """Print a checkpoint as tables for people."""
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


def _show_tensors(title: str, tensors: Sequence[SavedTensor]) -> None:
    columns = ("name", "optimizer state", "dtype", "shape", "size", "parts")
    rows = []
    for each in tensors:
        size, parts = size_text(tensor_bytes(each)), str(len(each.parts))
        rows.append((each.name, each.state, each.dtype, shape_text(each.shape), size, parts))
    show_table(title, columns, rows)


# --- saved tensors in rows: the layers that repeat are one ---

# ``model.layers.0.mlp.weight`` to ``model.layers.31.mlp.weight`` become
# ``model.layers.{0..31}.mlp.weight``, where they have one shape, one dtype and one optimizer state.


COLUMNS = ("name", "shape", "dtype", "tensors", "size", "optimizer state", "its size")


def summary(tensors: Iterable[SavedTensor]) -> list[tuple[str, ...]]:
    """Return rows of ``COLUMNS``, in the order in which the tensors come, and one with the sums."""
    parameters: dict[str, list[SavedTensor]] = {}
    for tensor in tensors:
        parameters.setdefault(tensor.name, []).append(tensor)
    ordered = sorted(parameters, key=_natural)
    kinds: dict[tuple[object, ...], list[str]] = {}
    for name in ordered:
        facts = sorted((each.state, each.dtype, each.shape) for each in parameters[name])
        kinds.setdefault((_pattern(name), *facts), []).append(name)
    rows = [(_joined(alike), alike) for alike in kinds.values()]
    rows += [("all", ordered)] if len(rows) > 1 else []
    return [_row(name, [t for one in names for t in parameters[one]]) for name, names in rows]


def _row(name: str, tensors: Sequence[SavedTensor]) -> tuple[str, ...]:
    values = [each for each in tensors if not each.state]
    states = [each for each in tensors if each.state]
    shapes = {shape_text(one.shape) for one in values}
    kinds = dict.fromkeys(f"{state.state.partition('.')[2]} {state.dtype}" for state in states)
    return (
        name,
        shapes.pop() if len(shapes) == 1 else "",
        ", ".join(dict.fromkeys(one.dtype for one in values)),
        str(len(values)),
        size_text(sum(map(tensor_bytes, values))),
        ", ".join(kinds),
        size_text(sum(map(tensor_bytes, states))) if states else "",
    )


def shape_text(shape: tuple[int, ...]) -> str:
    """Return ``64 x 64``, or ``scalar``."""
    return " x ".join(map(str, shape)) or "scalar"


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort layer 10 behind layer 9."""
    return [(int(p), "") if p.isdecimal() else (-1, p) for p in name.split(".")]


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _joined(names: Sequence[str]) -> str:
    """Return one name for several that differ in numbers."""
    columns = zip(*(name.split(".") for name in names), strict=True)
    return ".".join(_numbers(dict.fromkeys(parts)) for parts in columns)


def _numbers(parts: Iterable[str]) -> str:
    """Return one part as it is, and several as ``{0..31}`` or ``{0..3,5}``."""
    found = list(parts)
    if len(found) == 1:
        return found[0]
    texts = [
        f"{run[0]}..{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs(map(int, found))
    ]
    return f"{{{','.join(texts)}}}"
