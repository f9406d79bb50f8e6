"""Config files: `./svgen.toml` and `$XDG_CONFIG_HOME/svgen/config.toml` set what flags leave open.

    [generate]                # a table for each command; keys are its flags
    model = "wan2.1-1.3b"
    steps = 30

Precedence: flag, SVGEN_* variable, the project's file, the user's, then recipe, preset and model.
"""

import importlib
import os
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from svgen.cli.options import DURATION
from svgen.errors import SvgenError, UsageError, raise_all, shown
from svgen.untrusted import read_start

PROJECT_FILE = "svgen.toml"
COMMANDS = ("generate", "decode")  # those that a file may set up
MAX_BYTES = 64 * 1024
FLAG = "flag"  # the origin of a value from the command line
# What replaces files, downloads much or names a source is said on the command line only.
SHOWN_LETTERS = 60  # of a name in a message
NEVER = ("from", "prompts", "json", "overwrite", "yes", "dry-run", "help", "help-all")
HELP = ("-h", "--help", "--help-all")
META = "svgen.settings"  # key in a context's meta: option -> file
KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


class Configured(click.Command):
    """A command whose options take their defaults from config files."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the files first, unless only help is wanted."""
        if not ctx.resilient_parsing and not set(HELP) & set(args):
            values, origins = read_settings(ctx.info_name or "")
            ctx.default_map, ctx.meta[META] = values, origins
        return super().parse_args(ctx, args)


def user_file() -> Path:
    """The user's config file."""
    home = os.environ.get("XDG_CONFIG_HOME", "")
    base = Path(home) if os.path.isabs(home) else Path("~/.config").expanduser()
    return base / "svgen" / "config.toml"


def read_settings(command: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The values that the config files hold for a command, and which file each came from.

    Raises UsageError (E_CONFIG) with all that is wrong in them.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    problems: list[SvgenError] = []
    for path in (user_file(), Path(PROJECT_FILE)):
        try:
            found = read_file(path).get(command, {})
        except UsageError as error:
            problems.append(error)
            continue
        values |= found
        origins |= dict.fromkeys(found, str(path))
    raise_all(problems)
    return values, origins


def read_file(path: Path) -> dict[str, dict[str, Any]]:
    """Read and check one file: command -> option -> value. A file that is not there is empty."""
    table = _table(path)
    problems, found = [], {}
    for name, section in table.items():
        if name not in COMMANDS:
            what = f"table [{name[:SHOWN_LETTERS]}]"
            problems.append(_unknown(path, what, name, COMMANDS, "[{}]"))
        elif not isinstance(section, dict):
            problems.append(_problem(path, f"{name} is no table", "", f"[{name}]"))
        else:
            found[name], wrong = _section(path, name, section)
            problems += wrong
    raise_all(problems)
    return found


def _table(path: Path) -> dict[str, Any]:
    try:
        data = read_start(path, MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise _problem(path, "cannot be read", error.strerror or "", "chmod u+r it") from error
    if len(data) > MAX_BYTES:
        raise _problem(path, "is too large", f"at most {MAX_BYTES} bytes are read", "shorten it")
    try:
        return tomllib.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise _problem(path, "is not valid TOML", str(error), "mend the line it names") from error


def _section(
    path: Path, command: str, section: Mapping[str, Any]
) -> tuple[dict[str, Any], list[SvgenError]]:
    """Check one table; returns its values by option, and its problems."""
    options = options_of(command)
    values: dict[str, Any] = {}
    problems: list[SvgenError] = []
    for key, value in section.items():
        if key not in options:
            problems.append(_unknown(path, f"{command}.{key}", key, tuple(options), "{}"))
            continue
        problem = _value_problem(path, f"{command}.{key}", options[key], value)
        if problem:
            problems.append(problem)
        else:
            values[options[key].name or ""] = value
    return values, problems


def options_of(command: str) -> dict[str, click.Option]:
    """Key -> option, for what a file may set of a command."""
    params = importlib.import_module(f"svgen.cli.{command}").command.params
    options = [one for one in params if isinstance(one, click.Option)]
    named = {max(one.opts, key=len).removeprefix("--"): one for one in options}
    return {key: one for key, one in named.items() if key not in NEVER}


def kinds_of(option: click.Option) -> tuple[type, ...]:
    if option.count:
        return (int,)
    if option.is_flag:
        return (bool,)
    if option.type is DURATION:
        return (str, float, int)
    name = option.type.name.removesuffix(" range")
    return {"integer": (int,), "float": (float, int)}.get(name, (str,))


def _value_problem(path: Path, key: str, option: click.Option, value: Any) -> SvgenError | None:
    """Say what is wrong with one value: its TOML type, or what the option itself says of it."""
    kinds = kinds_of(option)
    what = f"{key} = {shown(value, SHOWN_LETTERS)}"
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        return _problem(path, what, f"it must be {KINDS[kinds[0]]}", f"see {option.opts[-1]}")
    try:
        option.type_cast_value(click.Context(click.Command("svgen")), value)
    except UsageError as error:
        return _problem(path, what, error.why, error.hint)
    except click.BadParameter as error:
        return _problem(path, what, error.message, f"see {option.opts[-1]}")
    return None


def _problem(path: Path, what: str, why: str, hint: str) -> UsageError:
    return UsageError("E_CONFIG", f"{path}: {what}", why=why, hint=hint)


def _unknown(path: Path, what: str, name: str, known: tuple[str, ...], form: str) -> UsageError:
    if name in NEVER:
        why, hint = "it is said on the command line only", "remove it"
    else:
        near = get_close_matches(name.replace("_", "-"), known, n=1, cutoff=0.6)
        why = f"what may stand there: {', '.join(known)}"
        hint = f"did you mean {form.format(near[0])}?" if near else "remove it"
    return _problem(path, f"unknown {what}", why, hint)


def origins_of(context: click.Context) -> dict[str, str]:
    """Where each option that was set came from: `flag`, a variable's name, or a file."""
    found: dict[str, str] = {}
    for option in context.command.params:
        name = option.name or ""
        source = context.get_parameter_source(name)
        if source is ParameterSource.COMMANDLINE:
            found[name] = FLAG
        elif source is ParameterSource.ENVIRONMENT:
            automatic = f"{context.auto_envvar_prefix}_{name.upper()}"
            found[name] = option.envvar if isinstance(option.envvar, str) else automatic
        elif source is ParameterSource.DEFAULT_MAP:
            found[name] = context.meta[META][name]
    return found


def rank(origin: str) -> int:
    """How strongly a value holds: 0 for a flag, 1 for a variable, then the project's file, then the
    user's.
    """
    if origin == FLAG:
        return 0
    if origin.startswith("SVGEN_"):
        return 1
    return 2 if origin == PROJECT_FILE else 3
