"""How far the scores of a head can reach, before any is computed: what a bounded softmax needs.

With any centre c of a head's keys and R = max_j |k_j - c|, Cauchy and Schwarz bound all scores:

    q_i k_j <= q_i c + |q_i| R

and the score of a query with itself, which every table keeps, bounds a row's maximum from below. A
head is *online* if the two can be too far apart for one float32 exponent. One pass over q and k.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

HEADROOM = 88.0  # weights reach 2^88: 2^20 of them times values of 2^19 are still float32
LIMIT = HEADROOM + 96.0  # a row's greatest weight is 2^-96 or more, and 2^20 lost ones 2^-106
SAFETY = 1.02  # over bfloat16 rounding of squares
SUBLANES, LANES = 8, 128
PACKED = 16  # rows of a bfloat16 register tile
TILE, SAMPLE, SAMPLES = 4096, 512, 16  # rows measured at a time, rows sampled at a time, how often
VMEM_MIB = 60

_dot = functools.partial(jnp.dot, preferred_element_type=jnp.float32)


class Measured(NamedTuple):
    """What is known of each head before it runs."""

    gauge: jax.Array  # float32 [A, 8, D]: rows 0 and 1 are c and, all along, R
    spread: jax.Array  # float32 [A], how far below its bound a row's maximum can lie
    online: jax.Array  # bool [A], whether that is too far


def measure(q: jax.Array, k: jax.Array, interpret=False) -> Measured:
    """Bound the scores of each head, q scaled by `fold_scale`. One pass over q and k."""
    found = _gauge(q, k, interpret)
    radius = jnp.sqrt(found[:, 1, :1] * SAFETY)
    longest = jnp.sqrt(found[:, 2, 0] * SAFETY)
    # Once as `_bound` takes it, from squares rounded once more; and products round to 2^-9.
    spread = longest * radius[:, 0] * (SAFETY + 2**-8) + found[:, 3, 0] + 2
    gauge = found.at[:, 1].set(jnp.broadcast_to(radius, found[:, 1].shape))
    return Measured(gauge, spread, jnp.logical_not(spread <= LIMIT))


def _gauge(q: jax.Array, k: jax.Array, interpret) -> jax.Array:  # [A, 8, D] float32
    """Per head, in row 0 a centre c of the keys, then max |k - c|^2, max |q|^2 and
    max (0, -q_i (k_i - c)), each all along its row.
    """
    heads, rows, size = q.shape
    tile = min(TILE, -(-rows // PACKED) * PACKED)
    sample = min(SAMPLE, tile)
    steps = -(-rows // tile)
    samples = min(SAMPLES, max(1, rows // sample))
    stride = (rows // sample) // samples if rows >= sample else 1

    def measured(head, step):
        return head, jnp.maximum(step - samples, 0), 0

    return pl.pallas_call(
        functools.partial(_gauge_kernel, rows=rows, samples=samples),
        grid=(heads, samples + steps),
        in_specs=[
            pl.BlockSpec(
                (None, sample, size),
                lambda head, step: (head, jnp.minimum(step, samples - 1) * stride, 0),
            ),
            pl.BlockSpec((None, tile, size), measured),
            pl.BlockSpec((None, tile, size), measured),
        ],
        out_specs=pl.BlockSpec((None, SUBLANES, size), lambda head, step: (head, 0, 0)),
        out_shape=jax.ShapeDtypeStruct((heads, SUBLANES, size), jnp.float32),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_MIB * 2**20),
        name="attention_gauge",
        interpret=interpret,
    )(k, q, k)


def _gauge_kernel(k_sample, q, k, out, *, rows, samples):
    """Sample the centre of a head's keys, then measure how far keys and scores reach.

    Sums over D are products with ones: lanes are not added up across.
    """
    step, size = pl.program_id(1), q.shape[1]

    @pl.when(step == 0)
    def _start():
        out[...] = jnp.zeros_like(out)

    @pl.when(step < samples)
    def _sample():
        there = jax.lax.broadcasted_iota(jnp.int32, (k_sample.shape[0], 1), 0) < rows
        kept = jnp.where(there, k_sample[...].astype(jnp.float32), 0.0)
        share = 1.0 / (samples * min(rows, k_sample.shape[0]))
        out[0:1] += jnp.sum(kept, axis=0, keepdims=True) * share

    @pl.when(step == samples)
    def _round():
        out[0:1] = out[0:1].astype(q.dtype).astype(jnp.float32)

    @pl.when(step >= samples)
    def _measure():
        there = (step - samples) * q.shape[0] + jax.lax.broadcasted_iota(
            jnp.int32, (q.shape[0], 1), 0
        ) < rows
        queries = jnp.where(there, q[...].astype(jnp.float32), 0.0)
        keys = jnp.where(there, k[...].astype(jnp.float32) - out[0:1], 0.0)
        half = LANES // 2
        ones = (jax.lax.broadcasted_iota(jnp.int32, (2 * size, LANES), 0) < size) == (
            jax.lax.broadcasted_iota(jnp.int32, (2 * size, LANES), 1) < half
        )
        ones = ones.astype(jnp.float32).astype(q.dtype)
        squares = jnp.concatenate([keys * keys, queries * queries], axis=1).astype(q.dtype)
        lengths = jnp.max(_dot(squares, ones), axis=0, keepdims=True)
        behind = _dot((-queries * keys).astype(q.dtype), ones[:size])
        behind = jnp.max(behind, axis=0, keepdims=True)
        found = lengths[:, :1], lengths[:, half : half + 1], behind[:, :1]
        for line, number in enumerate(found, 1):
            old = out[line : line + 1]
            out[line : line + 1] = jnp.maximum(old, jnp.broadcast_to(number, old.shape))
