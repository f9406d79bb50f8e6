"""Where a video goes: checked, with its name settled, before weights are loaded."""

import os
import sys
import tempfile
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

from svgen.cli.naming import output_path
from svgen.config import Request
from svgen.errors import UsageError

STDOUT = "-"


def plan_output(
    options: Mapping[str, Any], request: Request, *, sized: bool = True, index: int = 0
) -> Path:
    """Where the video goes; raises if it cannot go there. Unless the size is `sized` (valid), the
    space is not asked for. `index` is its place in a batch.
    """
    from svgen.partial import check_output
    from svgen.preview import check_preview
    from svgen.video import needed_bytes

    to_stdout = options["output"] == STDOUT
    spec = None if to_stdout else options["output"]
    path = output_path(spec, request, index=index, today=date.today())
    if to_stdout:
        _check_stdout(options)
        path = Path(tempfile.gettempdir(), path)
    elif options.get("skip_existing") and path.exists():
        return path
    elif options.get("auto_number"):
        path = _free_name(path)
    size = {name: getattr(request, name) for name in ("frames", "width_px", "height_px")}
    needed = needed_bytes(**size) if sized else 0
    check_output(path, overwrite=options["overwrite"] or to_stdout, needed=needed)
    if options.get("preview_every") and not to_stdout:
        check_preview(path, overwrite=options["overwrite"])
    return path


def _check_stdout(options: Mapping[str, Any]) -> None:
    if sys.stdout is None:
        message, hint = "-o - needs a standard output, and it is closed", "-o video.mp4"
        raise UsageError("E_OUTPUT_NAME", message, why="the MP4 goes there", hint=hint)
    terminal = sys.stdout.isatty()
    if not terminal and not options.get("json"):
        return
    raise UsageError(
        "E_OUTPUT_NAME",
        "-o - would write the MP4 to the terminal"
        if terminal
        else "-o - and --json exclude each other",
        why="the standard output carries one thing, and an MP4 is not text",
        hint="-o - > video.mp4, or -o video.mp4",
    )


def _free_name(path: Path) -> Path:
    """The first of NAME.mp4, NAME-1.mp4, NAME-2.mp4 ... that is not there."""
    number, found = 0, path
    while os.path.lexists(found):
        number += 1
        found = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return found
