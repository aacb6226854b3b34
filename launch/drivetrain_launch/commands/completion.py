"""``drivetrain completion``: prints the script that completes the command in a shell."""

import click
from click.shell_completion import get_completion_class

from drivetrain.errors import ConfigError

HINTS = {
    "bash": 'eval "$(drivetrain completion bash)"       # in ~/.bashrc',
    "zsh": 'eval "$(drivetrain completion zsh)"        # in ~/.zshrc',
    "fish": "drivetrain completion fish | source          # in ~/.config/fish/config.fish",
}


@click.command(
    epilog="Add one line to your shell's start file:\n\n\b\n" + "\n".join(HINTS.values()),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.argument("shell", type=click.Choice(list(HINTS)))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print the completion script of a shell."""
    completion = get_completion_class(shell)
    if completion is None:
        raise ConfigError(f"the installed click cannot complete for {shell}; update click")
    root = ctx.find_root().command
    click.echo(completion(root, {}, "drivetrain", "_DRIVETRAIN_COMPLETE").source())
