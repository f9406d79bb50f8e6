"""`svgen quality`: what sparse schedules cost, against dense attention from the same noise."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from svgen.cli.comparing import (
    FILES,
    VIDEO,
    Comparison,
    plan_comparison,
    prompt_problems,
    table,
    write_files,
)
from svgen.cli.options import (
    RESOLUTION,
    device_option,
    help_all_option,
    rare_option,
    with_console,
)
from svgen.cli.output import Console
from svgen.cli.planning import DTYPES
from svgen.cli.settings import origins_of
from svgen.config import SPARSITY_RANGES
from svgen.errors import UsageError, raise_all

if TYPE_CHECKING:
    import numpy as np

    from svgen.comparison import Score
    from svgen.pipeline import Pipeline

PRESETS = ("conservative", "aggressive")
SWEEP = tuple(tenth / 10 for tenth in range(1, 9))  # what `--sweep auto` means


class Shares(click.ParamType):
    """`auto`, or band shares as `0.1,0.25`; a tuple of them in ascending order."""

    name = "shares"

    def convert(self, value: Any, param: click.Parameter | None, ctx: Any) -> tuple[float, ...]:
        """Read shares."""
        if isinstance(value, tuple):
            return value
        if value.strip().lower() == "auto":
            return SWEEP
        least, most = SPARSITY_RANGES["band_share"]
        try:
            shares = {float(part) for part in value.split(",")}
            if not all(least <= share <= most for share in shares):
                raise ValueError
        except ValueError as error:
            raise UsageError(
                "E_VALUE",
                f"--sweep {value[:60]} is no list of band shares",
                why=f"each is a number from {least:g} to {most:g}, with commas between them",
                hint="--sweep 0.1,0.2,0.4 or --sweep auto",
            ) from error
        return tuple(sorted(shares))


def _open(console: Console, plan: Comparison, options: Mapping[str, Any]) -> "Pipeline":
    """The pipeline; prompts are checked with a model that had to be fetched."""
    from svgen.cli.execution import opened

    pipeline, request = opened(console, plan.run, options), plan.run.request
    raise_all(prompt_problems(pipeline, request, plan.prompts))
    return pipeline


def _execute(console: Console, plan: Comparison, options: Mapping[str, Any]) -> dict[str, Any]:
    """Render, decode and score what was planned, and write the video; returns the data of the
    result.
    """
    from svgen import comparison
    from svgen.cli.execution import say_run

    pipeline, request = _open(console, plan, options), plan.run.request
    schedules = comparison.schedules_of(plan.presets, options["sweep"] or ())
    tables = {one.name: comparison.tables_in(pipeline, request, one) for one in schedules}
    same = comparison.twins(schedules, tables)
    distinct = [one for one in schedules if one.name not in same]
    requests = comparison.requests_of(request, plan.prompts)
    say_run(console, plan.run, plan.notes)
    console.note(f"prompts: {len(plan.prompts)}, schedules: {len(distinct)}")
    plan.run.output.mkdir(exist_ok=True)
    steps = len(requests) * len(distinct) * request.steps
    with console.bar(steps, "denoise") as bar:

        def tick(name: str) -> None:
            bar.note(name)
            bar.update()

        renderings = comparison.render(pipeline, requests, distinct, tick)
    shown = [one.name for one in distinct if one.kind in (comparison.DENSE, comparison.PRESET)]
    with console.bar(len(requests) * len(distinct), "decode", "video") as bar:
        compared = comparison.decode(
            pipeline, requests, renderings, shown, lambda name: bar.update()
        )
        scores = _write_video(plan, compared, len(shown), options["overwrite"])
    rows = comparison.report(requests, schedules, tables, renderings, scores)
    return _data(plan, rows, shown)


def _write_video(
    plan: Comparison, compared: Iterator[Any], columns: int, overwrite: bool
) -> "list[Mapping[str, Score]]":
    """Write the videos side by side, prompt after prompt, as they are decoded; returns scores."""
    from svgen.comparison import width_of
    from svgen.video import write_video

    scores, request = [], plan.run.request

    def frames() -> "Iterator[np.ndarray]":
        for one in compared:
            scores.append(one.scores)
            yield one.frames

    write_video(
        frames(),
        plan.run.output / VIDEO,
        fps=request.fps,
        width_px=width_of(request.width_px, columns),
        height_px=request.height_px,
        frame_count=request.frames * len(plan.prompts),
        overwrite=overwrite,
    )
    return scores


def _data(plan: Comparison, rows: list[dict[str, Any]], shown: list[str]) -> dict[str, Any]:
    """The result as data, which the report holds too."""
    run, request = plan.run, plan.run.request
    sizes = ("width_px", "height_px", "frames", "steps", "guidance", "shift", "seed", "dtype")
    return {
        "output": str(run.output),
        "files": {name.partition(".")[0].replace("-", "_"): name for name in FILES},
        "model": run.model,
        "device": run.device.platform,
        **{name: getattr(request, name) for name in sizes},
        "prompts": list(plan.prompts),
        "side_by_side": shown,
        "schedules": rows,
    }


@click.command()
@click.argument("prompt", nargs=-1)
@click.option("--prompts", metavar="FILE", help='One a line; .jsonl: objects with "prompt".')
@click.option(
    "--model",
    default="auto",
    metavar="NAME|PATH|ORG/REPO",
    help="Default: Wan 2.1; without a TPU, demo.",
)
@click.option("--res", type=RESOLUTION, metavar="SIZE", help="480p, 720p, 1080p, 1440p or WxH.")
@click.option(
    "--preset",
    multiple=True,
    default=PRESETS,
    metavar="NAME|FILE",
    help=f"A schedule to compare, once for each. Default: {' and '.join(PRESETS)}.",
)
@click.option(
    "--sweep",
    type=Shares(),
    metavar="[auto|S,S,...]",
    help="Also the last preset with these band shares.",
)
@click.option("--frames", type=int, metavar="N", help="Number of frames, 4k+1.")
@click.option("--steps", type=int, metavar="N", help="Steps of the solver.")
@click.option("--guidance", type=float, metavar="G", help="Pull towards the prompt; 1 is none.")
@rare_option("--shift", type=float, metavar="S", help="Flow shift of the noise levels.")
@rare_option("--negative", metavar="TEXT", help="What the videos should not show.")
@click.option("--seed", type=int, metavar="N", help="Of the first prompt; the next has N+1.")
@click.option("-o", "--output", metavar="FOLDER", help="Default: svgen-quality-SEED.")
@click.option("--overwrite", is_flag=True, help="Replace a former report in the folder.")
@rare_option("--mesh", default="auto", metavar="CFGxSEQ", help="How chips share the run.")
@rare_option("--dtype", type=click.Choice(DTYPES), default="auto", help="Of weights and products.")
@rare_option("--offline", is_flag=True, help="Never use the network.")
@rare_option("-y", "--yes", is_flag=True, help="Download without asking.")
@device_option
@with_console
@help_all_option
def command(console: Console, **options: Any) -> None:
    """Compare sparse schedules with dense attention: PSNR, SSIM, seconds, kept pairs.

    Each PROMPT is rendered densely and by every schedule from the same noise. FOLDER gets
    report.json, side-by-side.mp4 and plot.png. The floor is dense attention summed in another
    order: nothing can come nearer. The first preset decides size, frames and steps that no flag
    gives.

    \b
    Examples:
      svgen quality "a cat surfing a wave at sunset"
      svgen quality --prompts prompts.txt --sweep auto -o tuning
      svgen quality "a cat" --preset mine.toml --preset aggressive --res 480p
    """
    from svgen.cli.execution import stages_of

    options["json"] = console.json
    origins = origins_of(click.get_current_context())
    plan = plan_comparison(options, origins, stages_of(console))
    data = _execute(console, plan, options)
    lines = [*table(data["schedules"]), "", f"side by side: {' | '.join(data['side_by_side'])}"]
    console.result(data, [*lines, data["output"]])
    # Last: a full disk costs the files, not what was found.
    write_files(console, plan.run.output, data, overwrite=options["overwrite"])
