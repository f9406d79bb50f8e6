"""Files of prompts: one a line, or, where the name ends in .jsonl, an object a line."""

import json
from pathlib import Path

from svgen.errors import FileError, SvgenError, UsageError, raise_all
from svgen.untrusted import read_start

SUFFIX = ".jsonl"
MAX_BYTES = 1 << 24
SHOWN_LETTERS = 40  # of a line in a message


def read_prompts(path: Path) -> list[str]:
    """Read the prompts of a file; empty lines are passed by. Of an object, "prompt" is used alone.

    Raises UsageError (E_PROMPTS) with every line that cannot be used.
    """
    lines = [(number, line.strip()) for number, line in enumerate(read_text(path).split("\n"), 1)]
    lines = [(number, line) for number, line in lines if line]
    problems: list[SvgenError] = []
    prompts = []
    for number, line in lines:
        try:
            prompts.append(_prompt(line, f"{path} line {number}") if _is_jsonl(path) else line)
        except UsageError as error:
            problems.append(error)
    if not lines:
        why, hint = "no line of it has text", "write one prompt a line"
        problems.append(UsageError("E_PROMPTS", f"{path} holds no prompt", why=why, hint=hint))
    raise_all(problems)
    return prompts


def _is_jsonl(path: Path) -> bool:
    return path.suffix.lower() == SUFFIX


def _prompt(line: str, where: str) -> str:
    """The prompt of one line of JSON."""
    shown = line if len(line) <= SHOWN_LETTERS else f"{line[:SHOWN_LETTERS]}..."
    example = '{"prompt": "a cat surfing a wave"}'
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            "E_PROMPTS", f"{where} is not JSON: {shown}", why=str(error), hint=example
        ) from error
    prompt = found.get("prompt") if isinstance(found, dict) else None
    if not isinstance(prompt, str) or not prompt.strip():
        why = 'each line is an object whose "prompt" is text'
        raise UsageError("E_PROMPTS", f"{where} has no prompt: {shown}", why=why, hint=example)
    return prompt


def read_text(path: Path) -> str:
    """Read a file of prompts; raises UsageError (E_PROMPTS) unless it is UTF-8 of bounded size."""
    try:
        data = read_start(path, MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        why = getattr(error, "strerror", None) or str(error)
        hint = "--prompts with a file of one prompt a line"
        raise FileError(
            "E_READ", f"the file of prompts {path} cannot be read", why=why, hint=hint
        ) from error
    if len(data) > MAX_BYTES:
        why, hint = f"at most {MAX_BYTES} bytes are read", "split it"
        raise UsageError("E_PROMPTS", f"{path} is too large", why=why, hint=hint)
    try:
        return data.decode("utf-8-sig")  # some editors begin a file with a byte order mark
    except UnicodeDecodeError as error:
        hint = "save it as UTF-8"
        raise UsageError("E_PROMPTS", f"{path} is not UTF-8", why=str(error), hint=hint) from error
