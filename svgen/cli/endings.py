"""How a run ends when it does not end well: any exception becomes an SvgenError with an exit code.

An exception that nobody expected is a defect: its traceback goes to a file, and the user sees
three lines.
"""

import os
import shlex
import sys
import time
import traceback
from pathlib import Path

import click

from svgen import __version__
from svgen.cli.secrets import hide
from svgen.errors import (
    FULL_DISK,
    FileError,
    InternalError,
    Interrupted,
    OutOfMemory,
    SvgenError,
    UsageError,
)

LOGS_KEPT = 20


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived: what Ctrl-C cleans up is cleaned up the same way."""


def explain(error: BaseException) -> SvgenError:
    """Turn whatever ended a command into the error that the user reads."""
    if isinstance(error, SvgenError):
        return error
    if isinstance(error, click.ClickException):
        return _usage_error(error)
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        return _interrupted(error)
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
        hint = "make a smaller or shorter video, or close other programs"
        return OutOfMemory("E_MEMORY", "memory ran out", why=_first_line(error), hint=hint)
    if isinstance(error, OSError) and error.errno in FULL_DISK:
        where = f" while writing {error.filename}" if error.filename else ""
        hint = "free some space, or choose another folder"
        return FileError(
            "E_DISK_FULL", f"the disk is full{where}", why=str(error.strerror), hint=hint
        )
    return _defect(error)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def _usage_error(error: click.ClickException) -> SvgenError:
    """Take click's complaint apart: its message, the usage line, and where the help is."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "svgen"
    near = getattr(error, "possibilities", None)
    why = " ".join(context.get_usage().split()) if context else ""
    message = error.message if near is not None else error.format_message()
    hint = " or ".join(near) if near else f"{path} --help"
    return UsageError("E_USAGE", message.rstrip("."), why=why, hint=hint)


def _interrupted(error: BaseException) -> SvgenError:
    terminated = isinstance(error, Terminated)
    problem = Interrupted(
        "E_INTERRUPTED", "stopped by SIGTERM" if terminated else "stopped by Ctrl-C"
    )
    problem.exit_code = 143 if terminated else 130
    return problem


def _defect(error: BaseException) -> SvgenError:
    name, log = type(error).__name__, _write_log(error)
    return InternalError(
        "E_INTERNAL",
        f"{name}: {_first_line(error)}" if str(error).strip() else name,
        why="svgen did not expect this; it is a defect" + (f", described in {log}" if log else ""),
        hint="report it with that file" if log else "run again with -vv, and report what it prints",
        details={"type": name, "log": str(log) if log else None},
    )


def state_folder() -> Path:
    """Where logs go: `$XDG_STATE_HOME/svgen`."""
    home = os.environ.get("XDG_STATE_HOME", "")
    base = Path(home) if os.path.isabs(home) else Path("~/.local/state").expanduser()
    return base / "svgen"


def _write_private(path: Path, text: str) -> None:
    """Write a file that only the user reads; none is left of one that does not fit on the disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError:
        path.unlink()
        raise


def _write_log(error: BaseException) -> Path | None:
    """Write the traceback where only the user reads it (the command line may hold a prompt)."""
    try:
        folder = state_folder()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        log = folder / f"error-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
        text = f"svgen {__version__}, Python {sys.version}\n{shlex.join(sys.argv)}\n\n"
        text += "".join(traceback.format_exception(error))
        _write_private(log, hide(text))
        for old in sorted(folder.glob("error-*.log"))[:-LOGS_KEPT]:
            old.unlink(missing_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: no home folder
        return None
    return log
