"""The command group ``drivetrain``: finds the subcommand, and turns every error into an exit code.

Subcommands are imported when they are called, so that ``drivetrain --help`` neither imports torch
nor reads a plugin.
"""

import difflib
import importlib
import sys
from collections.abc import Sequence

import click

from drivetrain._version import __version__
from drivetrain.errors import DrivetrainError

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it: 128 + SIGINT."""

COMMANDS = {
    "launch": "Run a training script on several processes.",
    "config": "Answer a few questions and write the configuration file.",
    "checkpoint": "Look into a checkpoint, check it, or export its weights.",
    "env": "Describe this machine, for a bug report.",
    "test": "Check in seconds that this machine trains correctly.",
    "completion": "Print the completion script of a shell.",
}


class Commands(click.Group):
    """A group whose commands are modules named ``NAME_command`` that hold a ``command``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, in the order in which a user needs them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command.

        Raises:
            click.UsageError: there is no such command.
        """
        if cmd_name not in COMMANDS:
            near = difflib.get_close_matches(cmd_name, COMMANDS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"commands: {', '.join(COMMANDS)}"
            raise click.UsageError(f"unknown command {cmd_name!r}; {hint}", ctx)
        command: click.Command = importlib.import_module(
            f"drivetrain_launch.{cmd_name}_command"
        ).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="drivetrain")
def group() -> None:
    """One loop, any parallelism: train PyTorch models on more than one device."""


def run(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit code; docs/cli.md lists the codes."""
    try:
        code = group.main(list(arguments), prog_name="drivetrain", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return INTERRUPTED
    except DrivetrainError as error:
        click.echo(f"error: {error}", err=True)
        return error.exit_code
    except BrokenPipeError:
        # The reader of our output, such as head, has left: nothing more to say to it.
        sys.stderr.close()
        return 1
    return code if isinstance(code, int) else 0


def main() -> None:
    """Entry point of the console script."""
    sys.exit(run(sys.argv[1:]))
