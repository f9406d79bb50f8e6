"""UMT5's encoder: token ids -> text [B, L, C], the transformer's other input.

Nothing encodes absolute positions: every layer adds its own learned bias, per head and bucketed
distance, to the attention scores, which are not scaled by 1/sqrt(D). Norms are root-mean-square,
the MLP is a gated GELU, and no projection has a bias vector.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from svgen.config import TextSpec
from svgen.kernels.heads import rms_norm
from svgen.models.layers import Gather, scan_layers

MASKED = float(np.finfo(np.float32).min)  # finite: a row without any valid key must not become NaN


def relative_buckets(length: int, buckets: int, max_distance: int) -> np.ndarray:  # [L, L]
    """Return the bucket of every (query, key) pair, T5's bidirectional scheme.

    One half of the buckets is for keys after the query. Within a half of n, distances below n/2
    have their own bucket and the others share logarithmically wider ones up to `max_distance`.
    For 8 buckets and max_distance 8:

        key - query   -8 -4 -3 -2 -1  0  1  2  3  4  8
        bucket         3  3  2  2  1  0  5  6  6  7  7
    """
    half = buckets // 2
    exact = half // 2
    if exact < 1 or max_distance <= exact:
        raise ValueError(
            f"{buckets} buckets up to distance {max_distance}: 4 and {exact + 1} at least"
        )
    distance = np.arange(-(length - 1), length)
    size = np.abs(distance)
    ratio = np.log(np.maximum(size, exact).astype(np.float32) / np.float32(exact))
    steps = ratio / np.float32(math.log(max_distance / exact)) * np.float32(half - exact)
    coarse = np.minimum(exact + steps.astype(np.int32), half - 1)
    bucket = np.where(size < exact, size, coarse) + np.where(distance > 0, half, 0)
    offsets = np.arange(length)[None, :] - np.arange(length)[:, None]
    return bucket[offsets + length - 1].astype(np.int32)


def _norm(x: jax.Array, scale: nnx.Param, eps: float) -> jax.Array:
    return rms_norm(x, scale[...].astype(jnp.float32), eps)


def _project(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Multiply [B, L, in] by [in, out] in the weight's dtype, accumulated in float32."""
    x = x.astype(weight.dtype)
    return jnp.einsum("BLi,io->BLo", x, weight, preferred_element_type=jnp.float32)


class EncoderLayers(nnx.Module):
    """All layers: each leaf stacks one parameter. Called on the slice of one layer."""

    def __init__(self, spec: TextSpec, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.heads, self.eps = spec.heads, spec.eps
        c, m, inner = spec.width, spec.mlp_width, spec.heads * spec.head_dim

        def weights(*shape: int, scale: float) -> nnx.Param:
            values = jax.random.normal(rngs.params(), (spec.layers, *shape), jnp.float32)
            return nnx.Param((values * scale).astype(dtype))

        def ones() -> nnx.Param:
            return nnx.Param(jnp.ones((spec.layers, c), dtype))

        self.attention_norm = ones()
        self.query = weights(c, inner, scale=(c * spec.head_dim) ** -0.5)
        self.key = weights(c, inner, scale=c**-0.5)
        self.value = weights(c, inner, scale=c**-0.5)
        self.out = weights(inner, c, scale=inner**-0.5)
        self.distance_bias = weights(spec.buckets, spec.heads, scale=c**-0.5)
        self.mlp_norm = ones()
        self.gate = weights(c, m, scale=c**-0.5)
        self.up = weights(c, m, scale=c**-0.5)
        self.down = weights(m, c, scale=m**-0.5)

    def __call__(self, x: jax.Array, buckets: jax.Array, valid: jax.Array) -> jax.Array:
        """Run one layer on float32 x [B, L, C]; buckets [L, L], valid [B, L] marks real keys."""
        x = x + self._attend(_norm(x, self.attention_norm, self.eps), buckets, valid)
        h = _norm(x, self.mlp_norm, self.eps)
        h = jax.nn.gelu(_project(h, self.gate[...]), approximate=True) * _project(h, self.up[...])
        return x + _project(h, self.down[...])

    def _attend(self, x: jax.Array, buckets: jax.Array, valid: jax.Array) -> jax.Array:
        dtype = self.query[...].dtype
        batch, length, _ = x.shape

        def split(weight: nnx.Param) -> jax.Array:
            return _project(x, weight[...]).astype(dtype).reshape(batch, length, self.heads, -1)

        q, k, v = split(self.query), split(self.key), split(self.value)  # [B, L, A, D]
        bias = self.distance_bias[...].astype(jnp.float32)[buckets].transpose(2, 0, 1)  # [A, L, L]
        scores = jnp.einsum("BqAD,BkAD->BAqk", q, k, preferred_element_type=jnp.float32)
        scores = jnp.where(valid[:, None, None, :], scores + bias[None], MASKED)
        shares = jax.nn.softmax(scores, axis=-1).astype(dtype)
        mixed = jnp.einsum("BAqk,BkAD->BqAD", shares, v, preferred_element_type=jnp.float32)
        return _project(mixed.reshape(batch, length, -1), self.out[...])


class TextEncoder(nnx.Module):
    """UMT5's encoder with weights of one dtype; activations between layers stay in float32."""

    def __init__(self, spec: TextSpec, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.buckets, self.max_distance = spec.buckets, spec.max_distance
        self.eps = spec.eps
        table = jax.random.normal(rngs.params(), (spec.vocabulary, spec.width), jnp.float32)
        self.embedding = nnx.Param(table.astype(dtype))
        self.layers = EncoderLayers(spec, dtype=dtype, rngs=rngs)
        self.norm = nnx.Param(jnp.ones((spec.width,), dtype))

    def __call__(
        self, ids: jax.Array, lengths: jax.Array, gather: Gather = lambda weights: weights
    ) -> jax.Array:
        """Encode int32 ids [B, L] with true lengths [B] as float32 text [B, L, C].

        Keys past the true length are masked and rows past it are zero, so L changes no real row.
        `gather` brings the weights of a layer together that lie on several chips.
        """
        length = ids.shape[1]
        valid = jnp.arange(length)[None, :] < lengths[:, None]  # [B, L]
        buckets = jnp.asarray(relative_buckets(length, self.buckets, self.max_distance))

        def step(layer: EncoderLayers, x: jax.Array, _: jax.Array) -> tuple[jax.Array, None]:
            return layer(x, buckets, valid), None

        x = self.embedding[...][ids].astype(jnp.float32)
        x, _ = scan_layers(self.layers, step, x, gather)
        return jnp.where(valid[:, :, None], _norm(x, self.norm, self.eps), 0.0)
