"""The recipe of a video: what was asked for, as JSON in the `comment` tag of its MP4.

Reading needs no ffmpeg: a few atoms are walked, each checked against the one around it.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from svgen.errors import FileError, UsageError
from svgen.untrusted import open_plain

RECIPE_BYTES_MAX = 16 << 20
ATOMS_MAX = 1 << 16  # at one level of an MP4; a fragmented one of an hour has a few thousand


def read_recipe(path: Path) -> dict[str, Any]:
    """Read the recipe of a video that svgen wrote; raise UsageError E_RECIPE if it has none."""
    try:
        with open_plain(path) as file:
            text = _read_comment(file)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        why = getattr(error, "strerror", None) or str(error)
        hint = "--from with a video that svgen wrote"
        raise FileError("E_READ", f"{path} cannot be read", why=why, hint=hint) from error
    try:
        recipe = json.loads(text)
    except (ValueError, RecursionError):  # ValueError: neither UTF-8 nor JSON
        recipe = None
    if not _is_recipe(recipe):
        raise UsageError(
            "E_RECIPE",
            f"{path} holds no recipe of svgen",
            why="it lies in the `comment` tag of an MP4, which other programs may drop",
            hint="give a video written by svgen without --no-metadata, or the flags themselves",
        )
    return recipe


def _is_recipe(value: object) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("svgen"), str)
        and isinstance(value.get("request"), dict)
    )


def comment_of(recipe: Mapping[str, Any]) -> str:
    """Spell the recipe in plain ASCII: no line ends, nothing that a code page could change."""
    if not _is_recipe(dict(recipe)):
        raise ValueError('a recipe holds "svgen" (a version) and "request" (an object)')
    text = json.dumps(dict(recipe), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    if len(text) > RECIPE_BYTES_MAX:
        raise ValueError(f"the recipe takes {len(text)} bytes, more than {RECIPE_BYTES_MAX}")
    return text


# Reading: moov / udta / meta / ilst / ©cmt / data. Each atom is a size, a name and a body.


def _atoms(file: BinaryIO, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield (name, start and end of the body); stop at one that does not fit into its parent."""
    for _ in range(ATOMS_MAX):
        file.seek(start)
        header = file.read(16)[: end - start]
        if len(header) < 8:
            return
        size, body = int.from_bytes(header[:4]), start + 8
        if size == 1:
            size, body = int.from_bytes(header[8:16]), start + 16
        stop = end if size == 0 else start + size
        if not body <= stop <= end:
            return
        yield header[4:8], body, stop
        start = stop


def _read_comment(file: BinaryIO) -> bytes:
    start, end = 0, file.seek(0, os.SEEK_END)
    path = ((b"moov", 0), (b"udta", 0), (b"meta", 4), (b"ilst", 0), (b"\xa9cmt", 0), (b"data", 8))
    for wanted, skip in path:
        spans = (span for name, *span in _atoms(file, start, end) if name == wanted)
        start, end = next(spans, (0, 0))
        start += skip
    if not 0 < end - start <= RECIPE_BYTES_MAX:
        return b""
    file.seek(start)
    return file.read(end - start)
