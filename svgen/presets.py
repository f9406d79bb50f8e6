"""Find, read and check presets: TOML files that name a size and how it is denoised.

schema = 1
extends = "720p-aggressive"   # a shipped preset; keys given here win
description = "Twice the steps"
resolution = "720p"           # or width and height
schedule = "mine"             # a name; "dense" means no [sparsity]
frames = 81                   # optional, as are steps and shift: the model's defaults stand
steps = 100

[sparsity]                    # fields of `config.SparsitySchedule`
band_share = 0.3              # of all pairs of tokens
dense_steps = 0.2             # the first ones: a share of the steps, or a whole number of them
dense_layers = 1

[sparsity.small]              # what differs for models below 5 billion parameters
band_share = 0.4
"""

import math
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from svgen.config import DENSE, SPARSITY_RANGES, Preset, SparsitySchedule
from svgen.errors import SvgenError, UsageError, raise_all, shown
from svgen.grid import RESOLUTIONS, WAN21, frames_problem, size_problem
from svgen.untrusted import read_start

SCHEMA = 1
SUFFIX = ".toml"
MAX_BYTES = 64 * 1024
MAX_DESCRIPTION = 200
SCHEDULES = (DENSE, "conservative", "aggressive")  # those shipped for every resolution
SCHEDULE_NAME = re.compile(r"[a-z][a-z0-9-]{0,31}")
RANGES: dict[str, tuple[float, float]] = {
    "steps": (1, 1000),
    "shift": (0.01, 100.0),
    **SPARSITY_RANGES,
}
Keys = Mapping[str, tuple[tuple[type, ...], str]]  # key -> types, and an example
KEYS: Keys = {
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
    "sparsity": ((dict,), "[sparsity]"),
}
SPARSITY_KEYS: Keys = {
    "band_share": ((float, int), "band_share = 0.3"),
    "dense_steps": ((float, int), "dense_steps = 0.2"),
    "dense_layers": ((int,), "dense_layers = 1"),
    "rows": ((int,), "rows = 64"),
    "budget": ((float, int), "budget = 0.3"),
    "small": ((dict,), "[sparsity.small]"),
}
SMALL_KEYS: Keys = {key: value for key, value in SPARSITY_KEYS.items() if key != "small"}
NESTED: dict[str, Keys] = {"sparsity": SPARSITY_KEYS, "small": SMALL_KEYS}
TYPE_NAMES = {int: "a whole number", str: "text", float: "a number", dict: "a table"}
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

    `720p-dense` is a name; `dense` is a schedule, needs `resolution`, and takes it: the preset made
    for the nearest size decides the rest. Whatever ends in .toml or holds a slash is a file. Raises
    UsageError (E_PRESET) with all that is wrong.
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
    good = _good(values, KEYS)
    merged = _inherit(good, path)
    problems = _schema_problems(values, source) + _table_problems(values, KEYS, source)
    problems += _value_problems(merged, source)
    if all(key in good for key in SIZE_KEYS if key in values):
        problems += _size_problems(merged, source)
    raise_all(problems)
    width, height = _size_of(merged)
    sparsity, small = _schedules(merged.get("sparsity"))
    return Preset(
        name=path.stem,
        width_px=width,
        height_px=height,
        schedule=merged.get("schedule", DENSE),
        sparsity=sparsity,
        small_sparsity=small,
        frames=merged.get("frames"),
        steps=merged.get("steps"),
        shift=float(merged["shift"]) if "shift" in merged else None,
        description=merged.get("description", ""),
        source=source,
    )


def _schedules(
    table: Mapping[str, Any] | None,
) -> tuple[SparsitySchedule | None, SparsitySchedule | None]:
    """The schedule of a checked [sparsity] table, and that for small models."""
    if table is None:
        return None, None
    own = {key: value for key, value in table.items() if key != "small"}
    return tuple(_schedule(values) for values in (own, {**own, **table.get("small", {})}))


def _schedule(values: Mapping[str, Any]) -> SparsitySchedule:
    shares = {key: float(values[key]) for key in ("band_share", "budget") if key in values}
    return SparsitySchedule(**{**values, **shares})


def _pair(schedule: str, presets: list[Preset], resolution: tuple[int, int] | None) -> Preset:
    """Choose the preset of a schedule whose size is nearest in pixels, and give it this size."""
    if resolution is None:
        hint = " or ".join(f"--preset {preset.name}" for preset in presets)
        why = "a schedule alone says no size"
        raise UsageError("E_PRESET", f"--preset {schedule} needs a size", why=why, hint=hint)
    width, height = resolution

    def distance(preset: Preset) -> float:
        return abs(math.log(preset.width_px * preset.height_px / (width * height)))

    nearest = min(presets, key=distance)
    made = (nearest.width_px, nearest.height_px)
    return replace(nearest, width_px=width, height_px=height, made_px=made)


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
    return shown(value, 60)


def _read_table(path: Path) -> dict[str, Any]:
    """Parse a file of bounded size."""
    source = str(path)
    try:
        if not path.exists() or path.is_dir():
            raise _problem(source, "there is no such preset file", "", "svgen presets list")
        data = read_start(path, MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        why = getattr(error, "strerror", None) or str(error)
        raise _problem(source, "cannot be read", why, "choose a file you can read") from error
    if len(data) > MAX_BYTES:
        raise _problem(
            source, "is too large", f"a preset has at most {MAX_BYTES} bytes", "shorten it"
        )
    try:
        return tomllib.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        hint = "compare with `svgen presets show 720p-dense`"
        raise _problem(source, "is not valid TOML", str(error), hint) from error


def _right_type(key: str, value: object, keys: Keys = KEYS) -> bool:
    return key in keys and isinstance(value, keys[key][0]) and not isinstance(value, bool)


def _good(values: Mapping[str, Any], keys: Keys) -> dict[str, Any]:
    """Keep what has a known key and the right type, in nested tables too."""
    found = {key: value for key, value in values.items() if _right_type(key, value, keys)}
    tables = {key: _good(found[key], NESTED[key]) for key in found if key in NESTED}
    return found | tables


def _schema_problems(values: Mapping[str, Any], source: str) -> list[SvgenError]:
    why, hint = f"this svgen reads schema {SCHEMA}", f"schema = {SCHEMA}"
    if "schema" not in values:
        return [_problem(source, "the key schema is missing", why, hint)]
    if isinstance(values["schema"], int) and values["schema"] != SCHEMA:
        return [_problem(source, f"schema = {_show(values['schema'])}", why, hint)]
    return []


def _table_problems(
    values: Mapping[str, Any], keys: Keys, source: str, prefix: str = ""
) -> list[SvgenError]:
    """Complain about keys that are unknown or of the wrong type, in nested tables too."""
    found: list[SvgenError] = []
    for key, value in values.items():
        if key not in keys:
            found.append(_key_problem(source, key, keys, prefix))
        elif not _right_type(key, value, keys):
            types, example = keys[key]
            why = f"{prefix}{key} must be {TYPE_NAMES[types[0]]}"
            found.append(_problem(source, f"{prefix}{key} = {_show(value)}", why, example))
        elif key in NESTED:
            found += _table_problems(value, NESTED[key], source, f"{prefix}{key}.")
    return found


def _key_problem(source: str, key: str, keys: Keys, prefix: str) -> UsageError:
    near = get_close_matches(key, keys, n=1)
    hint = f"write {near[0]}" if near else "remove it"
    what = f"unknown key {_show(prefix + key)}"
    return _problem(source, what, f"keys are {', '.join(keys)}", hint)


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
    if values.get("schedule") == DENSE and "sparsity" not in values:
        base.pop("sparsity", None)
    return _merge(base, values)


def _merge(base: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Lay tables over those of the same name, and everything else over what was there."""
    merged = {**base, **values}
    tables = [key for key in values if key in NESTED and key in base]
    return merged | {key: _merge(base[key], values[key]) for key in tables}


def _value_problems(values: Mapping[str, Any], source: str) -> list[SvgenError]:
    """Complain about values that no model can use."""
    checks: tuple[Callable[[Mapping[str, Any], str], list[SvgenError]], ...] = (
        _schedule_problems,
        _sparsity_problems,
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
    name = values.get("schedule", DENSE)
    what, found = f"schedule = {_show(name)}", []
    if not SCHEDULE_NAME.fullmatch(name):
        why = "a schedule has a name of small letters, digits and hyphens, at most 32"
        found.append(_problem(source, what, why, 'schedule = "mine"'))
    if name == DENSE and "sparsity" in values:
        why = "a dense schedule has no [sparsity]"
        found.append(_problem(source, what, why, 'schedule = "mine", or remove [sparsity]'))
    if name != DENSE and "sparsity" not in values:
        why = "every schedule but the dense one has a table [sparsity]"
        found.append(_problem(source, what, why, "[sparsity] with band_share = 0.3"))
    return found


def _sparsity_problems(values: Mapping[str, Any], source: str) -> list[SvgenError]:
    table = values.get("sparsity")
    if table is None:
        return []
    found = _range_problems(table, source, "sparsity.")
    found += _range_problems(table.get("small", {}), source, "sparsity.small.")
    if "band_share" not in table:
        why = "it decides how much each head sees"
        found.append(_problem(source, "sparsity.band_share is missing", why, "band_share = 0.3"))
    return found


def _range_problems(values: Mapping[str, Any], source: str, prefix: str = "") -> list[SvgenError]:
    found: list[SvgenError] = []
    for key, (least, most) in RANGES.items():
        value = values.get(key, least)
        if key == "dense_steps" and isinstance(value, float):
            most = 1.0  # a share
        if not least <= value <= most:  # true for NaN too
            why = f"{prefix}{key} must lie between {least} and {most}"
            near = most if value > most else least
            found.append(
                _problem(source, f"{prefix}{key} = {_show(value)}", why, f"{key} = {near}")
            )
    return found


def _number_problems(values: Mapping[str, Any], source: str) -> list[SvgenError]:
    found = _range_problems(values, source)
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
