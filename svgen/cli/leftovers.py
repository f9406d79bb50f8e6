"""What runs that were stopped or killed have left beside an output, and which of them this run may
go on from or sweep up.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any

from svgen.cli.naming import output_path
from svgen.cli.output import Console
from svgen.cli.placing import STDOUT, plan_output
from svgen.cli.resolve import Resolved
from svgen.config import Request
from svgen.errors import SvgenError, UsageError
from svgen.lock import lock_path, sole_run
from svgen.recipe import read_recipe
from svgen.untrusted import check_safetensors

LOOKED_AT = 200  # files of a folder
DRAWN_SEEDS = 2**32
STATE_SUFFIX, LATENTS_SUFFIX = ".state.safetensors", ".latents.safetensors"


def is_finished(path: Path, request: Request) -> bool:
    """Whether a file is the video of this request: its recipe says so."""
    try:
        return read_recipe(path)["request"] == json.loads(json.dumps(request.as_json()))
    except SvgenError:
        return False


# A run that was killed between the rename of its MP4 and its end.


def place(options: Mapping[str, Any], request: Request, *, sized: bool = True) -> Path:
    """Like `plan_output`, but a video that only was not swept up after is in nobody's way."""
    try:
        return plan_output(options, request, sized=sized)
    except UsageError as error:
        path = Path(error.details.get("path", ""))
        if error.code == "E_OUTPUT_EXISTS" and is_unswept(path, request):
            return path
        raise


def is_unswept(path: Path, request: Request) -> bool:
    """Whether a killed run has finished this video: its lock is still there."""
    return lock_path(path).exists() and is_finished(path, request)


def sweep(console: Console, video: Path, request: Request, *, keep_latents: bool) -> None:
    """Do what the killed run had left to do."""
    from svgen.cli.execution import Team
    from svgen.cli.saving import Saved

    with sole_run(video):
        saved = Saved(console, video, request, Team(console))
        saved.delete_state()
        saved.sweep(keep_latents=keep_latents)
    console.note(f"{video} is whole, made by a run that was killed later: nothing to do")


# A run whose seed was drawn, and that is started again by the same command.


def adopt_seed(options: Mapping[str, Any], resolved: Resolved) -> Resolved:
    """Take the seed of an unfinished run of the same request instead of a drawn one, where exactly
    one lies beside the output; else say how the states there differ.
    """
    if options["output"] == STDOUT or options.get("auto_number"):
        return resolved
    found, notes = {}, []
    for path, metadata in _leftovers(options, resolved.request):
        seed = _seed_of(path, metadata, resolved.request)
        if seed is not None and _belongs(path, replace(resolved.request, seed=seed), options):
            found[seed] = path
    if len(found) == 1:
        ((seed, path),) = found.items()
        request = replace(resolved.request, seed=seed)
        notes = [f"going on with seed {seed}, which an unfinished run has drawn: {path}"]
        origin = {**resolved.origin, "seed": "unfinished run"}
        return replace(resolved, request=request, origin=origin, notes=(*resolved.notes, *notes))
    if found:
        seeds = ", ".join(map(str, found))
        notes = [f"unfinished runs lie beside the output; --seed goes on with one: {seeds}"]
    return replace(resolved, notes=(*resolved.notes, *notes))


def _leftovers(
    options: Mapping[str, Any], request: Request
) -> Iterator[tuple[Path, Mapping[str, str]]]:
    """States and latents in the folder of the output, with the metadata of each."""
    from safetensors import SafetensorError, safe_open

    suffixes = (STATE_SUFFIX,) if options["keep_latents"] else (STATE_SUFFIX, LATENTS_SUFFIX)
    try:
        folder = output_path(options["output"], request, today=date.today()).parent
        names = sorted(name for name in os.listdir(folder) if name.endswith(suffixes))
    except (OSError, SvgenError):  # the output's own check will say it
        return
    for path in islice((folder / name for name in names), LOOKED_AT):
        try:
            check_safetensors(path)
            with safe_open(path, framework="np") as file:
                yield path, file.metadata() or {}
        except (OSError, SafetensorError):
            continue


def _seed_of(path: Path, metadata: Mapping[str, str], request: Request) -> int | None:
    """The seed of a file whose request differs from this one in nothing else."""
    from svgen.resume import differences

    if set(differences(request, metadata)) != {"seed"}:
        return None
    seed = json.loads(metadata["request"]).get("seed")
    return seed if type(seed) is int and 0 <= seed < DRAWN_SEEDS else None


def _belongs(path: Path, request: Request, options: Mapping[str, Any]) -> bool:
    """Whether a run of this request, to the same output, would go on from a file."""
    from svgen.resume import latents_path, state_path

    video = output_path(options["output"], request, today=date.today())
    paths = (state_path(video, request), latents_path(video, request))
    return path in paths and not video.exists()
