"""`svgen generate`: a prompt becomes an MP4."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import click

from svgen.cli.device import Device, prepare_jax
from svgen.cli.naming import output_path
from svgen.cli.options import DURATION, RESOLUTION, device_option, with_console
from svgen.cli.output import Console
from svgen.cli.resolve import Resolved, folder_rules, read_prompt, recipe_model, resolve
from svgen.config import Request
from svgen.errors import FileError, SvgenError, UsageError, raise_all

DTYPES = ("auto", "bfloat16", "float32")
EXAMPLES = """\b
Examples:
  svgen generate "a cat surfing a wave at sunset"
  svgen generate "a cat" --res 720p --duration 5s --seed 7 -o cat.mp4
  svgen generate --from cat.mp4 --seed 8
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run that has passed every check and has loaded nothing."""

    resolved: Resolved
    model: str
    folder: Path | None  # None: still to be fetched
    output: Path
    device: Device

    @property
    def request(self) -> Request:
        """What is asked for."""
        return self.resolved.request


def _recipe(source: str | None) -> dict[str, Any]:
    """The request inside a former video, or nothing."""
    if source is None:
        return {}
    from svgen.recipe import read_recipe
    from svgen.resume import request_from_json

    values = read_recipe(Path(source))["request"]
    try:
        kept = {**values, "prompt": values.get("prompt", "")}
        request_from_json(kept)
    except ValueError as error:
        raise UsageError(
            "E_RECIPE",
            f"the recipe in {source} cannot be used: {error}",
            why="it was written by another version of svgen, or changed",
            hint="give the flags themselves",
        ) from error
    return values


def _dtype(asked: str, platform: str) -> str:
    """The type of weights and products: bfloat16 where the hardware is made for it."""
    if asked != "auto":
        return asked
    return "float32" if platform == "cpu" else "bfloat16"


def _model(flags: Mapping[str, Any], recipe: Mapping[str, Any], platform: str) -> str:
    from svgen.hub import resolve_auto

    if flags["model"] != "auto":
        return flags["model"]
    return recipe_model(recipe) if recipe else resolve_auto(platform)


def _free_name(path: Path) -> Path:
    """The first of NAME.mp4, NAME-1.mp4, NAME-2.mp4 ... that is not there."""
    number, found = 0, path
    while found.exists():
        number += 1
        found = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return found


def plan_output(options: Mapping[str, Any], request: Request) -> Path:
    """Where the video goes; raises if it cannot go there."""
    from svgen.partial import check_output
    from svgen.video import needed_bytes

    path = output_path(options["output"], request, today=date.today())
    if options.get("skip_existing") and path.exists():
        return path
    if options.get("auto_number"):
        path = _free_name(path)
    needed = needed_bytes(
        frames=request.frames, width_px=request.width_px, height_px=request.height_px
    )
    check_output(path, overwrite=options["overwrite"], needed=needed)
    return path


class Collected(list[SvgenError]):
    """Problems found so far. `with collected:` adds what is raised inside, and goes on."""

    def __enter__(self) -> "Collected":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, (UsageError, FileError)):
            return False
        self.extend(error.problems)
        return True


def _check_on_disk(folder: Path, resolved: Resolved) -> None:
    """Count the prompt's tokens with the model's own tokenizer."""
    from svgen.pipeline import Pipeline

    if not resolved.problems:
        Pipeline(folder).tokens(resolved.request)


def plan_run(options: Mapping[str, Any]) -> Run:
    """Resolve and check everything that can be known before weights are loaded, and raise all
    problems at once.
    """
    from svgen.hub import find
    from svgen.presets import load_preset

    device = prepare_jax(options["device"])
    recipe = _recipe(options["source"])
    model = _model(options, recipe, device.platform)
    folder = find(model)
    problems, preset = Collected(), None
    with problems:
        if options["preset"]:
            preset = load_preset(options["preset"], options["res"])
    resolved = resolve(
        {**options, "prompt": read_prompt(options["prompt"], sys.stdin)},
        model=model,
        dtype=_dtype(options["dtype"], device.platform),
        preset=preset,
        recipe=recipe,
        rules=folder_rules(folder),
    )
    problems.extend(resolved.problems)
    output = Path()
    with problems:
        output = plan_output(options, resolved.request)
    with problems:
        if folder:
            _check_on_disk(folder, resolved)
    raise_all(problems)
    return Run(resolved=resolved, model=model, folder=folder, output=output, device=device)


def _describe(run: Run) -> dict[str, Any]:
    """What a run would do: `--dry-run`, and the notes of a real one."""
    from svgen.grid import grid_of

    request = run.request
    grid = grid_of(request.width_px, request.height_px, request.frames, folder_rules(run.folder))
    return {
        "output": str(run.output),
        "model": run.model,
        "on_disk": run.folder is not None,
        "device": run.device.platform,
        "seed": request.seed,
        "width_px": request.width_px,
        "height_px": request.height_px,
        "frames": request.frames,
        "fps": request.fps,
        "tokens": grid.tokens,
        "request": request.as_json(),
        "origin": dict(run.resolved.origin),
    }


def _dry_lines(data: Mapping[str, Any]) -> list[str]:
    """The effective values, and where each came from."""
    lines = [f"{name:<10} {data[name]}" for name in ("model", "device", "output", "tokens")]
    lines.append(f"{'size':<10} {data['width_px']}x{data['height_px']}  ({data['origin']['size']})")
    for name in ("frames", "fps", "steps", "guidance", "shift", "seed"):
        lines.append(f"{name:<10} {data['request'][name]:g}  ({data['origin'][name]})")
    return lines


def _fetch(console: Console, model: str, *, offline: bool, yes: bool) -> Path:
    from svgen.cli.models import fetch

    return fetch(console, model, offline=offline, yes=yes)


def _execute(console: Console, run: Run, options: Mapping[str, Any]) -> dict[str, Any]:
    """Run what was planned; returns the data of the result."""
    from svgen.cli.run import make_video, recipe_of
    from svgen.pipeline import Pipeline

    request = run.request
    folder = run.folder or _fetch(
        console, run.model, offline=options["offline"], yes=options["yes"]
    )
    pipeline = Pipeline(folder, dtype=request.dtype, stage=console.stage)
    pipeline.check(request)
    recipe = None
    if not options["no_metadata"]:
        recipe = recipe_of(request, with_prompt=not options["no_prompt_metadata"])
    written, latents = make_video(
        console,
        pipeline,
        request,
        run.output,
        keep_latents=options["keep_latents"],
        recipe=recipe,
        overwrite=options["overwrite"],
    )
    data = {**_describe(run), "bytes": written.size_bytes, "timings": dict(console.timings)}
    return data | ({"latents": str(latents)} if options["keep_latents"] else {})


def _say_plan(console: Console, run: Run) -> None:
    request = run.request
    for warning in run.resolved.warnings:
        console.warn(warning)
    for note in run.resolved.notes:
        console.note(note)
    console.note(
        f"{run.model} on {run.device.platform}: {request.width_px}x{request.height_px}, "
        f"{request.frames} frames, {request.steps} steps, seed {request.seed}"
    )


@click.command(epilog=EXAMPLES)
@click.argument("prompt", required=False)
@click.option("--model", default="auto", show_default=True, metavar="NAME|PATH|ORG/REPO[@REV]")
@click.option("--res", type=RESOLUTION, help="Size of the video.")
@click.option("--preset", metavar="NAME|FILE", help="Resolution and schedule; see `svgen presets`.")
@click.option("--frames", type=int, metavar="N", help="Number of frames, 4k+1.")
@click.option("--duration", type=DURATION, help="Instead of --frames: length in seconds.")
@click.option("--fps", type=float, metavar="N", help="Frames per second of the MP4.")
@click.option("--steps", type=int, metavar="N", help="Steps of the solver.")
@click.option("--guidance", type=float, metavar="G", help="Pull towards the prompt; 1 is none.")
@click.option("--shift", type=float, metavar="S", help="Flow shift of the noise levels.")
@click.option("--negative", metavar="TEXT", help="What the video should not show.")
@click.option("--seed", type=int, metavar="N", help="Drawn, printed and stored if not given.")
@click.option("-o", "--output", metavar="FILE|DIR/|TEMPLATE", help="Where the MP4 goes.")
@click.option("--overwrite", is_flag=True, help="Replace an existing output.")
@click.option("--skip-existing", is_flag=True, help="Do nothing if the output is there.")
@click.option("--auto-number", is_flag=True, help="Choose NAME-1.mp4 and so on if it is there.")
@click.option("--from", "source", metavar="MP4", help="Repeat the recipe in a video; flags win.")
@click.option("--truncate", is_flag=True, default=None, help="Cut prompts over 512 tokens.")
@click.option("--dtype", type=click.Choice(DTYPES), default="auto", show_default=True)
@click.option("--keep-latents", is_flag=True, help="Keep the latents beside the MP4.")
@click.option("--no-metadata", is_flag=True, help="Store no recipe in the MP4.")
@click.option("--no-prompt-metadata", is_flag=True, help="Store the recipe without the prompts.")
@click.option("--offline", is_flag=True, help="Never use the network.")
@click.option("-y", "--yes", is_flag=True, help="Download without asking.")
@click.option("--dry-run", is_flag=True, help="Check and show everything, load nothing.")
@device_option
@with_console
def command(console: Console, **options: Any) -> None:
    """Make a video from PROMPT (text, @FILE, or - for standard input)."""
    run = plan_run(options)
    if options["skip_existing"] and run.output.exists():
        console.note(f"{run.output} is there already: nothing to do")
        console.result({**_describe(run), "skipped": True}, [str(run.output)])
        return
    _say_plan(console, run)
    if options["dry_run"]:
        data = _describe(run)
        console.result({**data, "dry_run": True}, _dry_lines(data))
        return
    data = _execute(console, run, options)
    console.result(data, [data["output"]])
