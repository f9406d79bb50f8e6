"""What `quality` decides before weights are loaded, and what it says and writes at the end."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from svgen.cli.output import Console
from svgen.cli.planning import UNREAD, Collected, Run, plan_run
from svgen.cli.prompts import read_prompts
from svgen.cli.resolve import sparsity_of, unpaired
from svgen.comparison_plot import check_library
from svgen.config import Request, SparsitySchedule
from svgen.errors import UsageError
from svgen.grid import RESOLUTIONS

if TYPE_CHECKING:
    from svgen.pipeline import Pipeline, Stage

REPORT, VIDEO, PLOT = FILES = ("report.json", "side-by-side.mp4", "plot.png")
UNSET = dict.fromkeys(("source", "duration", "coordinator", "num_processes", "process_id"))
NAME_LETTERS = 22  # of a schedule in the table


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A comparison that has passed every check and has loaded nothing."""

    run: Run  # of the first prompt; its output is the folder
    prompts: tuple[str, ...]
    presets: Mapping[str, SparsitySchedule]
    notes: tuple[str, ...]


def plan_comparison(
    options: Mapping[str, Any], origins: Mapping[str, str], stage: "Stage"
) -> Comparison:
    """Resolve and check everything that can be known before weights are loaded, and raise all
    problems at once. The first preset decides what a preset can decide; of the others only the
    schedule is used.
    """
    problems = Collected()
    problems.get(check_library)
    prompts = problems.get(lambda: _prompts(options), [UNREAD])
    names = tuple(dict.fromkeys(options["preset"]))
    count = len(prompts) * (1 + len(names))

    def place(_: Any, request: Request, *, sized: bool = True) -> Path:
        return plan_folder(options, request, videos=count if sized else 0)

    asked = {**options, **UNSET, "prompt": UNREAD, "preset": names[0]}
    asked |= {"skip_existing": False, "auto_number": False, "dry_run": False, "truncate": None}
    run = problems.get(lambda: plan_run(asked, origins, stage, place=place))
    if run and run.device.processes > 1:
        problems.append(_several_processes())
    found = problems.get(lambda: presets_of(names, run, options), ({}, ()))
    if run and run.pipeline:
        problems += prompt_problems(run.pipeline, run.request, prompts)
    problems.raise_all()
    return Comparison(run=run, prompts=tuple(prompts), presets=found[0], notes=found[1])


def _prompts(options: Mapping[str, Any]) -> list[str]:
    """The prompts of the command line, then those of the file."""
    prompts = list(options["prompt"])
    if options["prompts"]:
        prompts += read_prompts(Path(options["prompts"]))
    if prompts:
        return prompts
    raise UsageError(
        "E_PROMPT_EMPTY",
        "there is no prompt",
        why="what a schedule costs is seen in videos",
        hint='svgen quality "a red ball moving to the right", or --prompts FILE',
    )


def prompt_problems(pipeline: "Pipeline", request: Request, prompts: Sequence[str]) -> Collected:
    """Say which prompts the text encoder cannot read."""
    problems = Collected()
    for prompt in prompts:
        if prompt != UNREAD:
            problems.get(lambda prompt=prompt: pipeline.tokens(replace(request, prompt=prompt)))
    return problems


def _several_processes() -> UsageError:
    return UsageError(
        "E_MESH",
        "svgen quality was started on several hosts",
        why="it compares videos in one process",
        hint="run it on one host",
    )


def presets_of(
    names: Sequence[str], run: Run | None, options: Mapping[str, Any]
) -> tuple[dict[str, SparsitySchedule], tuple[str, ...]]:
    """The sparse schedule of each preset, by a name that no other has, and what to tell of them."""
    from svgen.presets import load_preset

    size = (run.request.width_px, run.request.height_px) if run else options["res"]
    problems, found, notes = Collected(), {}, []
    for name in names:
        preset = problems.get(lambda name=name: load_preset(name, size or RESOLUTIONS["480p"]))
        if preset is None or run is None:
            continue
        label = name if Path(name).stem in (*found, "dense", "floor") else Path(name).stem
        parameters = run.pipeline.parameters if run.pipeline else None
        schedule = sparsity_of(preset, {}, run.model, parameters, run.request.steps)
        if schedule is None:
            notes.append(f"{name} is dense: what the others are compared with")
            continue
        found[label] = schedule
        notes += [text for text in (unpaired(preset, run.request),) if text]
    problems.raise_all()
    return found, tuple(notes)


def plan_folder(options: Mapping[str, Any], request: Request, *, videos: int) -> Path:
    """Where the files go; raises if they cannot go there. `videos`: as many fit side by side and
    one after the other (0: do not ask for space).
    """
    from svgen.partial import check_output
    from svgen.video import needed_bytes

    spec = options["output"]
    if spec is not None and (not spec.strip() or spec == "-"):
        why, hint = "the report, the video and the plot go into a folder", "-o FOLDER"
        raise UsageError("E_OUTPUT_NAME", f"-o {spec!r} is no folder", why=why, hint=hint)
    folder = Path(spec or f"svgen-quality-{request.seed}")
    size = {name: getattr(request, name) for name in ("width_px", "height_px")}
    needed = needed_bytes(frames=request.frames * videos, **size) if videos else 0
    if not folder.is_dir():
        check_output(folder / VIDEO if folder.exists() else folder, overwrite=False, needed=needed)
        return folder
    problems = Collected()
    for name in FILES:
        path = folder / name
        problems.get(
            lambda path=path: check_output(path, overwrite=options["overwrite"], needed=needed)
        )
    problems.raise_all()
    return folder


def write_files(
    console: Console, folder: Path, data: Mapping[str, Any], *, overwrite: bool
) -> None:
    """Write the plot and the report."""
    from svgen.comparison_plot import draw
    from svgen.partial import write_whole

    count = len(data["prompts"])
    prompts = f"{count} prompt{'s' if count > 1 else ''}"
    title = f"{Path(data['model']).name}, {prompts}, {data['steps']} steps"
    plot = draw(data["schedules"], f"{title}: mean, and down to the worst video")
    text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False)
    write_whole(folder / PLOT, plot, overwrite=overwrite)
    write_whole(folder / REPORT, f"{text}\n".encode(), overwrite=overwrite)
    console.event("saved", kind="report", path=folder / REPORT)


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What was found, in at most 80 columns."""
    lines = [
        f"{'schedule':<{NAME_LETTERS}}{'kept':>7}{'PSNR mean':>11}{'worst':>8}{'SSIM':>8}"
        f"{'seconds':>10}{'to dense':>10}"
    ]
    for row in rows:
        name = row["name"]
        name = name if len(name) < NAME_LETTERS else f"{name[: NAME_LETTERS - 4]}..."
        numbers = f"{name:<{NAME_LETTERS}}{row['kept_pairs']:>7.1%}"
        if row["kind"] == "dense":
            numbers += " " * 27
        else:
            psnr, ssim = row["psnr_db"], row["ssim"]
            numbers += f"{psnr['mean']:>8.1f} dB{psnr['worst']:>8.1f}{ssim['mean']:>8.3f}"
        if row["same_as"]:
            lines.append(f"{numbers}  = {row['same_as']}"[:80])
        else:
            lines.append(f"{numbers}{row['denoise_s']:>10.2f}{row['ratio_to_dense']:>10.2f}")
    return lines
