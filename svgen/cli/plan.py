"""`svgen plan`: what a run would take on TPUs that are not attached."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from svgen.catalog import sampling_of
from svgen.cli.device import cache_folder
from svgen.cli.options import RESOLUTION, with_console
from svgen.cli.output import Console
from svgen.config import SMALL_PARAMETERS, Preset
from svgen.errors import UsageError, raise_all
from svgen.grid import WAN21, frames_problem, grid_of, size_problem
from svgen.plan import TPUS, Job, fingerprint, parse_slice, predict, prepare_environment
from svgen.shapes import SPECS

FRAMES = 81


def _preset(name: str, size: tuple[int, int]) -> Preset:
    from svgen.presets import load_preset

    return load_preset(name, size)


def _job(options: Mapping[str, Any]) -> Job:
    """What the flags ask for; raises UsageError with every problem."""
    from svgen.catalog import entry_of

    name = options["model"]
    if name not in SPECS:
        raise UsageError(
            "E_MODEL",
            f"--model {name[:60]} cannot be planned",
            why=f"a plan needs no weights, but sizes that svgen knows: {', '.join(SPECS)}",
            hint="--model wan2.1-14b",
        )
    sampling = sampling_of(name)
    width, height = options["res"] or sampling.size_px
    frames = options["frames"] or FRAMES
    found = (size_problem(width, height, WAN21), frames_problem(frames, WAN21))
    raise_all([problem for problem in found if problem])
    preset = _preset(options["preset"], (width, height))
    small = entry_of(name).parameters < SMALL_PARAMETERS
    schedule = preset.small_sparsity if small else preset.sparsity
    steps = options["steps"] or preset.steps or sampling.steps
    return Job(
        specs=SPECS[name],
        grid=grid_of(width, height, frames, WAN21),
        steps=steps,
        branches=2,
        sparsity=schedule.counted(steps) if schedule else None,
        slice=parse_slice(options["tpu"]),
        mesh=options["mesh"],
    )


def _planned(console: Console, job: Job) -> dict[str, Any]:
    """The plan, from the cache if the same was asked before with the same jax."""
    name = hashlib.sha256(fingerprint(job).encode()).hexdigest()[:32]
    path = cache_folder() / "plans" / f"{name}.json"
    kept = _read(path)
    if kept is not None:
        return {**kept, "cached": True}
    console.note("compiling for TPUs that are not there: some minutes")
    with console.stage("plan"):
        found = predict(job)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_text(json.dumps(found), encoding="utf-8")
    except OSError as error:
        console.warn(f"the plan is not kept: {error}")
    return {**found, "cached": False}


def _read(path: Path) -> dict[str, Any] | None:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return kept if isinstance(kept, dict) and "step_s" in kept else None


def _lines(job: Job, plan: Mapping[str, Any]) -> list[str]:
    """The plan as a table of at most 80 columns."""
    memory, attention, step = plan["hbm_gib_per_chip"], plan["attention"], plan["step_s"]
    verdict = "fits" if plan["fits"] else "does not fit: more chips, or fewer frames"
    return [
        f"{plan['tpu']}, mesh {plan['mesh']}, {attention['tokens']} tokens, {job.steps} steps",
        f"({plan['label']})",
        "",
        f"memory of a chip     {memory['total']:.1f} of {plan['hbm_limit_gib']:.1f} GiB: {verdict}",
        f"attention of a layer {attention['sparse_ms']:.1f} ms, densely "
        f"{attention['dense_ms']:.1f}, JAX's Splash {attention['splash_ms']:.1f}",
        f"a step               {step['sparse']:.2f} s, densely {step['dense']:.2f}",
        f"denoising            {plan['denoise_s']:.0f} s, densely {plan['denoise_dense_s']:.0f}, "
        f"with Splash {plan['denoise_splash_s']:.0f}: {plan['speedup']:.2f} times as fast",
    ]


@click.command()
@click.option("--model", default="wan2.1-14b", show_default=True, metavar="NAME")
@click.option("--res", type=RESOLUTION, metavar="SIZE", help="Default: the model's own.")
@click.option("--preset", default="aggressive", show_default=True, metavar="NAME|FILE")
@click.option("--frames", type=int, metavar="N", help=f"Default: {FRAMES}.")
@click.option("--steps", type=int, metavar="N", help="Default: the model's.")
@click.option(
    "--tpu",
    default="v6e-8",
    show_default=True,
    metavar="|".join(f"{name}-N" for name in TPUS),
    help="Which TPU, and how many chips (v5p: cores).",
)
@click.option("--mesh", default="auto", show_default=True, metavar="CFGxSEQ")
@with_console
def command(console: Console, **options: Any) -> None:
    """Say what a run takes on TPUs that are not attached: memory, time, and whether it fits.

    The very programs of a run are compiled with libtpu, which needs Linux on x86-64, and their
    cycles are counted. No weights are needed.

    \b
    Examples:
      svgen plan --res 1440p --preset aggressive --tpu v6e-8
      svgen plan --model wan2.1-1.3b --res 480p --tpu v5e-4 --json
    """
    job = _job(options)
    prepare_environment()
    plan = _planned(console, job)
    console.result(plan, _lines(job, plan))
