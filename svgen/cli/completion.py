"""`svgen completion`: a script that makes a shell complete svgen's commands and flags."""

import click
from click.shell_completion import ShellComplete, get_completion_class

from svgen.cli.options import with_console
from svgen.cli.output import Console

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_SVGEN_COMPLETE"  # set by the script when it asks for completions


def script_of(shell: str) -> str:
    """The script for one shell. Nothing is started to make it."""
    from svgen.cli import cli

    kind = get_completion_class(shell)
    return ShellComplete.source(kind(cli, {}, "svgen", VARIABLE)).strip()


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@with_console
def command(console: Console, shell: str) -> None:
    """Print a script that completes commands and flags in a shell.

    \b
    Examples:
      svgen completion bash > ~/.local/share/bash-completion/completions/svgen
      svgen completion zsh > ~/.zfunc/_svgen
      svgen completion fish > ~/.config/fish/completions/svgen.fish
    """
    script = script_of(shell)
    console.result({"shell": shell, "script": script}, script.splitlines())
