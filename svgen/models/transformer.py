"""Wan's diffusion transformer: latents, time and text in, flow velocity out.

    latents [B, F, H, W, Z] -> patches -> tokens [B, N, C] -> layers, in one scan -> velocity

Each layer: self-attention (modulated by time, rotary positions), attention to the text, an MLP
(modulated by time). Norms, softmax, modulation and rotation in float32; weights and matrix products
in `dtype`. Source: arXiv 2503.20314 and diffusers' WanTransformer3DModel, against which it is
tested.
"""

import math
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from svgen.attention import attend as attention
from svgen.config import TEXT_TOKENS, TransformerSpec
from svgen.kernels.heads import Turn, join_heads, normed_heads, split_heads
from svgen.models.layers import (
    layer_norm,
    rotary_angles,
    scan_layers,
    stack_layers,
    time_features,
)


class Layout(Protocol):
    """How tokens and weights lie on chips (`sharding.Spread`); n tokens of N lie on this one."""

    def take(self, x: jax.Array, axis: int) -> jax.Array:
        """This chip's n of N tokens, along an axis."""

    def join(self, x: jax.Array) -> jax.Array:
        """All N tokens of x [B, n, ...]."""

    def join_branches(self, x: jax.Array) -> jax.Array:
        """All branches of x [B, ...]."""

    def attend(self, inner: attention.Attend) -> attention.Attend:
        """What lets `inner` see all tokens."""

    def gather(self, weights: object) -> object:
        """The whole weights of one layer."""


class OneChip:
    """Everything lies on one chip."""

    def take(self, x: jax.Array, axis: int) -> jax.Array:
        """All tokens."""
        return x

    def join(self, x: jax.Array) -> jax.Array:
        """All tokens."""
        return x

    def join_branches(self, x: jax.Array) -> jax.Array:
        """All branches."""
        return x

    def attend(self, inner: attention.Attend) -> attention.Attend:
        """It sees all tokens already."""
        return inner

    def gather(self, weights: object) -> object:
        """They are whole."""
        return weights


ONE_CHIP = OneChip()


def _linear(inputs: int, outputs: int, dtype: jnp.dtype, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(inputs, outputs, dtype=dtype, param_dtype=dtype, rngs=rngs)


class Projections(nnx.Module):
    """The projections of one attention: queries and keys normed over all heads, values, output.

    Heads come first on the way in and out: [B, A, N, D] is how attention reads and writes.
    """

    def __init__(self, spec: TransformerSpec, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        width = spec.width
        self.spec, self.dtype = spec, dtype
        self.q = _linear(width, width, dtype, rngs)
        self.k = _linear(width, width, dtype, rngs)
        self.v = _linear(width, width, dtype, rngs)
        self.out = _linear(width, width, dtype, rngs)
        self.q_scale = nnx.Param(jnp.ones(width, jnp.float32))
        self.k_scale = nnx.Param(jnp.ones(width, jnp.float32))

    def _normed(self, x: jax.Array, scale: jax.Array, turn: Turn | None) -> jax.Array:
        return normed_heads(x, scale, turn, heads=self.spec.heads, eps=self.spec.eps)

    def queries(self, x: jax.Array, turn: Turn | None = None) -> jax.Array:
        """Project x [B, N, C] to normed and, by `turn`, rotated queries [B, A, N, D]."""
        return self._normed(self.q(x), self.q_scale[...], turn)

    def keys(self, x: jax.Array, turn: Turn | None = None) -> jax.Array:
        """Project x [B, N, C] to normed and, by `turn`, rotated keys [B, A, N, D]."""
        return self._normed(self.k(x), self.k_scale[...], turn)

    def values(self, x: jax.Array) -> jax.Array:
        """Project x [B, N, C] to values [B, A, N, D]."""
        return split_heads(self.v(x), self.spec.heads)

    def join(self, heads: jax.Array) -> jax.Array:
        """Project the output of all heads [B, A, N, D] back to [B, N, C]."""
        return self.out(join_heads(heads))


class Layer(nnx.Module):
    """One transformer layer."""

    def __init__(self, spec: TransformerSpec, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        width = spec.width
        self.spec, self.dtype = spec, dtype
        self.self_attention = Projections(spec, dtype=dtype, rngs=rngs)
        self.text_attention = Projections(spec, dtype=dtype, rngs=rngs)
        if spec.cross_norm:
            self.norm_scale = nnx.Param(jnp.ones(width, jnp.float32))
            self.norm_bias = nnx.Param(jnp.zeros(width, jnp.float32))
        self.mlp_in = _linear(width, spec.mlp_width, dtype, rngs)
        self.mlp_out = _linear(spec.mlp_width, width, dtype, rngs)
        self.modulation = nnx.Param(jnp.zeros((6, width), jnp.float32))

    def _modulated(self, x: jax.Array, shift: jax.Array, scale: jax.Array) -> jax.Array:
        normed = layer_norm(x.astype(jnp.float32), self.spec.eps)
        return (normed * (1 + scale) + shift).astype(self.dtype)

    def _add(self, x: jax.Array, change: jax.Array, gate: jax.Array) -> jax.Array:
        return (x.astype(jnp.float32) + change.astype(jnp.float32) * gate).astype(self.dtype)

    def _attend_to_text(self, x: jax.Array, text: jax.Array) -> jax.Array:
        if self.spec.cross_norm:
            normed = layer_norm(x.astype(jnp.float32), self.spec.eps)
            normed = normed * self.norm_scale[...][None, None] + self.norm_bias[...][None, None]
        else:
            normed = x.astype(jnp.float32)
        part = self.text_attention
        q = part.queries(normed.astype(self.dtype))
        return part.join(attention.to_text(q, part.keys(text), part.values(text), TEXT_TOKENS))

    def __call__(
        self,
        x: jax.Array,  # [B, N, C]
        time: jax.Array,  # float32 [B, 6, C]
        text: jax.Array,  # [B, L, C]
        turn: Turn,
        attend: attention.Attend,
        index: jax.Array,
    ) -> tuple[jax.Array, object]:
        """Apply the layer; returns the new x and what `attend` recorded."""
        parts = jnp.split(self.modulation[...][None] + time, 6, axis=1)  # six [B, 1, C]
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = parts
        normed = self._modulated(x, shift, scale)
        part = self.self_attention
        q, k = part.queries(normed, turn), part.keys(normed, turn)
        heads, record = attend(q, k, part.values(normed), index)
        x = self._add(x, part.join(heads), gate)
        x = x + self._attend_to_text(x, text)
        hidden = self.mlp_in(self._modulated(x, mlp_shift, mlp_scale))
        x = self._add(x, self.mlp_out(jax.nn.gelu(hidden, approximate=True)), mlp_gate)
        return x, record


class Transformer(nnx.Module):
    """Wan's text-to-video transformer."""

    def __init__(self, spec: TransformerSpec, *, dtype: jnp.dtype = jnp.float32, rngs: nnx.Rngs):
        width, cells = spec.width, math.prod(spec.patch)
        self.spec, self.dtype = spec, dtype
        self.patch_in = _linear(cells * spec.in_channels, width, dtype, rngs)
        self.time_in = _linear(spec.frequency_width, width, jnp.float32, rngs)
        self.time_out = _linear(width, width, jnp.float32, rngs)
        self.time_modulation = _linear(width, 6 * width, dtype, rngs)
        self.text_in = _linear(spec.text_width, width, dtype, rngs)
        self.text_out = _linear(width, width, dtype, rngs)
        self.layers = stack_layers(
            lambda rngs: Layer(spec, dtype=dtype, rngs=rngs), spec.layers, rngs
        )
        self.modulation = nnx.Param(jnp.zeros((2, width), jnp.float32))
        self.patch_out = _linear(width, cells * spec.out_channels, dtype, rngs)

    def _embed_time(self, time: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Embed times [B] as ([B, C], its six modulations [B, 6, C]), float32."""
        features = time_features(time, self.spec.frequency_width)
        embedded = self.time_out(jax.nn.silu(self.time_in(features)))
        six = self.time_modulation(jax.nn.silu(embedded).astype(self.dtype))
        return embedded, six.astype(jnp.float32).reshape(-1, 6, self.spec.width)

    def _to_tokens(self, latents: jax.Array, layout: Layout) -> jax.Array:
        """Cut latents [B, F, H, W, Z] into patches and project them to tokens [B, n, C]."""
        batch, frames, rows, columns, channels = latents.shape
        t, h, w = self.spec.patch
        cut = latents.reshape(batch, frames // t, t, rows // h, h, columns // w, w, channels)
        patches = cut.transpose(0, 1, 3, 5, 2, 4, 6, 7)
        size = t * h * w * channels
        held = layout.take(patches.reshape(batch, -1, size), 1)
        return self.patch_in(held.astype(self.dtype))

    def _to_latents(
        self, x: jax.Array, embedded: jax.Array, shape: tuple[int, ...], layout: Layout
    ) -> jax.Array:
        """Norm and project tokens [B, n, C] and lay the patches out as latents of `shape`."""
        parts = self.modulation[...][None] + embedded[:, None]
        shift, scale = jnp.split(parts, 2, axis=1)
        normed = layer_norm(x.astype(jnp.float32), self.spec.eps) * (1 + scale) + shift
        patches = layout.join(self.patch_out(normed.astype(self.dtype)).astype(jnp.float32))
        batch, frames, rows, columns, _ = shape
        t, h, w = self.spec.patch
        grid = (frames // t, rows // h, columns // w)
        cut = patches.reshape(batch, *grid, t, h, w, self.spec.out_channels)
        return cut.transpose(0, 1, 4, 2, 5, 3, 6, 7).reshape(*shape[:-1], self.spec.out_channels)

    def __call__(
        self,
        latents: jax.Array,  # float32 [B, F, H, W, Z]
        time: jax.Array,  # float32 [B], in thousandths of the way to pure noise
        text: jax.Array,  # [B, L, text width], zero past the prompt (one row at least)
        attend: attention.Attend = attention.dense,
        layout: Layout = ONE_CHIP,
    ) -> tuple[jax.Array, object]:
        """Predict the velocity (noise minus video) at `latents`.

        Returns float32 [B, F, H, W, Z] and the records of `attend`, stacked over layers. F, H and W
        must be multiples of the patch; L may be any length up to 512 (`tokenizer.bucket_length`).
        With several chips, `layout` says which tokens and weights this one holds.
        """
        _, frames, rows, columns, _ = latents.shape
        sides = zip((frames, rows, columns), self.spec.patch, strict=True)
        grid = tuple(side // patch for side, patch in sides)
        angles = rotary_angles(grid, self.spec.head_dim)
        turned = tuple(layout.take(part, 0) for part in (jnp.cos(angles), jnp.sin(angles)))
        attend = layout.attend(attend)
        embedded, six = self._embed_time(time)
        text = self.text_out(jax.nn.gelu(self.text_in(text.astype(self.dtype)), approximate=True))

        def step(layer: nnx.Module, x: jax.Array, index: jax.Array) -> tuple[jax.Array, object]:
            return layer(x, six, text, turned, attend, index)

        tokens = self._to_tokens(latents, layout)
        x, records = scan_layers(self.layers, step, tokens, layout.gather)
        return self._to_latents(x, embedded, latents.shape, layout), records
