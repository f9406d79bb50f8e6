"""What `bench` decides before anything is timed: device, model, size, schedules; all problems at
once.
"""

import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from svgen import __version__
from svgen.catalog import Sampling, entry_of, read_sampling, sampling_of
from svgen.cli.device import Device, prepare_jax
from svgen.cli.planning import (
    Collected,
    check_platform,
    check_size,
    choose_dtype,
    choose_model,
    open_pipeline,
)
from svgen.cli.resolve import Resolved, resolve
from svgen.config import SMALL_PARAMETERS, Preset, Request, SparsitySchedule
from svgen.errors import UsageError
from svgen.presets import SCHEDULES, load_preset
from svgen.shapes import SPECS

if TYPE_CHECKING:
    from svgen.pipeline import Pipeline, Stage

STAGES = ("embed", "attention", "step", "decode")
PROMPT = "a red ball moving to the right"
CHECKPOINT, MADE_UP = "checkpoint", "made up"
CLOCK = "time.perf_counter around one call and the wait for its result, warm"
LIBRARIES = ("jax", "jaxlib", "libtpu")
ROOM = 0.6  # of the budget for the rounds: the rest is for loading and compiling


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A trial that has passed every check and has loaded nothing."""

    pipeline: "Pipeline"
    request: Request  # as it is timed
    asked: Request
    schedules: Mapping[str, SparsitySchedule]
    device: Device
    weights: str
    notes: tuple[str, ...]


def plan_trial(options: Mapping[str, Any], stage: "Stage") -> Planned:
    """Check everything, all problems at once, and choose what fits the time."""
    problems = Collected()
    chosen = options["device"] != "auto" or bool(os.environ.get("JAX_PLATFORMS"))
    device = problems.get(lambda: prepare_jax(options["device"]))
    problems.raise_all()
    model = problems.get(lambda: choose_model(options, {}, device.platform), "")
    problems.get(lambda: check_platform(model, device.platform, chosen))
    problems.raise_all()
    dtype = choose_dtype(options, {}, device.platform)
    pipeline, weights = problems.get(
        lambda: open_any(model, dtype, stage, options["mesh"]), ("", "")
    )
    problems.raise_all()
    problems.get(lambda: check_size(pipeline, model, device.platform, chosen))
    sampling = problems.get(lambda: sampling_for(model, pipeline, weights), sampling_of(model))
    preset = problems.get(
        lambda: load_preset(options["preset"], options["res"] or sampling.size_px)
    )
    values = {"model": model, "dtype": dtype, "preset": preset, "sampling": sampling}
    resolved = resolve_trial(options, pipeline, **values)
    problems += resolved.problems
    request = problems.get(lambda: checked(pipeline, resolved, weights), resolved.request)
    problems.raise_all()
    return fit(options, device, pipeline, request, weights)


def open_any(model: str, dtype: str, stage: "Stage", mesh: str) -> tuple["Pipeline", str]:
    """The model's pipeline if it is on disk, else one of its shapes; and what its weights are."""
    pipeline = open_pipeline(model, dtype, stage, mesh=mesh)
    if pipeline is not None:
        return pipeline, CHECKPOINT
    entry = entry_of(model.partition("@")[0])
    if entry is None or entry.name not in SPECS:
        raise UsageError(
            "E_MODEL",
            f"--model {model[:60]} is not on disk",
            why=f"without weights, only sizes are timed that svgen knows: {', '.join(SPECS)}",
            hint=f"svgen models pull {model[:60]}",
        )
    from svgen.stand_in import StandIn

    return StandIn(SPECS[entry.name], dtype=dtype, stage=stage, mesh=mesh), MADE_UP


def sampling_for(model: str, pipeline: "Pipeline", weights: str) -> Sampling:
    """The sampling values of a checkpoint, or of the catalog."""
    own = read_sampling(pipeline.folder) if weights == CHECKPOINT else None
    return own or sampling_of(model)


def resolve_trial(
    options: Mapping[str, Any],
    pipeline: "Pipeline",
    *,
    model: str,
    dtype: str,
    preset: Preset | None,
    sampling: Sampling,
) -> Resolved:
    """The request that a run with these flags would have."""
    given = {name: options[name] for name in ("res", "frames", "steps")}
    return resolve(
        {"prompt": PROMPT, "seed": 0, **given},
        model=model,
        dtype=dtype,
        preset=preset,
        sampling=sampling,
        rules=pipeline.rules,
        parameters=pipeline.parameters,
    )


def checked(pipeline: "Pipeline", resolved: Resolved, weights: str) -> Request:
    """Raise what keeps a request from running; routes of made-up weights have no budget."""
    request = resolved.request
    pipeline.split(request)
    pipeline.tokens(request)
    if weights == CHECKPOINT:
        pipeline.check_files()
    elif request.sparsity is not None:
        request = replace(request, sparsity=replace(request.sparsity, budget=None))
    return request


def fit(
    options: Mapping[str, Any],
    device: Device,
    pipeline: "Pipeline",
    asked: Request,
    weights: str,
) -> Planned:
    """Choose the largest size that fits the time, and say so where it is not the one asked for. To
    compare with a saved run takes the size that was asked for.
    """
    from svgen.fitting import fitting

    budget = options["budget"]
    request, seconds = asked, 0.0
    if not options["against"]:
        stages, sized = options["only"] or STAGES, bool(options["res"])
        request, seconds = fitting(pipeline, asked, stages, ROOM * budget, sized=sized)
    notes = []
    if request != asked:
        notes.append(
            f"{_size(asked)} would take longer than --budget {budget:g}: {_size(request)} is timed"
        )
    if seconds > ROOM * budget:
        notes.append(f"that takes longer too: about {seconds / ROOM:,.0f} s")
    if weights == MADE_UP:
        notes.append("the model is not on disk: its sizes are timed with weights that mean nothing")
    return Planned(
        pipeline=pipeline,
        request=request,
        asked=asked,
        schedules=schedules_of(request, pipeline.parameters),
        device=device,
        weights=weights,
        notes=(*device.warnings, *notes),
    )


def _size(request: Request) -> str:
    return f"{request.width_px}x{request.height_px} with {request.frames} frames"


def schedules_of(request: Request, parameters: int) -> dict[str, SparsitySchedule]:
    """The sparse schedules of a size, and the request's own."""
    size, found = (request.width_px, request.height_px), {}
    for name in SCHEDULES:
        preset = load_preset(name, size)
        chosen = preset.small_sparsity if parameters < SMALL_PARAMETERS else preset.sparsity
        if chosen is not None:
            found[name] = chosen.counted(request.steps)
    if request.sparsity is not None:
        found[request.schedule] = request.sparsity
    return found


def describe(planned: Planned) -> dict[str, Any]:
    """What is timed and on what, as data."""
    from svgen.attention.attend import chip_of, kernel_name

    request, pipeline, device = planned.request, planned.pipeline, planned.device
    split = pipeline.split(request)
    head_dim = pipeline.specs.transformer.head_dim
    asked = planned.asked
    return {
        "device": device.platform,
        "chip": processor() if device.platform == "cpu" else device.kind,
        "chips": split.chips,
        "mesh": str(split),
        "model": request.model,
        "weights": planned.weights,
        "width_px": request.width_px,
        "height_px": request.height_px,
        "frames": request.frames,
        "asked": {name: getattr(asked, name) for name in ("width_px", "height_px", "frames")},
        "tokens": pipeline.grid(request).tokens,
        "steps": request.steps,
        "branches": 2 if request.guidance > 1 else 1,
        "dtype": request.dtype,
        "dense_kernel": kernel_name(chip_of(device.kind), head_dim),
        "schedule": request.schedule,
        "schedules": {
            name.replace("-", "_"): one.band_share for name, one in planned.schedules.items()
        },
        "versions": versions(),
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "clock": CLOCK,
    }


def versions() -> dict[str, str]:
    """Versions that decide how fast a run is."""
    found = {"svgen": __version__, "python": platform.python_version()}
    for name in LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def processor() -> str:
    """Name the CPU, with the cores that this process may use."""
    name = platform.processor() or platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        name = names[0] if names and names[0] else name
    counted = getattr(os, "sched_getaffinity", None)
    cores = len(counted(0)) if counted else os.cpu_count() or 1
    return f"{name}, {cores} core{'s' * (cores > 1)}"
