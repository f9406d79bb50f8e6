"""`svgen bench`: how fast the programs of a run are here."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from svgen import baseline
from svgen.cli.options import (
    RESOLUTION,
    device_option,
    help_all_option,
    rare_option,
    with_console,
)
from svgen.cli.output import Console
from svgen.cli.planning import DTYPES
from svgen.cli.timings import table
from svgen.cli.trial import STAGES, describe, plan_trial
from svgen.errors import UsageError

BUDGET_S = 100.0
PLANNED_MODEL = "wan2.1-14b"  # whose plan is shown for a model that cannot be planned


def _check(options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Raise what is wrong with files and names; returns the run to compare with."""
    from svgen.partial import check_output

    if options["save"]:
        check_output(Path(options["save"]), overwrite=options["overwrite"], flag="--save")
    if options["profile"] and Path(options["profile"]).is_file():
        raise UsageError(
            "E_OUTPUT_NAME",
            f"--profile {options['profile']} is a file",
            why="a trace is a folder of files",
            hint="--profile trace/",
        )
    if options["profile"] and options["only"] and "step" not in options["only"]:
        raise UsageError(
            "E_USAGE",
            "--profile needs a step",
            why="--only leaves steps out",
            hint="--only step --profile trace/",
        )
    if options["tpu"]:
        _check_plan(options)
    return baseline.read(Path(options["against"])) if options["against"] else None


def _check_plan(options: Mapping[str, Any]) -> None:
    from svgen.cli.plan import job_of

    job_of({"mesh": "auto", **_plan_options(options), "res": options["res"]})


def _plan_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """What `svgen plan` is asked: this model if it has a plan, else the largest."""
    from svgen.shapes import SPECS

    model = options["model"] if options["model"] in SPECS else PLANNED_MODEL
    asked = {name: options[name] for name in ("preset", "frames", "steps", "tpu")}
    return {"model": model, **asked}


def _predict(console: Console, options: Mapping[str, Any]) -> dict[str, Any]:
    """Rows of `svgen plan`, labelled as predicted."""
    from svgen.cli.plan import plan_apart

    asked = _plan_options(options)
    if options["res"]:
        asked["res"] = "x".join(map(str, options["res"]))
    console.note(f"asking svgen plan about {asked['model']} on {options['tpu']}")
    plan = plan_apart({name: value for name, value in asked.items() if value is not None})
    step, attention = plan["step_s"], plan["attention"]
    rows = {
        "step_dense": step["dense"] * 1e3,
        "step_sparse": step["sparse"] * 1e3,
        "attention_dense": attention["dense_ms"],
        "attention_sparse": attention["sparse_ms"],
        "attention_jax_splash": attention["splash_ms"],
    }
    names = ("label", "tpu", "chips", "mesh", "denoise_s", "denoise_dense_s", "speedup")
    kept = {name: plan[name] for name in names}
    return {**kept, "model": asked["model"], "tokens": attention["tokens"], "rows_ms": rows}


def _measure(
    console: Console, options: Mapping[str, Any], theirs: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Time this machine; the record."""
    from svgen.cli.execution import stages_of

    planned = plan_trial({**options, **_size_of(options, theirs)}, stages_of(console))
    for note in planned.notes:
        console.note(note)
    found = describe(planned)
    if theirs is not None:
        baseline.check_comparable(found, theirs, Path(options["against"]))
    from svgen.bench import Trial, counted_hits, measure
    from svgen.stopwatch import Stopwatch

    trial = Trial(
        request=planned.request,
        schedules=planned.schedules,
        stages=options["only"] or STAGES,
        profile=Path(options["profile"]) if options["profile"] else None,
    )
    console.note(f"{found['model']} on {found['chip']}: up to about {options['budget']:g} s")
    with counted_hits() as hits:
        watch = Stopwatch(options["budget"], hits=hits)
        return {"schema": baseline.SCHEMA, **found, **measure(planned.pipeline, trial, watch)}


def _size_of(options: Mapping[str, Any], theirs: Mapping[str, Any] | None) -> dict[str, Any]:
    """The size of the run to compare with, where flags say nothing else."""
    if theirs is None:
        return {}
    size = {"res": (theirs["width_px"], theirs["height_px"]), "frames": theirs["frames"]}
    return {name: options[name] or value for name, value in size.items()}


def _compare(
    console: Console, record: Mapping[str, Any], theirs: Mapping[str, Any], path: Path
) -> dict[str, Any]:
    """Compare with a saved run, and say aloud what differs besides the times."""
    differs = baseline.check_comparable(record, theirs, path)
    for one in differs:
        console.warn(f"compared with another {one}")
    rows = baseline.compare(record, theirs)
    return {"file": str(path), "differs": differs, "rows": rows}


@click.command()
@click.option("--model", default="auto", metavar="NAME|PATH", help="Need not be on disk.")
@click.option("--res", type=RESOLUTION, metavar="SIZE", help="Default: the model's own.")
@click.option("--preset", default="aggressive", show_default=True, metavar="NAME|FILE")
@click.option("--frames", type=int, metavar="N", help="Default: the model's own.")
@click.option("--steps", type=int, metavar="N", help="Of the run that is added up.")
@click.option(
    "--budget",
    type=click.FloatRange(5, 86_400),
    default=BUDGET_S,
    show_default=True,
    metavar="SECONDS",
    help="Frames are halved until this suffices.",
)
@click.option("--only", type=click.Choice(STAGES), multiple=True, help="Time these stages alone.")
@click.option("--save", metavar="FILE", help="Write the result as JSON.")
@click.option("--overwrite", is_flag=True, help="Replace an existing file.")
@click.option("--against", metavar="FILE", help="Compare with a result that was saved.")
@click.option("--read", metavar="FILE", help="Time nothing: take a result that was saved.")
@click.option("--tpu", metavar="NAME-N", help="Add what svgen plan predicts for it: v6e-8.")
@click.option("--profile", metavar="DIR", help="Write a trace of two steps for xprof.")
@rare_option("--mesh", default="auto", metavar="CFGxSEQ", help="How chips share the run.")
@rare_option("--dtype", type=click.Choice(DTYPES), default="auto", help="Of weights and products.")
@device_option
@with_console
@help_all_option
def command(console: Console, **options: Any) -> None:
    """Time the programs of a run on this machine: each stage, dense and sparse steps, attention.

    Weights are not needed: a model that is not on disk is timed by its sizes. Compile time is told
    apart; every time is the median of several, warm, with its spread.

    \b
    Examples:
      svgen bench
      svgen bench --res 480p --save before.json
      svgen bench --res 480p --against before.json
    """
    theirs = _check(options)
    if options["read"]:
        record = baseline.read(Path(options["read"]))
    else:
        record = _measure(console, options, theirs)
    if options["tpu"]:
        record["predicted"] = _predict(console, options)
    if theirs is not None:
        record["against"] = _compare(console, record, theirs, Path(options["against"]))
    if not console.json:
        for line in table(record):
            console.note(line)
    console.result(record, [json.dumps(record, allow_nan=False)])
    if options["save"]:  # last: a full disk costs the file, not the times
        baseline.save(Path(options["save"]), record, overwrite=options["overwrite"])
