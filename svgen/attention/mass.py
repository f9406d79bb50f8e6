"""Where heads look: along time, on the frame, and in both orders of the tokens.

Measured on sampled query rows, so that no N x N array is ever held.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from svgen.attention.attend import Attend
from svgen.attention.routing import ROWS, row_key, sample_rows

BINS = 128  # of keys in a map, at most


class View(NamedTuple):
    """Where one head looks; distances are those between query and key.

    Keys of a map are summed in K runs of neighbors. Its query rows are in the same order as they.
    """

    along_time: jax.Array  # float32 [F], share of attention by distance in frames
    on_frame: jax.Array  # float32 [rings], by distance on the frame in tokens, rounded
    frame_major: jax.Array  # float32 [R, K], frame after frame: a spatial head is a diagonal
    position_major: jax.Array  # float32 [R, K], position after position: a temporal head is one


def rings(rows: int, columns: int) -> int:
    """How many whole distances there are on a frame, 0 among them."""
    return round(math.hypot(rows - 1, columns - 1)) + 1


def head_view(
    q: jax.Array,  # [R, D], query rows of one head
    k: jax.Array,  # [N, D]
    tokens: jax.Array,  # int32 [R], which tokens the queries are, ascending
    grid: tuple[int, int, int],  # F, H, W
) -> View:
    """Look at one head. Evenly spread attention has 1/F inside its frame, 1/(H W) along its
    position.
    """
    frames, positions = grid[0], grid[1] * grid[2]
    scores = jax.lax.dot_general(q, k, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(scores * jnp.float32(q.shape[-1] ** -0.5), axis=1)
    cube = weights.reshape(-1, frames, positions)
    apart = jnp.abs(jnp.arange(frames)[None] - (tokens // positions)[:, None])
    by_position = jnp.argsort(tokens % positions * frames + tokens // positions)
    return View(
        _shares(apart, cube.sum(axis=2), frames),
        _shares(_ring(tokens % positions, grid), cube.sum(axis=1), rings(*grid[1:])),
        _binned(weights),
        _binned(cube.swapaxes(1, 2).reshape(weights.shape)[by_position]),
    )


def _ring(position: jax.Array, grid: tuple[int, int, int]) -> jax.Array:
    """How far every position of a frame is from some, int32 [R, H W]."""
    rows, columns = grid[1:]
    there = jnp.arange(rows * columns)[None]
    down = there // columns - (position // columns)[:, None]
    right = there % columns - (position % columns)[:, None]
    return jnp.round(jnp.hypot(*(x.astype(jnp.float32) for x in (down, right)))).astype(jnp.int32)


def _shares(kinds: jax.Array, weights: jax.Array, count: int) -> jax.Array:
    """Sum weights [R, n] by their kinds, int32 of the same shape; the mean over rows, [count]."""
    sums = jnp.zeros(count, jnp.float32).at[kinds].add(weights)
    return sums / jnp.float32(weights.shape[0])


def _binned(weights: jax.Array) -> jax.Array:
    """Sum the keys of [R, N] in at most `BINS` runs."""
    rows, tokens = weights.shape
    bins = min(BINS, tokens)
    run = jnp.asarray(np.arange(tokens, dtype=np.int64) * bins // tokens, jnp.int32)
    return jnp.zeros((rows, bins), jnp.float32).at[:, run].add(weights)


def watching(
    inner: Attend,
    grid: tuple[int, int, int],  # F, H, W
    *,
    seed: jax.Array,
    step: jax.Array,
    rows: int = ROWS,
) -> Attend:
    """Make an `Attend` that attends as `inner` does, and records a `View` of each head instead of
    what that records: arrays [B, A, ...].
    """
    frames, positions = grid[0], grid[1] * grid[2]
    count = min(rows, frames * positions)

    def attend(
        q: jax.Array, k: jax.Array, v: jax.Array, layer: jax.Array
    ) -> tuple[jax.Array, View]:
        out, _ = inner(q, k, v, layer)
        chosen = jnp.sort(sample_rows(row_key(seed, step, layer), frames, positions, count))
        batch, heads, _, size = q.shape
        parts = [x.reshape(batch * heads, -1, size) for x in (q, k)]

        def one(head: tuple[jax.Array, jax.Array]) -> View:
            return head_view(head[0][chosen], head[1], chosen, grid)

        views = jax.lax.map(one, tuple(parts))
        return out, jax.tree.map(lambda x: x.reshape(batch, heads, *x.shape[1:]), views)

    return attend
