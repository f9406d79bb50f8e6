"""What `generate` and `decode` do once everything is resolved: run the programs, keep the latents,
write the MP4.
"""

import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from svgen import __version__
from svgen.cli.hosts import PeerWatch, lost
from svgen.cli.memory import advised, check_memory
from svgen.cli.output import NORMAL, Console
from svgen.cli.previewing import Previews
from svgen.cli.saving import Saved
from svgen.cli.stopping import Stop, stopping_between_steps
from svgen.cli.watch import Watch
from svgen.config import Request
from svgen.hub.source import DEMO_NAME
from svgen.partial import write_error
from svgen.video import Written, write_video

if TYPE_CHECKING:
    from svgen.cli.planning import Run
    from svgen.pipeline import Pipeline, Stage
    from svgen.scheduler import DenoiseState

COMPILING = "compiling (first run; cached afterwards)"
# Stages that wait for the compiler.
COMPILED = ("compile the step", "encode the prompt", "look at the heads", "fit the previews")
PATIENCE_S = 1.0  # a wait that lasts longer is explained


def recipe_of(request: Request, *, with_prompt: bool = True) -> dict[str, Any]:
    """The recipe that an MP4 carries: `generate --from` repeats it."""
    values = request.as_json()
    if not with_prompt:
        values = {
            name: value for name, value in values.items() if name not in ("prompt", "negative")
        }
    return {"svgen": __version__, "request": values}


def say_run(console: Console, run: "Run", notes: Sequence[str] | None = None) -> None:
    """Tell what is about to run, and what may surprise about it; `notes` instead of its own."""
    request = run.request
    for warning in (*run.warnings, *run.resolved.warnings):
        console.warn(warning)
    for note in run.resolved.notes if notes is None else notes:
        console.note(note)
    if run.model == DEMO_NAME and run.origins["model"] == "device":
        console.note("no TPU is attached: the small model in the package makes this video")
    console.note(
        f"{run.model} on {run.device.platform}: {request.width_px}x{request.height_px}, "
        f"{request.frames} frames, {request.steps} steps, seed {request.seed}"
    )


def opened(console: Console, run: "Run", options: Mapping[str, Any]) -> "Pipeline":
    """The pipeline of a run; a model that is not on disk is fetched, and checked then."""
    if run.pipeline is not None:
        return run.pipeline
    pipeline = open_fetched(console, run.model, run.request.dtype, options)
    pipeline.check(run.request)
    check_memory(run.model, pipeline, run.request)
    pipeline.check_files()
    return pipeline


def open_fetched(
    console: Console, model: str, dtype: str, options: Mapping[str, Any]
) -> "Pipeline":
    """Fetch a model that is not on disk yet, and open it."""
    from svgen.cli.models import fetch
    from svgen.pipeline import Pipeline

    folder = fetch(console, model, offline=options["offline"], yes=options["yes"])
    return Pipeline(folder, dtype=dtype, stage=stages_of(console), mesh=options["mesh"])


@contextmanager
def target_of(console: Console, path: Path, *, to_stdout: bool) -> Iterator[Path]:
    """The file to write: the output itself, or a temporary one that is then sent to stdout."""
    if not to_stdout:
        yield path
        return
    try:
        folder = Path(tempfile.mkdtemp(prefix="svgen-"))
    except OSError as error:
        way = "set TMPDIR to another folder"
        raise write_error(Path("a temporary folder"), error, way) from error
    target, lost = folder / path.name, False
    try:
        yield target
        lost = True
        console.send(target)
        lost = False
    finally:
        with suppress(OSError):
            if not lost:  # else the video is what is left of the run
                target.unlink(missing_ok=True)
        with suppress(OSError):
            folder.rmdir()  # it stays if latents are kept in it


@contextmanager
def explained_wait(console: Console, text: str) -> Iterator[None]:
    """Say why nothing happens, if it takes longer than a moment."""
    timer = threading.Timer(PATIENCE_S, console.note, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def stages_of(console: Console) -> "Stage":
    """Like `console.stage`; one that takes longer than a moment is named without `-v` too."""

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        text = COMPILING if name in COMPILED else f"{name} ..."
        quiet = console.verbosity > NORMAL and name not in COMPILED  # it is named anyway
        with console.stage(name), nullcontext() if quiet else explained_wait(console, text):
            yield

    return stage


class Team:
    """The processes that make one video: this one of them, and whether it writes."""

    def __init__(self, console: Console, count: int = 1, index: int = 0):
        self.console, self.count, self.writes = console, count, index == 0

    @contextmanager
    def watched(self, saved: Saved) -> Iterator[None]:
        """End this process, its state saved, when another one dies in the block.

        Whoever waits for a dead process waits for ever, or gets an error of no meaning.
        """
        if self.count == 1:
            yield
            return

        def end(why: str) -> None:
            self.console.leave(saved.explain(lost(why)))

        watch = PeerWatch(self.count, end)
        watch.start()
        try:
            yield
        except RuntimeError as error:  # of a collective that lacks a member, most likely
            if "RESOURCE_EXHAUSTED" in str(error):
                raise
            end(str(error).strip().splitlines()[0][:300])
        finally:
            watch.end()

    def wait(self) -> None:
        """Wait until all are done, so that nobody who leaves early looks dead."""
        if self.count > 1:
            from jax.experimental.multihost_utils import sync_global_devices

            sync_global_devices("svgen is done")


def denoise(
    console: Console,
    pipeline: "Pipeline",
    request: Request,
    parts: tuple[Saved, Previews, Stop],
    *,
    text: Any = None,
) -> tuple[np.ndarray, dict[str, int]]:
    """Embed (unless the `text` is given) and denoise one request; returns its latents on the host,
    and how many calls of heads ran by each route, in this process.
    """
    from svgen.attention.attend import count_calls
    from svgen.attention.masks import ROUTES

    saved, previews, stop = parts
    begin = saved.read(pipeline)
    done = int(begin.step) if begin else 0
    text = pipeline.embed(request) if text is None else text
    previews.prepare(pipeline, request)
    start, others = time.perf_counter(), sum(console.timings.values())
    latents, calls = begin.latents if begin else None, np.zeros(len(ROUTES), np.int64)
    with console.bar(request.steps, "denoise") as bar, previews, saved.good_kept():
        if done:
            bar.update(done)
        for step in pipeline.denoise(request, text, begin):
            stop.listen()  # loading and compiling, before the first step, stop at once
            latents = step.state.latents
            calls += count_calls(step.record)
            bar.update()
            previews.see(step.state)
            if request.sparsity and int(step.state.step) == request.sparsity.dense_steps:
                bar.restart()  # sparse steps take another time than dense ones
            if int(step.state.step) < request.steps:
                _pause(saved, step.state, stop)
    result = np.array(latents)
    others = sum(console.timings.values()) - others  # loading and compiling have their own
    console.timings["denoise"] = time.perf_counter() - start - others
    return result, dict(zip(ROUTES, calls.tolist(), strict=True))


def _pause(saved: Saved, state: "DenoiseState", stop: Stop) -> None:
    """Between two steps: save the state if it is time to, and stop if that is wanted."""
    saved.write(state)
    if not stop.wanted:
        return
    if saved.step < int(state.step):
        saved.write(state, now=True)
    try:
        stop.raise_if_wanted()
    except KeyboardInterrupt as error:
        raise saved.explain(error, state) from error


def _watched(console: Console, chunks: Iterator[np.ndarray], frames: int) -> Iterator[np.ndarray]:
    """Pass frames on, count them, and warn at the end of what a failed run looks like."""
    watch, compiled = Watch(), 0
    with console.bar(frames, "decode", "frame") as bar:
        while True:
            with explained_wait(console, COMPILING) if compiled < 2 else nullcontext():
                chunk = next(chunks, None)
            if chunk is None:
                break
            compiled += 1  # the first latent frame and the later ones have a program each
            watch.see(chunk)
            yield chunk
            bar.update(len(chunk))
    for warning in watch.warnings():
        console.warn(warning)


def decode(
    console: Console,
    pipeline: "Pipeline",
    latents: np.ndarray,
    request: Request,
    target: Path,
    **options: Any,
) -> Written:
    """Decode latents straight into an MP4."""
    frames = _watched(console, pipeline.decode(latents, request), request.frames)
    with console.stage("decode and encode"):
        written = write_video(
            frames,
            target,
            fps=request.fps,
            width_px=request.width_px,
            height_px=request.height_px,
            frame_count=request.frames,
            **options,
        )
    console.event("saved", kind="video", path=target, bytes=written.size_bytes)
    return written


def make_video(
    console: Console,
    pipeline: "Pipeline",
    request: Request,
    target: Path,
    *,
    keep_latents: bool,
    team: Team | None = None,
    text: Any = None,
    save_every: float | None = None,
    resumable: bool = True,
    preview_every: int | None = None,
    **options: Any,
) -> tuple[Written | None, Path, dict[str, int]]:
    """Run one request from prompt (or its embedded `text`) to MP4; also returns where its latents
    are kept, and its calls by route (none, if a former run has taken all steps). The latents are
    saved before decoding, and deleted when the MP4 is whole.

    Of a team, one process writes; the others work with it and return no file.
    """
    team = team or Team(console)
    saved = Saved(console, target, request, team, every_s=save_every, resumable=resumable)
    previews = Previews(console, target, preview_every if team.writes else None)
    advice = advised(pipeline, request)
    with saved.explaining(), team.watched(saved), advice, stopping_between_steps() as stop:
        latents, calls = saved.read_latents(pipeline), {}
        if latents is None:
            parts = (saved, previews, stop)
            latents, calls = denoise(console, pipeline, request, parts, text=text)
            saved.write_latents(latents)
        stop.end()
        with saved.keeping_latents():
            stop.raise_if_wanted()
            written = None
            if team.writes:
                written = decode(console, pipeline, latents, request, target, **options)
            else:  # work with the one that writes
                deque(pipeline.decode(latents, request), maxlen=0)
        team.wait()
    previews.delete()
    saved.delete_state()
    if team.writes:
        saved.sweep(keep_latents=keep_latents)
    return written, saved.latents_path, calls
