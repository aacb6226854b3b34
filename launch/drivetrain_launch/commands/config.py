"""``drivetrain config``: writes, shows and checks the configuration file."""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from drivetrain.config import Layer, read_file
from drivetrain.config.resolve import resolve
from drivetrain.errors import ConfigError
from drivetrain.registry import strategies
from drivetrain_launch.commands.options import (
    complete_file,
    complete_known_key,
    resolve_command_line,
    source_options,
)

DEFAULT_PATH = Path("drivetrain.yaml")


@click.group(
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--default",
    "use_default",
    is_flag=True,
    help="Write the defaults without asking, to standard output unless --output is given.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help=f"File to write. [default: {DEFAULT_PATH}]",
)
@click.pass_context
def command(ctx: click.Context, use_default: bool, output: Path | None) -> int:
    """Answer a few questions and write the configuration file."""
    if ctx.invoked_subcommand is not None:
        return 0
    if use_default:
        return write_defaults(output)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError(
            "expected a terminal to ask questions on, found none; "
            "'drivetrain config --default --output FILE' writes the defaults without asking"
        )
    return ask(output or DEFAULT_PATH)


@command.command("show")
@source_options()
def show(config: str | None, assignments: tuple[str, ...]) -> None:
    """Show every key with its value and where that came from."""
    from drivetrain_launch.commands.preview import show_configuration

    show_configuration(resolve_command_line(config, assignments))


@command.command("check")
@click.argument("file", metavar="FILE", shell_complete=complete_file)
def check(file: str) -> None:
    """Check a file: print 'ok', or every error in it and exit with 2."""
    from drivetrain_launch.forecast.planning import check_run

    check_run(resolve_command_line(file, ()))
    click.echo("ok")


@command.command("explain")
@click.argument("key", metavar="KEY", shell_complete=complete_known_key)
def explain(key: str) -> None:
    """Explain a key, such as launch.timeout_s, the keys of a section, or the options of a strategy.

    KEY is also strategy.OPTION, or the name of a strategy.
    """
    from drivetrain_launch.commands.explaining import explained

    click.echo(explained(key))


@command.command(
    "import",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="File to write. [default: standard output]",
)
@click.argument(
    "source",
    nargs=-1,
    required=True,
    type=click.UNPROCESSED,
    metavar="SOURCE...",
    shell_complete=complete_file,
)
def import_(source: tuple[str, ...], output: Path | None) -> None:
    """Translate a configuration of another program.

    SOURCE is a file of Accelerate (YAML) or DeepSpeed (JSON), a script of the shell that calls
    torchrun, accelerate or deepspeed, or such a call itself. Settings that no key stands for become
    comments.
    """
    from drivetrain_launch.commands.importing import imported

    if Path(source[0]).is_file():
        file, *rest = source
        source = (file,)
        output = _trailing_output(rest) or output
    text, script, hosts = imported(source)
    if output is None:
        click.echo(text, nl=False)
    else:
        write(output, text, replace=False)
        click.echo(f"wrote {output}")
    click.echo(run_line(output or DEFAULT_PATH, hosts, script), err=output is None)


def _trailing_output(words: Sequence[str]) -> Path | None:
    """Return the value of ``--output`` after a file; words of a command line stay its own.

    Raises:
        ConfigError: there are other words.
    """
    match words:
        case []:
            return None
        case ["--output", path]:
            return Path(path)
        case [word] if word.startswith("--output="):
            return Path(word.partition("=")[2])
    raise ConfigError(
        f"expected one file, or a command line, found more after the file: {' '.join(words)}"
    )


def write_defaults(output: Path | None) -> int:
    """Write every knob at its default; a file that exists is left alone.

    Raises:
        ConfigError: the file exists or cannot be written.
    """
    text = resolve(Layer(), find_config=strategies().find_config).to_yaml()
    if output is None:
        click.echo(text, nl=False)
    else:
        write(output, text, replace=False)
        click.echo(f"wrote {output}")
    return 0


def ask(output: Path) -> int:
    """Run the wizard on this terminal, and write the configuration."""
    from drivetrain_launch.wizard.dialog import ask_all, ask_where
    from drivetrain_launch.wizard.questions import Wizard

    text = ask_all(Wizard(strategies()))
    path = ask_where(text, output)
    write(path, text, replace=True)
    # Read the file as a run will: a mistake of ours must show here, and not in the run.
    from drivetrain_launch.forecast.planning import check_run

    resolved = resolve(read_file(path), find_config=strategies().find_config)
    check_run(resolved)
    click.echo(f"wrote {path}\n{run_line(path, resolved.run.launch.nnodes, 'train.py')}")
    return 0


def run_line(path: Path, hosts: int, script: str) -> str:
    """Return the command that runs a script with a file, for the user to copy.

    Args:
        path: of the file.
        hosts: how many; each runs the command with an index of its own.
        script: with its arguments, as a shell reads them.
    """
    where = "run" if hosts == 1 else f"run on each of the {hosts} hosts, with its own --node-rank"
    rank = "" if hosts == 1 else " --node-rank 0"
    return f"{where}: drivetrain launch --config {shlex.quote(str(path))}{rank} {script}"


def write(path: Path, text: str, *, replace: bool) -> None:
    """Write a whole file; after an error the file is as it was.

    Raises:
        ConfigError: the file exists and may not be replaced, or cannot be written.
    """
    if path.exists() and not replace:
        what = "is a folder" if path.is_dir() else "exists"
        raise ConfigError(f"{path} {what}; choose another --output, or remove it first")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
