"""Flags and value types that commands share; `with_console` makes a function the body of a command.

Every option can also be set by an environment variable: `--device` by SVGEN_DEVICE. A flag wins.
"""

import functools
import logging
import os
import re
import warnings
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from itertools import zip_longest
from typing import Any

import click

from svgen import __version__
from svgen.cli.output import DEBUG, Console, truthy
from svgen.cli.secrets import hide_in_log
from svgen.errors import UsageError
from svgen.grid import RESOLUTIONS

ENVIRONMENT_PREFIX = "SVGEN"
CONTEXT = {"help_option_names": ["-h", "--help"], "auto_envvar_prefix": ENVIRONMENT_PREFIX}
LONGEST_HELP = 400  # characters
LONGEST_S = 1e6  # of a duration
DEVICES = ("auto", "tpu", "cpu", "gpu")
JSON_FORMS = ("object", "events")
SHOW_ALL = "svgen.show_all"  # key in a context's meta
LIBRARIES = ("absl", "flax", "huggingface_hub", "jax", "jaxlib", "tokenizers", "urllib3")
QUIET_ENVIRONMENT = {  # read by native code and by huggingface_hub when they load
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "GLOG_minloglevel": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    "HF_HUB_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class Group(click.Group):
    """A group whose commands read SVGEN_* variables; it guesses what a mistyped command meant."""

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """Find a command and give it the shared settings."""
        command = super().get_command(context, name)
        if command is not None:
            for key, value in CONTEXT.items():
                command.context_settings.setdefault(key, value)
        return command

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands with their whole first sentence; click would cut it."""
        rows = []
        for name in self.list_commands(context):
            command = self.get_command(context, name)
            if command is not None and not command.hidden:
                rows.append((name, command.get_short_help_str(limit=LONGEST_HELP)))
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def resolve_command(self, context: click.Context, args: list[str]) -> Any:
        """Find the command that the first argument names; only whole names count."""
        known = self.list_commands(context)
        if args[0] not in known and not args[0].startswith("-") and not context.resilient_parsing:
            near = get_close_matches(args[0], known, n=2, cutoff=0.5)
            raise UsageError(
                "E_USAGE",
                f"{context.command_path} has no command {args[0]!r}",
                why=f"its commands are {', '.join(known)}",
                hint=" or ".join(f"{context.command_path} {name}" for name in near)
                or f"{context.command_path} --help",
            )
        return super().resolve_command(context, args)


class Rare(click.Option):
    """An option that only `--help-all` shows."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Its line in the help."""
        return super().get_help_record(ctx) if ctx.meta.get(SHOW_ALL) else None


def rare_option(*names: str, **settings: Any) -> Callable:
    """Like `click.option`, for a flag that few need."""
    return click.option(*names, cls=Rare, **settings)


def _print_all(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        context.meta[SHOW_ALL] = True
        click.echo(context.get_help())
        context.exit()


def help_all_option(body: Callable) -> Callable:
    """Add `--help-all`, which also shows the flags that few need."""
    return click.option(
        "--help-all",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        allow_from_autoenv=False,
        callback=_print_all,
        help="Show every flag.",
    )(body)


def spell_bare(args: Sequence[str]) -> list[str]:
    """Write `--json` as `--json=object`, so that it never takes the next argument for its value,
    and `--sweep` as `--sweep=auto` where a flag, a text of several words or nothing follows.
    """
    end = args.index("--") if "--" in args else len(args)
    spelled = []
    for arg, value in zip_longest(args[:end], args[1:end]):
        bare = value is None or value.startswith("-") or " " in value
        values = {"--json": "object", **({"--sweep": "auto"} if bare else {})}
        spelled.append(f"{arg}={values[arg]}" if arg in values else arg)
    return [*spelled, *args[end:]]


class JsonForm(click.ParamType):
    """What `--json` asks for: `object`, `events`, or nothing (empty)."""

    name = "form"

    def convert(self, value: Any, param: click.Parameter | None, ctx: Any) -> str:
        """Read a form; a variable of the environment may also be a plain switch."""
        if value in ("", *JSON_FORMS):
            return value
        if value.lower() in ("1", "true", "yes", "on"):
            return JSON_FORMS[0]
        if not truthy(value):
            return ""
        raise UsageError(
            "E_USAGE",
            f"--json={value} is not known",
            why="the result is one object, or a line for each event with the result as the last",
            hint="--json or --json=events",
        )


class Resolution(click.ParamType):
    """`480p`, `720p`, `1080p`, `1440p` or WxH, as (width, height) in pixels.

    Whether a model can make that size is not its business.
    """

    name = "resolution"

    def convert(self, value: Any, param: click.Parameter | None, ctx: Any) -> tuple[int, int]:
        """Read a size."""
        if isinstance(value, tuple):
            return value
        text = str(value).strip().lower()
        if text in RESOLUTIONS:
            return RESOLUTIONS[text]
        match = re.fullmatch(r"([0-9]{1,6})[x×]([0-9]{1,6})", text)
        if match and int(match[1]) and int(match[2]):
            return int(match[1]), int(match[2])
        near = get_close_matches(text, RESOLUTIONS, n=1, cutoff=0.5) or ["720p"]
        width, height = RESOLUTIONS[near[0]]
        raise UsageError(
            "E_SIZE",
            f"--res {value} is not a size",
            why=f"a size is one of {', '.join(RESOLUTIONS)}, or width x height in pixels",
            hint=f"--res {near[0]} or --res {width}x{height}",
        )

    def get_metavar(self, param: click.Parameter, ctx: Any = None) -> str:
        """What the help shows."""
        return f"{'|'.join(RESOLUTIONS)}|WxH"


class Duration(click.ParamType):
    """`5s`, `2.5s` or `5`, in seconds as a float."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: Any) -> float:
        """Read a time."""
        if isinstance(value, float) and 0 < value < LONGEST_S:
            return value
        match = re.fullmatch(
            r"([0-9]{1,6}(?:\.[0-9]{1,6})?|\.[0-9]{1,6}) ?s?", str(value).strip().lower()
        )
        if match and float(match[1]) > 0:
            return float(match[1])
        raise UsageError(
            "E_VALUE",
            f"--duration {value} is not a duration",
            why="a duration is a positive number of seconds",
            hint="--duration 5s or --duration 2.5s",
        )

    def get_metavar(self, param: click.Parameter, ctx: Any = None) -> str:
        """What the help shows."""
        return "SECONDS"


RESOLUTION, DURATION = Resolution(), Duration()


def device_option(body: Callable) -> Callable:
    """Add `--device`; the body gets `device`, for `prepare_jax`."""
    text = "Where to compute. auto: a TPU if there is one."
    return click.option("--device", type=click.Choice(DEVICES), default="auto", help=text)(body)


def output_options(body: Callable) -> Callable:
    """Add `-q`, `-v`, `--json` and `--no-color`."""
    for option in (
        rare_option("--no-color", is_flag=True, help="No colours, whatever the terminal."),
        click.option(
            "--json",
            type=JsonForm(),
            default="",
            metavar="[=events]",
            help="Print JSON: one object, or a line per event.",
        ),
        click.option("-v", "--verbose", count=True, help="Say more; -vv adds logs of JAX."),
        click.option("-q", "--quiet", count=True, help="Only errors; -qq not even those."),
    ):
        body = option(body)
    return body


def with_console(body: Callable[..., None]) -> Callable[..., None]:
    """Make a function `body(console, **arguments)` one run of a command, adding the output flags.

    Whatever it raises is reported in the documented shape and becomes the exit code.
    """

    @output_options
    @functools.wraps(body)
    def command(*, quiet: int, verbose: int, json: str, no_color: bool, **arguments: Any) -> None:
        console = Console(
            command_name(click.get_current_context()),
            verbosity=verbose - quiet,
            json=bool(json),
            events=json == "events",
            color=False if no_color else None,
        )
        hush_libraries(console.verbosity)
        console.event("start", command=console.command, version=__version__)
        run_reported(console, lambda: body(console, **arguments))
        raise click.exceptions.Exit(console.exit_code)

    return command


def run_reported(console: Console, body: Callable[[], None]) -> None:
    """Run something, report what it raises, and write the JSON object if one is due."""
    try:
        body()
    except click.exceptions.Exit:
        raise
    except (Exception, KeyboardInterrupt) as error:
        console.crash(error)
    try:
        console.finish()
    except Exception as error:
        console.crash(error)


def command_name(context: click.Context | None) -> str:
    """Name a command without the program: `models pull`."""
    names = []
    while context is not None and context.parent is not None:
        names.append(context.info_name or "")
        context = context.parent
    return " ".join(reversed(names))


def hush_libraries(verbosity: int) -> None:
    """Keep other libraries' logs and warnings off the terminal, up to -v.

    Call it before they are imported: most read their level then. What the user has set in the
    environment wins.
    """
    if verbosity >= DEBUG:
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
        for handler in logging.getLogger().handlers:
            handler.addFilter(hide_in_log)
        return
    for name, value in QUIET_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for name in LIBRARIES:
        logging.getLogger(name).setLevel(logging.CRITICAL)
        warnings.filterwarnings("ignore", module=rf"{name}(\.|$)")
