"""The standard streams of a process in whatever state they come: closed, full, without a reader."""

import os
import sys
from contextlib import suppress
from typing import TextIO

from svgen.errors import FileError


def occupy_closed() -> None:
    """Open /dev/null in the place of each standard stream that was closed before the start.

    The next file opened would get its number: what a library prints would go into a video.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free: this one
            os.set_inheritable(number, True)


def abandon(stream: TextIO | None) -> None:
    """Send whatever is still written to a stream nowhere: its reader left, or its disk is full."""
    with suppress(AttributeError, OSError, ValueError):  # no real file, as in a test
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def give_up_stdout(error: OSError, saved: str = "") -> FileError:
    """Abandon stdout after a failure; returns the error to report. `saved` was written before."""
    abandon(sys.stdout)
    gone = isinstance(error, BrokenPipeError)
    hint = "" if gone else "free space on its disk, or send the output elsewhere"
    parts = (hint, f"it is whole: {saved}" if saved else "")
    return FileError(
        "E_WRITE",
        "the standard output cannot be written",
        why="its reader left before the end" if gone else str(error.strerror or error),
        hint="; ".join(part for part in parts if part),
        details={"saved": saved} if saved else None,
    )
