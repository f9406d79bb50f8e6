"""Saved timings, and how new ones compare with them.

A file is what `svgen bench` printed: read with care, for it may come from anywhere. Two runs
compare only if they timed the same thing on the same kind of device.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from svgen.errors import SvgenError, UsageError, shown
from svgen.partial import write_whole
from svgen.untrusted import read_start

SCHEMA = "svgen.bench/1"
MAX_BYTES = 1 << 20
MAX_ROWS = 256
MAX_TEXT = 500
SHOWN_LETTERS = 60
MOST = 1e15
NAME = re.compile(r"[a-z0-9_.]{1,80}")
TEXTS = ("device", "chip", "mesh", "model", "weights", "dtype", "dense_kernel", "measured_at")
COUNTS = ("chips", "width_px", "height_px", "frames", "tokens", "steps", "branches")
TIMES = ("median_ms", "least_ms", "most_ms", "n")  # that every row has
SAME = ("device", "chip", "model", "weights", "width_px", "height_px", "frames", "branches")
ANNOUNCED = ("chips", "mesh", "dtype", "dense_kernel", "schedules", "versions")
Check = Callable[[str, Any], Any]  # (name, value) -> the value; raises ValueError


def save(path: Path, record: Mapping[str, Any], *, overwrite: bool) -> None:
    """Write a record; the file appears whole or not at all."""
    text = json.dumps(record, indent=1, allow_nan=False) + "\n"
    way = "choose another place with --save"
    write_whole(path, text.encode(), overwrite=overwrite, way=way)


def read(path: Path) -> dict[str, Any]:
    """Read a record, or the object of `--json` that holds one, and check what is used of it.

    Raises UsageError (E_BENCH) for anything else.
    """
    try:
        data = read_start(path, MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise _bad(path, getattr(error, "strerror", None) or str(error)) from error
    try:
        if len(data) > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES} bytes")
        body = json.loads(data.decode("utf-8"), parse_constant=_no_number)
        return _checked(body)
    except (ValueError, RecursionError) as error:
        raise _bad(path, str(error)[:MAX_TEXT] or type(error).__name__) from error


def _no_number(name: str) -> None:
    raise ValueError(f"it holds {name}")


def _bad(path: Path, why: str) -> SvgenError:
    return UsageError(
        "E_BENCH",
        f"{path} holds no timings of svgen bench",
        why=why,
        hint="svgen bench --save FILE writes such a file",
    )


def _checked(body: Any) -> dict[str, Any]:
    """What is known of an untrusted record, each value checked; raises ValueError."""
    if isinstance(body, dict) and isinstance(body.get("data"), dict):
        body = body["data"]
    if not isinstance(body, dict) or body.get("schema") != SCHEMA:
        raise ValueError(f"its schema is not {SCHEMA}")
    found: dict[str, Any] = {"schema": SCHEMA}
    found |= {name: _text(name, body.get(name)) for name in TEXTS}
    found |= {name: _count(name, body.get(name)) for name in COUNTS}
    found["versions"] = _table("versions", body.get("versions"), _text)
    found["schedules"] = _table("schedules", body.get("schedules"), _number)
    found["rows"] = _table("rows", body.get("rows"), _row)
    if not found["rows"]:
        raise ValueError("it has no rows")
    return found


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise ValueError(f"{name} = {shown(value, SHOWN_LETTERS)} is no short text")
    return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} = {shown(value, SHOWN_LETTERS)} is no number")
    if not 0 <= value < MOST:  # also true for NaN
        raise ValueError(f"{name} = {shown(value, SHOWN_LETTERS)} is out of range")
    return value


def _count(name: str, value: Any) -> int:
    if not isinstance(value, int) or _number(name, value) < 1:
        raise ValueError(f"{name} = {shown(value, SHOWN_LETTERS)} is no count")
    return value


def _table(name: str, values: Any, check: Check) -> dict[str, Any]:
    if not isinstance(values, dict) or len(values) > MAX_ROWS:
        raise ValueError(f"{name} is no table of at most {MAX_ROWS} entries")
    for key in values:
        if not NAME.fullmatch(key):
            raise ValueError(f"{name} has the key {key[:SHOWN_LETTERS]!r}")
    return {key: check(f"{name}.{key}", value) for key, value in values.items()}


def _row(name: str, values: Any) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise ValueError(f"{name} is no table")
    found = {key: _number(f"{name}.{key}", values.get(key)) for key in TIMES}
    found["n"] = _count(f"{name}.n", found["n"])
    if not found["least_ms"] <= found["median_ms"] <= found["most_ms"]:
        raise ValueError(f"{name} has a median outside of its spread")
    optional = ("compile_s", "utilisation")
    return found | {key: _number(f"{name}.{key}", values[key]) for key in optional if key in values}


def check_comparable(ours: Mapping[str, Any], theirs: Mapping[str, Any], path: Path) -> list[str]:
    """Raise UsageError (E_BENCH) if two records timed different things, naming each field; return
    what else differs, to be said aloud. A field that `ours` lacks is not known yet.
    """
    wrong = [name for name in SAME if name in ours and ours[name] != theirs[name]]
    if wrong:
        values = (f"{name} {theirs[name]}, here {ours[name]}" for name in wrong)
        raise UsageError(
            "E_BENCH",
            f"{path} cannot be compared with: {', '.join(wrong)} differ",
            why="; ".join(values),
            hint="give --model, --res, --frames and --device as there",
            details={"fields": wrong},
        )
    return [
        f"{name}: {_shown(theirs[name])} there, {_shown(ours[name])} here"
        for name in ANNOUNCED
        if name in ours and ours[name] != theirs[name]
    ]


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {one}" for name, one in value.items())
    return str(value)


def compare(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Ratios of the medians of rows that both have, and which lie outside of their spread."""
    return {
        name: {
            "ratio": row["median_ms"] / theirs["rows"][name]["median_ms"],
            "ours_ms": row["median_ms"],
            "theirs_ms": theirs["rows"][name]["median_ms"],
            "verdict": verdict(row, theirs["rows"][name]),
        }
        for name, row in ours["rows"].items()
        if name in theirs["rows"] and theirs["rows"][name]["median_ms"] > 0
    }


def verdict(ours: Mapping[str, float], theirs: Mapping[str, float]) -> str:
    """`slower` or `faster` if each median lies outside of the other's spread; else `same`."""
    if ours["median_ms"] > theirs["most_ms"] and theirs["median_ms"] < ours["least_ms"]:
        return "slower"
    if ours["median_ms"] < theirs["least_ms"] and theirs["median_ms"] > ours["most_ms"]:
        return "faster"
    return "same"
