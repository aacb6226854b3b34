"""The command group ``drivetrain``: finds the subcommand, and turns every error into an exit code.

Subcommands are imported when they are called, so that ``drivetrain --help`` imports neither torch
nor a plugin. Plugins add commands by entry point; a broken command is an error only when called.
"""

import difflib
import importlib
import sys
from collections.abc import Sequence

import click
from click.shell_completion import CompletionItem, shell_complete

from drivetrain._version import __version__
from drivetrain.errors import ConfigError, DrivetrainError
from drivetrain.registry import Registry, commands

SYSTEM = "linux"
"""The supported system: signals, sessions and the heap are managed by its means."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it: 128 + SIGINT."""

COMMANDS = {
    "launch": "Run a training script on several processes.",
    "config": "Answer a few questions and write the configuration file.",
    "checkpoint": "Look into a checkpoint, check it, or export its weights.",
    "env": "Describe this machine, for a bug report.",
    "test": "Check in seconds that this machine trains correctly.",
    "estimate": "Show the bytes that each strategy holds and sends for a model.",
    "report": "Show recorded runs, and make or compare their reports.",
    "plan": "Predict the time and memory of layouts, and find the best one.",
    "hardware": "Show or measure descriptions of hardware, for plans.",
    "verify": "Compare a script's numbers under a strategy with the right ones.",
    "manifest": "Write the job file of SLURM, Kubernetes or SkyPilot.",
    "completion": "Print the completion script of a shell.",
}
HEADINGS = {
    "Train": ("launch", "config", "manifest"),
    "Plan": ("estimate", "plan", "hardware"),
    "Check": ("test", "verify", "env"),
    "Look back": ("report", "checkpoint"),
    "Shell": ("completion",),
}
"""The commands under the headings of the help."""

BESIDE = {"estimate": "plan", "hardware": "plan", "test": "launch"}
"""Commands that are in the module of another one."""

SHELLS = {
    "bash": 'eval "$(drivetrain completion bash)"       # in ~/.bashrc',
    "zsh": 'eval "$(drivetrain completion zsh)"        # in ~/.zshrc',
    "fish": "drivetrain completion fish | source          # in ~/.config/fish/config.fish",
}
"""The line of each shell's start file that completes the command."""


class Commands(click.Group):
    """A group whose commands are our modules in ``commands``, and those of plugins.

    A plugin's command cannot take the place of one of ours.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, ours first, in the order in which a user needs them."""
        return [*COMMANDS, *_added(commands())]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command.

        Raises:
            click.UsageError: there is no such command.
            ConfigError: the plugin that provides the command is broken.
        """
        if cmd_name == completion.name:
            return completion
        if cmd_name in COMMANDS:
            module = f"drivetrain_launch.commands.{BESIDE.get(cmd_name, cmd_name)}"
            name = cmd_name if cmd_name in BESIDE else "command"
            ours: click.Command = getattr(importlib.import_module(module), name)
            return ours
        registry = commands()
        if cmd_name in registry.names:
            return _load(registry, cmd_name)
        names = self.list_commands(ctx)
        near = difflib.get_close_matches(cmd_name, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"commands: {', '.join(names)}"
        raise click.UsageError(f"unknown command {cmd_name!r}; {hint}", ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        for heading, names in HEADINGS.items():
            with formatter.section(heading):
                formatter.write_dl([(name, COMMANDS[name]) for name in names])
        added = _added(commands())
        if added:
            with formatter.section("Commands of plugins"):
                formatter.write_dl(list(added.items()))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Offer the commands without importing them, then the options."""
        offered = [
            CompletionItem(name, help=text)
            for name, text in {**COMMANDS, **_added(commands())}.items()
            if name.startswith(incomplete)
        ]
        return offered + click.Command.shell_complete(self, ctx, incomplete)


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="drivetrain")
def group() -> None:
    """One loop, any parallelism: train PyTorch models on more than one device."""


@click.command(
    epilog="Add one line to your shell's start file:\n\n\b\n" + "\n".join(SHELLS.values()),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.argument("shell", type=click.Choice(list(SHELLS)))
def completion(shell: str) -> None:
    """Print the completion script of a shell."""
    shell_complete(group, {}, "drivetrain", "_DRIVETRAIN_COMPLETE", f"{shell}_source")


def run(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit code; docs/cli.md lists the codes."""
    try:
        code = group.main(list(arguments), prog_name="drivetrain", standalone_mode=False)
    except click.ClickException as error:
        text = error.format_message()
        if not text.startswith("Usage: "):  # of a group without a command: its help
            context = getattr(error, "ctx", None)
            where = f" (see '{context.command_path} --help')" if context is not None else ""
            text = f"error: {text[:1].lower()}{text[1:].rstrip('.')}{where}"
        click.echo(text, err=True)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return INTERRUPTED
    except DrivetrainError as error:
        click.echo(f"error: {error}", err=True)
        return error.exit_code
    except BrokenPipeError:
        # The reader of our output, such as head, has left.
        sys.stderr.close()
        return 1
    return code if isinstance(code, int) else 0


def main() -> None:
    """Entry point of the console script."""
    if not sys.platform.startswith(SYSTEM):
        sys.exit(
            f"error: expected Linux, which alone is supported, found {sys.platform}; "
            "take a Linux machine, a container or, on Windows, WSL 2"
        )
    sys.exit(run(sys.argv[1:]))


def _added(registry: Registry) -> dict[str, str]:
    """Return the commands of plugins with a line about each; none of them is imported."""
    return {name: registry.summary(name) for name in registry.names if name not in COMMANDS}


def _load(registry: Registry, name: str) -> click.Command:
    command = registry.load(name)
    if not isinstance(command, click.Command):
        raise ConfigError(
            f"the command {name!r} of {registry.origin(name)}: expected a click.Command, found "
            f"{type(command).__name__}; decorate it with @click.command()"
        )
    return command
