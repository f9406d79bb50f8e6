"""`svgen decode`: latents that a run has saved become an MP4."""

from pathlib import Path
from typing import Any

import click

from svgen.cli.device import prepare_jax
from svgen.cli.options import device_option, with_console
from svgen.cli.output import Console

EXAMPLES = """\b
Examples:
  svgen decode cat-1a2b3c4d.latents.safetensors -o cat.mp4
  svgen decode cat-1a2b3c4d.latents.safetensors --model ./wan2.1-1.3b
"""


@click.command(epilog=EXAMPLES)
@click.argument("latents", metavar="LATENTS.safetensors")
@click.option(
    "--model", metavar="NAME|PATH|ORG/REPO[@REV]", help="Default: the one that made them."
)
@click.option("-o", "--output", metavar="FILE|DIR/|TEMPLATE", help="Where the MP4 goes.")
@click.option("--overwrite", is_flag=True, help="Replace an existing output.")
@click.option("--offline", is_flag=True, help="Never use the network.")
@click.option("-y", "--yes", is_flag=True, help="Download without asking.")
@device_option
@with_console
def command(console: Console, latents: str, **options: Any) -> None:
    """Decode LATENTS.safetensors: what is left of a run whose MP4 could not be written."""
    from svgen.cli.generate import plan_output
    from svgen.resume import load_latents

    array, request = load_latents(Path(latents))
    target = plan_output(options, request)
    prepare_jax(options["device"])
    from svgen.cli.models import fetch
    from svgen.cli.run import decode, recipe_of
    from svgen.pipeline import Pipeline

    folder = fetch(
        console, options["model"] or request.model, offline=options["offline"], yes=options["yes"]
    )
    pipeline = Pipeline(folder, stage=console.stage)
    pipeline.check_latents(array, request)
    written = decode(
        console,
        pipeline,
        array,
        request,
        target,
        recipe=recipe_of(request),
        overwrite=options["overwrite"],
    )
    data = {
        "output": str(target),
        "frames": written.frames,
        "bytes": written.size_bytes,
        "request": request.as_json(),
        "timings": dict(console.timings),
    }
    console.result(data, [str(target)])
