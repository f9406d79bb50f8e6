"""What `generate` and `decode` do once everything is resolved: run the programs, keep the latents,
write the MP4.
"""

import shlex
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from svgen import __version__
from svgen.cli.endings import explain
from svgen.cli.hosts import PeerWatch, lost, shared_state
from svgen.cli.output import NORMAL, Console
from svgen.cli.resolve import recipe_model
from svgen.cli.stopping import Stop, stopping_between_steps
from svgen.cli.watch import Watch
from svgen.config import Request
from svgen.errors import SvgenError
from svgen.hub.source import DEMO_NAME
from svgen.partial import write_error
from svgen.resume import latents_path, load_state, save_latents, save_state, state_path
from svgen.video import Written, write_video

if TYPE_CHECKING:
    from svgen.cli.planning import Run
    from svgen.pipeline import Pipeline, Stage
    from svgen.scheduler import DenoiseState

COMPILING = "compiling (first run; cached afterwards)"
# Stages that wait for the compiler.
COMPILED = ("compile the step", "encode the prompt", "look at the heads")
SAVE_EVERY_S = 60.0  # at most so much of a run is lost; a state is five times the latents
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
        raise write_error(Path("a temporary folder"), error) from error
    target = folder / path.name
    try:
        yield target
        console.send(target)
    finally:
        with suppress(OSError):
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
    def watched(self, saved: "Saved") -> Iterator[None]:
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


class Saved:
    """The state of a run on disk: read at its start, written now and then, deleted at its end."""

    def __init__(self, console: Console, path: Path, request: Request, team: Team):
        self.console, self.path, self.request, self.team = console, path, request, team
        self.written = time.monotonic()
        self.last: dict[str, np.ndarray] = {}  # in a team, whose buffers may die with a peer

    def read(self, pipeline: "Pipeline") -> "DenoiseState | None":
        """The state to go on from, if a former run has left one."""
        from svgen.scheduler import DenoiseState

        shape = pipeline.latents_shape(self.request)
        found = load_state(self.path, self.request, shape) if self.team.writes else None
        if self.team.count > 1:  # all go on where the one that writes can
            found = shared_state(found, shape)
        if found is None:
            return None
        self.console.note(
            f"going on after step {int(found['step'])} of {self.request.steps}: {self.path}"
        )
        return DenoiseState(**found)

    def write(self, state: "DenoiseState", *, least_s: float = 0.0) -> None:
        """Write a state, unless the last one is younger than `least_s`."""
        if self.team.count > 1:
            self.last = {name: np.array(value) for name, value in state._asdict().items()}
        if time.monotonic() - self.written < least_s or not self.team.writes:
            return
        self._save(state._asdict())

    def _save(self, state: Mapping[str, np.ndarray]) -> None:
        save_state(self.path, state, self.request)
        self.written = time.monotonic()
        self.console.event("saved", kind="state", path=self.path)

    def explain(self, error: BaseException, state: "DenoiseState | None" = None) -> SvgenError:
        """Say how to go on after an error: after `state`, which is saved, or the last one that is
        known.
        """
        problem = explain(error)
        if state is None and self.last:
            self._save(self.last)
        step = int(state.step if state is not None else self.last.get("step", 0))
        if step:
            problem.details["state"] = str(self.path)
            again = f"the same command with --seed {self.request.seed} goes on after step {step}"
            problem.hint = f"{problem.hint}; {again}" if problem.hint else again
        return problem

    def delete(self) -> None:
        """Sweep up after a run that has ended well."""
        with suppress(OSError):
            self.path.unlink()


def denoise(
    console: Console, pipeline: "Pipeline", request: Request, saved: Saved, text: Any = None
) -> tuple[np.ndarray, dict[str, int]]:
    """Embed (unless the `text` is given) and denoise one request; returns its latents on the host,
    and how many calls of heads ran by each route, in this process.
    """
    from svgen.attention.attend import count_calls
    from svgen.attention.masks import ROUTES

    begin = saved.read(pipeline)
    done = int(begin.step) if begin else 0
    text = pipeline.embed(request) if text is None else text
    start, others = time.perf_counter(), sum(console.timings.values())
    latents, calls = begin.latents if begin else None, np.zeros(len(ROUTES), np.int64)
    stop = None
    with console.bar(request.steps, "denoise") as bar, ExitStack() as signals:
        if done:
            bar.update(done)
        for step in pipeline.denoise(request, text, begin):
            # Loading and compiling, before the first step, stop at once.
            stop = stop or signals.enter_context(stopping_between_steps())
            latents = step.state.latents
            calls += np.asarray(count_calls(step.record))
            bar.update()
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
    if not stop.wanted:
        saved.write(state, least_s=SAVE_EVERY_S)
        return
    saved.write(state)
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
    **options: Any,
) -> tuple[Written | None, Path, dict[str, int]]:
    """Run one request from prompt (or its embedded `text`) to MP4; also returns where its latents
    are kept, and its calls by route. The latents are saved before decoding, and deleted when the
    MP4 is whole.

    Of a team, one process writes; the others work with it and return no file.
    """
    team = team or Team(console)
    saved = Saved(console, state_path(target, request), request, team)
    with team.watched(saved):
        latents, calls = denoise(console, pipeline, request, saved, text)
        if not team.writes:
            for _ in pipeline.decode(latents, request):
                pass
            team.wait()
            return None, target, calls
        saved.last = {}  # the latents are worth more
        kept = latents_path(target, request)
        save_latents(kept, latents, request)
        saved.delete()
        console.detail(f"latents saved: {kept}")
        console.event("saved", kind="latents", path=kept)
        with keeping(kept, request):
            written = decode(console, pipeline, latents, request, target, **options)
        team.wait()
    if not keep_latents:
        with suppress(OSError):
            kept.unlink()
    return written, kept, calls


@contextmanager
def keeping(latents: Path, request: Request) -> Iterator[None]:
    """Say, with whatever ends the block, that the latents are kept and how to decode them."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        problem = explain(error)
        problem.details["latents"] = str(latents)
        words = ["svgen", "decode", str(latents), "-o", "NAME.mp4"]
        if not _is_named(request):  # a folder has to be named again
            words += ["--model", request.model]
        again = f"the latents are kept: {shlex.join(words)}"
        problem.hint = f"{problem.hint}; {again}" if problem.hint else again
        raise problem from error


def _is_named(request: Request) -> bool:
    """Whether `svgen decode` takes the model from the latents."""
    with suppress(SvgenError):
        return bool(recipe_model(request.as_json()))
    return False
