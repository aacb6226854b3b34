"""``drivetrain plan``, ``estimate``, ``hardware``: time, memory and bytes before anything runs."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import click

from drivetrain.config import LaunchConfig
from drivetrain.config.outline import EXACT
from drivetrain.config.resolve import Resolved
from drivetrain.config.schema import MOST_HOSTS, MOST_RANKS_OF_A_HOST, LinksConfig
from drivetrain.errors import ConfigError, write_text
from drivetrain.hardware.description import (
    SUFFIX,
    Hardware,
    hardware_names,
    hardware_text,
    load_hardware,
    names_a_device,
)
from drivetrain.hardware.sizes import DEVICES, GIB, device_bytes, size_text, unit_of
from drivetrain.simulator.transformer import GptShape, SimulatedModel
from drivetrain_launch.commands.options import (
    SETTINGS,
    GroupedCommand,
    ModelCommand,
    complete_file,
    grouped_option,
    json_option,
    resolve_command_line,
    rest_argument,
    source_options,
    worded_flags,
)
from drivetrain_launch.console import show_table

# --- drivetrain plan ---

if TYPE_CHECKING:
    from drivetrain.cost import ModelSpec
    from drivetrain.planner.search import Found, Prediction, Predictor, Task
    from drivetrain_launch.forecast import Promise

LONGEST = 4096
"""Tokens of a sample that the help promises; see ``forecast``."""

BEST = "best"
"""Stands for the layout that a search finds."""

_LINK = re.compile(r"(\d+(?:\.\d+)?)\s*(GB/s|Gbit/s|MB/s|Mbit/s)", re.IGNORECASE)
_RATES = {"gb/s": 1.0, "gbit/s": 1 / 8, "mb/s": 1e-3, "mbit/s": 1e-3 / 8}


@click.command(cls=ModelCommand)
@grouped_option("Model", "--gpt", metavar="KEY=VALUE,...", help="Sizes of a GPT: "
                + ", ".join(GptShape.keys()) + ".")  # fmt: skip
@grouped_option("Model", "--hf", metavar="FILE", shell_complete=complete_file,
                help="A config.json of transformers, or its folder; no weights are read."
                )  # fmt: skip
@grouped_option("Model", "--model", "factory", metavar="MODULE:FUNCTION",
                help="A function that returns the model.")  # fmt: skip
@grouped_option("Model", "--seq", type=click.IntRange(min=1), metavar="N",
                help="Tokens of a sample, for --hf and --model. "
                f"[default: the model's longest, at most {LONGEST}]")  # fmt: skip
@grouped_option("Model", "--batch", type=click.IntRange(min=1), metavar="N",
                help="Samples of a step, of all ranks. [default: a batch of the script's loader on "
                "every rank]")  # fmt: skip
@grouped_option("Hardware", "--hardware", "source", metavar="NAME|FILE",
                help="Description of the devices; see `drivetrain hardware show`.")  # fmt: skip
@grouped_option("Hardware", "--nnodes", "hosts", former=("--hosts",), metavar="N", default=1,
                type=click.IntRange(1, MOST_HOSTS), help="Hosts.", show_default=True)  # fmt: skip
@grouped_option("Hardware", "--nproc-per-node", "devices_per_host", metavar="N",
                former=("--devices-per-host",), type=click.IntRange(1, MOST_RANKS_OF_A_HOST),
                help="Devices of a host. [default: those of the description]")  # fmt: skip
@grouped_option("Hardware", "--link-between", metavar="RATE",
                help="What a host sends to other hosts over all its adapters, such as 100GB/s or "
                "25Gbit/s. [default: the description's]")  # fmt: skip
@grouped_option("Layouts", "--layout", metavar="KEY=VALUE,...", help="Predict this layout alone.")
@grouped_option("Layouts", "--explain", metavar="KEY=VALUE,...|best",
                help="Show one layout in detail: its time by parts, its memory by kinds, and what "
                "would make it fit.")  # fmt: skip
@grouped_option("Layouts", "--precision", type=click.Choice(["fp16", "bf16", "fp8", "no"]),
                default="bf16", show_default=True,
                help="Of the layouts that are searched.")  # fmt: skip
@grouped_option("Layouts", "--allow", default=EXACT, show_default=True,
                type=click.Choice(get_args(get_type_hints(LinksConfig)["allow"])),
                help="How far training may be from exact training, at most: a search then weighs "
                "methods for slow links, too.")  # fmt: skip
@json_option
@grouped_option("Output", "--trace", type=click.Path(path_type=Path), metavar="FILE",
                help="With --layout or --explain: write the step as a Chrome trace.")  # fmt: skip
@grouped_option("Output", "--output", "file", former=("--write",), metavar="FILE",
                type=click.Path(path_type=Path),
                help="Write the configuration of the (first) layout for `drivetrain launch "
                "--config`.")  # fmt: skip
@click.argument("script", required=False, metavar="[SCRIPT]", shell_complete=complete_file)
@rest_argument()
def command(
    layout: str | None,
    explain: str | None,
    precision: str,
    allow: str,
    as_json: bool,
    trace: Path | None,
    file: Path | None,
    **given: Any,
) -> None:
    """Predict the time and the memory of a training step, or search for the best layout.

    The model comes from --gpt, --hf, --model, or from SCRIPT, which is run with ARGS as one process
    until it prepares its model. Nothing is trained and no device is needed: see docs/planning.md
    for the method, and for its errors on published measurements.

    Example: drivetrain plan --hf config.json --batch 512 --hardware h100 --nnodes 8
    """
    from drivetrain.compression.compressor import Fidelity
    from drivetrain.planner.layout import read_layout
    from drivetrain.planner.search import Predictor, search

    if layout is not None and explain is not None:
        raise ConfigError("expected one of --layout and --explain, found both; leave one out")
    task = _task(**given)
    chosen = layout or explain
    if chosen is not None and chosen != BEST:
        predictor, planned = Predictor(task), read_layout(chosen)
        _show(predictor, predictor.predict(planned), as_json, trace, file)
        _remark(task, planned.precision)
        return
    _remark(task, precision)
    found = search(task, precision, Fidelity(allow))
    if chosen == BEST:
        _show(Predictor(task), found.best[0], as_json, trace, file)
        return
    if trace is not None:
        raise ConfigError("--trace: expected with --layout or --explain, found neither")
    if file is not None:
        write_text(file, file_of(task, found.best[0]))
    if as_json:
        click.echo(json.dumps([each.to_json() for each in found.best]))
    else:
        show_found(task, found, methods=allow != EXACT)


def _remark(task: "Task", precision: str) -> None:
    if remark := task.remark(precision):
        click.echo(remark, err=True)


def _task(
    *,
    source: str | None,
    hosts: int,
    devices_per_host: int | None,
    link_between: str | None,
    batch: int | None,
    **models: Any,
) -> "Task":
    from drivetrain.planner.search import Task

    if source is None:
        raise ConfigError(
            f"expected --hardware, found none; known: {', '.join(hardware_names())}; or a file of "
            "`drivetrain hardware measure`"
        )
    hardware = _with_link(load_hardware(source), link_between)
    per_host = devices_per_host or hardware.host.devices
    try:
        hardware.check_measured(hosts, per_host)
    except ConfigError as error:
        raise ConfigError(
            f"{error}; for links between hosts, --link-between does as well"
        ) from None
    model, loader_batch = _subject(**models)
    batch = batch or loader_batch * hosts * per_host
    if not batch:
        raise ConfigError("expected --batch, the samples of a step of all ranks, found none")
    return Task(model, batch, hardware, hosts, per_host)


def _subject(
    gpt: str | None,
    hf: str | None,
    factory: str | None,
    seq: int | None,
    script: str | None,
    arguments: tuple[str, ...],
) -> "tuple[SimulatedModel, int]":
    """Return the model to plan for, and the samples of a batch of its script's loader."""
    from drivetrain_launch import forecast

    given = {"--gpt": gpt, "--hf": hf, "--model": factory, "a script": script}
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        raise ConfigError(
            f"expected one of {', '.join(given)}, found {' and '.join(named) or 'none'}"
        )
    if seq is not None and (gpt or script):
        raise ConfigError(
            f"--seq: expected with --hf or --model, found {named[0]}, which says it itself"
        )
    if gpt is not None:
        return read_shape(gpt), 0
    if hf is not None:
        return forecast.subject_of_config(hf, seq), 0
    if factory is not None:
        return forecast.subject_of_function(factory, seq), 0
    return forecast.subject_of_script(str(script), arguments)


def read_shape(text: str) -> GptShape:
    """Read the sizes of a GPT.

    Raises:
        ConfigError: a key or a value is wrong.
    """
    from drivetrain.planner.layout import read_pairs

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
    between = hardware.links.between.model_copy(
        update={"gigabytes_per_second": speed, "source": "given as --link-between"}
    )
    links = hardware.links.model_copy(update={"between": between})
    return hardware.model_copy(update={"links": links})


def _show(
    predictor: "Predictor",
    first: "Prediction",
    as_json: bool,
    trace: Path | None,
    file: Path | None,
) -> None:
    """Print one layout in detail, and write its files."""
    if trace is not None:
        from drivetrain.simulator.step import write_trace

        write_trace(first.played, trace)
    if file is not None:
        write_text(file, file_of(predictor.task, first))
    if as_json:
        click.echo(json.dumps(first.to_json()))
        return
    for line in explained(predictor, first):
        click.echo(line)


def show_found(task: "Task", found: "Found", *, methods: bool = False) -> None:
    """Print the best layouts, the reasons of the others' defeat, and the numbers left out.

    Args:
        task: of the search.
        found: its outcome.
        methods: whether approximate methods took part: then a column names those of each layout.
    """
    from drivetrain.planner.search import room_of

    unit = "tokens/s" if task.model.seq > 1 else "samples/s"
    memory = f"memory of {size_text(room_of(task))}"
    between = ["between hosts"] * (task.hosts > 1) + ["method (class)"] * methods
    columns = ["layout", "step", unit, "MFU", memory, *between, "idle", "why not first"]
    common, rows = found_rows(found, between)
    title = (
        f"{task.model.parameters:,} parameters, batch {task.batch}, {task.ranks} x "
        f"{task.hardware.name}: {found.tried:,} layouts tried"
    )
    show_table(title + (common and f"\neach with {common}"), columns, rows, folds=True)
    for reason, count in found.left_out.items():
        click.echo(f"left out: {count:,} {reason}")
    click.echo("\nthe first one as a configuration:\n" + file_of(task, found.best[0]))


# --- the words of ``drivetrain plan`` ---

SHOWN = 10
"""Rows of the table of a search."""

SMALL = 0.002
"""Shares of a step that are not shown."""


def file_of(task: "Task", prediction: "Prediction") -> str:
    """Return the configuration file of a layout."""
    from drivetrain.planner.layout import run_file

    return run_file(prediction.planned, prediction.micro_batches, task.hosts, task.per_host)


def explained(predictor: "Predictor", prediction: "Prediction") -> Iterator[str]:
    """Yield lines about one layout: its time by parts, its memory by kinds, its messages."""
    from drivetrain.planner.search import remedies, room_of

    task = predictor.task
    yield prediction.layout
    yield f"step     {prediction.step_seconds:.4g} s, idle {prediction.idle:.1%}"
    unit = "tokens/s" if task.model.seq > 1 else "samples/s"
    yield (
        f"speed    {prediction.tokens_per_second:,.0f} {unit}, MFU {prediction.mfu:.1%} of the "
        "devices' peak"
    )
    parts = sorted(prediction.parts.items(), key=lambda each: -each[1])
    for name, seconds in parts:
        share = seconds / prediction.step_seconds
        if share > SMALL:
            yield f"  {share:6.1%}  {seconds:.4g} s  {name}"
    room, needed = room_of(task), prediction.needed()
    yield f"memory   {size_text(needed)} of {size_text(room)}" + (
        "" if needed <= room else f": {size_text(needed - room)} too much"
    )
    for kind, nbytes in prediction.held.items():
        yield f"  held   {kind}: {size_text(nbytes)}"
    rest = prediction.peak_bytes - sum(prediction.held.values())
    yield f"  for a while   activations and what is gathered: {size_text(rest)}"
    if len(prediction.peaks) > 1:
        peaks = ", ".join(size_text(each) for each in prediction.peaks)
        yield f"  at the peak, by stage: {peaks}"
    for tier in ("host", "disk"):
        if there := prediction.stored_most(tier):
            yield f"  on the {tier}, of a rank: {size_text(there)}"
    for (axis, operation), nbytes in prediction.sent.items():
        yield f"  sent   {operation} over {axis}: {size_text(nbytes)}"
    yield f"  a host sends to others: {size_text(prediction.leaving)}"
    if prediction.planned.fidelity != EXACT:
        yield f"  approximate between hosts: {prediction.planned.methods()}"
    if needed > room:
        yield f"would fit with any of: {'; '.join(remedies(predictor, prediction.planned))}"


def found_rows(found: "Found", between: Sequence[str]) -> tuple[str, list[list[str]]]:
    """Return the keys that all layouts share, and the rows of the table of a search.

    A layout with the numbers of one before is only counted.

    Args:
        found: the outcome of the search.
        between: columns about links between hosts.
    """
    alike: dict[tuple[str, ...], list[str]] = {}
    for each in found.best:
        numbers = (
            f"{each.step_seconds:.4g} s",
            f"{each.tokens_per_second:,.0f}",
            f"{each.mfu:.1%}",
            size_text(each.needed()),
            *[size_text(each.leaving)] * ("between hosts" in between),
            *[each.planned.methods()] * ("method (class)" in between),
            f"{each.idle:.1%}",
            each.against(found.best[0]),
        )
        alike.setdefault(numbers, []).append(each.layout)
    shown = list(alike.items())[:SHOWN]
    keys = [layouts[0].split(",") for _, layouts in shown]
    common = [key for key in keys[0] if len(keys) > 1 and all(key in each for each in keys)]
    rows = []
    for own, (numbers, layouts) in zip(keys, shown, strict=True):
        more = f"and {len(layouts) - 1} more alike" if len(layouts) > 1 else ""
        layout = ",".join(key for key in own if key not in common)
        rows.append([layout, *numbers[:-1], "; ".join(filter(None, (numbers[-1], more)))])
    return ",".join(common), rows


# --- drivetrain hardware ---

MEASURING = "drivetrain.hardware.measuring"
"""The program that measures, on every rank."""


@click.group(context_settings=SETTINGS)
def hardware() -> None:
    """Show or measure descriptions of hardware, which 'drivetrain plan' reads."""


@hardware.command()
@click.argument("source", metavar="[NAME|FILE]", required=False)
def show(source: str | None) -> None:
    """Print a description, or list their names.

    A description has the sources of its numbers.

    Example: drivetrain hardware show h100
    """
    if source is None:
        for name in hardware_names():
            facts = load_hardware(name)
            peak = max(facts.device.teraflops.values())
            click.echo(
                f"{name:12} {peak:g} TFLOP/s, {facts.device.memory.gib:g} GiB, "
                f"{facts.device.memory.gigabytes_per_second:g} GB/s, {facts.host.devices} per host"
            )
        return
    load_hardware(source)
    click.echo(hardware_text(source), nl=False)


@hardware.command(cls=GroupedCommand)
@click.argument("target", metavar="FILE", type=click.Path(path_type=Path))
@worded_flags(
    nproc_per_node=("N|auto", "Ranks of this host, one per device. [default: auto]"),
    cpu=("", "Leave accelerators alone."),
    nnodes=("N", "Number of hosts. [default: 1]"),
    node_rank=("N", "Index of this host, from 0. [default: 0]"),
    rdzv_endpoint=("HOST:PORT", "Where the hosts meet; needed with nnodes > 1. [default: none]"),
)
def measure(target: Path, **flags: Any) -> int:
    """Measure this hardware, and write its description.

    Devices, memory, links and disk are measured in two minutes; on a loaded machine fewer times:
    after a minute, no further round of devices begins, nor one of links. The description goes to
    FILE.

    With several hosts, run it on each of them, as `drivetrain launch`: FILE is written on host 0.
    Lines of the file say which figures scattered by more than 20%.

    Example: drivetrain hardware measure mine.yaml
    """
    from drivetrain_launch.commands.launch import launch

    if target.suffix != SUFFIX:
        raise ConfigError(f"expected a file that ends with {SUFFIX}, found {str(target)!r}")
    if not target.resolve().parent.is_dir():
        raise ConfigError(f"cannot write {str(target)!r}: there is no such folder; make it first")
    return launch(resolve_command_line(None, (), flags), ("-m", MEASURING, str(target.resolve())))


# --- drivetrain estimate ---

KINDS = ("parameters", "masters", "gradients", "optimizer")
"""Columns of their own; other kinds on the device are added up."""

USUAL_RANKS = 8
"""Ranks of a host where nobody says how many."""


@click.command(cls=ModelCommand)
@source_options
@worded_flags(
    nproc_per_node=("N", "Ranks of a host. [default: the configuration's; 8 where that is auto]"),
    nnodes=("N", "Number of hosts. [default: the configuration's]"),
)
@click.option("--ranks", type=click.IntRange(min=1), hidden=True, help="Ranks of all hosts.")
@grouped_option(
    "Hardware",
    "--hardware",
    former=("--device",),
    metavar="NAME|GIB|FILE",
    help="Memory of a rank's device, for the column of what fits: in GiB, by name "
    f"({', '.join(DEVICES)}), or a description as of 'drivetrain plan'.",
)
@json_option
@click.argument("source", metavar="MODEL", shell_complete=complete_file)
@rest_argument()
def estimate(
    config: str | None,
    assignments: tuple[str, ...],
    ranks: int | None,
    hardware: str | None,
    as_json: bool,
    source: str,
    arguments: tuple[str, ...],
    **flags: Any,
) -> None:
    """Show the bytes that every strategy holds and sends for MODEL, on rank 0, with Adam.

    MODEL is a config.json of transformers or its folder, a script (run as one process until it
    prepares its model, with ARGS), MODULE:FUNCTION, or a number of parameters such as 7B.
    Activations are not counted.

    Example: drivetrain estimate --nproc-per-node 8 --hardware h100 7B
    """
    room = _room(hardware)
    resolved = resolve_command_line(config, assignments, flags)
    ranks = _all_ranks(resolved.run.launch, ranks)
    from drivetrain_launch.forecast import model_of, promises_for

    model = model_of(source, arguments)
    promises = list(promises_for(model, resolved, ranks))
    if as_json:
        click.echo(json.dumps([_plain(promise, room) for promise in promises]))
    else:
        _show_promises(model, promises, resolved, ranks, room)


def _room(hardware: str | None) -> int | None:
    """Return the bytes of a device.

    Raises:
        ConfigError: it is no name, no number, and no description.
    """
    if hardware is None:
        return None
    if not names_a_device(hardware) or hardware.lower() in hardware_names():
        return int(load_hardware(hardware).device.memory.gib * GIB)
    try:
        return device_bytes(hardware)
    except ConfigError as error:
        raise ConfigError(f"--hardware: {error}") from None


def _all_ranks(launch: LaunchConfig, given: int | None) -> int:
    """Return the ranks of all hosts, which every host has as many of."""
    hosts, per_host = launch.nnodes, launch.nproc_per_node
    if given is None:
        return hosts * (USUAL_RANKS if per_host == "auto" else per_host)
    if given % hosts:
        raise ConfigError(
            f"--ranks: expected a multiple of the {hosts} hosts, found {given}; every host has as "
            "many ranks, --nproc-per-node"
        )
    return given


def _plain(promise: "Promise", room: int | None) -> dict[str, Any]:
    """Return one form for JSON, in bytes: what rank 0 holds and sends, or why it cannot run."""
    if promise.refusal:
        return {"strategy": promise.form, "refusal": promise.refusal}
    return {
        "strategy": promise.form,
        "on_device": promise.cost.on_device,
        "held": dict(promise.cost.held),
        "host": promise.cost.in_host_memory,
        "disk": promise.cost.on_disk,
        "sent": promise.cost.total_sent,
        "leaves_host": promise.between_hosts,
        "not_counted": dict(promise.cost.uncounted),
        "fits": None if room is None else promise.cost.on_device <= room,
    }


def _show_promises(
    model: "ModelSpec", promises: "list[Promise]", resolved: Resolved, ranks: int, room: int | None
) -> None:
    """Print one table over all forms, and the reasons of refusals."""
    hosts = resolved.run.launch.nnodes
    where = f"{ranks} ranks" if hosts == 1 else f"{ranks} ranks on {hosts} hosts"
    count = sum(spec.numel for spec in model.parameters)
    columns = ["strategy", "on device", *KINDS, "other", "host", "disk", "sent"]
    columns += ["leaves host"] if hosts > 1 else []
    counted = [promise for promise in promises if not promise.refusal]
    unit, size = unit_of(max((promise.cost.on_device for promise in counted), default=0))
    rows = [_row(promise, size, hosts, room) for promise in counted]
    title = (
        f"{count:,} parameters, {where}, precision {resolved.run.precision}: {unit} that rank 0 "
        "holds between steps and sends in a step"
    )
    show_table(title, columns + (["fits"] if room else []), rows)
    for promise in promises:
        if promise.refusal:
            click.echo(f"{promise.form}: {promise.refusal}")
        elif promise.cost.uncounted:
            axes = ", ".join(f"{what} over {a}" for a, what in promise.cost.uncounted.items())
            click.echo(f"{promise.form}: sends {axes} as well, which depend on the batch")
    if hosts > 1:
        click.echo("leaves host: bytes that all ranks of a host send to other hosts in a step.")
    click.echo("Activations are not counted.")


def _row(promise: "Promise", unit: int, hosts: int, room: int | None) -> list[str]:
    cost = promise.cost
    kinds = [cost.held.get(kind, 0) for kind in KINDS]
    other = cost.on_device - sum(kinds)
    numbers = [cost.on_device, *kinds, other, cost.in_host_memory, cost.on_disk, cost.total_sent]
    numbers += [promise.between_hosts] if hosts > 1 else []
    fits = [] if room is None else ["yes" if promise.cost.on_device <= room else "no"]
    return [promise.form, *(f"{number / unit:,.2f}" for number in numbers), *fits]
