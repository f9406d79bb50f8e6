"""One line of a file of prompts: an object whose keys are flags of `generate`.

The file may be anybody's: its lines name files in the folder of the run or below, and no others.
"""

import json
from functools import partial
from pathlib import PureWindowsPath
from typing import Any

import click

from svgen.cli.placing import STDOUT
from svgen.cli.planning import Collected
from svgen.cli.prompts import SHOWN_LETTERS
from svgen.cli.resolve import MAX_PROMPT_BYTES
from svgen.cli.settings import KINDS, kinds_of, options_of
from svgen.errors import UsageError, shown

COMMAND = "generate"
OF_THE_PROCESS = (  # said once, for all lines
    *("device", "mesh", "coordinator", "num-processes", "process-id", "offline"),
    *("quiet", "verbose", "no-color"),
)
PATHS = ("output", "model", "preset")  # options that may name a file


def read_line(text: str) -> dict[str, Any]:
    """The options of one line, by name; raises UsageError (E_PROMPTS) with all that is wrong."""
    cut = text if len(text) <= SHOWN_LETTERS else f"{text[:SHOWN_LETTERS]}..."
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _bad(f"is not JSON: {cut}", str(error), '{"prompt": "a cat"}') from error
    prompt = values.get("prompt") if isinstance(values, dict) else None
    if not isinstance(prompt, str) or not prompt.strip() or prompt == STDOUT:
        why = 'each line is an object whose "prompt" is text'
        raise _bad(f"has no prompt: {cut}", why, '{"prompt": "a cat"}')
    _check_prompt(prompt)
    known = {key: one for key, one in options_of(COMMAND).items() if key not in OF_THE_PROCESS}
    known["overwrite"] = next(one for one in _params() if one.name == "overwrite")
    problems, found = Collected(), {"prompt": prompt}
    for key, value in values.items():
        name = key.replace("_", "-")
        if name in known:
            found[known[name].name] = problems.get(partial(_cast, known[name], key, value))
            problems.get(partial(_check_inside, name, value))
        elif key != "prompt":
            why = f"what may stand there: prompt, {', '.join(known)}"
            problems.append(_bad(f"unknown key {key[:SHOWN_LETTERS]!r}", why, "remove it"))
    problems.raise_all()
    return found


def _check_prompt(prompt: str) -> None:
    """Raise for a prompt that would be looked up elsewhere, or takes long to look at."""
    if prompt.startswith("@"):
        why = "a line's prompt is its own text and names no file"
        hint = "put a space before the @ to mean text"
        raise _bad(f"the prompt {prompt[:SHOWN_LETTERS]!r} begins with @", why, hint)
    if len(prompt) > MAX_PROMPT_BYTES:
        why = "the text encoder reads 512 tokens"
        raise _bad(f"the prompt has {len(prompt)} characters", why, "shorten it")


def _check_inside(name: str, value: Any) -> None:
    """Raise for a path that leaves the folder of the run: a file of prompts may be anybody's."""
    if name not in PATHS or not isinstance(value, str):
        return
    path = PureWindowsPath(value)  # both kinds of slash, and drives
    if path.anchor or value.startswith("~") or ".." in path.parts or value == STDOUT:
        why = "a line names files in the folder that svgen runs in, or below"
        hint = f"--{name} on the command line, where any path is allowed"
        raise _bad(f"{name} = {value[:SHOWN_LETTERS]!r} leads elsewhere", why, hint)


def _params() -> list[click.Parameter]:
    from svgen.cli.generate import command

    return command.params


def _cast(option: click.Option, key: str, value: Any) -> Any:
    """The value of an option as its flag would be read; raises UsageError (E_PROMPTS)."""
    kinds, what = kinds_of(option), f"{key} = {shown(value, SHOWN_LETTERS)}"
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise _bad(what, f"it must be {KINDS[kinds[0]]}", f"see {option.opts[-1]}")
    try:
        return option.type_cast_value(click.Context(click.Command("svgen")), value)
    except UsageError as error:
        raise _bad(what, error.why, error.hint) from error
    except click.BadParameter as error:
        raise _bad(what, error.message, f"see {option.opts[-1]}") from error


def _bad(what: str, why: str, hint: str) -> UsageError:
    return UsageError("E_PROMPTS", what, why=why, hint=hint)
