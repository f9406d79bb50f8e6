"""`svgen decode`: latents that a run has saved become an MP4."""

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from svgen.cli.device import prepare_jax
from svgen.cli.memory import Memory
from svgen.cli.options import device_option, help_all_option, rare_option, with_console
from svgen.cli.output import Console
from svgen.cli.placing import STDOUT, plan_output
from svgen.cli.planning import Collected, open_pipeline
from svgen.cli.resolve import range_problems, recipe_model, size_problems
from svgen.cli.settings import Configured
from svgen.config import Request
from svgen.errors import UsageError

if TYPE_CHECKING:
    from svgen.pipeline import Pipeline

RANGED = ("size", "frames", "fps", "steps", "guidance", "shift", "seed")
ORIGIN = "the latents' request"


def _model(options: Mapping[str, Any], request: Request) -> str:
    """The model whose VAE decodes: the flag's, else the one that made the latents."""
    if options["model"]:
        return options["model"]
    try:
        return recipe_model(request.as_json())
    except UsageError as error:
        raise UsageError(
            "E_MODEL",
            f"the latents were made with the model {request.model[:200]!r}, which is a folder",
            why="a file of latents is not allowed to name folders of this machine",
            hint="--model with a folder or a name of that model",
        ) from error


def _plan(
    console: Console, latents: np.ndarray, request: Request, options: Mapping[str, Any]
) -> tuple[Path, "Pipeline"]:
    """Check everything, all problems at once, before the model is fetched if it is not on disk;
    returns the output and the pipeline.
    """
    from svgen.cli.execution import open_fetched, stages_of

    problems = Collected()
    output = problems.get(lambda: plan_output(options, request, sized=False))
    device = problems.get(lambda: prepare_jax(options["device"]))
    model = problems.get(lambda: _model(options, request), "")
    stages, mesh = stages_of(console), options["mesh"]
    pipeline = problems.get(lambda: open_pipeline(model, "float32", stages, mesh=mesh))
    if pipeline:
        problems.get(lambda: _check(latents, request, pipeline))
    problems.raise_all()
    for warning in device.warnings:
        console.warn(warning)
    if pipeline is None:
        pipeline = open_fetched(console, model, "float32", options)
        _check(latents, request, pipeline)
    return output, pipeline


def _check(latents: np.ndarray, request: Request, pipeline: "Pipeline") -> None:
    """Raise what keeps latents from being decoded."""
    problems = Collected(range_problems(request.as_json(), dict.fromkeys(RANGED, ORIGIN)))
    size = (request.width_px, request.height_px, request.frames)
    problems += size_problems(*size, pipeline.rules, dict.fromkeys(RANGED, ORIGIN))
    problems.raise_all()
    pipeline.check_latents(latents, request)
    pipeline.split(request)
    pipeline.check_files("vae")
    if not np.isfinite(latents).all():
        raise UsageError(
            "E_LATENTS",
            "the latents hold NaN or infinity",
            why="every frame decoded from them would be black or noise",
            hint="generate the video again",
        )
    Memory.now(pipeline.specs, pipeline.split(request)).check(request, "decode")


@click.command(cls=Configured)
@click.argument("latents", metavar="LATENTS.safetensors")
@click.option(
    "--model", metavar="NAME|PATH|ORG/REPO[@REV]", help="Default: the one that made them."
)
@click.option("-o", "--output", metavar="OUT", help="FILE, DIR/, TEMPLATE, or - for stdout.")
@click.option("--overwrite", is_flag=True, help="Replace an existing output.")
@rare_option("--mesh", default="auto", metavar="CFGxSEQ", help="How chips share the work.")
@rare_option("--no-metadata", is_flag=True, help="Store no recipe in the MP4.")
@rare_option("--no-prompt-metadata", is_flag=True, help="Store the recipe without the prompts.")
@rare_option("--offline", is_flag=True, help="Never use the network.")
@rare_option("-y", "--yes", is_flag=True, help="Download without asking.")
@device_option
@with_console
@help_all_option
def command(console: Console, latents: str, **options: Any) -> None:
    """Decode LATENTS.safetensors: what is left of a run whose MP4 could not be written.

    \b
    Examples:
      svgen decode cat-1a2b3c4d.latents.safetensors -o cat.mp4
      svgen decode cat-1a2b3c4d.latents.safetensors --model ./wan2.1-1.3b
    """
    from svgen.cli.execution import decode, recipe_of, target_of
    from svgen.lock import sole_run
    from svgen.resume import load_latents

    options["json"] = console.json
    array, request = load_latents(Path(latents))
    to_stdout = options["output"] == STDOUT
    output, pipeline = _plan(console, array, request, options)
    recipe = None
    if not options["no_metadata"]:
        recipe = recipe_of(request, with_prompt=not options["no_prompt_metadata"])
    alone = nullcontext() if to_stdout else sole_run(output)
    with alone, target_of(console, output, to_stdout=to_stdout) as target:
        written = decode(
            console,
            pipeline,
            array,
            request,
            target,
            recipe=recipe,
            overwrite=options["overwrite"],
        )
    data = {
        "output": STDOUT if to_stdout else str(output),
        "frames": written.frames,
        "bytes": written.size_bytes,
        "request": request.as_json(),
        "timings": dict(console.timings),
    }
    console.result(data, [] if to_stdout else [str(output)])
