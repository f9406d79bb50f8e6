"""The `svgen` command: a click group that loads a subcommand's file only when that subcommand runs.

A file `svgen/cli/NAME.py` holds one click command named `command`; a dash in its name is an
underscore in the file's. Nothing here imports jax.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

import click

from svgen import __version__
from svgen.cli.options import CONTEXT, Group, command_name, run_reported, spell_bare
from svgen.cli.output import Console, truthy
from svgen.cli.stopping import take_signals
from svgen.cli.streams import abandon, give_up_stdout, occupy_closed
from svgen.errors import FULL_DISK

COMMANDS = {  # name -> its line in the help
    "generate": "Make a video from a prompt.",
    "decode": "Make a video from latents that a run has saved.",
    "bench": "Time the programs of a run on this machine.",
    "plan": "Say what a run takes on TPUs that are not attached.",
    "quality": "Measure what sparse schedules cost, against dense attention.",
    "profile-heads": "Say which way each attention head runs, and draw it.",
    "models": "List, fetch, verify and remove models.",
    "cache": "Show and clear what svgen keeps on disk for later runs.",
    "presets": "List, show and check presets.",
    "doctor": "Check this machine: versions, TPU, memory, disk, network.",
    "completion": "Print a script that completes commands in a shell.",
}
EXAMPLES = """\b
Examples:
  svgen generate "a cat surfing a wave at sunset"
  svgen generate "a cat" --res 720p --duration 5s -o cat.mp4
"""
VERSIONED = ("jax", "libtpu")


class LazyGroup(Group):
    """The commands of the table above, each imported when it is first needed."""

    def list_commands(self, context: click.Context) -> list[str]:
        """Name the commands, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """Import a command's file."""
        if name in COMMANDS and name not in self.commands:
            module = importlib.import_module(f"svgen.cli.{name.replace('-', '_')}")
            self.add_command(module.command, name)
        return super().get_command(context, name)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def version_line() -> str:
    """Write the versions that decide what a run computes, read from package metadata."""
    from importlib.metadata import PackageNotFoundError, version

    found = []
    for name in VERSIONED:
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return f"svgen {__version__}" + (f" ({', '.join(found)})" if found else "")


def _print_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        click.echo(version_line())
        context.exit()


@click.group(cls=LazyGroup, context_settings=CONTEXT, epilog=EXAMPLES)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    allow_from_autoenv=False,
    callback=_print_version,
    help="Print the versions of svgen, jax and libtpu.",
)
def cli() -> None:
    """Turn prompts into videos with Wan's diffusion transformers in JAX, on TPUs."""


def _json_form(args: Sequence[str]) -> str:
    """Whether, and how, errors before a command has its console are JSON too."""
    flags = args[: args.index("--")] if "--" in args else args
    asked = [flag for flag in flags if flag.startswith("--json=")]
    form = asked[-1].partition("=")[2] if asked else os.environ.get("SVGEN_JSON", "")
    return form if truthy(form) else ""


def _named_command(args: Sequence[str], error: BaseException) -> str:
    context = getattr(error, "ctx", None)
    if context is not None:
        return command_name(context)
    return args[0] if args and args[0] in COMMANDS else ""


def _parse_and_run(args: list[str]) -> int:
    try:
        with cli.make_context("svgen", args) as context:
            cli.invoke(context)
    except click.exceptions.Exit as ending:
        return ending.exit_code
    return 0


def run(args: Sequence[str]) -> int:
    """Run one command line (without the program's name) and return its exit code."""
    args = spell_bare(args)
    try:
        return _parse_and_run(list(args))  # click empties the list
    except click.exceptions.NoArgsIsHelpError as error:
        if not _json_form(args):
            with suppress(OSError):
                click.echo(error.ctx.get_help(), err=True)
            return error.exit_code
        failure: BaseException = click.UsageError("a command is missing", ctx=error.ctx)
    except BrokenPipeError:  # help or versions, to a reader that left
        abandon(sys.stdout)
        return 0
    except OSError as error:
        to_stdout = error.errno in FULL_DISK and error.filename is None
        failure = give_up_stdout(error) if to_stdout else error
    except (Exception, KeyboardInterrupt) as error:
        failure = error
    form = _json_form(args)
    named = _named_command(args, failure)
    console = Console(named, json=bool(form), events=form == "events")
    run_reported(console, lambda: console.crash(failure))
    return console.exit_code


def main() -> NoReturn:
    """Be the `svgen` program."""
    occupy_closed()
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError):
            stream.reconfigure(
                errors="backslashreplace"
            )  # a path or prompt that the terminal cannot show
    take_signals()
    if os.environ.get("_SVGEN_COMPLETE"):  # a shell asks for completions
        cli.main(sys.argv[1:], prog_name="svgen")
    code = run(sys.argv[1:])
    _leave_team(code)
    sys.exit(code)


def _leave_team(code: int) -> None:
    """End a process that works for another one, which may be gone already: JAX would abort when it
    cannot say goodbye.
    """
    jax = sys.modules.get("jax")
    if jax is None or not jax.distributed.is_initialized() or jax.process_index() == 0:
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()
    os._exit(code)
