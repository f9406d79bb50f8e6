"""How svgen is compared with diffusers: the same inputs through every part, and through a whole
run.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from svgen.config import Request
from svgen.pipeline import Pipeline

PART_TOLERANCE = 2e-4  # of the value range of the reference
FRAME_SHARE = 0.999  # of the pixels lie within 1 of 255
PROMPT, NEGATIVE = "a red ball moving to the right", "blurry, static"
SEED = 7


def request_for(width_px: int, height_px: int, frames: int) -> Request:
    """The request that the reference run was made for."""
    return Request(
        prompt=PROMPT,
        negative=NEGATIVE,
        model="tiny",
        width_px=width_px,
        height_px=height_px,
        frames=frames,
        fps=16.0,
        steps=8,
        guidance=4.0,
        shift=5.0,
        seed=SEED,
    )


def error(ours: jax.Array, theirs: np.ndarray) -> float:
    """The largest difference, as a share of the reference's value range."""
    ours = np.asarray(ours)
    assert ours.shape == theirs.shape
    assert np.ptp(theirs) > 0.5, "a reference that hardly varies proves nothing"
    return float(np.abs(ours - theirs).max() / np.ptp(theirs))


def part_errors(
    folder: Path, reference: dict[str, np.ndarray], clip: np.ndarray
) -> dict[str, float]:
    """Run each network on the reference's inputs: the error of each output, as `error` gives it."""
    pipeline = Pipeline(folder)
    frames, height, width = clip.shape[1:4]
    text = pipeline.embed(request_for(width, height, frames))
    graph, weights = pipeline._load("transformer")
    noise = jnp.asarray(np.concatenate([reference["noise"]] * 2))
    time = jnp.asarray([731.0, 731.0], jnp.float32)

    @jax.jit
    def transformer(weights, latents, time, text):
        return nnx.merge(graph, weights)(latents, time, text)[0]

    vae = nnx.merge(*pipeline._load("vae"))
    encode, decode = nnx.jit(lambda vae, x: vae.encode(x)), nnx.jit(lambda vae, z: vae.decode(z))
    return {
        "text": error(text, reference["text"]),
        "velocity": error(
            transformer(weights, noise, time, jnp.asarray(reference["text"])), reference["velocity"]
        ),
        "encoded": error(encode(vae, jnp.asarray(clip)), reference["encoded"]),
        "decoded": error(decode(vae, jnp.asarray(reference["encoded"])), reference["decoded"]),
    }


def run_errors(folder: Path, reference: dict[str, np.ndarray]) -> tuple[list[float], np.ndarray]:
    """Make the whole run: errors of the latents after each step, differences of the frames."""
    pipeline = Pipeline(folder)
    frames, height, width = reference["frames"].shape[:3]
    request = request_for(width, height, frames)
    pipeline.check(request)
    text = pipeline.embed(request)
    steps = []
    for step, theirs in zip(pipeline.denoise(request, text), reference["trajectory"], strict=True):
        steps.append(error(step.state.latents[0], theirs))
    made = np.concatenate(list(pipeline.decode(np.asarray(step.state.latents), request)))
    cropped = made[:, :height, :width].astype(int)
    return steps, np.abs(cropped - reference["frames"].astype(int))
