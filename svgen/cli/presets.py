"""`svgen presets`: list, show and check presets."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from svgen.cli.options import Group, with_console
from svgen.cli.output import Console
from svgen.config import Preset, SparsitySchedule
from svgen.errors import UsageError, raise_all
from svgen.presets import SCHEMA, list_presets, load_preset, read_preset

MODEL_KEYS = ("frames", "steps", "shift")


def _as_json(preset: Preset) -> dict[str, Any]:
    return {
        "name": preset.name,
        "width": preset.width_px,
        "height": preset.height_px,
        "schedule": preset.schedule,
        "sparsity": _values(preset.sparsity),
        "small_sparsity": _values(preset.small_sparsity),
        "frames": preset.frames,
        "steps": preset.steps,
        "shift": preset.shift,
        "description": preset.description,
        "source": preset.source,
    }


def _as_toml(preset: Preset) -> list[str]:
    """Write a preset as a file that `check` accepts, with all that it inherits."""
    values: dict[str, Any] = {
        "schema": SCHEMA,
        "description": preset.description,
        "width": preset.width_px,
        "height": preset.height_px,
        "schedule": preset.schedule,
        **{key: getattr(preset, key) for key in MODEL_KEYS},
    }
    lines = [f"# {preset.name}, from {preset.source}"]
    for key, value in values.items():
        text = f"{key} = {json.dumps(value, ensure_ascii=False)}"
        lines.append(f"# {key}: the model's default" if value is None else text)
    for table, schedule in (
        ("sparsity", preset.sparsity),
        ("sparsity.small", preset.small_sparsity),
    ):
        given = {key: value for key, value in _values(schedule).items() if value is not None}
        if given:
            lines += ["", f"[{table}]", *(f"{key} = {value}" for key, value in given.items())]
    return lines


def _values(schedule: SparsitySchedule | None) -> dict[str, Any]:
    return asdict(schedule) if schedule else {}


@click.group(cls=Group)
def command() -> None:
    """List, show and check presets: a size, and how a video of that size is denoised.

    \b
    Examples:
      svgen presets list
      svgen presets show 720p-dense > mine.toml
      svgen presets check mine.toml
    """


@command.command("list")
@with_console
def list_command(console: Console) -> None:
    """List the presets that come with svgen."""
    presets = list_presets()
    names = ("name", "size", "band share", "dense steps", "dense layers")
    rows = [names, *(_row(preset) for preset in presets)]
    lines = [f"{a:<18}  {b:<9}  {c:>10}  {d:>11}  {e:>12}" for a, b, c, d, e in rows]
    console.result({"presets": [_as_json(preset) for preset in presets]}, lines)


def _row(preset: Preset) -> tuple[str, ...]:
    """What the list shows of a preset, for large models."""
    size, schedule = f"{preset.width_px}x{preset.height_px}", preset.sparsity
    if schedule is None:
        return preset.name, size, "", "all", "all"
    steps = schedule.dense_steps
    count = f"first {steps:.0%}" if isinstance(steps, float) else f"first {steps}"
    return preset.name, size, f"{schedule.band_share:.2f}", count, f"first {schedule.dense_layers}"


@command.command("show")
@click.argument("name", metavar="NAME|FILE")
@with_console
def show_command(console: Console, name: str) -> None:
    """Print a preset with all that it inherits, as a file to start from."""
    preset = load_preset(name)
    console.result(_as_json(preset), _as_toml(preset))


@command.command("check")
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@with_console
def check_command(console: Console, files: tuple[str, ...]) -> None:
    """Check preset files; every problem is reported."""
    rows: list[dict[str, Any]] = []
    found: list[UsageError] = []
    for file in files:
        try:
            preset = read_preset(Path(file))
            rows.append({"file": file, "ok": True, "preset": _as_json(preset), "problems": []})
        except UsageError as error:
            parts = ("message", "why", "hint")
            problems = [{part: getattr(one, part) for part in parts} for one in error.problems]
            rows.append({"file": file, "ok": False, "preset": None, "problems": problems})
            found.append(error)
    lines = [f"ok  {row['file']}" for row in rows if row["ok"]]
    console.result({"files": rows}, lines)
    raise_all(found)
