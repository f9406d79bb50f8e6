"""Wan 2.1's causal video autoencoder: frames <-> latents, chunk by chunk.

Both directions are one chain of layers, called as `layer(x, cache) -> (x, cache)` with
x [B, T, h, w, C]. The cache holds what a layer needs of earlier chunks: the last two inputs of a
causal convolution, nothing where frames are seen one at a time. `cache=None` stands for the
beginning of the video, whose first chunk is one frame; others have `spec.frame_stride`:

    frames   0 | 1 2 3 4 | 5 6 7 8 | ...
    latents  0 |    1    |    2    | ...

h, w are the rows and columns at a layer's own resolution, C and O widths in and out.
"""

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from svgen.config import VaeSpec
from svgen.models.convolution import TIME_TAPS, convolve_frames, convolve_video

COLORS = 3
NORM_FLOOR = 1e-12  # smallest vector length a norm divides by
LOG_VARIANCE_RANGE = (-30.0, 20.0)
QUERY_BLOCK = 1024  # queries per block of the attention: it holds QUERY_BLOCK * h * w scores

Cache = Any  # nested tuples of arrays [B, 1 or 2, h, w, C], one entry per layer


def normalize_latents(z: jax.Array, spec: VaeSpec) -> jax.Array:
    """Bring the encoder's latents [..., Z] to zero mean and unit deviation, the transformer's."""
    mean, std = _statistics(z, spec)
    return (z - mean) / std


def denormalize_latents(z: jax.Array, spec: VaeSpec) -> jax.Array:
    """Undo `normalize_latents`: the transformer's latents [..., Z] -> what the decoder expects."""
    mean, std = _statistics(z, spec)
    return z * std + mean


def _statistics(z: jax.Array, spec: VaeSpec) -> tuple[jax.Array, jax.Array]:
    mean, std = (jnp.asarray(v, z.dtype) for v in (spec.latents_mean, spec.latents_std))
    return _along_channels(mean, z), _along_channels(std, z)


def _along_channels(vector: jax.Array, x: jax.Array) -> jax.Array:
    """Give a vector [C] as many axes as x [..., C] has."""
    return vector.reshape((1,) * (x.ndim - 1) + vector.shape)


class Convolution(nnx.Module):
    """Kernel and bias of a convolution of single frames: [k, k, C, O] and [O]."""

    def __init__(
        self, width: int, out: int, size: tuple[int, ...], *, dtype: jnp.dtype, rngs: nnx.Rngs
    ):
        scale = 1 / math.sqrt(width * math.prod(size))
        kernel = scale * jax.random.normal(rngs.params(), (*size, width, out), jnp.float32)
        self.kernel = nnx.Param(kernel.astype(dtype))
        self.bias = nnx.Param(jnp.zeros((out,), dtype))

    def add_bias(self, y: jax.Array) -> jax.Array:
        return y + _along_channels(self.bias[...], y)

    def __call__(self, x: jax.Array, **options: Any) -> jax.Array:
        return self.add_bias(convolve_frames(x, self.kernel[...], **options))


class CausalConvolution(Convolution):
    """Convolution over time too, kernel [3, k, k, C, O]; cache: the last two frames it has seen.

    Before the video there is nothing but zeros, so its first frame meets the last time tap alone.
    """

    def __init__(self, width: int, out: int, *, size: int = 3, dtype: jnp.dtype, rngs: nnx.Rngs):
        super().__init__(width, out, (TIME_TAPS, size, size), dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        if cache is None:
            y = convolve_frames(x, self.kernel[-1])
            return self.add_bias(y), jnp.concatenate([jnp.zeros_like(x), x], axis=1)
        seen = jnp.concatenate([cache, x], axis=1)
        y = convolve_video(seen, self.kernel[...])
        return self.add_bias(y), seen[:, -cache.shape[1] :]


class Norm(nnx.Module):
    """Scale the channels of a position to unit mean square, in float32, and by a learned factor."""

    def __init__(self, width: int, *, dtype: jnp.dtype):
        self.scale = nnx.Param(jnp.ones((width,), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        square = jnp.sum(y * y, axis=-1, keepdims=True)
        y = y * (math.sqrt(x.shape[-1]) * lax.rsqrt(jnp.maximum(square, NORM_FLOOR**2)))
        return (y * _along_channels(self.scale[...].astype(jnp.float32), x)).astype(x.dtype)


class NormedConvolution(nnx.Module):
    """Norm, SiLU, causal convolution: half a residual block, and the end of both chains."""

    def __init__(self, width: int, out: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.norm = Norm(width, dtype=dtype)
        self.conv = CausalConvolution(width, out, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        return self.conv(jax.nn.silu(self.norm(x)), cache)


class Residual(nnx.Module):
    """x + two normed convolutions of it; a 1x1 convolution of x where the width changes."""

    def __init__(self, width: int, out: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.first = NormedConvolution(width, out, dtype=dtype, rngs=rngs)
        self.second = NormedConvolution(out, out, dtype=dtype, rngs=rngs)
        shortcut = partial(Convolution, width, out, (1, 1), dtype=dtype, rngs=rngs)
        self.shortcut = shortcut() if width != out else None

    def __call__(self, x: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        first, second = cache or (None, None)
        y, first = self.first(x, first)
        y, second = self.second(y, second)
        carried = x if self.shortcut is None else self.shortcut(x)
        return carried + y, (first, second)


class Attention(nnx.Module):
    """Attention of one head among the positions of each frame."""

    def __init__(self, width: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.norm = Norm(width, dtype=dtype)
        self.to_qkv = Convolution(width, 3 * width, (1, 1), dtype=dtype, rngs=rngs)
        self.to_out = Convolution(width, width, (1, 1), dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        batch, frames, height, width, channels = x.shape
        qkv = self.to_qkv(self.norm(x)).reshape(batch * frames, height * width, 3 * channels)
        y = jax.vmap(attend_frame)(*jnp.split(qkv, 3, axis=-1))
        return x + self.to_out(y.reshape(x.shape)), ()


def attend_frame(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attend among all positions of one frame, arrays [N, C], a block of queries at a time."""

    def attend_one(query: jax.Array) -> jax.Array:
        scores = jnp.einsum("c,nc->n", query, k, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(scores / math.sqrt(query.shape[-1]))
        return jnp.einsum("n,nc->c", weights.astype(v.dtype), v)

    return lax.map(attend_one, q, batch_size=min(QUERY_BLOCK, q.shape[0]))


class Upsample(nnx.Module):
    """Twice the rows and columns at half the width.

    A temporal one makes two frames of each frame, except of the first of the video.
    """

    def __init__(self, width: int, *, temporal: bool, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.conv = Convolution(width, width // 2, (3, 3), dtype=dtype, rngs=rngs)
        time = partial(CausalConvolution, width, 2 * width, size=1, dtype=dtype, rngs=rngs)
        self.time = time() if temporal else None

    def __call__(self, x: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        if self.time is None:
            cache = ()
        elif cache is None:  # the first frame stays one, and is not remembered
            cache = jnp.zeros((x.shape[0], TIME_TAPS - 1, *x.shape[2:]), x.dtype)
        else:
            y, cache = self.time(x, cache)
            x = split_frames(y)
        return self.conv(double_size(x)), cache


def split_frames(x: jax.Array) -> jax.Array:
    """Make two frames of each, first channels first: [B, T, h, w, 2*C] -> [B, 2*T, h, w, C]."""
    batch, frames, height, width, channels = x.shape
    x = x.reshape(batch, frames, height, width, 2, channels // 2)
    return jnp.moveaxis(x, 4, 2).reshape(batch, 2 * frames, height, width, channels // 2)


def double_size(x: jax.Array) -> jax.Array:
    """Repeat every row and column: [B, T, h, w, C] -> [B, T, 2*h, 2*w, C]."""
    return jnp.repeat(jnp.repeat(x, 2, axis=2), 2, axis=3)


class Downsample(nnx.Module):
    """Half the rows and columns.

    A temporal one makes one frame of two, except of the first of the video; cache: the last frame.
    """

    def __init__(self, width: int, *, temporal: bool, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.conv = Convolution(width, width, (3, 3), dtype=dtype, rngs=rngs)
        time = partial(Convolution, width, width, (TIME_TAPS, 1, 1), dtype=dtype, rngs=rngs)
        self.time = time() if temporal else None

    def __call__(self, x: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        x = self.conv(x, stride=2, padding=(0, 1))
        if self.time is None:
            return x, ()
        if cache is None:
            return x, x
        seen = jnp.concatenate([cache, x], axis=1)
        y = convolve_video(seen, self.time.kernel[...], stride=2)
        return self.time.add_bias(y), seen[:, -1:]


class Chain(nnx.Module):
    """Layers called in turn, each with its own cache."""

    def __init__(self, layers: Iterable[nnx.Module]):
        self.layers = nnx.List(layers)

    def __call__(self, x: jax.Array, caches: Cache) -> tuple[jax.Array, Cache]:
        after = []
        for layer, before in zip(self.layers, caches or [None] * len(self.layers), strict=True):
            x, cache = layer(x, before)
            after.append(cache)
        return x, tuple(after)


def _middle(width: int, **options: Any) -> list[nnx.Module]:
    attention = Attention(width, **options)
    return [Residual(width, width, **options), attention, Residual(width, width, **options)]


def build_encoder(spec: VaeSpec, **options: Any) -> Chain:
    """Lay out frames [B, T, h, w, 3] -> moments [B, F, H, W, 2*Z]."""
    width = spec.base_width
    layers = [CausalConvolution(COLORS, width, **options)]
    for multiplier, temporal in zip(
        spec.multipliers, (*spec.temporal_downsample, None), strict=True
    ):
        for _ in range(spec.blocks):
            layers.append(Residual(width, spec.base_width * multiplier, **options))
            width = spec.base_width * multiplier
        if temporal is not None:
            layers.append(Downsample(width, temporal=temporal, **options))
    layers += _middle(width, **options)
    layers.append(NormedConvolution(width, 2 * spec.z_channels, **options))
    return Chain(layers)


def build_decoder(spec: VaeSpec, **options: Any) -> Chain:
    """Lay out latents [B, F, H, W, Z] -> frames [B, T, h, w, 3]."""
    width = spec.base_width * spec.multipliers[-1]
    layers = [CausalConvolution(spec.z_channels, width, **options), *_middle(width, **options)]
    upsample = (*reversed(spec.temporal_downsample), None)
    for multiplier, temporal in zip(reversed(spec.multipliers), upsample, strict=True):
        for _ in range(spec.blocks + 1):
            layers.append(Residual(width, spec.base_width * multiplier, **options))
            width = spec.base_width * multiplier
        if temporal is not None:
            layers.append(Upsample(width, temporal=temporal, **options))
            width //= 2
    layers.append(NormedConvolution(width, COLORS, **options))
    return Chain(layers)


class Vae(nnx.Module):
    """The autoencoder: weights and arithmetic in `dtype`, norms and results in float32.

    Latents are the autoencoder's own (see `denormalize_latents`). Caches keep their shapes from
    chunk to chunk, so that two programs decode any video: `decode_first` and `decode_next`.
    """

    def __init__(self, spec: VaeSpec, *, dtype: jnp.dtype = jnp.float32, rngs: nnx.Rngs):
        self.spec = spec
        self.dtype = dtype
        width = spec.z_channels
        conv = partial(Convolution, size=(1, 1), dtype=dtype, rngs=rngs)
        self.encoder = build_encoder(spec, dtype=dtype, rngs=rngs)
        self.to_moments = conv(2 * width, 2 * width)
        self.from_latents = conv(width, width)
        self.decoder = build_decoder(spec, dtype=dtype, rngs=rngs)

    def decode_first(self, z: jax.Array) -> tuple[jax.Array, Cache]:
        """Decode the first latents [B, 1, H, W, Z] -> (frame [B, 1, h, w, 3] in [-1, 1], cache)."""
        return self._decode(z, None)

    def decode_next(self, z: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Decode later latents [B, 1, H, W, Z] -> (spec.frame_stride frames, cache)."""
        return self._decode(z, cache)

    def _decode(self, z: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        x, cache = self.decoder(self.from_latents(z.astype(self.dtype)), cache)
        x = x.astype(jnp.float32)
        # Clipped, infinity would look like white or black: NaN says that it was none.
        return jnp.where(jnp.isfinite(x), jnp.clip(x, -1.0, 1.0), jnp.nan), cache

    def encode_first(self, frames: jax.Array) -> tuple[tuple[jax.Array, jax.Array], Cache]:
        """Encode a frame [B, 1, h, w, 3] -> ((mean, log variance) [B, 1, H, W, Z] each, cache)."""
        return self._encode(frames, None)

    def encode_next(
        self, frames: jax.Array, cache: Cache
    ) -> tuple[tuple[jax.Array, jax.Array], Cache]:
        """Encode later frames [B, spec.frame_stride, h, w, 3], as `encode_first` does."""
        return self._encode(frames, cache)

    def _encode(self, frames: jax.Array, cache: Cache) -> tuple[tuple[jax.Array, jax.Array], Cache]:
        x, cache = self.encoder(frames.astype(self.dtype), cache)
        mean, log_variance = jnp.split(self.to_moments(x).astype(jnp.float32), 2, axis=-1)
        return (mean, jnp.clip(log_variance, *LOG_VARIANCE_RANGE)), cache

    def decode(self, z: jax.Array) -> jax.Array:
        """Decode a whole video, latents [B, F, H, W, Z] -> frames [B, T, h, w, 3].

        T = 1 + (F - 1) * spec.frame_stride.
        """
        frames, cache = self.decode_first(z[:, :1])
        chunks = [frames]
        for index in range(1, z.shape[1]):
            frames, cache = self.decode_next(z[:, index : index + 1], cache)
            chunks.append(frames)
        return jnp.concatenate(chunks, axis=1)

    def encode(self, frames: jax.Array) -> jax.Array:
        """Encode a whole video [B, T, h, w, 3] -> its latents' mean [B, F, H, W, Z].

        T must be one more than a multiple of `spec.frame_stride`.
        """
        step = self.spec.frame_stride
        if frames.shape[1] % step != 1 % step:
            raise ValueError(f"{frames.shape[1]} frames: one more than a multiple of {step} needed")
        (mean, _), cache = self.encode_first(frames[:, :1])
        means = [mean]
        for start in range(1, frames.shape[1], step):
            (mean, _), cache = self.encode_next(frames[:, start : start + step], cache)
            means.append(mean)
        return jnp.concatenate(means, axis=1)
