"""Where heads look: the share of attention inside the query's frame, and along its position.

Measured on sampled query rows, so that no N x N array is ever held.
"""

import jax
import jax.numpy as jnp

from svgen.attention.attend import Attend, dense
from svgen.attention.routing import ROWS, row_key, sample_rows


def head_mass(
    q: jax.Array,  # [R, D], query rows of one head
    k: jax.Array,  # [N, D]
    rows: jax.Array,  # int32 [R], which tokens the queries are
    positions: int,
) -> jax.Array:
    """Mean share of attention inside the query's frame, and along its position in all frames:
    float32 [2]. Evenly spread attention has 1/F and 1/P.
    """
    scores = jax.lax.dot_general(q, k, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(scores * jnp.float32(q.shape[-1] ** -0.5), axis=1)
    tokens = jnp.arange(k.shape[0], dtype=jnp.int32)[None]
    same_frame = tokens // positions == (rows // positions)[:, None]
    same_position = tokens % positions == (rows % positions)[:, None]
    masks = (same_frame, same_position)
    return jnp.stack([jnp.where(mask, weights, 0.0).sum(axis=1).mean() for mask in masks])


def measuring(
    frames: int, positions: int, *, seed: jax.Array, step: jax.Array, rows: int = ROWS
) -> Attend:
    """Make an `Attend` that is dense and records `head_mass`: float32 [B, A, 2]."""
    count = min(rows, frames * positions)

    def attend(
        q: jax.Array, k: jax.Array, v: jax.Array, layer: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        out, _ = dense(q, k, v, layer)
        chosen = sample_rows(row_key(seed, step, layer), frames, positions, count)
        batch, heads, _, size = q.shape
        parts = [x.reshape(batch * heads, -1, size) for x in (q, k)]

        def one(head: tuple[jax.Array, jax.Array]) -> jax.Array:
            return head_mass(head[0][chosen], head[1], chosen, positions)

        return out, jax.lax.map(one, tuple(parts)).reshape(batch, heads, 2)

    return attend
