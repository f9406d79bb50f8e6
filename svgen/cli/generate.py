"""`svgen generate`: a prompt becomes an MP4."""

from contextlib import nullcontext
from typing import Any

import click

from svgen.cli.hosts import hosts_options
from svgen.cli.leftovers import adopt_seed, place, sweep
from svgen.cli.options import (
    DURATION,
    RESOLUTION,
    device_option,
    help_all_option,
    rare_option,
    with_console,
)
from svgen.cli.output import Console
from svgen.cli.planning import DTYPES, Run, describe, plan_lines, plan_run
from svgen.cli.settings import Configured, origins_of


def _execute(console: Console, run: Run, options: dict[str, Any]) -> dict[str, Any]:
    """Run what was planned; returns the data of the result."""
    from svgen.cli.execution import Team, make_video, opened, recipe_of, target_of
    from svgen.lock import sole_run

    request = run.request
    team = Team(console, run.device.processes, run.device.process)
    alone = sole_run(run.output) if team.writes and not run.to_stdout else nullcontext()
    recipe = None
    if not options["no_metadata"]:
        recipe = recipe_of(request, with_prompt=not options["no_prompt_metadata"])
    with alone, target_of(console, run.output, to_stdout=run.to_stdout) as target:
        pipeline = opened(console, run, options)
        written, latents, calls = make_video(
            console,
            pipeline,
            request,
            target,
            keep_latents=options["keep_latents"],
            preview_every=options["preview_every"],
            team=team,
            save_every=options["save_every"],
            resumable=not run.to_stdout,
            recipe=recipe,
            overwrite=options["overwrite"],
        )
    found = {
        "bytes": written.size_bytes if written else 0,
        "calls": calls,
        "timings": dict(console.timings),
    }
    data = {**describe(run), **found}
    return data | ({"latents": str(latents)} if options["keep_latents"] else {})


def _is_done(console: Console, run: Run, options: dict[str, Any]) -> bool:
    """Whether the video is there and stays; what a killed run has left beside it is swept up."""
    if run.to_stdout or options["overwrite"] or not run.output.exists():
        return False
    if options["skip_existing"]:
        console.note(f"{run.output} is there already: nothing to do")
    elif not options["dry_run"]:
        sweep(console, run.output, run.request, keep_latents=options["keep_latents"])
    return True


@click.command(cls=Configured)
@click.argument("prompt", required=False)
@click.option("--prompts", metavar="FILE.jsonl", help="A batch: a request a line, flags as keys.")
@click.option(
    "--model",
    default="auto",
    metavar="NAME|PATH|ORG/REPO",
    help="Default: Wan 2.1; without a TPU, demo.",
)
@click.option("--res", type=RESOLUTION, metavar="SIZE", help="480p, 720p, 1080p, 1440p or WxH.")
@click.option("--preset", metavar="NAME|FILE", help="Size and schedule: `svgen presets`.")
@click.option("--frames", type=int, metavar="N", help="Number of frames, 4k+1.")
@click.option("--duration", type=DURATION, help="Instead of --frames: a length like 5s.")
@rare_option("--fps", type=float, metavar="N", help="Frames per second of the MP4.")
@click.option("--steps", type=int, metavar="N", help="Steps of the solver.")
@rare_option("--guidance", type=float, metavar="G", help="Pull towards the prompt; 1 is none.")
@rare_option("--shift", type=float, metavar="S", help="Flow shift of the noise levels.")
@click.option("--negative", metavar="TEXT", help="What the video should not show.")
@click.option("--seed", type=int, metavar="N", help="Drawn, printed and stored if not given.")
@click.option("-o", "--output", metavar="OUT", help="FILE, DIR/, TEMPLATE, or - for stdout.")
@click.option("--overwrite", is_flag=True, help="Replace an existing output.")
@rare_option("--skip-existing", is_flag=True, help="Do nothing if the output is there.")
@rare_option("--auto-number", is_flag=True, help="Choose NAME-1.mp4 and so on if it is there.")
@click.option(
    "--from", "source", envvar="SVGEN_FROM", metavar="MP4", help="Repeat a recipe; flags win."
)
@rare_option("--truncate", is_flag=True, default=None, help="Cut prompts over 512 tokens.")
@rare_option("--mesh", default="auto", metavar="CFGxSEQ", help="How chips share the run.")
@hosts_options
@rare_option("--dtype", type=click.Choice(DTYPES), default="auto", help="Of weights and products.")
@rare_option("--keep-latents", is_flag=True, help="Keep the latents beside the MP4.")
@rare_option(
    "--save-every",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Of states to go on from. Default: as often as takes less than 1 % of the time.",
)
@rare_option(
    "--preview-every",
    type=click.IntRange(min=1),
    metavar="N",
    help="Draw the video so far as NAME.preview.png, anew every N steps, until the MP4 is there.",
)
@rare_option("--no-metadata", is_flag=True, help="Store no recipe in the MP4.")
@rare_option("--no-prompt-metadata", is_flag=True, help="Store the recipe without the prompts.")
@rare_option("--offline", is_flag=True, help="Never use the network.")
@rare_option("-y", "--yes", is_flag=True, help="Download without asking.")
@click.option("--dry-run", is_flag=True, help="Check and show everything, load nothing.")
@device_option
@with_console
@help_all_option
def command(console: Console, **options: Any) -> None:
    """Make a video from PROMPT (text, @FILE, or - for standard input).

    \b
    Examples:
      svgen generate "a cat surfing a wave at sunset"
      svgen generate "a cat" --res 720p --duration 5s --seed 7 -o cat.mp4
      svgen generate --from cat.mp4 --seed 8
      svgen generate --prompts requests.jsonl --res 480p -o videos/
    """
    from svgen.cli.execution import say_run, stages_of

    options["json"] = console.json
    origins = origins_of(click.get_current_context())
    if options["prompts"]:
        from svgen.cli.batch import run_batch

        run_batch(console, options, origins)
        return
    stages, give_up = stages_of(console), console.leave
    run = plan_run(options, origins, stages, give_up, place=place, adopt=adopt_seed)
    if run.device.process > 0:
        console.mute()
    if _is_done(console, run, options):
        console.result({**describe(run), "skipped": True}, [str(run.output)])
        return
    say_run(console, run)
    if options["dry_run"]:
        data = describe(run)
        console.result({**data, "dry_run": True}, plan_lines(data))
        return
    data = _execute(console, run, options)
    console.result(data, [] if run.to_stdout else [data["output"]])
