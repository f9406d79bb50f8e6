"""`svgen generate --prompts FILE.jsonl`: a request a line, each an object whose keys are flags.

    {"prompt": "a red ball", "seed": 3, "output": "ball.mp4"}
    {"prompt": "a blue cube", "res": "480p", "preset": "aggressive"}

Flags of the command line hold for every line that does not say otherwise. A seed counts up from
`--seed` (or 0) line by line, so that a rerun knows what is finished: a video whose recipe is the
request. All texts are embedded first; then the transformer and the VAE stay loaded, and what is
compiled is used again.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from svgen.cli.endings import explain
from svgen.cli.hosts import hosts_of
from svgen.cli.leftovers import is_finished, is_unswept, sweep
from svgen.cli.lines import read_line
from svgen.cli.output import Console
from svgen.cli.placing import STDOUT, plan_output
from svgen.cli.planning import (
    EXISTING,
    Collected,
    Run,
    describe,
    open_pipeline,
    plan_run,
)
from svgen.cli.prompts import read_text
from svgen.cli.settings import FLAG
from svgen.config import Request
from svgen.errors import InternalError, Interrupted, NumericalError, SvgenError, UsageError
from svgen.lock import check_free

if TYPE_CHECKING:
    from svgen.pipeline import Pipeline, Stage

GROUPS = (("frames", "duration"), EXISTING)  # a line that says one of them takes back the others
SEEDS = 2**63


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One line of the file, checked."""

    line: int
    run: Run
    options: Mapping[str, Any]
    finished: bool  # its video is there already


def run_batch(console: Console, options: Mapping[str, Any], origins: Mapping[str, str]) -> None:
    """Check all lines, then make their videos, one after the other; give one result for all."""
    from svgen.cli.execution import stages_of

    items = plan_items(options, origins, stages_of(console))
    for text in dict.fromkeys(text for item in items for text in item.run.warnings):
        console.warn(text)
    if options["dry_run"]:
        rows = [_row(item, "planned") | describe(item.run) for item in items]
        console.result({"items": rows, "dry_run": True}, [row["output"] for row in rows])
        return
    for item in items:
        if not item.finished:
            check_free(item.run.output)
    rows = make_videos(console, items, options)
    counts = {
        state: sum(row["state"] == state for row in rows) for state in ("done", "skipped", "failed")
    }
    console.result({**counts, "items": rows}, error=_partial(rows))


# Planning.


def plan_items(
    options: Mapping[str, Any], origins: Mapping[str, str], stage: "Stage"
) -> list[Item]:
    """Check every line of the file as if it were run alone; raises all problems at once, those of
    a line as E_PROMPTS.
    """
    path, problems = Path(options["prompts"]), Collected()
    _check_flags(options)
    opener = cache(open_pipeline)
    items = []
    for index, (line, text) in enumerate(_lines(path)):
        found = Collected()
        values = found.get(partial(read_line, text))
        if values is not None:
            merged, said = _merged(options, origins, values, index)
            item = found.get(partial(_item, line, index, (merged, said), (stage, opener)))
            items += [item] if item else []
        told = {(one.code, one.message) for one in problems}
        new = [_of_line(one, path, line) for one in found]
        problems += [one for one in new if (one.code, one.message) not in told]
    problems += _clashes(items, path)
    problems.raise_all()
    return items


def _check_flags(options: Mapping[str, Any]) -> None:
    """Raise what excludes a batch."""
    problems = Collected()
    hint = "leave it out"
    if options["prompt"] is not None:
        why = "a batch takes its prompts from the file"
        problems.append(
            UsageError("E_USAGE", "PROMPT and --prompts exclude each other", why=why, hint=hint)
        )
    if options["output"] == STDOUT:
        why, hint = "the standard output carries one thing", "-o FOLDER/"
        problems.append(UsageError("E_OUTPUT_NAME", "-o - and --prompts", why=why, hint=hint))
    if problems.get(lambda: hosts_of(options)):
        why, hint = "one process goes on past an item that failed alone", "run it on one host"
        problems.append(UsageError("E_USAGE", "--prompts on several hosts", why=why, hint=hint))
    problems.raise_all()


def _lines(path: Path) -> list[tuple[int, str]]:
    """The lines that hold text, with their numbers from 1."""
    lines = enumerate(read_text(path).split("\n"), 1)
    found = [(number, line.strip()) for number, line in lines if line.strip()]
    if not found:
        why, hint = "no line of it has text", '{"prompt": "a cat", "seed": 3}'
        raise UsageError("E_PROMPTS", f"{path} holds no request", why=why, hint=hint)
    return found


def _merged(
    options: Mapping[str, Any], origins: Mapping[str, str], values: Mapping[str, Any], index: int
) -> tuple[dict[str, Any], dict[str, str]]:
    """The options of one line over those of the command line, and where each came from."""
    merged = dict(options)
    for group in GROUPS:
        if any(values.get(name) not in (None, False) for name in group):
            merged |= dict.fromkeys(group)
    merged["seed"] = ((options["seed"] or 0) + index) % SEEDS
    said = {**origins, **dict.fromkeys((*values, "seed"), FLAG)}
    return {**merged, **values}, said


def _item(
    line: int,
    index: int,
    settled: tuple[dict[str, Any], dict[str, str]],  # of `_merged`
    opening: tuple["Stage", Any],  # stages, and what opens a pipeline
) -> Item:
    """Plan one line. A finished video is not in the way of itself."""
    (options, said), (stage, opener) = settled, opening
    finished = False

    def place(options: Mapping[str, Any], request: Request, *, sized: bool = True) -> Path:
        nonlocal finished
        try:
            return plan_output(options, request, sized=sized, index=index)
        except UsageError as error:
            path = Path(error.details.get("path", ""))
            finished = error.code == "E_OUTPUT_EXISTS" and is_finished(path, request)
            if not finished:
                raise
            return path

    run = plan_run(options, said, stage, place=place, opener=opener)
    skipped = bool(options["skip_existing"]) and run.output.exists()
    return Item(line=line, run=run, options=options, finished=finished or skipped)


def _of_line(problem: SvgenError, path: Path, line: int) -> SvgenError:
    """Say which line a problem is in; what is no line's own stays as it is."""
    if not isinstance(problem, UsageError):
        return problem
    details = {**problem.details, "line": line, "code": problem.code}
    message = f"{path} line {line}: {problem.message}"
    return UsageError("E_PROMPTS", message, why=problem.why, hint=problem.hint, details=details)


def _clashes(items: list[Item], path: Path) -> list[SvgenError]:
    """Say which lines would write the same file."""
    first: dict[Path, int] = {}
    problems: list[SvgenError] = []
    for item in items:
        output = item.run.output.absolute()
        if output in first:
            what = f"{path} line {item.line}: it writes {item.run.output}, as line {first[output]}"
            hint = '"output": "{index}.mp4", or another seed'
            why = "each video has a file of its own"
            problems.append(UsageError("E_PROMPTS", what, why=why, hint=hint))
        first.setdefault(output, item.line)
    return problems


# Running.


def make_videos(
    console: Console, items: list[Item], options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Make the videos that are not there yet; an item that fails does not stop the others."""
    pipelines = _pipelines(console, items, options)
    wanted = [item for item in items if not item.finished]
    texts: dict[int, Any] = {}
    failed: dict[int, SvgenError] = {}
    with _kept(pipelines):
        for item in wanted:
            pipeline = pipelines[_key(item)]
            with _surviving(failed, item):
                pipeline.check(item.run.request)
                texts[item.line] = pipeline.embed(item.run.request)
    rows = []
    with _kept(pipelines):
        for item in items:
            row = _row(item, "skipped" if item.finished else "done")
            if item.finished and is_unswept(item.run.output, item.run.request):
                with _surviving(failed, item):
                    _sweep(console, item)
            if not item.finished and item.line not in failed:
                with _surviving(failed, item):
                    row |= _make(console, item, pipelines[_key(item)], texts.pop(item.line))
            if item.line in failed:
                row |= {"state": "failed", "error": failed[item.line].as_json()}
            _say(console, row, failed.get(item.line))
            rows.append(row)
    return rows


def _key(item: Item) -> tuple[str, str]:
    return item.run.model, item.run.request.dtype


def _pipelines(
    console: Console, items: list[Item], options: Mapping[str, Any]
) -> dict[tuple[str, str], "Pipeline"]:
    """One pipeline for each model of the batch; models that are not on disk are fetched."""
    from svgen.cli.execution import open_fetched

    found = {}
    for item in items:
        if not item.finished and _key(item) not in found:
            fetched = item.run.pipeline or open_fetched(console, *_key(item), options)
            found[_key(item)] = fetched
    return found


def _kept(pipelines: Mapping[Any, "Pipeline"]) -> ExitStack:
    """Keep what all pipelines load and compile, until the block ends."""
    with ExitStack() as stack:
        for pipeline in pipelines.values():
            stack.enter_context(pipeline.keeping())
        return stack.pop_all()


@contextmanager
def _surviving(failed: dict[int, SvgenError], item: Item) -> Iterator[None]:
    """Keep what an item raises, but for what ends the whole command."""
    try:
        yield
    except Interrupted:
        raise
    except Exception as error:
        failed[item.line] = _alone(explain(error))


def _alone(problem: SvgenError) -> SvgenError:
    """An error without the calls that it passed through: they hold weights, latents and frames."""
    problem.__traceback__ = problem.__cause__ = problem.__context__ = None
    if isinstance(problem, NumericalError):
        problem.state = None
    return problem


def _make(console: Console, item: Item, pipeline: "Pipeline", text: Any) -> dict[str, Any]:
    """Make one video; returns what its row says of it."""
    from svgen.cli.execution import make_video, recipe_of
    from svgen.lock import sole_run

    request, options, recipe = item.run.request, item.options, None
    console.note(f"line {item.line}: seed {request.seed}, {item.run.output}")
    told = len(console.warnings)
    if not options["no_metadata"]:
        recipe = recipe_of(request, with_prompt=not options["no_prompt_metadata"])
    with sole_run(item.run.output):
        written, _, calls = make_video(
            console,
            pipeline,
            request,
            item.run.output,
            keep_latents=options["keep_latents"],
            preview_every=options["preview_every"],
            text=text,
            save_every=options["save_every"],
            recipe=recipe,
            overwrite=options["overwrite"],
        )
    return {"bytes": written.size_bytes, "calls": calls, "warnings": console.warnings[told:]}


def _sweep(console: Console, item: Item) -> None:
    keep = item.options["keep_latents"]
    sweep(console, item.run.output, item.run.request, keep_latents=keep)


def _row(item: Item, state: str) -> dict[str, Any]:
    run = item.run
    where = {"line": item.line, "state": state, "output": str(run.output)}
    return {**where, "seed": run.request.seed, "request": run.request.as_json()}


def _say(console: Console, row: Mapping[str, Any], error: SvgenError | None) -> None:
    """Give the line of an item that has ended, and why it failed."""
    console.line(f"{row['state']:<8} {row['output']}")
    console.event("item", **{name: row[name] for name in ("line", "state", "output")})
    if error:
        hint = f" ({error.hint})" if error.hint else ""
        console.note(f"line {row['line']} failed: {error.code}: {error.message}{hint}")


def _partial(rows: Sequence[Mapping[str, Any]]) -> SvgenError | None:
    """The error of a batch in which something failed."""
    lines = [row["line"] for row in rows if row["state"] == "failed"]
    if not lines:
        return None
    return InternalError(
        "E_PARTIAL",
        f"{len(lines)} of {len(rows)} videos failed: line {', '.join(map(str, lines))}",
        why=next(row["error"]["message"] for row in rows if row["state"] == "failed"),
        hint="the same command makes those that are missing",
        details={"lines": lines},
    )
