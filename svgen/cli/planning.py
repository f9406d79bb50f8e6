"""What `generate` decides before weights are loaded: every check that can be made, all problems at
once.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from svgen.catalog import read_sampling, sampling_of
from svgen.cli.device import Device, no_tpu, prepare_jax
from svgen.cli.hosts import hosts_of, shared_seed
from svgen.cli.memory import check_memory
from svgen.cli.output import printable
from svgen.cli.placing import STDOUT, plan_output
from svgen.cli.resolve import Resolved, read_prompt, recipe_model, resolve
from svgen.cli.settings import FLAG, rank
from svgen.config import DTYPES as TYPES
from svgen.config import Preset, Request
from svgen.errors import Interrupted, MachineError, SvgenError, UsageError, raise_all
from svgen.grid import WAN21, Rules, grid_of

if TYPE_CHECKING:
    from svgen.pipeline import Pipeline, Stage

T = TypeVar("T")
Place = Callable[..., Path]  # (options, request, *, sized) -> the output; raises what is wrong
DTYPES = ("auto", *TYPES)
UNREAD = "(could not be read)"  # stands for a prompt while the other checks go on
EXISTING = ("overwrite", "skip_existing", "auto_number")
SHOWN_LETTERS = 60
LARGE = 500_000_000  # parameters of a transformer that nobody runs on a CPU by accident


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run that has passed every check and has loaded nothing."""

    resolved: Resolved
    model: str
    pipeline: "Pipeline | None"  # None: the model is still to be fetched
    output: Path
    to_stdout: bool
    device: Device
    origins: Mapping[str, str]  # of model, dtype, device, output
    warnings: tuple[str, ...]

    @property
    def request(self) -> Request:
        """What is asked for."""
        return self.resolved.request

    @property
    def rules(self) -> Rules:
        """The size rules of the model."""
        return self.pipeline.rules if self.pipeline else WAN21


class Collected(list[SvgenError]):
    """Problems found so far."""

    def get(self, action: Callable[[], T], default: Any = None) -> T:
        """What an action returns, or the default after keeping what it raises."""
        try:
            return action()
        except Interrupted:
            raise
        except SvgenError as error:
            self.extend(error.problems)
            return default

    def raise_all(self) -> None:
        """Raise them as one error, what is wrong with the command line first."""
        raise_all(sorted(self, key=lambda problem: not isinstance(problem, UsageError)))


def plan_run(
    options: Mapping[str, Any],
    origins: Mapping[str, str] | None = None,
    stage: "Stage" = nullcontext,
    give_up: Callable[[SvgenError], None] = lambda error: None,
    *,
    place: Place | None = None,
    opener: Callable[..., "Pipeline | None"] | None = None,
    adopt: Callable[[Mapping[str, Any], Resolved], Resolved] = lambda options, resolved: resolved,
) -> Run:
    """Resolve and check everything that can be known before weights are loaded, and raise all
    problems at once. `origins` says where each option that was set came from; `give_up` ends the
    process with an error where other processes do not come; `place` says where the result goes
    (default: `plan_output`, a video), `opener` opens the pipeline, as `open_pipeline` does, `adopt`
    may give a run another seed than the one it has drawn.
    """
    place, opener = place or plan_output, opener or open_pipeline
    said, problems, machine = origins or {}, Collected(), Collected()
    options = problems.get(lambda: settle(options, said), options)
    chosen = options["device"] != "auto" or bool(os.environ.get("JAX_PLATFORMS"))
    hosts = problems.get(lambda: hosts_of(options))
    device = problems.get(lambda: prepare_jax(options["device"], hosts=hosts, give_up=give_up))
    platform = device.platform if device else "cpu"
    recipe = problems.get(lambda: read_request(options["source"]), {"prompt": UNREAD})
    model = machine.get(lambda: choose_model(options, recipe, platform), "")
    chosen = chosen or device is None
    machine.get(lambda: check_platform(model, platform, chosen))
    dtype = choose_dtype(options, recipe, platform)
    pipeline = problems.get(lambda: opener(model, dtype, stage, mesh=options["mesh"]))
    machine.get(lambda: check_size(pipeline, model, platform, chosen))
    problems += [one for one in machine if not (options["dry_run"] and _is_machine(one))]
    sampling = problems.get(lambda: read_sampling(pipeline.folder)) if pipeline else None
    size = (sampling or sampling_of(model)).size_px
    preset = problems.get(lambda: _preset(options, recipe, size))
    prompt = problems.get(lambda: read_prompt(options["prompt"], sys.stdin), UNREAD)
    resolved = resolve(
        {**options, "prompt": prompt},
        model=model or _default_model(),
        dtype=dtype,
        preset=preset,
        recipe=recipe,
        rules=pipeline.rules if pipeline else WAN21,
        sampling=sampling,
        origins=said,
        parameters=pipeline.parameters if pipeline else None,
    )
    problems += resolved.problems
    drawn = resolved.origin.get("seed") == "drawn"
    resolved = adopt(options, resolved) if drawn and not problems else resolved
    if device and device.processes > 1 and drawn:
        seed = shared_seed(resolved.request.seed)
        resolved = replace(resolved, request=replace(resolved.request, seed=seed))
    sized = not resolved.problems
    output = problems.get(lambda: place(options, resolved.request, sized=sized))
    if pipeline:
        _check_on_disk(problems, pipeline, resolved.request)
    if sized and device and not machine:  # of a machine that will not do, nothing is counted
        memory = Collected()
        memory.get(lambda: check_memory(model, pipeline, resolved.request, options["mesh"]))
        (machine if options["dry_run"] else problems).extend(memory)
    problems.raise_all()
    return Run(
        resolved=resolved,
        model=resolved.request.model,
        pipeline=pipeline,
        output=output,
        to_stdout=options["output"] == STDOUT,
        device=device,
        origins=_other_origins(options, recipe, said),
        warnings=(*device.warnings, *(one.message for one in machine)),
    )


def _is_machine(problem: SvgenError) -> bool:
    return isinstance(problem, MachineError)


def _default_model() -> str:
    from svgen.hub.source import DEFAULT_MODEL

    return DEFAULT_MODEL


def settle(options: Mapping[str, Any], said: Mapping[str, str]) -> dict[str, Any]:
    """Of options that exclude each other, keep the one that holds more strongly; raise UsageError
    for those of equal strength.
    """
    kept, problems = dict(options), []
    for group in (("frames", "duration"), EXISTING):
        given = [name for name in group if kept.get(name) not in (None, False)]
        strength = {name: rank(said.get(name, FLAG)) for name in given}
        strongest = [name for name in given if strength[name] == min(strength.values())]
        if len(strongest) > 1:
            problems.append(_exclusive(strongest))
        for name in set(given) - set(strongest):
            kept[name] = None
    raise_all(problems)
    return kept


def _exclusive(names: Sequence[str]) -> UsageError:
    flags = [f"--{name.replace('_', '-')}" for name in names]
    return UsageError(
        "E_USAGE",
        f"{' and '.join(flags)} exclude each other",
        why="each of them says something else about the same thing",
        hint=" or ".join(flags),
    )


def read_request(source: str | None) -> dict[str, Any]:
    """The request inside a former video (`--from`), each field checked; nothing without one."""
    if source is None:
        return {}
    from svgen.recipe import read_recipe
    from svgen.resume import request_from_json

    values = read_recipe(Path(source))["request"]
    try:
        request = request_from_json({**values, "prompt": values.get("prompt", "")})
    except ValueError as error:
        raise UsageError(
            "E_RECIPE",
            f"the recipe in {source} cannot be used: {error}",
            why="it was written by another version of svgen, or changed",
            hint="give the flags themselves",
        ) from error
    return {name: getattr(request, name) for name in values}


def choose_model(options: Mapping[str, Any], recipe: Mapping[str, Any], platform: str) -> str:
    """The model of the flag, else of the recipe, else the default of the platform."""
    from svgen.hub import resolve_auto

    if options["model"] != "auto":
        return _unmistakable(options["model"])
    return recipe_model(recipe) if "model" in recipe else resolve_auto(platform)


def _unmistakable(model: str) -> str:
    """Write a folder so that no recipe can be read as naming a repository: `./a/b` for `a/b`."""
    from svgen.hub import parse

    folder = parse(model).folder
    plain = folder is not None and not folder.is_absolute() and model[0] not in "./~"
    return f"./{model}" if plain else model


def check_platform(model: str, platform: str, chosen: bool) -> None:
    """Raise MachineError where a model of the Hub would run on the CPU without anyone having said
    so.
    """
    from svgen.hub import parse

    if platform == "cpu" and not chosen and model and not parse(model).folder:
        raise no_tpu(f"{model} is made for TPUs; on a CPU it takes hours")


def check_size(pipeline: "Pipeline | None", model: str, platform: str, chosen: bool) -> None:
    """Raise MachineError where a folder of Wan's size would run on the CPU without anyone having
    said so.
    """
    if pipeline and platform == "cpu" and not chosen and pipeline.parameters > LARGE:
        raise no_tpu(f"{model} has the size of a model made for TPUs; on a CPU it takes hours")


def choose_dtype(options: Mapping[str, Any], recipe: Mapping[str, Any], platform: str) -> str:
    """The type of weights and products: bfloat16 where the hardware is made for it."""
    if options["dtype"] != "auto":
        return options["dtype"]
    return recipe.get("dtype") or ("float32" if platform == "cpu" else "bfloat16")


def _preset(
    options: Mapping[str, Any], recipe: Mapping[str, Any], size_px: tuple[int, int]
) -> Preset | None:
    """The preset asked for; a bare schedule takes the size of the flag, the recipe or the model."""
    from svgen.presets import load_preset

    if not options["preset"]:
        return None
    made = (recipe["width_px"], recipe["height_px"]) if "width_px" in recipe else size_px
    return load_preset(options["preset"], options["res"] or made)


def open_pipeline(
    model: str, dtype: str, stage: "Stage" = nullcontext, *, mesh: str = "auto"
) -> "Pipeline | None":
    """The model's pipeline if it is on disk, else None. A folder must be complete."""
    from svgen.hub import find, locate, parse

    if not model:
        return None
    folder = find(model) or (locate(model) if parse(model).folder else None)
    if folder is None:
        return None
    from svgen.pipeline import Pipeline

    return Pipeline(folder, dtype=dtype, stage=stage, mesh=mesh)


def _check_on_disk(problems: Collected, pipeline: "Pipeline", request: Request) -> None:
    """Count the tokens of the prompts, split the chips, and hold the weights' headers against the
    configs.
    """
    problems.get(lambda: pipeline.split(request))
    if request.prompt.strip():
        problems.get(lambda: pipeline.tokens(request))
    problems.get(pipeline.check_files)


def _other_origins(
    options: Mapping[str, Any], recipe: Mapping[str, Any], said: Mapping[str, str]
) -> dict[str, str]:
    """Where the values came from that `resolve` does not choose."""
    origins = {name: said.get(name, "default") for name in ("output", "device", "preset", "mesh")}
    for name in ("model", "dtype"):
        automatic = "recipe" if name in recipe else "device"
        origins[name] = automatic if options[name] == "auto" else said.get(name, FLAG)
    return origins


def describe(run: Run) -> dict[str, Any]:
    """What a run does, as data: of `--dry-run`, and of a result."""
    request = run.request
    grid = grid_of(request.width_px, request.height_px, request.frames, run.rules)
    return {
        "output": STDOUT if run.to_stdout else str(run.output),
        "model": run.model,
        "on_disk": run.pipeline is not None,
        "device": run.device.platform,
        "mesh": str(run.pipeline.split(request)) if run.pipeline else None,
        "seed": request.seed,
        "width_px": request.width_px,
        "height_px": request.height_px,
        "frames": request.frames,
        "fps": request.fps,
        "tokens": grid.tokens,
        "request": request.as_json(),
        "origin": {**run.origins, **run.resolved.origin},
    }


def _schedule_text(name: str, sparsity: Mapping[str, Any] | None) -> str:
    """A schedule in words."""
    if sparsity is None:
        return name
    steps, layers = sparsity["dense_steps"], sparsity["dense_layers"]
    text = f"{name}: band share {sparsity['band_share']:g}, dense in {steps} steps"
    return f"{text} and {layers} layers"


def plan_lines(data: Mapping[str, Any]) -> list[str]:
    """The effective values of `describe`, and where each came from."""
    request, origin = data["request"], data["origin"]
    shown = {
        **{name: data[name] for name in ("model", "device", "mesh", "output")},
        "size": f"{data['width_px']}x{data['height_px']}",
        **{name: f"{request[name]:g}" for name in ("frames", "fps", "steps", "guidance", "shift")},
        "seed": request["seed"],
        "preset": request["preset"],
        "schedule": _schedule_text(request["schedule"], request["sparsity"]),
        **{name: request[name] for name in ("dtype", "prompt", "negative")},
    }
    origin = {"schedule": origin.get("preset", "default"), **origin}
    lines = [f"{'tokens':<10}{data['tokens']}"]
    for name, value in shown.items():
        text = printable(" ".join(str(value).split())) if value not in (None, "") else "none"
        text = text if len(text) <= SHOWN_LETTERS else f"{text[:SHOWN_LETTERS]}..."
        lines.append(f"{name:<10}{text}  ({origin.get(name, 'default')})")
    return lines
