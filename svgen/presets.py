"""Find, read and check presets: TOML files that name a size and how it is denoised.

schema = 1
extends = "720p-dense"        # a shipped preset; keys given here win
description = "Twice the steps"
resolution = "720p"           # or width and height
schedule = "dense"
frames = 81                   # optional, as are steps and shift: the model's defaults stand
steps = 100
"""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from svgen.config import Preset
from svgen.errors import SvgenError, UsageError, raise_all
from svgen.grid import RESOLUTIONS, WAN21, frames_problem, size_problem

SCHEMA = 1
SUFFIX = ".toml"
MAX_BYTES = 64 * 1024
MAX_DESCRIPTION = 200
SCHEDULES = ("dense",)
STEPS = (1, 1000)
SHIFT = (0.01, 100.0)
KEYS: dict[str, tuple[tuple[type, ...], str]] = {  # key -> types, and an example
    "schema": ((int,), "schema = 1"),
    "extends": ((str,), 'extends = "720p-dense"'),
    "description": ((str,), 'description = "what it is for"'),
    "resolution": ((str,), 'resolution = "720p"'),
    "width": ((int,), "width = 1280"),
    "height": ((int,), "height = 720"),
    "schedule": ((str,), 'schedule = "dense"'),
    "frames": ((int,), "frames = 81"),
    "steps": ((int,), "steps = 50"),
    "shift": ((float, int), "shift = 5.0"),
}
TYPE_NAMES = {int: "a whole number", str: "text", float: "a number"}
SIZE_KEYS = ("resolution", "width", "height")


def presets_folder() -> Path:
    """Where the shipped presets lie: inside an installed package, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "_presets"
    return installed if installed.is_dir() else package.parent / "presets"


def list_presets() -> list[Preset]:
    """Read all shipped presets, small sizes first; raises UsageError if one is not valid."""
    found = [read_preset(path) for path in presets_folder().glob(f"*{SUFFIX}")]
    return sorted(found, key=lambda preset: (preset.width_px * preset.height_px, preset.name))


def load_preset(name_or_path: str, resolution: tuple[int, int] | None = None) -> Preset:
    """Find a preset by its name, by its schedule (with the size it is wanted for), or as a file.

    `720p-dense` is a name; `dense` is a schedule and needs `resolution`, in either orientation;
    whatever ends in .toml or holds a slash is a file. Raises UsageError (E_PRESET) with all that is
    wrong.
    """
    if name_or_path.endswith(SUFFIX) or "/" in name_or_path or "\\" in name_or_path:
        return read_preset(Path(name_or_path))
    presets = {preset.name: preset for preset in list_presets()}
    if name_or_path in presets:
        return presets[name_or_path]
    paired = [preset for preset in presets.values() if preset.schedule == name_or_path]
    if paired:
        return _pair(name_or_path, paired, resolution)
    raise _unknown(name_or_path, list(presets))


def read_preset(path: Path) -> Preset:
    """Read and check one file; raises UsageError (E_PRESET) with every problem in it."""
    values, source = _read_table(path), str(path)
    good = {key: value for key, value in values.items() if _right_type(key, value)}
    merged = _inherit(good, path)
    problems = _table_problems(values, source) + _value_problems(merged, source)
    if all(key in good for key in SIZE_KEYS if key in values):
        problems += _size_problems(merged, source)
    raise_all(problems)
    width, height = _size_of(merged)
    return Preset(
        name=path.stem,
        width_px=width,
        height_px=height,
        schedule=merged.get("schedule", "dense"),
        frames=merged.get("frames"),
        steps=merged.get("steps"),
        shift=float(merged["shift"]) if "shift" in merged else None,
        description=merged.get("description", ""),
        source=source,
    )


def _pair(schedule: str, presets: list[Preset], resolution: tuple[int, int] | None) -> Preset:
    """Choose the preset of a schedule for a size, turned to portrait if that is what is wanted."""
    hint = " or ".join(f"--preset {preset.name}" for preset in presets)
    if resolution is None:
        why = "a schedule alone says no size"
        raise UsageError("E_PRESET", f"--preset {schedule} needs a size", why=why, hint=hint)
    for preset in presets:
        size = (preset.width_px, preset.height_px)
        if resolution in (size, size[::-1]):
            return replace(preset, width_px=resolution[0], height_px=resolution[1])
    width, height = resolution
    raise UsageError(
        "E_PRESET",
        f"there is no preset {schedule} for {width}x{height}",
        why="each preset is made for one size; another size takes a preset by its full name",
        hint=f"--res {width}x{height} with {hint}",
    )


def _unknown(name: str, known: list[str]) -> UsageError:
    near = get_close_matches(name, [*known, *SCHEDULES], n=2, cutoff=0.5)
    return UsageError(
        "E_PRESET",
        f"there is no preset {_show(name)}",
        why=f"presets are {', '.join(known)}, or a file that ends in {SUFFIX}",
        hint=" or ".join(f"--preset {one}" for one in near) or "svgen presets list",
    )


def _problem(source: str, what: str, why: str, hint: str) -> UsageError:
    return UsageError("E_PRESET", f"{source}: {what}", why=why, hint=hint)


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _read_table(path: Path) -> dict[str, Any]:
    """Parse a file of bounded size."""
    source = str(path)
    try:
        if not path.is_file():
            raise _problem(source, "there is no such preset file", "", "svgen presets list")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise _problem(
            source, "cannot be read", str(error), "choose a file you can read"
        ) from error
    if len(data) > MAX_BYTES:
        raise _problem(
            source, "is too large", f"a preset has at most {MAX_BYTES} bytes", "shorten it"
        )
    try:
        return tomllib.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        hint = "compare with `svgen presets show 720p-dense`"
        raise _problem(source, "is not valid TOML", str(error), hint) from error


def _right_type(key: str, value: object) -> bool:
    return key in KEYS and isinstance(value, KEYS[key][0]) and not isinstance(value, bool)


def _table_problems(values: Mapping[str, Any], source: str) -> list[SvgenError]:
    """Complain about keys that are unknown, of the wrong type, or missing."""
    found: list[SvgenError] = [_key_problem(source, key) for key in values if key not in KEYS]
    for key, value in values.items():
        if key in KEYS and not _right_type(key, value):
            types, example = KEYS[key]
            why = f"{key} must be {TYPE_NAMES[types[0]]}"
            found.append(_problem(source, f"{key} = {_show(value)}", why, example))
    why, hint = f"this svgen reads schema {SCHEMA}", f"schema = {SCHEMA}"
    if "schema" not in values:
        found.append(_problem(source, "the key schema is missing", why, hint))
    elif isinstance(values["schema"], int) and values["schema"] != SCHEMA:
        found.append(_problem(source, f"schema = {_show(values['schema'])}", why, hint))
    return found


def _key_problem(source: str, key: str) -> UsageError:
    near = get_close_matches(key, KEYS, n=1)
    hint = f"write {near[0]}" if near else "remove it"
    return _problem(source, f"unknown key {_show(key)}", f"keys are {', '.join(KEYS)}", hint)


def _inherit(values: dict[str, Any], path: Path, seen: tuple[str, ...] = ()) -> dict[str, Any]:
    """Lay a preset's keys over those of the shipped preset that it extends."""
    parent = values.get("extends")
    if parent is None:
        return values
    shipped = {file.stem: file for file in presets_folder().glob(f"*{SUFFIX}")}
    if parent not in shipped or parent in (*seen, path.stem if path in shipped.values() else ""):
        what, names = f"extends = {_show(parent)}", sorted(shipped)
        near = get_close_matches(parent, names, n=1)
        why = f"it must name another shipped preset: {', '.join(names)}"
        raise _problem(str(path), what, why, f'extends = "{near[0]}"' if near else "remove it")
    base = _read_table(shipped[parent])
    base = _inherit(base, shipped[parent], (*seen, parent))
    if any(key in values for key in SIZE_KEYS):
        base = {key: value for key, value in base.items() if key not in SIZE_KEYS}
    return {**base, **values}


def _value_problems(values: Mapping[str, Any], source: str) -> list[SvgenError]:
    """Complain about values that no model can use."""
    checks: tuple[Callable[[Mapping[str, Any], str], list[SvgenError]], ...] = (
        _schedule_problems,
        _number_problems,
        _description_problems,
    )
    return [problem for check in checks for problem in check(values, source)]


def _size_of(values: Mapping[str, Any]) -> tuple[int, int]:
    if "resolution" in values:
        return RESOLUTIONS[values["resolution"]]
    return values["width"], values["height"]


def _size_problems(values: Mapping[str, Any], source: str) -> list[SvgenError]:
    given = [key for key in SIZE_KEYS if key in values]
    if given not in (["resolution"], ["width", "height"]):
        what = f"the size is given by {' and '.join(given) or 'nothing'}"
        why = "a size is either resolution, or width and height"
        return [_problem(source, what, why, 'resolution = "720p"')]
    name = values.get("resolution")
    if name is not None and name not in RESOLUTIONS:
        near = get_close_matches(name, RESOLUTIONS, n=1, cutoff=0.5) or ["720p"]
        why = f"resolution is one of {', '.join(RESOLUTIONS)}"
        return [_problem(source, f"resolution = {_show(name)}", why, f'resolution = "{near[0]}"')]
    width, height = _size_of(values)
    wrong = size_problem(width, height, WAN21)
    if wrong is None:
        return []
    hint = " or ".join(f"width = {w}, height = {h}" for w, h in wrong.details["nearest"])
    return [_problem(source, f"width = {_show(width)}, height = {_show(height)}", wrong.why, hint)]


def _schedule_problems(values: Mapping[str, Any], source: str) -> list[SvgenError]:
    name = values.get("schedule", "dense")
    if name in SCHEDULES:
        return []
    why = f"schedule is one of {', '.join(SCHEDULES)}"
    return [_problem(source, f"schedule = {_show(name)}", why, f'schedule = "{SCHEDULES[0]}"')]


def _number_problems(values: Mapping[str, Any], source: str) -> list[SvgenError]:
    found: list[SvgenError] = []
    for key, (least, most) in {"steps": STEPS, "shift": SHIFT}.items():
        value = values.get(key, least)
        if not least <= value <= most:  # true for NaN too
            why = f"{key} must lie between {least} and {most}"
            near = most if value > most else least
            found.append(_problem(source, f"{key} = {_show(value)}", why, f"{key} = {near}"))
    wrong = frames_problem(values["frames"], WAN21) if "frames" in values else None
    if wrong is not None:
        hint = " or ".join(f"frames = {frames}" for frames in wrong.details["nearest"])
        found.append(_problem(source, f"frames = {_show(values['frames'])}", wrong.why, hint))
    return found


def _description_problems(values: Mapping[str, Any], source: str) -> list[SvgenError]:
    text = values.get("description", "")
    if len(text) <= MAX_DESCRIPTION and (text.isprintable() or not text):
        return []
    why = f"a description is one line of at most {MAX_DESCRIPTION} characters"
    return [_problem(source, f"description = {_show(text)}", why, "shorten it to one line")]
