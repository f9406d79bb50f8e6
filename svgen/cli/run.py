"""What `generate` and `decode` do once everything is resolved: run the programs, keep the latents,
write the MP4.
"""

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from svgen import __version__
from svgen.cli.output import Console
from svgen.config import Request
from svgen.errors import SvgenError
from svgen.resume import latents_path, save_latents
from svgen.video import Written, write_video

if TYPE_CHECKING:
    from svgen.pipeline import Pipeline


def recipe_of(request: Request, *, with_prompt: bool = True) -> dict[str, Any]:
    """The recipe that an MP4 carries: `generate --from` repeats it."""
    values = request.as_json()
    if not with_prompt:
        values = {
            name: value for name, value in values.items() if name not in ("prompt", "negative")
        }
    return {"svgen": __version__, "request": values}


def denoise(console: Console, pipeline: "Pipeline", request: Request) -> np.ndarray:
    """Embed and denoise one request; returns its latents on the host."""
    text = pipeline.embed(request)
    start = time.perf_counter()
    with console.bar(request.steps, "denoise") as bar:
        for state in pipeline.denoise(request, text):
            latents = state.latents
            bar.update()
    result = np.asarray(latents)
    console.timings["denoise"] = time.perf_counter() - start
    return result


def _counted(console: Console, chunks: Iterator[np.ndarray], frames: int) -> Iterator[np.ndarray]:
    with console.bar(frames, "decode", "frame") as bar:
        for chunk in chunks:
            yield chunk
            bar.update(len(chunk))


def decode(
    console: Console,
    pipeline: "Pipeline",
    latents: np.ndarray,
    request: Request,
    target: Path,
    **options: Any,
) -> Written:
    """Decode latents straight into an MP4."""
    frames = _counted(console, pipeline.decode(latents), request.frames)
    with console.stage("decode and encode"):
        return write_video(
            frames,
            target,
            fps=request.fps,
            width_px=request.width_px,
            height_px=request.height_px,
            frame_count=request.frames,
            **options,
        )


def make_video(
    console: Console,
    pipeline: "Pipeline",
    request: Request,
    target: Path,
    *,
    keep_latents: bool,
    **options: Any,
) -> tuple[Written, Path]:
    """Run one request from prompt to MP4. The latents are saved before decoding, and deleted when
    the MP4 is whole.
    """
    latents = denoise(console, pipeline, request)
    kept = latents_path(target, request)
    save_latents(kept, latents, request)
    console.detail(f"latents saved: {kept}")
    try:
        written = decode(console, pipeline, latents, request, target, **options)
    except SvgenError as error:
        error.details["latents"] = str(kept)
        error.hint = f"{error.hint}; the latents are kept: svgen decode {kept} -o NAME.mp4"
        raise
    if not keep_latents:
        with suppress(OSError):
            kept.unlink()
    return written, kept
