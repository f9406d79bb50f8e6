"""Which head is which: some query rows are attended densely and as each mask would, and the mask
that comes nearer wins.

Rows are drawn over all frames and positions; errors are float32, of the visit tables that will
run. Only a head's [rows, N] scores are ever held, and all masks read the same ones.

Source: Sparse VideoGen's online profiling, arXiv 2502.01776.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from svgen.attention.masks import DENSE, SPATIAL, TEMPORAL, Tables
from svgen.kernels.tables import VisitTable

ROWS = 64  # query rows that are sampled


class Routing(NamedTuple):
    """What was decided for each head, and how far either mask was from dense attention."""

    routes: jax.Array  # int32 [B, A], as in `masks.ROUTES`
    errors: jax.Array  # float32 [B, A, 2], spatial and temporal: |sparse - dense| / |dense|


def row_key(seed: jax.Array, step: jax.Array, layer: jax.Array) -> jax.Array:
    """The key that draws the rows of one layer at one step, from integers."""
    key = jax.random.key(seed, impl="threefry2x32")
    return jax.random.fold_in(jax.random.fold_in(key, step), layer)


def sample_rows(key: jax.Array, frames: int, positions: int, count: int = ROWS) -> jax.Array:
    """Draw `count` tokens, int32: one from each of `count` strata of frames, and of positions.

    Strata of the two are paired at random (a Latin hypercube), and each token is as likely as any
    other.
    """
    if not 1 <= count <= frames * positions:
        raise ValueError(f"{count} rows cannot be drawn from {frames * positions} tokens")
    order, within = jax.random.split(key)
    strata = jnp.arange(count, dtype=jnp.float32)
    strata = jnp.stack([strata, jax.random.permutation(order, strata)])
    place = (strata + jax.random.uniform(within, (2, count))) / jnp.float32(count)
    frame = (place[0] * jnp.float32(frames)).astype(jnp.int32).clip(0, frames - 1)
    position = (place[1] * jnp.float32(positions)).astype(jnp.int32).clip(0, positions - 1)
    return frame * positions + position


def kept_keys(table: VisitTable, rows: jax.Array) -> jax.Array:
    """Which keys a table keeps for query tokens `rows` [R]: bool [R, N], from indices alone."""
    outer, inner = table.queries.outer, table.queries.inner
    query_tile = rows % inner // table.queries.size
    keys, sink = (jnp.asarray(kinds)[query_tile] for kinds in table.kinds)
    kinds = jnp.repeat(keys, table.keys.size, axis=1)[:, None, :inner]
    read = jnp.arange(outer) >= table.keys.skip
    kinds = jnp.where(read[None, :, None], kinds, jnp.int8(0)).reshape(-1, table.tokens)
    if table.sink is not None:
        first = jnp.repeat(sink, table.sink.size, axis=1)[:, : table.sink.inner]
        kinds = jnp.concatenate([first, kinds[:, table.sink.inner :]], axis=1)
    if not table.masked.any():
        return kinds > 0
    tokens = jnp.arange(table.tokens)
    near = jnp.abs(_order(rows, table)[:, None] - _order(tokens, table)[None]) <= table.width
    return (kinds == 1) | ((kinds == 2) & (near | (tokens < table.sink_tokens)[None]))


def _order(tokens: jax.Array, table: VisitTable) -> jax.Array:
    outer, inner = table.queries.outer, table.queries.inner
    return tokens % inner * outer + tokens // inner


def _attend(scores: jax.Array, v: jax.Array) -> jax.Array:
    """Softmax of scores [R, N], times v [N, D], all in float32."""
    weights = jnp.exp(scores - scores.max(axis=1, keepdims=True))
    out = jnp.dot(weights, v.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    return out / weights.sum(axis=1, keepdims=True)


def mask_errors(
    q: jax.Array,  # [R, D], sampled query rows of one head
    k: jax.Array,  # [N, D]
    v: jax.Array,  # [N, D]
    kept: tuple[jax.Array, ...],  # bool [R, N] each
) -> jax.Array:
    """How far the output under each mask is from that of dense attention: |sparse - dense| /
    |dense| over all rows, float32.
    """
    scores = jax.lax.dot_general(
        q,
        k,
        (((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    scores = scores * jnp.float32(q.shape[-1] ** -0.5)
    dense = _attend(scores, v)
    errors = [
        jnp.sum(jnp.square(_attend(jnp.where(mask, scores, -jnp.inf), v) - dense)) for mask in kept
    ]
    tiny = jnp.float32(jnp.finfo(jnp.float32).tiny)  # values of zero: every mask is right
    return jnp.sqrt(jnp.stack(errors) / jnp.maximum(jnp.sum(jnp.square(dense)), tiny))


def choose(errors: jax.Array, budget: float | None = None) -> jax.Array:
    """Route heads by their errors [B, A, 2]: the smaller one, or dense if both exceed `budget`."""
    spatial, temporal = errors[..., 0], errors[..., 1]
    routes = jnp.where(temporal < spatial, jnp.int32(TEMPORAL), jnp.int32(SPATIAL))
    if budget is None:
        return routes
    return jnp.where(jnp.minimum(spatial, temporal) > budget, jnp.int32(DENSE), routes)


def route(
    q: jax.Array,  # [B, A, N, D]
    k: jax.Array,  # [B, A, N, D]
    v: jax.Array,  # [B, A, N, D]
    rows: jax.Array,  # int32 [R], query tokens to look at
    tables: Tables,
    *,
    budget: float | None = None,
    heads_at_once: int = 1,
) -> Routing:
    """Decide for each head of each batch row, `heads_at_once` at a time (R N floats each).

    With a `budget`, a head whose relative error exceeds it under both masks stays dense.
    """
    kept = (kept_keys(tables.spatial, rows), kept_keys(tables.temporal, rows))
    flat = [x.reshape(-1, *x.shape[2:]) for x in (q[:, :, rows], k, v)]

    def one_head(head: tuple[jax.Array, ...]) -> jax.Array:
        return mask_errors(*head, kept)

    at_once = min(heads_at_once, len(flat[0]))
    errors = jax.lax.map(one_head, tuple(flat), batch_size=at_once if at_once > 1 else None)
    errors = errors.reshape(*q.shape[:2], 2)
    return Routing(choose(errors, budget), errors)
