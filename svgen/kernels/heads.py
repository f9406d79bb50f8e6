"""Between projections [B, N, A * D] and attention, which wants heads first: [B, A, N, D].

Queries and keys are normed over all heads and rotated on the way:

    x / rms(x) * scale, its pairs (i, i + D/2) turned

XLA takes several passes of float32 over a layer's tokens for that, and its copies between the
layouts run at a quarter to a half of the memory's speed; the kernels read and write each number
once, in bfloat16. NOTES.md has what that saves.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

HEAD_DIM = 128  # the kernel's: heads that fill a register's lanes
ROWS = 128  # tokens at a time

Turn = tuple[jax.Array, jax.Array]  # cosines and sines, float32 [N, D/2]


def normed_heads(
    x: jax.Array,  # [B, N, C]
    scale: jax.Array,  # float32 [C]
    turn: Turn | None,  # None: not rotated
    *,
    heads: int,
    eps: float,
) -> jax.Array:  # [B, A, N, D], of x's type
    """Divide by the root mean square of all heads, scale, rotate, and bring heads to the front.

    In float32, rounded once. On a TPU bfloat16 heads of 128 numbers go through one kernel.
    """
    plain = functools.partial(plain_heads, heads=heads, eps=eps)
    fused = functools.partial(fused_heads, heads=heads, eps=eps)
    return _choose(x.shape[-1] // heads, plain, fused, x, scale, turn)


def split_heads(x: jax.Array, heads: int) -> jax.Array:
    """Bring [B, N, A * D] to [B, A, N, D]; on a TPU in one kernel, for the same heads."""
    plain = functools.partial(plain_split, heads=heads)
    return _choose(x.shape[-1] // heads, plain, functools.partial(moved, heads=heads), x)


def join_heads(x: jax.Array) -> jax.Array:
    """Bring [B, A, N, D] back to [B, N, A * D]; on a TPU in one kernel, for the same heads."""
    return _choose(x.shape[-1], plain_join, functools.partial(moved, heads=None), x)


def _choose(size: int, plain: Callable, fused: Callable, x: jax.Array, *more) -> jax.Array:
    if x.dtype != jnp.bfloat16 or size != HEAD_DIM:
        return plain(x, *more)
    return jax.lax.platform_dependent(x, *more, tpu=fused, default=plain)


def plain_split(x: jax.Array, heads: int) -> jax.Array:
    """Do what `split_heads` does, in plain JAX."""
    return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def plain_join(x: jax.Array) -> jax.Array:
    """Do what `join_heads` does, in plain JAX."""
    x = x.transpose(0, 2, 1, 3)
    return x.reshape(*x.shape[:2], -1)


def plain_heads(
    x: jax.Array, scale: jax.Array, turn: Turn | None, *, heads: int, eps: float
) -> jax.Array:
    """Do what `normed_heads` does, in plain JAX."""
    y = rms_norm(x.astype(jnp.float32), scale, eps).reshape(*x.shape[:2], heads, -1)
    if turn is not None:
        y = rotate(y, *turn)
    return y.astype(x.dtype).transpose(0, 2, 1, 3)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Divide by the root mean square over the last axis, times `scale` [C]; float32 in and out."""
    mean_square = jnp.square(x).mean(axis=-1, keepdims=True)
    normed = x * jax.lax.rsqrt(mean_square + jnp.float32(eps))
    return normed * jnp.expand_dims(scale, tuple(range(x.ndim - 1)))


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate the pairs (i, i + D/2) of x [B, N, A, D] by the angles of `cos`, `sin` [N, D/2];
    float32.

    Upstream rotates neighbours (2i, 2i+1); `models.keys` reorders the projections of q and k so
    that partners lie half a head apart, which leaves every product q.k as it was and needs no
    strided access.
    """
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = cos[None, :, None], sin[None, :, None]
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


def fused_heads(
    x: jax.Array,
    scale: jax.Array,
    turn: Turn | None,
    *,
    heads: int,
    eps: float,
    interpret=False,
) -> jax.Array:
    """Do what `normed_heads` does in one kernel, for heads of 128 numbers."""
    batch, tokens, width = x.shape
    size = width // heads
    rows = min(ROWS, tokens)

    def of_tokens(step, item):
        return step, 0

    inputs = [x, scale[None]]
    specs = [
        pl.BlockSpec((None, rows, width), lambda step, item: (item, step, 0)),
        pl.BlockSpec((1, width), lambda step, item: (0, 0)),
    ]
    if turn is not None:
        cos, sin = turn
        inputs += [jnp.concatenate([cos, cos], -1), jnp.concatenate([-sin, sin], -1)]
        specs += [pl.BlockSpec((rows, size), of_tokens)] * 2
    return pl.pallas_call(
        functools.partial(_kernel, heads=heads, eps=eps),
        grid=(pl.cdiv(tokens, rows), batch),  # items inside: a step's angles are read once
        in_specs=specs,
        out_specs=pl.BlockSpec((None, heads, rows, size), lambda step, item: (item, 0, step, 0)),
        out_shape=jax.ShapeDtypeStruct((batch, heads, tokens, size), x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        name="normed_heads",
        interpret=interpret,
    )(*inputs)


def moved(x: jax.Array, *, heads: int | None, interpret=False) -> jax.Array:
    """Split x [B, N, A * D] into its `heads`, or, without their number, join [B, A, N, D]."""
    batch, *inner, size = x.shape
    joined = size if heads else inner[0] * size
    count = heads or inner[0]
    tokens, size = (inner[-1], joined // count)
    rows = min(ROWS, tokens)
    flat = pl.BlockSpec((None, rows, joined), lambda item, step: (item, step, 0))
    first = pl.BlockSpec((None, count, rows, size), lambda item, step: (item, 0, step, 0))
    shape = (batch, count, tokens, size) if heads else (batch, tokens, joined)

    def kernel(x, out):
        for head in range(count):
            lanes = slice(head * size, (head + 1) * size)
            if heads:
                out[head] = x[:, lanes]
            else:
                out[:, lanes] = x[head]

    return pl.pallas_call(
        kernel,
        grid=(batch, pl.cdiv(tokens, rows)),
        in_specs=[flat if heads else first],
        out_specs=first if heads else flat,
        out_shape=jax.ShapeDtypeStruct(shape, x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        name="split_heads" if heads else "join_heads",
        interpret=interpret,
    )(x)


def _kernel(x, scale, *rest, heads, eps):
    """Norm a block of tokens over all heads, then scale and rotate head by head."""
    *turn, out = rest
    width = x.shape[-1]
    size = width // heads

    def load(head):
        return x[:, head * size : (head + 1) * size].astype(jnp.float32)

    squares = jnp.zeros((x.shape[0], size), jnp.float32)
    for head in range(heads):
        squares += jnp.square(load(head))
    factor = jax.lax.rsqrt(jnp.sum(squares, axis=-1, keepdims=True) / width + eps)
    for head in range(heads):
        y = load(head) * factor * scale[:, head * size : (head + 1) * size]
        if turn:
            cos, sin = turn
            y = y * cos[...] + pltpu.roll(y, size // 2, 1) * sin[...]
        out[head] = y.astype(out.dtype)
