"""What `profile-heads` checks before anything is loaded: which heads it shall show, which files it
shall write, and whether the schedule routes anything.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from svgen.cli.planning import Collected
from svgen.config import Request
from svgen.errors import MachineError, UsageError

if TYPE_CHECKING:
    from svgen.pipeline import Pipeline

PRESET = "aggressive"
SUFFIXES = (".json", ".npz")
MOST_HEADS = 12


class Heads(click.ParamType):
    """`L:H,L:H`: heads by their layers and numbers, both from 0."""

    name = "heads"

    def convert(self, value: Any, param: click.Parameter | None, ctx: Any) -> tuple:
        """Read a list of heads; naming one twice is naming it once."""
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in str(value).split(",")]
        matches = [re.fullmatch(r"([0-9]{1,4}):([0-9]{1,4})", part) for part in parts]
        found = tuple(dict.fromkeys((int(one[1]), int(one[2])) for one in matches if one))
        if all(matches) and len(found) <= MOST_HEADS:
            return found
        raise UsageError(
            "E_VALUE",
            f"--heads {str(value)[:60]} is no list of heads",
            why=f"a head is LAYER:HEAD, both counted from 0, and {MOST_HEADS} fit in a picture",
            hint="--heads 0:0,1:3",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Targets:
    """The files to write."""

    dump: Path | None
    plot: Path | None
    views: Path | None  # beside `plot`, with --heads

    @property
    def all(self) -> list[Path]:
        """Those that were asked for."""
        return [path for path in (self.dump, self.plot, self.views) if path]


def _suffix_problem(flag: str, path: Path, suffixes: Sequence[str]) -> UsageError:
    kind = path.suffix or "no suffix"
    return UsageError(
        "E_OUTPUT_NAME",
        f"{flag} {path} ends in {kind}",
        why=f"the suffix says what is written: {' or '.join(suffixes)}",
        hint=" or ".join(f"{flag} {path.with_suffix('').name or 'heads'}{one}" for one in suffixes),
    )


def targets_of(options: Mapping[str, Any]) -> Targets:
    """What is written where; raises every problem with it."""
    from svgen.partial import check_output

    dump, plot = (Path(options[name]) if options[name] else None for name in ("output", "plot"))
    views = plot.with_name(f"{plot.stem}-heads.png") if plot and options["heads"] else None
    targets, problems = Targets(dump=dump, plot=plot, views=views), Collected()
    for flag, path, suffixes in (("-o", dump, SUFFIXES), ("--plot", plot, (".png",))):
        if path and path.suffix not in suffixes:
            problems.append(_suffix_problem(flag, path, suffixes))
    if not problems:
        for path in targets.all:
            problems.get(partial(check_output, path, overwrite=options["overwrite"]))
    if options["heads"] and not plot:
        why = "heads are drawn into a picture beside that of --plot"
        problems.append(
            UsageError("E_USAGE", "--heads needs --plot", why=why, hint="--plot heads.png")
        )
    if plot and not find_spec("matplotlib"):
        why, hint = "--plot draws with it", "pip install matplotlib"
        problems.append(MachineError("E_LIBRARY", "matplotlib is missing", why=why, hint=hint))
    problems.raise_all()
    return targets


def routed(request: Request, everywhere: bool) -> Request:
    """The request, routed everywhere if that is wanted; raises if nothing would be routed."""
    schedule = request.sparsity
    if schedule is None:
        raise UsageError(
            "E_PRESET",
            f"the schedule {request.schedule} routes no head",
            why="all of its attention is dense",
            hint=f"--preset {PRESET}, or a preset with [sparsity]",
        )
    if everywhere:
        return replace(request, sparsity=replace(schedule, dense_steps=0, dense_layers=0))
    if schedule.dense_steps >= request.steps:
        raise UsageError(
            "E_VALUE",
            f"none of {request.steps} steps is routed",
            why=f"the schedule leaves the first {schedule.dense_steps} dense",
            hint="--route-all, or more --steps",
        )
    return request


def check_model(pipeline: "Pipeline", request: Request, heads: Sequence[tuple[int, int]]) -> None:
    """Raise unless the model has these heads and the schedule routes some layer."""
    spec, schedule, problems = pipeline.specs.transformer, request.sparsity, Collected()
    missing = [one for one in heads if one[0] >= spec.layers or one[1] >= spec.heads]
    if missing:
        problems.append(
            UsageError(
                "E_VALUE",
                f"--heads {','.join(f'{layer}:{head}' for layer, head in missing)}: not there",
                why=f"the model has the layers 0 to {spec.layers - 1} of heads 0 to "
                f"{spec.heads - 1}",
                hint=f"--heads {spec.layers - 1}:{spec.heads - 1}",
            )
        )
    if schedule and schedule.dense_layers >= spec.layers:
        problems.append(
            UsageError(
                "E_VALUE",
                f"none of {spec.layers} layers is routed",
                why=f"the schedule leaves the first {schedule.dense_layers} dense",
                hint="--route-all",
            )
        )
    problems.raise_all()
