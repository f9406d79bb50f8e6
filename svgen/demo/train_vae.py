"""Trains the demo's VAE on crops of rendered scenes.

Crops are 32x32 pixels, mostly near the object: a convolutional network needs no more to learn what
the whole frame asks of it. In time they hold 17 frames: trained on 9, a VAE reconstructs those and
drifts away after them, because what it keeps of past chunks was never used for longer.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from svgen.config import VaeSpec
from svgen.demo import scenes
from svgen.models.vae import Vae

CROP_PX, CROP_FRAMES = 32, 17
NEAR_OBJECT = 0.8  # share of the crops that are laid over the object
KL_WEIGHT = 1e-5
FIRST_LOG_VARIANCE = -5.0

Weights = nnx.State


def crops(seed: int, batch: int) -> Iterator[np.ndarray]:
    """Endless batches of crops, float32 [batch, 9, 64, 64, 3] in [-1, 1]."""
    rng = np.random.default_rng(seed)
    while True:
        yield np.stack([_crop(rng) for _ in range(batch)]).astype(np.float32) / 127.5 - 1


def _crop(rng: np.random.Generator) -> np.ndarray:
    clip = scenes.render(scenes.sample(rng))
    first = int(rng.integers(0, len(clip) - CROP_FRAMES + 1))
    part = clip[first : first + CROP_FRAMES]
    room = clip.shape[1] - CROP_PX
    corner = rng.integers(0, room + 1, 2)
    if rng.random() < NEAR_OBJECT:
        middle = part[CROP_FRAMES // 2].astype(int)
        rows, columns = np.nonzero(np.abs(middle - middle[0, 0]).sum(axis=-1) > 60)
        if len(rows):
            centre = np.array([rows.mean(), columns.mean()]) - CROP_PX / 2
            corner = np.clip(centre + rng.integers(-20, 21, 2), 0, room).astype(int)
    row, column = corner
    return part[:, row : row + CROP_PX, column : column + CROP_PX]


def _moments(vae: Vae, frames: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean and log-variance of the latents of frames [B, T, h, w, 3]."""
    moments, cache = vae.encode_first(frames[:, :1])
    parts = [moments]
    stride = vae.spec.frame_stride
    for start in range(1, frames.shape[1], stride):
        moments, cache = vae.encode_next(frames[:, start : start + stride], cache)
        parts.append(moments)
    means, log_variances = zip(*parts, strict=True)
    return jnp.concatenate(means, axis=1), jnp.concatenate(log_variances, axis=1)


def loss(graph: nnx.GraphDef, weights: Weights, frames: jax.Array, key: jax.Array) -> jax.Array:
    """Absolute and squared error, plus a touch of divergence from a unit Gaussian."""
    vae = nnx.merge(graph, weights)
    mean, log_variance = _moments(vae, frames)
    z = mean + jnp.exp(log_variance / 2) * jax.random.normal(key, mean.shape, jnp.float32)
    difference = vae.decode(z) - frames
    error = jnp.abs(difference).mean() + jnp.square(difference).mean()
    divergence = 0.5 * (jnp.square(mean) + jnp.exp(log_variance) - 1 - log_variance).mean()
    return error + KL_WEIGHT * divergence


def optimizer(steps: int, rate: float) -> optax.GradientTransformation:
    """AdamW with a short warm-up, then a rate that falls to a fiftieth along a cosine."""
    warm_up = min(100, steps // 10)
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, warm_up, steps, rate / 50)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=1e-4))


@partial(jax.jit, static_argnames=("graph", "transform"), donate_argnames=("weights", "moments"))
def train_step(
    graph: nnx.GraphDef,
    transform: optax.GradientTransformation,
    weights: Weights,
    moments: Any,
    frames: jax.Array,
    key: jax.Array,
) -> tuple[Weights, Any, jax.Array]:
    """One step of the optimiser; returns new weights, new optimiser state and the loss."""
    value, gradient = jax.value_and_grad(partial(loss, graph))(weights, frames, key)
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


def latent_statistics(vae: Vae, clips: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of each latent channel over clips."""
    encode = nnx.jit(lambda vae, x: vae.encode(x))
    latents = np.stack(
        [np.asarray(encode(vae, jnp.asarray(c[None], jnp.float32) / 127.5 - 1))[0] for c in clips]
    )
    return latents.mean(axis=(0, 1, 2, 3)), latents.std(axis=(0, 1, 2, 3))


def new_vae(spec: VaeSpec, seed: int) -> Vae:
    """A VAE with its first weights. Its latents start with little noise: with as much as upstream's
    zero log-variance means, no step would learn anything before that noise had been unlearned.
    """
    vae = Vae(spec, dtype=jnp.float32, rngs=nnx.Rngs(seed))
    bias = vae.to_moments.bias
    bias[...] = bias[...].at[spec.z_channels :].set(FIRST_LOG_VARIANCE)
    return vae
