"""Flags, preset, recipe and model defaults -> one checked Request, with the origin of each of its
values.

A flag (or its environment variable or config file) wins over the preset that it names, that over
the recipe of `--from`, and that over the model's defaults.
"""

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from svgen.catalog import Sampling, entry_of, sampling_of
from svgen.cli.settings import FLAG
from svgen.config import DENSE, SMALL_PARAMETERS, Preset, Request, SparsitySchedule
from svgen.errors import FileError, SvgenError, UsageError
from svgen.grid import MAX_SIDE_PX, WAN21, Rules, frames_problem, size_problem
from svgen.hub.source import is_bundled
from svgen.untrusted import read_start

MAX_PROMPT_BYTES = 1 << 20
RANGES: dict[str, tuple[float, float, str]] = {  # field -> least, most, and what the number means
    "steps": (1, 1000, "steps of the solver"),
    "guidance": (1, 100, "1 means no guidance"),
    "shift": (0.01, 100, "flow shift"),
    "fps": (1, 240, "frames per second"),
    "seed": (0, 2**63 - 1, "a seed"),
}
FIELDS = ("prompt", "negative", "frames", "fps", "steps", "guidance", "shift", "seed", "truncate")


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """A request, where each value came from, what keeps it from running, and what the user should
    know about it.
    """

    request: Request
    origin: Mapping[str, str]
    problems: tuple[SvgenError, ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def read_prompt(text: str | None, stdin: Any) -> str | None:
    """The prompt itself, or what `@FILE` or `-` (standard input) holds: UTF-8, at most 1 MiB."""
    if text is None or not (text == "-" or text.startswith("@")):
        return text
    data = _read_bytes(text, stdin)
    if len(data) > MAX_PROMPT_BYTES:
        raise UsageError(
            "E_PROMPT_LONG",
            f"the prompt from {text} has more than {MAX_PROMPT_BYTES} bytes",
            why="the text encoder reads 512 tokens",
            hint="shorten it",
        )
    try:
        return data.decode("utf-8-sig")  # some editors begin a file with a byte order mark
    except UnicodeDecodeError as error:
        raise UsageError(
            "E_USAGE",
            f"the prompt from {text} is not UTF-8",
            why=str(error),
            hint="save it as UTF-8",
        ) from error


def _read_bytes(text: str, stdin: Any) -> bytes:
    where = "the standard input" if text == "-" else f"the prompt file {text[1:] or '(no name)'}"
    try:
        if text != "-":
            return read_start(Path(text[1:]), MAX_PROMPT_BYTES + 1)
        if stdin is None:
            raise OSError(0, "it is closed")
        return stdin.buffer.read(MAX_PROMPT_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name, or stdin is closed
        raise FileError(
            "E_READ",
            f"{where} cannot be read",
            why=getattr(error, "strerror", None) or str(error),
            hint="a prompt that starts with @ names a file; put a space before it to mean text",
        ) from error


def is_repository(name: str) -> bool:
    """Whether a name is that of a repository on the Hub, of which no folder of this machine takes
    the place.
    """
    from svgen.hub import parse

    if name.count("/") != 1 or name[0] in "./~":
        return False
    try:
        return not parse(name).folder
    except UsageError:
        return False


def recipe_model(recipe: Mapping[str, Any]) -> str:
    """The model that a recipe names. A recipe is not trusted to name a folder: raises UsageError
    for one.
    """
    name = recipe.get("model")
    if isinstance(name, str):
        if is_bundled(name):
            return name
        base, _, revision = name.partition("@")
        entry = entry_of(base)
        if entry or is_repository(base):
            made_with = revision or recipe.get("revision")
            pinned = entry.revision if entry else None
            return base if made_with in (None, pinned) else f"{base}@{made_with}"
    raise UsageError(
        "E_RECIPE",
        f"the recipe was made with the model {str(name)[:200]!r}, which is a folder",
        why="a recipe is not allowed to name folders of this machine",
        hint="add --model and the folder",
    )


def _size(
    flags: Mapping[str, Any], recipe: Mapping[str, Any], preset: Preset | None, sampling: Sampling
) -> tuple[tuple[int, int], str]:
    if flags.get("res"):
        return flags["res"], FLAG
    if preset:
        return (preset.width_px, preset.height_px), "preset"
    if "width_px" in recipe and "height_px" in recipe:
        return (recipe["width_px"], recipe["height_px"]), "recipe"
    return sampling.size_px, "model"


def _frames_of(duration: float, fps: float, stride: int) -> int:
    """The number of frames that the VAE can make (4k+1) nearest to a duration."""
    return max(1, 1 + stride * round((duration * fps - 1) / stride))


def _apply_duration(
    values: dict[str, Any], origin: dict[str, str], duration: float | None, rules: Rules
) -> str:
    """Let `--duration` decide the number of frames; returns what to tell the user."""
    least, most, _ = RANGES["fps"]
    if duration is None or not least <= values["fps"] <= most:
        return ""
    frames = values["frames"] = _frames_of(duration, values["fps"], rules.frame_stride)
    origin["frames"] = FLAG
    seconds = frames / values["fps"]
    return (
        f"--duration {duration:g}s is {frames} frames at {values['fps']:g} per second: "
        f"{seconds:.2f} s"
    )


def even_problem(width_px: int, height_px: int, rules: Rules) -> SvgenError | None:
    """Say which sizes near an odd one can be stored; None for an even one."""
    if width_px % 2 == 0 and height_px % 2 == 0:
        return None
    steps = [math.lcm(2, rules.stride * patch) for patch in (rules.patch[2], rules.patch[1])]
    sides = list(zip((width_px, height_px), steps, strict=True))
    below = tuple(side // step * step for side, step in sides)
    above = tuple(-(-side // step) * step for side, step in sides)
    nearest = [size for size in (below, above) if size_problem(*size, rules) is None]
    return UsageError(
        "E_SIZE",
        f"--res {width_px}x{height_px} cannot be stored in an MP4",
        why=f"with 4:2:0 colours, width and height are even, at most {MAX_SIDE_PX}",
        hint=" or ".join(f"--res {width}x{height}" for width, height in nearest),
        details={"nearest": [list(size) for size in nearest]},
    )


def _values(
    flags: Mapping[str, Any], recipe: Mapping[str, Any], preset: Preset | None, sampling: Sampling
) -> tuple[dict[str, Any], dict[str, str]]:
    """Pick every simple field from the first source that has it."""
    sources = (
        (FLAG, flags),
        ("preset", {name: getattr(preset, name, None) for name in ("frames", "steps", "shift")}),
        ("recipe", recipe),
        ("model", {name: getattr(sampling, name, None) for name in FIELDS}),
    )
    values, origin = {}, {}
    for name in FIELDS:
        for label, source in sources:
            if source.get(name) is not None:
                values[name], origin[name] = source[name], label
                break
    return values, origin


def range_problems(
    values: Mapping[str, Any], origin: Mapping[str, str] | None = None
) -> list[SvgenError]:
    """Say which numbers of a request lie outside their ranges."""
    problems: list[SvgenError] = []
    for name, (least, most, meaning) in RANGES.items():
        value = values[name]
        if least <= value <= most:  # also false for NaN
            continue
        near = least if not value > most else most
        problem = UsageError(
            "E_VALUE",
            f"--{name} {value} is out of range",
            why=f"it must lie between {least} and {most} ({meaning})",
            hint=f"--{name} {near}",
        )
        problems.append(_located(problem, (origin or {}).get(name, FLAG)))
    return problems


def _located(problem: SvgenError, origin: str) -> SvgenError:
    """Say where a bad value came from, if it was not given as a flag."""
    if origin != FLAG:
        problem.message += f" ({'it is in the ' if origin == 'recipe' else 'from '}{origin})"
    return problem


def size_problems(
    width_px: int, height_px: int, frames: int, rules: Rules, origin: Mapping[str, str]
) -> list[SvgenError]:
    """Say what is wrong with the size and the number of frames."""
    size = size_problem(width_px, height_px, rules) or even_problem(width_px, height_px, rules)
    found = ((size, "size"), (frames_problem(frames, rules), "frames"))
    return [_located(problem, origin.get(name, FLAG)) for problem, name in found if problem]


def _warnings(request: Request, sampling: Sampling) -> tuple[str, ...]:
    """What was asked for outside of what the model was trained on."""
    found = []
    if sampling.max_frames and request.frames > sampling.max_frames:
        found.append(
            f"{request.model} was trained on up to {sampling.max_frames} frames; "
            f"{request.frames} may repeat or burn out"
        )
    if sampling.trained_px:
        trained = sampling.trained_px
        size = (request.width_px, request.height_px)
        if size not in trained and size[::-1] not in trained:
            names = " and ".join(f"{width}x{height}" for width, height in trained)
            found.append(
                f"{request.model} was trained at {names}; {size[0]}x{size[1]} may look worse"
            )
        if request.fps != sampling.fps:
            found.append(
                f"{request.model} makes {sampling.fps:g} frames per second; "
                f"at {request.fps:g} motion plays at another speed"
            )
    return tuple(found)


def resolve(
    flags: Mapping[str, Any],
    *,
    model: str,
    dtype: str,
    preset: Preset | None = None,
    recipe: Mapping[str, Any] | None = None,
    rules: Rules = WAN21,
    sampling: Sampling | None = None,
    origins: Mapping[str, str] | None = None,
    parameters: int | None = None,
) -> Resolved:
    """Build the request. `flags` holds what the user set (None or absent: not set), `origins` where
    (a flag, if it does not say), `recipe` a former request's fields.

    `rules`, `sampling` and `parameters` are those of the model (None: by its name); its own check
    (`Pipeline.check`) follows once its configs are at hand.
    """
    recipe, said = recipe or {}, origins or {}
    sampling = sampling or sampling_of(model)
    values, origin = _values(flags, recipe, preset, sampling)
    if "seed" not in values:
        values["seed"], origin["seed"] = secrets.randbelow(2**32), "drawn"
    (width, height), origin["size"] = _size(flags, recipe, preset, sampling)
    duration = flags.get("duration") if flags.get("frames") is None else None
    note = _apply_duration(values, origin, duration, rules)
    options = {"size": "res"} | ({"frames": "duration"} if note else {})
    origin = {
        name: said.get(options.get(name, name), FLAG) if one == FLAG else one
        for name, one in origin.items()
    }
    problems = range_problems(values, origin)
    problems += size_problems(width, height, values["frames"], rules, origin)
    problems += _no_prompt(values)
    request = Request(
        **{"prompt": "", "negative": "", **values, "fps": float(values["fps"])},
        model=model,
        revision=_revision(model),
        width_px=width,
        height_px=height,
        preset=preset.name if preset else recipe.get("preset"),
        schedule=preset.schedule if preset else recipe.get("schedule", DENSE),
        sparsity=sparsity_of(preset, recipe, model, parameters, values["steps"]),
        item=recipe.get("item", 0),
        dtype=dtype,
    )
    return Resolved(
        request=request,
        origin=origin,
        problems=tuple(problems),
        notes=tuple(text for text in (note, unpaired(preset, request)) if text),
        warnings=_warnings(request, sampling),
    )


def sparsity_of(
    preset: Preset | None,
    recipe: Mapping[str, Any],
    model: str,
    parameters: int | None,
    steps: int,
) -> SparsitySchedule | None:
    """The schedule of the preset that suits the model's size, with its dense steps counted; else
    that of the recipe.
    """
    if preset is None:
        return recipe.get("sparsity")
    entry = entry_of(model.partition("@")[0])
    parameters = parameters or (entry.parameters if entry else None)
    is_small = parameters is not None and parameters < SMALL_PARAMETERS
    chosen = preset.small_sparsity if is_small else preset.sparsity
    return chosen.counted(steps) if chosen else None


def unpaired(preset: Preset | None, request: Request) -> str:
    """Tell that a schedule was measured at another size than this one."""
    if preset is None or preset.sparsity is None:
        return ""
    made = preset.made_px or (preset.width_px, preset.height_px)
    size = (request.width_px, request.height_px)
    if made in (size, size[::-1]):
        return ""
    return f"{preset.name} was made for {made[0]}x{made[1]}; this video has {size[0]}x{size[1]}"


def _no_prompt(values: Mapping[str, Any]) -> list[SvgenError]:
    if str(values.get("prompt", "")).strip():
        return []
    problem = UsageError(
        "E_PROMPT_EMPTY",
        "the prompt is empty",
        why="a video is made of what the prompt says",
        hint='svgen generate "a cat surfing a wave at sunset"',
    )
    return [problem]


def _revision(model: str) -> str | None:
    base, _, revision = model.partition("@")
    entry = entry_of(base)
    return revision or (entry.revision if entry else None)
