"""``drivetrain estimate``: the bytes that each strategy promises to hold and send for a model."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import click

from drivetrain.config import Layer, ValueOrigin
from drivetrain.config.resolve import Resolved, resolve
from drivetrain.cost import Cost, ModelSpec
from drivetrain.errors import ConfigError, DrivetrainError
from drivetrain.registry import strategies
from drivetrain_launch.commands.options import resolve_command_line, source_options
from drivetrain_launch.commands.tables import show_table

GIB = 2**30
KINDS = ("parameters", "masters", "gradients", "optimizer")
"""Columns of their own; other kinds on the device are added up."""

HOST, DISK = " in host memory", " on disk"
"""Ends of the names of kinds that do not lie on the device."""

DEVICES: Mapping[str, int] = {
    "t4": 16, "v100": 32, "a10": 24, "l4": 24, "l40s": 48, "rtx3090": 24, "rtx4090": 24,
    "a100-40": 40, "a100": 80, "h100": 80, "h200": 141, "b200": 180, "mi300x": 192,
}  # fmt: skip
"""GiB of memory of devices, by name."""


@dataclass(frozen=True, slots=True)
class Promise:
    """The cost of one form of a strategy, or the reason why there is none.

    Attributes:
        form: the strategy with its options.
        cost: bytes that rank 0 holds and sends.
        refusal: why the strategy cannot train the model so.
    """

    form: str
    cost: Cost | None
    refusal: str = ""

    @property
    def on_device(self) -> int:
        """Bytes on the device."""
        held = self.cost.held if self.cost else {}
        return sum(count for kind, count in held.items() if not kind.endswith((HOST, DISK)))


@click.command(
    options_metavar="[OPTIONS]",
    context_settings={
        "allow_interspersed_args": False,
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
    },
)
@source_options()
@click.option("--ranks", type=click.IntRange(min=1), default=8, help="Ranks. [default: 8]")
@click.option(
    "--device",
    metavar="NAME|GIB",
    help=f"Memory of a rank's device, in GiB or by name: {', '.join(DEVICES)}.",
)
@click.argument("source", metavar="MODEL")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
def command(
    config: str | None,
    assignments: tuple[str, ...],
    ranks: int,
    device: str | None,
    source: str,
    arguments: tuple[str, ...],
) -> None:
    """Show the bytes that every strategy holds and sends for MODEL, on rank 0, with Adam.

    MODEL is a config.json of transformers or its folder, a script (run as one process until it
    prepares its model, with ARGS), MODULE:FUNCTION, or a number of parameters such as 7B.
    Activations are not counted.
    """
    room = device_bytes(device) if device else None
    resolved = resolve_command_line(config, assignments)
    from drivetrain_launch.commands.models import model_of

    model = model_of(source, arguments)
    promises = list(promises_for(model, resolved, ranks))
    show(model, promises, resolved.run.precision, ranks, room)


def device_bytes(text: str) -> int:
    """Return the memory of a device.

    Raises:
        ConfigError: the name is unknown, and the text is no number.
    """
    if text.lower() in DEVICES:
        return DEVICES[text.lower()] * GIB
    try:
        return int(float(text) * GIB)
    except ValueError:
        raise ConfigError(
            f"--device: expected a number of GiB or one of {', '.join(DEVICES)}, found {text!r}"
        ) from None


def promises_for(model: ModelSpec, resolved: Resolved, ranks: int) -> Iterator[Promise]:
    """Yield the promise of every installed strategy in its forms, on accelerators.

    Args:
        model: its facts.
        resolved: the precision and the accumulation of the run; its strategy is one more form where
            somebody has chosen it.
        ranks: in all, on one host.
    """
    registry = strategies()
    chosen = "strategy.name" in resolved.origins
    forms: list[tuple[str, Mapping[str, Any]]] = [
        (name, options)
        for name in registry.names
        if not registry.load(name).reference
        for options in registry.load(name).variants(ranks)
    ]
    if chosen:
        given = resolved.to_dict()["strategy"]
        own = {key: value for key, value in given.items() if key != "name"}
        yield _promise(f"{resolved.strategy} (as configured)", model, resolved, ranks)
        forms = [form for form in forms if form != (resolved.strategy, own)]
    for name, chosen_options in forms:
        options = dict(chosen_options)
        origin = ValueOrigin("file", "the form")
        layer = Layer({"strategy": {"name": name, **options}}, {"strategy": origin})
        core = {key: value for key, value in resolved.to_dict().items() if key != "strategy"}
        shown = ", ".join(f"{key} {value}" for key, value in options.items())
        try:
            form = resolve(Layer(core), layer, find_config=registry.find_config)
        except ConfigError as error:
            yield Promise(f"{name} {shown}".strip(), None, str(error))
            continue
        yield _promise(f"{name} {shown}".strip(), model, form, ranks)


def _promise(form: str, model: ModelSpec, resolved: Resolved, ranks: int) -> Promise:
    from drivetrain.strategy import find_strategy
    from drivetrain_launch.commands.preview import plan

    try:
        kind, options = find_strategy(resolved.strategy, resolved.strategy_config)
        run = plan(resolved, ranks, on_accelerators=True)
        kind.check_options(options, run.precision)
        return Promise(form, kind.cost(options, model, run))
    except DrivetrainError as error:
        return Promise(form, None, str(error).splitlines()[0])


def show(
    model: ModelSpec, promises: list[Promise], precision: str, ranks: int, room: int | None
) -> None:
    """Print one table over all forms, and the reasons of refusals."""
    count = sum(spec.numel for spec in model.parameters)
    columns = ["strategy", "on device", *KINDS, "other", "host", "disk", "sent"]
    rows = [_row(promise, room) for promise in promises if promise.cost is not None]
    title = (
        f"{count:,} parameters, {ranks} ranks, precision {precision}: GiB that rank 0 holds "
        "between steps and sends in a step"
    )
    show_table(title, columns + (["fits"] if room else []), rows)
    for promise in promises:
        if promise.cost is None:
            click.echo(f"{promise.form}: {promise.refusal}")
        elif promise.cost.uncounted:
            axes = ", ".join(f"{what} over {a}" for a, what in promise.cost.uncounted.items())
            click.echo(f"{promise.form}: sends {axes} as well, which depend on the batch")
    click.echo("Activations are not counted.")


def _row(promise: Promise, room: int | None) -> list[str]:
    held = promise.cost.held if promise.cost else {}
    elsewhere = {
        end: sum(count for kind, count in held.items() if kind.endswith(end))
        for end in (HOST, DISK)
    }
    kinds = [held.get(kind, 0) for kind in KINDS]
    other = promise.on_device - sum(kinds)
    sent = promise.cost.total_sent if promise.cost else 0
    numbers = [promise.on_device, *kinds, other, elsewhere[HOST], elsewhere[DISK], sent]
    fits = [] if room is None else ["yes" if promise.on_device <= room else "no"]
    return [promise.form, *(f"{number / GIB:,.2f}" for number in numbers), *fits]
