"""``drivetrain hardware``: the descriptions of hardware that plans are made for."""

import click

from drivetrain.hardware.catalog import hardware_names, hardware_text, load_hardware


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Show descriptions of hardware, which ``drivetrain plan`` reads."""


@command.command()
@click.argument("source", metavar="[NAME|FILE]", required=False)
def show(source: str | None) -> None:
    """Print a description with the sources of its numbers; without a name, list the names."""
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
