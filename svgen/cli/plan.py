"""`svgen plan`: what a run would take on TPUs that are not attached."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from svgen import cycles
from svgen.catalog import sampling_of
from svgen.cli.device import cache_folder
from svgen.cli.options import RESOLUTION, with_console
from svgen.cli.output import Console
from svgen.config import SMALL_PARAMETERS, Preset
from svgen.errors import MachineError, SvgenError, UsageError, raise_all
from svgen.grid import RESOLUTIONS, WAN21, frames_problem, grid_of, size_problem
from svgen.partial import write_whole
from svgen.plan import Job, fingerprint, predict, prepare_environment
from svgen.private import make_private
from svgen.shapes import SPECS
from svgen.tpus import TPUS, parse_slice

FRAMES = 81
OF_A_RUN, OF_A_KERNEL = ("model", "preset", "steps", "mesh"), ("heads", "band_share")


def _preset(name: str, size: tuple[int, int]) -> Preset:
    from svgen.presets import load_preset

    return load_preset(name, size)


def job_of(options: Mapping[str, Any]) -> Job:
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


def _planned(console: Console, key: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The plan, from the cache if the same was asked before with the same jax."""
    name = hashlib.sha256(key.encode()).hexdigest()[:32]
    path = cache_folder() / "plans" / f"{name}.json"
    kept = _read(path)
    if kept is not None:
        return {**kept, "cached": True}
    console.note("compiling for TPUs that are not there: some minutes")
    with console.stage("plan"):
        found = make()
    try:
        make_private(path.parent)
        write_whole(path, json.dumps(found).encode(), overwrite=True)
    except (OSError, SvgenError) as error:
        console.warn(f"the plan is not kept: {error}")
    return {**found, "cached": False}


def plan_apart(options: Mapping[str, Any]) -> dict[str, Any]:
    """The plan of `svgen plan` with these options, made by a process of its own: libtpu reads its
    environment before jax is imported, and here it is.
    """
    flags = [f"--{name}={value}" for name, value in options.items()]
    done = subprocess.run(
        [sys.executable, "-m", "svgen", "plan", "--json", *flags],
        stdout=subprocess.PIPE,
        encoding="utf-8",
        check=False,
    )
    try:
        body = json.loads(done.stdout)
        plan, error = body["data"], body["error"] or {}
    except (ValueError, KeyError, TypeError):
        plan, error = None, {}
    if done.returncode or plan is None:
        raise MachineError(
            "E_LIBRARY",
            error.get("message", "svgen plan has failed"),
            why=error.get("why", ""),
            hint=error.get("hint", "") or "svgen plan says more",
        )
    return plan


def _read(path: Path) -> dict[str, Any] | None:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return kept if isinstance(kept, dict) and {"decode_s", "kernel"} & kept.keys() else None


def _lines(job: Job, plan: Mapping[str, Any]) -> list[str]:
    """The plan as a table of at most 80 columns."""
    memory, attention, step = plan["hbm_gib_per_chip"], plan["attention"], plan["step_s"]
    decode = plan["decode_gib_per_chip"]
    others = [f"--{name} {value}" for name, value in plan["would_fit"].items()]
    verdict = "fits" if plan["fits"] else f"does not fit{', but ' * bool(others)}"
    verdict += " or ".join(others)
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
        f"decoding             {plan['decode_s']:.1f} s, {decode['total']:.1f} GiB of a chip",
    ]


def _check_flags(context: click.Context) -> None:
    """Raise for flags that the plan asked for would not use."""
    kernel = context.params["kernel"]
    given = [
        f"--{name.replace('_', '-')}"
        for name in (OF_A_RUN if kernel else OF_A_KERNEL)
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT
    ]
    if given and kernel:
        raise UsageError(
            "E_USAGE",
            f"--kernel and {', '.join(given)} exclude each other",
            why="attention alone has no model, schedule or mesh",
            hint="svgen plan --kernel --heads 10 --band-share 0.35",
        )
    if given:
        raise UsageError(
            "E_USAGE",
            f"without --kernel, {' and '.join(given)} mean nothing",
            why="a run has its heads from the model, and its band share from the preset",
            hint="svgen plan --kernel --heads 10 --band-share 0.35",
        )


def _kernel_plan(console: Console, options: Mapping[str, Any]) -> None:
    """Count attention alone, on one chip."""
    width, height = options["res"] or RESOLUTIONS["720p"]
    frames, heads, share = options["frames"] or FRAMES, options["heads"], options["band_share"]
    found = (size_problem(width, height, WAN21), frames_problem(frames, WAN21))
    raise_all([problem for problem in found if problem])
    name = options["tpu"]
    chip = parse_slice(name if "-" in name else f"{name}-8").tpu.chip
    grid = grid_of(width, height, frames, WAN21)
    shape = grid.latent_frames, grid.tokens // grid.latent_frames
    key = fingerprint([chip, width, height, frames, heads, share])
    prepare_environment()
    plan = _planned(console, key, lambda: cycles.compare_kernels(chip, shape, heads, share))
    lines = [
        f"attention of {heads} heads on one {chip}, {plan['tokens']} tokens, band share {share:g}",
        f"({plan['label']})",
        "",
        f"{'':<18}{'cycles per 2^20 pairs':>22}{'pairs visited':>18}{'ms':>9}",
    ]
    for name, one in plan["kernel"].items():
        numbers = f"{one['cycles_per_mpair']:>22,.0f}{one['visited_pairs']:>18,}{one['ms']:>9.2f}"
        lines.append(f"{name.replace('_', ' '):<18}{numbers}")
    console.result(plan, lines)


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
    help="Which TPU, and how many chips (v4, v5p: cores).",
)
@click.option("--mesh", default="auto", show_default=True, metavar="CFGxSEQ")
@click.option("--kernel", is_flag=True, help="Attention alone, each kind of mask, on one chip.")
@click.option("--heads", type=click.IntRange(1, 64), default=10, help="With --kernel: of the chip.")
@click.option(
    "--band-share",
    type=click.FloatRange(0.01, 1.0),
    default=0.35,
    help="With --kernel: the share of all pairs that a mask's band holds.",
)
@with_console
def command(console: Console, **options: Any) -> None:
    """Say what a run takes on TPUs that are not attached: memory, time, and whether it fits.

    The very programs of a run are compiled with libtpu, which needs Linux on x86-64, and their
    cycles are counted. No weights are needed.

    \b
    Examples:
      svgen plan --res 1440p --preset aggressive --tpu v6e-8
      svgen plan --model wan2.1-1.3b --res 480p --tpu v5e-4 --json
      svgen plan --kernel --res 720p --heads 10 --band-share 0.35 --tpu v6e
    """
    _check_flags(click.get_current_context())
    if options["kernel"]:
        _kernel_plan(console, options)
        return
    job = job_of(options)
    prepare_environment()
    plan = _planned(console, fingerprint(asdict(job)), lambda: predict(job))
    console.result(plan, _lines(job, plan))
