"""Small layers shared by the networks: norms in float32, embeddings of time, rotary embedding,
stacked layers.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

Gather = Callable[[object], object]  # the weights of one layer, from their parts


def layer_norm(x: jax.Array, eps: float) -> jax.Array:
    """Normalise the last axis to mean 0 and variance 1; float32 in and out."""
    mean = x.mean(axis=-1, keepdims=True)
    centred = x - mean
    variance = jnp.square(centred).mean(axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + jnp.float32(eps))


def time_features(t: jax.Array, width: int) -> jax.Array:
    """Sinusoidal features of times [B]: cosines, then sines, of t * 10000^(-i/(width/2)). Returns
    float32 [B, width].
    """
    half = width // 2
    frequencies = np.exp(-np.log(10000.0) * np.arange(half) / half).astype(np.float32)
    angles = t[:, None] * frequencies[None]
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def rotary_split(head_dim: int) -> tuple[int, int, int]:
    """How many of a head's D/2 rotated pairs belong to frames, rows and columns: D = 128 gives 22,
    21, 21.
    """
    side = head_dim // 6
    return head_dim // 2 - 2 * side, side, side


def rotary_angles(grid: tuple[int, int, int], head_dim: int) -> jax.Array:
    """Rotation angles of every token of a grid (frames, rows, columns), float32 [N, D/2].

    Pair i of an axis that owns P pairs turns by position * 10000^(-i/P). Source: Wan's
    three-dimensional RoPE.
    """
    frames, rows, columns = grid
    tables = []
    for positions, pairs in zip(grid, rotary_split(head_dim), strict=True):
        frequencies = 10000.0 ** (-np.arange(pairs) / pairs)
        tables.append(np.outer(np.arange(positions), frequencies).astype(np.float32))
    by_frame, by_row, by_column = tables
    parts = [by_frame[:, None, None], by_row[None, :, None], by_column[None, None]]
    shape = (frames, rows, columns)
    full = [jnp.broadcast_to(part, (*shape, part.shape[-1])) for part in parts]
    return jnp.concatenate(full, axis=-1).reshape(frames * rows * columns, head_dim // 2)


def stack_layers(make: Callable[[nnx.Rngs], nnx.Module], layers: int, rngs: nnx.Rngs) -> nnx.Module:
    """Build `layers` modules of one kind as one module whose leaves have a leading layer axis."""
    keys = jax.random.split(rngs.params(), layers)
    return nnx.vmap(lambda key: make(nnx.Rngs(params=key)))(keys)


def scan_layers(
    layers: nnx.Module,
    step: Callable[[nnx.Module, jax.Array, jax.Array], tuple[jax.Array, object]],
    x: jax.Array,
    gather: Gather = lambda weights: weights,
) -> tuple[jax.Array, object]:
    """Run x through stacked layers in one scan: `step(layer, x, index) -> (x, record)`.

    `gather` brings the weights of one layer together that lie on several chips. Records come back
    stacked. The barrier keeps XLA on a CPU from converting the whole stack of
    bfloat16 weights to float32 ahead of the loop (jax 0.10: three times the memory). Training keeps
    each layer's input and computes the layer again; a forward pass alone is not changed by that.
    """
    graph, stack = nnx.split(layers)
    count = jax.tree.leaves(stack)[0].shape[0]

    @jax.checkpoint
    def body(carry: jax.Array, index: jax.Array) -> tuple[jax.Array, object]:
        held, index = jax.lax.optimization_barrier((stack, index))
        leaves = jax.tree.map(
            lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, 0, False), held
        )
        return step(nnx.merge(graph, gather(leaves)), carry, index)

    return jax.lax.scan(body, x, jnp.arange(count))
