"""Output names: `-o FILE | DIR/ | TEMPLATE` and a request become the path of one MP4.

What the user typed stays as it is. What is filled in for a field is made safe for every file system
and shortened, free text first, so that a seed or a hash is never what gets cut.
"""

import difflib
import os
import re
import string
import unicodedata
from datetime import date
from pathlib import Path

from svgen.config import Request
from svgen.errors import UsageError

DEFAULT_NAME = "svgen-{seed}-{hash8}.mp4"
SUFFIX = ".mp4"
NAME_BYTES = 120  # of a name without its suffix: what filled-in text is shortened to
LITERAL_BYTES = 240  # what file systems take, with room for the suffix and a number
SLUG_BYTES = 60
FREE_TEXT = ("slug", "model", "preset")  # shortened in this order
UNSAFE = re.compile(r'[<>:"/\\|?*\s]+')
DEVICES = frozenset(
    ["CON", "PRN", "AUX", "NUL", "CONIN$", "CONOUT$"]
    + [f"{port}{digit}" for port in ("COM", "LPT") for digit in "0123456789¹²³"]
)  # names that Windows keeps for itself, with any suffix
NUMBER_FORMAT = re.compile(r"0?\d{1,2}d?")


def output_path(spec: str | None, request: Request, *, index: int = 0, today: date) -> Path:
    """Name the output of one request; `index` is its place in a batch.

    `spec` is a file, a folder (ends in a slash, or is there) or a template, whose fields may stand
    in folder names too. Raises UsageError E_OUTPUT_NAME.
    """
    fields = _fields(request, index, today)
    if spec is None:
        return Path(_filled(DEFAULT_NAME, fields))
    _check_spec(spec)
    if os.path.isdir(spec):
        return Path(spec, _filled(DEFAULT_NAME, fields))
    parts = Path(spec).parts
    if spec.endswith(_separators()):
        parts = (*parts, DEFAULT_NAME)
    anchor = Path(spec).anchor
    folders = [part if part == anchor else _filled(part, fields) for part in parts[:-1]]
    return Path(*folders, _filled(_with_suffix(parts[-1]), fields))


def _fields(request: Request, index: int, today: date) -> dict[str, str | int]:
    model = request.model.rstrip("/\\").replace("\\", "/").rpartition("/")[2]
    return {
        "model": _safe(model) or "model",
        "preset": _safe(request.preset or "") or "none",
        "res": f"{request.width_px}x{request.height_px}",
        "frames": request.frames,
        "seed": request.seed,
        "index": index,
        "hash8": request.fingerprint[:8],
        "date": today.isoformat(),
        "slug": _slug(request.prompt) or "video",
    }


def _safe(text: str) -> str:
    """Replace what some file system refuses; never a folder, a hidden name or an option."""
    text = UNSAFE.sub("-", unicodedata.normalize("NFC", text))
    return "".join(char for char in text if unicodedata.category(char)[0] != "C").strip(" .-")


def _slug(prompt: str) -> str:
    """The prompt's words in lower case, joined by hyphens: letters and digits of any script."""
    text = unicodedata.normalize("NFKC", prompt).lower()
    kept = (char if unicodedata.category(char)[0] in "LMN" else " " for char in text)
    return _cut("-".join("".join(kept).split()), SLUG_BYTES)


def _cut(text: str, limit: int) -> str:
    """The longest start of `text` within `limit` UTF-8 bytes that ends in no separator."""
    return text.encode()[:limit].decode(errors="ignore").rstrip(" .-")


def _size(name: str) -> int:
    return len(name.encode(errors="replace"))


def _separators() -> tuple[str, ...]:
    return tuple(mark for mark in (os.sep, os.altsep) if mark)


def _problem(message: str, *, why: str, hint: str) -> UsageError:
    return UsageError("E_OUTPUT_NAME", message, why=why, hint=hint)


def _check_spec(spec: str) -> None:
    if not spec.strip():
        raise _problem("-o is empty", why="the output needs a name", hint="-o video.mp4")
    if spec == "-":
        raise _problem(
            "-o - would write to the standard output",
            why="an MP4 that players can seek in needs a file",
            hint="-o video.mp4",
        )
    if any(unicodedata.category(char) == "Cc" for char in spec):
        raise _problem(
            f"-o {spec!r} has control characters",
            why="line ends, tabs and the like make no usable name",
            hint="-o video.mp4",
        )


def _with_suffix(name: str) -> str:
    """Add `.mp4` to a template without a suffix; refuse another suffix."""
    found = re.search(r"\.[A-Za-z][A-Za-z0-9]{0,4}$", name)  # `take1.5` has no suffix
    suffix = found[0] if found else ""
    stem = name.removesuffix(suffix)
    if suffix and suffix.lower() != SUFFIX:
        way_out = f"-o {stem or 'video'}{SUFFIX}"
        raise _problem(f"-o {name} ends in {suffix}", why="svgen writes .mp4 files", hint=way_out)
    if name in (".", "..") or not stem:
        raise _problem(
            f"-o {name} has no file name", why="the output is a file", hint="-o video.mp4"
        )
    return name if suffix else name + SUFFIX


def _filled(template: str, fields: dict[str, str | int]) -> str:
    """Fill one part of a path, shortening free text until the name fits."""
    pieces = _pieces(template, fields)
    used = {name for _, name, _ in pieces if name}
    if not used:
        name = "".join(text for text, _, _ in pieces)
    else:
        name = _joined(pieces, _shortened(pieces, fields, used))
        name = _not_a_device(name)
    if _size(name.removesuffix(SUFFIX)) > LITERAL_BYTES:
        raise _problem(
            f"the output name {name} takes {_size(name)} bytes",
            why=f"a name may take {LITERAL_BYTES} bytes, or fewer where the disk says so",
            hint="choose a shorter name with -o",
        )
    return name


def _pieces(template: str, fields: dict[str, str | int]) -> list[tuple[str, str, str]]:
    """Split into (text before, field or "", number format)."""
    try:
        parsed = list(string.Formatter().parse(template))
    except ValueError as error:
        raise _problem(
            f"-o {template}: {error}",
            why="braces enclose the name of a field",
            hint="write {{ and }} for braces that belong to the name",
        ) from error
    pieces = []
    for text, name, form, conversion in parsed:
        if name is not None:
            _check_field(template, name, fields)
            number = isinstance(fields[name], int)
            if conversion or (form and not (number and NUMBER_FORMAT.fullmatch(form))):
                raise _problem(
                    f"-o {template}: {{{name}}} cannot be formatted that way",
                    why="only numbers take a format, and only a width of up to 99 digits",
                    hint=f"{{{name}:03d}}" if number else f"{{{name}}}",
                )
        pieces.append((text, name or "", form or ""))
    return pieces


def _check_field(template: str, name: str, fields: dict[str, str | int]) -> None:
    if name in fields:
        return
    close = [field for field in fields if name.lower().startswith(field)]
    close += difflib.get_close_matches(name.lower(), fields, n=1, cutoff=0.5)
    known = " ".join(f"{{{field}}}" for field in fields)
    raise _problem(
        f"-o {template}: there is no field {{{name}}}",
        why=f"the fields are {known}",
        hint=f"did you mean {{{close[0]}}}?"
        if close
        else "double the braces to keep them as they are",
    )


def _shortened(
    pieces: list[tuple[str, str, str]], fields: dict[str, str | int], used: set[str]
) -> dict[str, str | int]:
    values = dict(fields)
    for name in FREE_TEXT:
        excess = _size(_joined(pieces, values).removesuffix(SUFFIX)) - NAME_BYTES
        if name in used and excess > 0:
            times = sum(field == name for _, field, _ in pieces)
            keep = _size(str(values[name])) - -(-excess // times)
            values[name] = _cut(str(values[name]), max(0, keep))
    return values


def _joined(pieces: list[tuple[str, str, str]], values: dict[str, str | int]) -> str:
    return "".join(
        text + (format(values[name], form) if name else "") for text, name, form in pieces
    )


def _not_a_device(name: str) -> str:
    """`CON`, `nul.mp4` and their like open a device on Windows: `CON_`, `nul_.mp4` do not."""
    base, dot, rest = name.partition(".")
    return f"{base}_{dot}{rest}" if base.rstrip().upper() in DEVICES else name
