"""`svgen profile-heads`: which way each attention head runs, as data and as pictures."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from svgen.cli.options import (
    RESOLUTION,
    device_option,
    help_all_option,
    rare_option,
    with_console,
)
from svgen.cli.output import Console
from svgen.cli.planning import DTYPES, Collected, Run, describe, plan_run
from svgen.cli.profiling import PRESET, SUFFIXES, Heads, Targets, check_model, routed, targets_of
from svgen.cli.settings import origins_of
from svgen.config import Request
from svgen.errors import SvgenError

if TYPE_CHECKING:
    from svgen.profile_heads import Profile, Seen

PROMPT = "a red ball moving to the right"
MOMENT = "last step, the prompt's branch"  # that views show
NOT_SAID = (  # flags of `generate` that this command has not
    *("source", "fps", "shift", "duration", "negative", "truncate"),
    *("coordinator", "num_processes", "process_id"),
)


def _plan(console: Console, options: Mapping[str, Any]) -> tuple[Run, Request, Targets]:
    """Check everything that can be checked before weights are loaded."""
    from svgen.cli.execution import stages_of

    settled: list[Targets] = []

    def place(options: Mapping[str, Any], request: Request, *, sized: bool) -> Path | None:
        settled.append(targets_of(options))
        return settled[0].dump

    said = origins_of(click.get_current_context())
    run = plan_run(options, said, stages_of(console), console.leave, place=place)
    request, problems = run.request, Collected()
    request = problems.get(lambda: routed(request, options["route_all"]), request)
    if run.pipeline:
        problems.get(lambda: check_model(run.pipeline, request, options["heads"]))
    problems.raise_all()
    return run, request, settled[0]


def _write(
    console: Console,
    targets: Targets,
    parts: tuple["Profile", Sequence["Seen"], Request],
    overwrite: bool,
) -> None:
    """Write the dump and the pictures, each whole or not at all."""
    from svgen.partial import write_whole
    from svgen.profile_heads import as_json, as_npz

    found, seen, request = parts
    save = partial(write_whole, overwrite=overwrite)
    if targets.dump:
        is_json = targets.dump.suffix == SUFFIXES[0]
        text = json.dumps(as_json(found, request)).encode() if is_json else None
        save(targets.dump, text or as_npz(found, request))
    if targets.plot:
        from svgen.head_pictures import as_png, routes_picture, views_picture

        model = Path(request.model).name
        title = f"{model}, {request.width_px}x{request.height_px}, {request.frames} frames"
        save(targets.plot, as_png(routes_picture(found, title)))
        if targets.views:
            save(targets.views, as_png(views_picture(found, seen, f"{title}, {MOMENT}")))
    for path in targets.all:
        console.event("saved", kind="dump" if path == targets.dump else "picture", path=path)


def _table(rows: Sequence[Mapping[str, Any]], found: "Profile") -> list[str]:
    """The summary for a terminal, of at most 80 columns."""
    step, steps = int(found.routed_steps[-1]) + 1, len(found.routes)
    lines = [
        f"head calls of each layer in step {step} of {steps}, mean margin (0 to 1) there,",
        "and stability: share of its routed steps in which a head had its usual route",
        "",
        f"{'layer':>5}{'spatial':>10}{'temporal':>10}{'dense':>8}"
        f"{'margin':>9}{'stability':>12}{'routed steps':>15}",
    ]
    for row in rows:
        margin, stability = (
            "-" if row[name] is None else f"{row[name]:.2f}" for name in ("margin", "stability")
        )
        lines.append(
            f"{row['layer']:>5}{row['spatial']:>10}{row['temporal']:>10}{row['dense']:>8}"
            f"{margin:>9}{stability:>12}{row['routed_steps']:>15}"
        )
    return lines


def _profile(console: Console, run: Run, request: Request, options: Mapping[str, Any]) -> tuple:
    """Run the model and gather how its heads ran."""
    from svgen.cli.execution import opened
    from svgen.profile_heads import profile

    pipeline = opened(console, run, options)
    if run.pipeline is None:
        check_model(pipeline, request, options["heads"])
    with console.bar(request.steps, "denoise") as bar:
        return profile(pipeline, request, heads=options["heads"], on_step=bar.update)


@click.command()
@click.argument("prompt", default=PROMPT)
@click.option(
    "--model",
    default="auto",
    metavar="NAME|PATH|ORG/REPO",
    help="Default: Wan 2.1; without a TPU, demo.",
)
@click.option("--res", type=RESOLUTION, metavar="SIZE", help="480p, 720p, 1080p, 1440p or WxH.")
@click.option("--preset", default=PRESET, show_default=True, metavar="NAME|FILE")
@click.option("--frames", type=int, metavar="N", help="Number of frames, 4k+1.")
@click.option("--steps", type=int, metavar="N", help="Steps of the solver.")
@rare_option("--guidance", type=float, metavar="G", help="Pull towards the prompt; 1 is none.")
@click.option("--seed", type=int, metavar="N", help="Drawn, printed and stored if not given.")
@click.option("--route-all", is_flag=True, help="Also what the schedule leaves dense.")
@click.option("-o", "--output", metavar="FILE", help="The dump: NAME.json, or NAME.npz.")
@click.option("--plot", metavar="FILE.png", help="Draw routes and margins of all heads.")
@click.option(
    "--heads",
    type=Heads(),
    default=(),
    metavar="L:H,...",
    help="Draw where these heads look into FILE-heads.png, beside --plot.",
)
@click.option("--summary", is_flag=True, help="Print a row per layer (the default without files).")
@click.option("--overwrite", is_flag=True, help="Replace existing files.")
@rare_option("--mesh", default="auto", metavar="CFGxSEQ", help="How chips share the run.")
@rare_option("--dtype", type=click.Choice(DTYPES), default="auto", help="Of weights and products.")
@rare_option("--offline", is_flag=True, help="Never use the network.")
@rare_option("-y", "--yes", is_flag=True, help="Download without asking.")
@device_option
@with_console
@help_all_option
def command(console: Console, **options: Any) -> None:
    """Say which way each attention head runs: in near frames (spatial) or along time (temporal).

    A video of PROMPT is denoised and not decoded. The dump has, for each step, layer, branch of
    guidance and head, the route, both errors and the margin between them.

    \b
    Examples:
      svgen profile-heads --summary
      svgen profile-heads "a red ball" --plot heads.png --heads 1:0,4:2
      svgen profile-heads --model wan2.1-1.3b --res 480p -o heads.npz
    """
    from svgen.cli.execution import say_run

    options |= dict.fromkeys(NOT_SAID) | {"json": console.json, "dry_run": False}
    run, request, targets = _plan(console, options)
    if run.device.process > 0:  # another process speaks and writes
        console.mute()
    say_run(console, run)
    found, seen = _profile(console, run, request, options)
    problem = None
    if run.device.process == 0:
        try:
            _write(console, targets, (found, seen, request), options["overwrite"])
        except SvgenError as error:  # a full disk costs the files, not what was found
            problem = error
    _report(console, (run, request, targets), found, options["summary"], problem)


def _report(
    console: Console,
    planned: tuple[Run, Request, Targets],
    found: "Profile",
    wanted: bool,
    problem: SvgenError | None = None,
) -> None:
    """Give the result: the summary, and the dump itself if it is in no file."""
    from svgen.profile_heads import as_json, summary

    run, request, targets = planned
    rows = summary(found)
    paths = [] if problem else [str(path) for path in targets.all]
    data = {
        **describe(run),
        "request": request.as_json(),
        "output": targets.dump,
        "plots": [path for path in (targets.plot, targets.views) if path],
        "summary": rows,
        "dump": None if targets.dump and not problem else as_json(found, request),
        "timings": dict(console.timings),
    }
    table = _table(rows, found) if wanted or not paths else []
    console.result(data, [*table, *paths], error=problem)
