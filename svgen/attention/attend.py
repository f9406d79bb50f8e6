"""The one entry for attention. The transformer calls it and knows nothing of how it is done.

A transformer is given an `Attend`: a function of (q, k, v, layer) that returns the output and a
record, any pytree of arrays that says what was done; records come back stacked over layers. `dense`
attends to everything and records nothing; `sparse` makes one that routes each head and records how.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from svgen.attention.masks import ROUTES, Tables
from svgen.attention.routing import ROWS, Routing, route, row_key, sample_rows
from svgen.kernels import reference

# (q [B, N, A, D], k, v of the same shape, layer []) -> (out [B, N, A, D], record)
Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]

# (q [B, A, N, D], k, v, routes [B, A], tables) -> (out [B, A, N, D], log-sum-exp [B, A, N])
Kernel = Callable[..., tuple[jax.Array, jax.Array]]


class Record(NamedTuple):
    """What `sparse` did in one layer; stacked, each array gains a leading axis of layers."""

    routes: jax.Array  # int32 [B, A], as in `masks.ROUTES`: how each head ran
    errors: jax.Array  # float32 [B, A, 2], of `routing.Routing`; zero where nothing was sampled
    sampled: jax.Array  # bool []: whether the layer was routed, not dense by schedule


def _heads_first(x: jax.Array) -> jax.Array:
    return x.transpose(0, 2, 1, 3)


def dense(
    q: jax.Array,  # [B, N, A, D]
    k: jax.Array,
    v: jax.Array,
    layer: jax.Array,
) -> tuple[jax.Array, tuple[()]]:
    """Let every query look at every key."""
    del layer
    out = reference.attention(_heads_first(q), _heads_first(k), _heads_first(v))
    return _heads_first(out), ()


def to_text(
    q: jax.Array,  # [B, N, A, D]
    k: jax.Array,  # [B, L, A, D]
    v: jax.Array,  # [B, L, A, D]
    text_tokens: int,
) -> jax.Array:  # [B, N, A, D]
    """Attend to text that upstream pads to `text_tokens` rows and does not mask.

    All padding rows are the same row, so L < text_tokens rows suffice: the last one, which must be
    padding, stands for itself and all that were left out, by adding the logarithm of their number
    to its scores. Exact, and 8 times less work for a prompt of 50 tokens.
    """
    rows = k.shape[1]
    count = jnp.asarray(text_tokens - rows + 1, jnp.float32)
    bias = jnp.zeros(rows, jnp.float32).at[-1].set(jnp.log(count))
    out = reference.attention(_heads_first(q), _heads_first(k), _heads_first(v), bias)
    return _heads_first(out)


def sparse(
    tables: Tables,
    *,
    seed: jax.Array,  # uint32 []
    step: jax.Array,  # int32 []
    dense_steps: int,
    dense_layers: int,
    rows: int = ROWS,
    budget: float | None = None,
    kernel: Kernel = reference.sparse_attention,
) -> Attend:
    """Make an `Attend` that routes each head anew and lets it read its route's table.

    In the first `dense_steps` steps, and in the first `dense_layers` layers of any step, nothing is
    sampled and every head is dense. Elsewhere `rows` query rows decide (`routing.route`); a head
    whose error exceeds `budget` under both masks stays dense.
    """
    frames, positions = tables.temporal.queries.outer, tables.temporal.queries.inner
    count = min(rows, frames * positions)

    def attend(
        q: jax.Array, k: jax.Array, v: jax.Array, layer: jax.Array
    ) -> tuple[jax.Array, Record]:
        q, k, v = _heads_first(q), _heads_first(k), _heads_first(v)

        def decide() -> Routing:
            key = row_key(seed, step, layer)
            return route(q, k, v, sample_rows(key, frames, positions, count), tables, budget=budget)

        def stay_dense() -> Routing:
            heads = q.shape[:2]
            return Routing(jnp.zeros(heads, jnp.int32), jnp.zeros((*heads, 2), jnp.float32))

        sampled = (step >= dense_steps) & (layer >= dense_layers)
        routing = jax.lax.cond(sampled, decide, stay_dense)
        out, _ = kernel(q, k, v, routing.routes, tables)
        return _heads_first(out), Record(*routing, sampled)

    return attend


def count_calls(record: Record) -> jax.Array:
    """Count how many head calls ran by each of `masks.ROUTES`, int32 [3], in any stack of
    records.
    """
    routes = jnp.arange(len(ROUTES), dtype=jnp.int32)
    return jnp.sum(record.routes.reshape(-1, 1) == routes[None], axis=0, dtype=jnp.int32)
