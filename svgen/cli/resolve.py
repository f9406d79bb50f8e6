"""Flags, recipe, preset and model defaults -> one checked Request, with the origin of each of its
values.

A flag (or its environment variable or config file) wins over the recipe of `--from`, that over the
preset, and that over the model's defaults.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from svgen.catalog import Sampling, entry_of, sampling_of
from svgen.config import Preset, Request
from svgen.errors import FileError, SvgenError, UsageError
from svgen.grid import RESOLUTIONS, WAN21, Rules, frames_problem, size_problem

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
    try:
        if text == "-":
            data = stdin.buffer.read(MAX_PROMPT_BYTES + 1)
        else:
            with open(text[1:], "rb") as file:
                data = file.read(MAX_PROMPT_BYTES + 1)
    except OSError as error:
        raise FileError(
            "E_READ",
            f"the prompt file {text[1:] or '(no name)'} cannot be read",
            why=error.strerror or str(error),
            hint="a prompt that starts with @ names a file; put a space before it to mean text",
        ) from error
    if len(data) > MAX_PROMPT_BYTES:
        raise UsageError(
            "E_PROMPT_LONG",
            f"the prompt from {text} has more than {MAX_PROMPT_BYTES} bytes",
            why="the text encoder reads 512 tokens",
            hint="shorten it",
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            "E_USAGE",
            f"the prompt from {text} is not UTF-8",
            why=str(error),
            hint="save it as UTF-8",
        ) from error


def recipe_model(recipe: Mapping[str, Any]) -> str:
    """The model that a recipe names. A recipe is not trusted to name a folder: raises UsageError
    for one.
    """
    name = recipe.get("model")
    if isinstance(name, str):
        is_repository = name.count("/") == 1 and name[0] not in "./~"
        if entry_of(name) or is_repository:
            return name
    raise UsageError(
        "E_RECIPE",
        f"the recipe was made with the model {name!r}, which is a folder",
        why="a recipe is not allowed to name folders of this machine",
        hint="add --model and the folder",
    )


def _size(
    flags: Mapping[str, Any], recipe: Mapping[str, Any], preset: Preset | None, sampling: Sampling
) -> tuple[tuple[int, int], str]:
    if flags.get("res"):
        return flags["res"], "flag"
    if "width_px" in recipe and "height_px" in recipe:
        return (recipe["width_px"], recipe["height_px"]), "recipe"
    if preset:
        return (preset.width_px, preset.height_px), "preset"
    return RESOLUTIONS[sampling.resolution], "model"


def _frames_of(duration: float, fps: float) -> int:
    """The number of frames 4k+1 nearest to a duration."""
    return max(1, 1 + 4 * round((duration * fps - 1) / 4))


def _values(
    flags: Mapping[str, Any], recipe: Mapping[str, Any], preset: Preset | None, sampling: Sampling
) -> tuple[dict[str, Any], dict[str, str]]:
    """Pick every simple field from the first source that has it."""
    sources = (
        ("flag", flags),
        ("recipe", recipe),
        ("preset", {name: getattr(preset, name, None) for name in ("frames", "steps", "shift")}),
        ("model", {name: getattr(sampling, name, None) for name in FIELDS}),
    )
    values, origin = {}, {}
    for name in FIELDS:
        for label, source in sources:
            if source.get(name) is not None:
                values[name], origin[name] = source[name], label
                break
    return values, origin


def _range_problems(values: Mapping[str, Any]) -> list[SvgenError]:
    problems: list[SvgenError] = []
    for name, (least, most, meaning) in RANGES.items():
        value = values[name]
        if least <= value <= most:  # also false for NaN
            continue
        near = least if not value > most else most
        problems.append(
            UsageError(
                "E_VALUE",
                f"--{name} {value} is out of range",
                why=f"it must lie between {least} and {most} ({meaning})",
                hint=f"--{name} {near}",
            )
        )
    return problems


def _warnings(request: Request, sampling: Sampling) -> tuple[str, ...]:
    """What was asked for outside of what the model was trained on."""
    found = []
    if sampling.max_frames and request.frames > sampling.max_frames:
        found.append(
            f"{request.model} was trained on up to {sampling.max_frames} frames; "
            f"{request.frames} may repeat or burn out"
        )
    if sampling.resolutions:
        trained = [RESOLUTIONS[name] for name in sampling.resolutions]
        size = (request.width_px, request.height_px)
        if size not in trained and size[::-1] not in trained:
            names = " and ".join(sampling.resolutions)
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
) -> Resolved:
    """Build the request. `flags` holds what the user set (None or absent: not set), `recipe` a
    former request's fields.

    `rules` are those of the model; its own check (`Pipeline.check`) follows once its configs are at
    hand.
    """
    recipe = recipe or {}
    sampling = sampling_of(model)
    values, origin = _values(flags, recipe, preset, sampling)
    if "seed" not in values:
        values["seed"], origin["seed"] = secrets.randbelow(2**32), "drawn"
    (width, height), origin["size"] = _size(flags, recipe, preset, sampling)
    notes = []
    if flags.get("duration") and flags.get("frames") is None:
        values["frames"] = _frames_of(flags["duration"], values["fps"])
        origin["frames"] = "flag"
        seconds = values["frames"] / values["fps"]
        notes.append(
            f"--duration {flags['duration']:g}s is {values['frames']} frames "
            f"at {values['fps']:g} per second: {seconds:.2f} s"
        )
    problems = _range_problems(values)
    problems += [
        problem
        for problem in (
            size_problem(width, height, rules),
            frames_problem(values["frames"], rules),
            _no_prompt(values),
        )
        if problem
    ]
    request = Request(
        **{"prompt": "", "negative": "", **values, "fps": float(values["fps"])},
        model=model,
        revision=_revision(model),
        width_px=width,
        height_px=height,
        preset=preset.name if preset else None,
        schedule=preset.schedule if preset else "dense",
        dtype=dtype,
    )
    return Resolved(
        request=request,
        origin=origin,
        problems=tuple(problems),
        notes=tuple(notes),
        warnings=_warnings(request, sampling),
    )


def _no_prompt(values: Mapping[str, Any]) -> SvgenError | None:
    if str(values.get("prompt", "")).strip():
        return None
    return UsageError(
        "E_PROMPT_EMPTY",
        "the prompt is empty",
        why="a video is made of what the prompt says",
        hint='svgen generate "a cat surfing a wave at sunset"',
    )


def _revision(model: str) -> str | None:
    base, _, revision = model.partition("@")
    entry = entry_of(base)
    return revision or (entry.revision if entry else None)


def folder_rules(folder: Path | None) -> Rules:
    """The size rules of a checkpoint that is on disk; Wan 2.1's for one that is still to be
    fetched.
    """
    if folder is None:
        return WAN21
    from svgen.checkpoint import read_specs

    specs = read_specs(folder)
    return Rules.of(specs.transformer, specs.vae)
