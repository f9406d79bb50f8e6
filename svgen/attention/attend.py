"""The one entry for attention. The transformer calls it and knows nothing of how it is done.

A transformer is given an `Attend`: a function of (q, k, v, layer) that returns the output and a
record, any pytree of arrays that says what was done; records come back stacked over layers. `dense`
attends to everything and records nothing.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from svgen.kernels import reference

# (q [B, N, A, D], k, v of the same shape, layer []) -> (out [B, N, A, D], record)
Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]


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
