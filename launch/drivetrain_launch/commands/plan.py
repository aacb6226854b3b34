"""``drivetrain plan``: the time and memory of layouts before anything runs, and the best."""

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from drivetrain.errors import ConfigError
from drivetrain.hardware.catalog import load_hardware
from drivetrain.hardware.description import Hardware
from drivetrain.paper.transformer import GptShape
from drivetrain_launch.forecast.sizes import GIB, size_text
from drivetrain_launch.tables import show_table

if TYPE_CHECKING:
    from drivetrain_launch.planner.predict import Prediction, Task
    from drivetrain_launch.planner.search import Found

SHOWN = 10
"""Rows of the table of a search."""

_LINK = re.compile(r"(\d+(?:\.\d+)?)\s*(GB/s|Gbit/s|MB/s|Mbit/s)", re.IGNORECASE)
_RATES = {"gb/s": 1.0, "gbit/s": 1 / 8, "mb/s": 1e-3, "mbit/s": 1e-3 / 8}


@click.command(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option("--gpt", metavar="KEY=VALUE,...", required=True, help="Sizes of a GPT: "
              + ", ".join(GptShape.keys()) + ".")  # fmt: skip
@click.option("--batch", type=click.IntRange(min=1), required=True, help="Sequences of a step.")
@click.option("--hardware", "source", metavar="NAME|FILE", required=True,
              help="Description of the devices; see `drivetrain hardware show`.")  # fmt: skip
@click.option("--hosts", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--devices-per-host", type=click.IntRange(min=1),
              help="[default: those of the description]")  # fmt: skip
@click.option("--link-between", metavar="RATE",
              help="What a host sends to other hosts over all its adapters, such as 100GB/s or "
              "25Gbit/s. [default: the description's]")  # fmt: skip
@click.option("--layout", metavar="KEY=VALUE,...", help="Predict this layout alone.")
@click.option("--precision", type=click.Choice(["fp16", "bf16", "no"]), default="bf16",
              show_default=True, help="Of the layouts that are searched.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--trace", type=click.Path(path_type=Path), metavar="FILE",
              help="With --layout: write the predicted step as a Chrome trace.")  # fmt: skip
def command(
    layout: str | None, precision: str, as_json: bool, trace: Path | None, **given: Any
) -> None:
    """Predict the time and the memory of a training step, or search for the best layout.

    Nothing is trained and no device is needed: see docs/planning.md for what is predicted, how,
    and how far off it was on published measurements.
    """
    task = _task(**given)
    if layout is None:
        _search(task, precision, as_json)
    else:
        _one(task, layout, as_json, trace)


def _task(
    gpt: str,
    batch: int,
    source: str,
    hosts: int,
    devices_per_host: int | None,
    link_between: str | None,
) -> "Task":
    from drivetrain_launch.planner.predict import Task

    hardware = _with_link(load_hardware(source), link_between)
    per_host = devices_per_host or hardware.host.devices
    return Task(read_shape(gpt), batch, hardware, hosts, per_host)


def read_shape(text: str) -> GptShape:
    """Read the sizes of a GPT.

    Raises:
        ConfigError: a key or a value is wrong.
    """
    from drivetrain_launch.planner.layout import read_pairs

    kinds = {field.name: field.type for field in fields(GptShape)}
    values: dict[str, Any] = {}
    for key, value in read_pairs(text, "--gpt").items():
        if key not in kinds:
            raise ConfigError(f"--gpt: unknown key {key!r}; known: {', '.join(kinds)}")
        if kinds[key] is bool:
            if value.lower() not in ("true", "false"):
                raise ConfigError(f"--gpt: expected {key} true or false, found {value!r}")
            values[key] = value.lower() == "true"
        elif not value.isdigit():
            raise ConfigError(f"--gpt: expected a whole number for {key}, found {value!r}")
        else:
            values[key] = int(value)
    needed = {"layers", "hidden", "heads", "seq"} - set(values)
    if needed:
        raise ConfigError(f"--gpt: expected {', '.join(sorted(needed))} as well, found {text!r}")
    return GptShape(**values)


def _with_link(hardware: Hardware, rate: str | None) -> Hardware:
    if rate is None:
        return hardware
    match = _LINK.fullmatch(rate.strip())
    if match is None or not float(match[1]):
        raise ConfigError(
            f"--link-between: expected a rate such as 100GB/s or 25Gbit/s, found {rate!r}"
        )
    speed = float(match[1]) * _RATES[match[2].lower()] * hardware.links.reached
    between = hardware.links.between.model_copy(update={"gigabytes_per_second": speed})
    links = hardware.links.model_copy(update={"between": between})
    return hardware.model_copy(update={"links": links})


def _one(task: "Task", layout: str, as_json: bool, trace: Path | None) -> None:
    from drivetrain.paper.trace import write_trace
    from drivetrain_launch.planner.layout import read_layout
    from drivetrain_launch.planner.predict import Predictor

    prediction = Predictor(task).predict(read_layout(layout))
    if trace is not None:
        write_trace(prediction.played, trace)
    if as_json:
        click.echo(json.dumps(prediction.to_json()))
        return
    room = task.hardware.device.memory.gib * GIB
    needed = prediction.needed()
    click.echo(prediction.layout)
    click.echo(f"step     {prediction.step_seconds:.4g} s, idle {prediction.idle:.1%}")
    click.echo(
        f"speed    {prediction.tokens_per_second:,.0f} tokens/s, MFU {prediction.mfu:.1%} of the "
        "devices' peak"
    )
    click.echo(
        f"memory   {size_text(round(needed))} of {size_text(round(room))}"
        + ("" if needed <= room else f": {size_text(round(needed - room))} too much")
    )
    for kind, nbytes in prediction.held.items():
        click.echo(f"  held   {kind}: {size_text(round(nbytes))}")
    for (axis, operation), nbytes in prediction.sent.items():
        click.echo(f"  sent   {operation} over {axis}: {size_text(round(nbytes))}")


def _search(task: "Task", precision: str, as_json: bool) -> None:
    from drivetrain_launch.planner.search import search

    found = search(task, precision)
    if as_json:
        click.echo(json.dumps([each.to_json() for each in found.best]))
        return
    show_found(task, found)


def show_found(task: "Task", found: "Found") -> None:
    """Print the best layouts, the reasons of the others' defeat, and the numbers left out."""
    rows = [_row(each, found.best[0]) for each in found.best[:SHOWN]]
    columns = ["layout", "step", "tokens/s", "MFU", "memory", "idle", "why not first"]
    title = (
        f"{task.shape.parameters / 1e9:.3g} B parameters, batch {task.batch}, {task.ranks} x "
        f"{task.hardware.name}: {found.tried:,} layouts tried"
    )
    show_table(title, columns, rows)
    for reason, count in found.left_out.items():
        click.echo(f"left out: {count:,} {reason}")
    click.echo("\nthe first one as YAML:\n" + found.best[0].planned.yaml())


def _row(each: "Prediction", best: "Prediction") -> list[str]:
    return [
        each.layout,
        f"{each.step_seconds:.4g} s",
        f"{each.tokens_per_second:,.0f}",
        f"{each.mfu:.1%}",
        size_text(round(each.needed())),
        f"{each.idle:.1%}",
        each.against(best),
    ]
