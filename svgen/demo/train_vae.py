"""Teaches the demo's VAE the latents of `basis`: the encoder to write them, the decoder to draw.

Crops of 48x48 pixels, mostly near the object, teach nearly everything. Whole frames must follow for
some hundred steps: in its middle the VAE attends over a frame, and one that has only seen crops
takes the brightness of a lit background from too far away. In time crops hold 17 frames: trained on
9, a VAE reconstructs those and drifts away after them, because what it keeps of past chunks was
never used for longer.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from optax.contrib import MuonDimensionNumbers

from svgen.demo import scenes
from svgen.demo.basis import STRIDE, Basis
from svgen.demo.optimizer import falling
from svgen.models.vae import Vae

NEAR_OBJECT = 0.8  # share of the crops that are laid over the object
LATENT_WEIGHT = 0.1  # of the encoder's error in the loss
MOST_NOISE = 0.15  # in the latents that the decoder learns from: the flow's are not perfect either

Weights = nnx.State


class Crops(NamedTuple):
    """What one step learns from."""

    frames: jax.Array  # float32 [B, T, side, side, 3] in [-1, 1]
    latents: jax.Array  # float32 [B, F, H, W, Z]


def crops(basis: Basis, seed: int, batch: int, *, side: int, frames: int) -> Iterator[Crops]:
    """Endless batches of crops of `frames` frames and side x side pixels."""
    rng = np.random.default_rng(seed)
    while True:
        some = [_crop(rng, side, frames) for _ in range(batch)]
        latents = np.stack([basis.latents(one) for one in some])
        yield Crops(np.stack(some).astype(np.float32) / 127.5 - 1, latents)


def _crop(rng: np.random.Generator, side: int, frames: int) -> np.ndarray:
    clip = scenes.render(scenes.sample(rng))
    first = int(rng.integers(0, len(clip) - frames + 1))
    part = clip[first : first + frames]
    room = clip.shape[1] - side
    corner = rng.integers(0, room + 1, 2)
    if rng.random() < NEAR_OBJECT:
        middle = part[frames // 2].astype(int)
        rows, columns = np.nonzero(np.abs(middle - middle[0, 0]).sum(axis=-1) > 60)
        if len(rows):
            centre = np.array([rows.mean(), columns.mean()]) - side / 2
            corner = np.clip(centre + rng.integers(-20, 21, 2), 0, room).astype(int)
    row, column = corner // STRIDE * STRIDE
    return part[:, row : row + side, column : column + side]


def encode_at_once(vae: Vae, frames: jax.Array) -> jax.Array:
    """Do what `Vae.encode` does, with all later chunks as one: quicker to compile and to run."""
    (first, _), cache = vae.encode_first(frames[:, :1])
    (later, _), _ = vae.encode_next(frames[:, 1:], cache)
    return jnp.concatenate([first, later], axis=1)


def decode_at_once(vae: Vae, z: jax.Array) -> jax.Array:
    """Do what `Vae.decode` does, with all later chunks as one."""
    first, cache = vae.decode_first(z[:, :1])
    later, _ = vae.decode_next(z[:, 1:], cache)
    return jnp.concatenate([first, later], axis=1)


def loss(graph: nnx.GraphDef, weights: Weights, crops: Crops, key: jax.Array) -> jax.Array:
    """Error of the encoder's latents, and of frames drawn from true latents with a little noise
    (half of the batch) and from the encoder's own (the other half).
    """
    vae = nnx.merge(graph, weights)
    written = encode_at_once(vae, crops.frames)
    noise_key, level_key = jax.random.split(key)
    level = MOST_NOISE * jax.random.uniform(level_key, (len(written), 1, 1, 1, 1))
    noisy = crops.latents + level * jax.random.normal(noise_key, written.shape, jnp.float32)
    half = len(written) // 2
    difference = decode_at_once(vae, jnp.concatenate([noisy[:half], written[half:]])) - crops.frames
    error = jnp.abs(difference).mean() + jnp.square(difference).mean()
    return error + LATENT_WEIGHT * jnp.square(written - crops.latents).mean()


def optimizer(steps: int, rate: float) -> optax.GradientTransformation:
    """Muon for the kernels, AdamW for the rest."""
    return falling(steps, rate, matrices=_kernels, weight_decay=0.0)


def _kernels(weights: Any) -> Any:
    """Mark the kernels [..., in, out] at least 8 wide; `None` elsewhere."""

    def mark(leaf: jax.Array) -> MuonDimensionNumbers | None:
        if leaf.ndim < 4 or min(leaf.shape[-2:]) < 8:
            return None
        return MuonDimensionNumbers(tuple(range(leaf.ndim - 1)), leaf.ndim - 1)

    return jax.tree.map(mark, weights)


@partial(jax.jit, static_argnames=("graph", "transform"), donate_argnames=("weights", "moments"))
def train_step(
    graph: nnx.GraphDef,
    transform: optax.GradientTransformation,
    weights: Weights,
    moments: Any,
    crops: Crops,
    key: jax.Array,
) -> tuple[Weights, Any, jax.Array]:
    """One step of the optimiser; returns new weights, new optimiser state and the loss."""
    value, gradient = jax.value_and_grad(partial(loss, graph))(weights, crops, key)
    updates, moments = transform.update(gradient, moments, weights)
    return optax.apply_updates(weights, updates), moments, value


def psnr_db(vae: Vae, clips: np.ndarray) -> float:
    """Mean PSNR of reconstructed clips, uint8 [B, T, h, w, 3], over 8-bit frames."""
    encode = nnx.jit(lambda vae, x: vae.encode(x))
    decode = nnx.jit(lambda vae, z: vae.decode(z))
    found = []
    for clip in clips:
        x = jnp.asarray(clip[None], jnp.float32) / 127.5 - 1
        y = np.asarray(decode(vae, encode(vae, x)))[0]
        levels = np.round((y + 1) * 127.5).clip(0, 255)
        error = np.square(levels - clip).mean(axis=(1, 2, 3))
        found.append(np.mean(10 * np.log10(255**2 / np.maximum(error, 1e-3))))
    return float(np.mean(found))
