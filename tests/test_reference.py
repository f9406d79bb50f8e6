"""Attention in jax.numpy against a softmax in float64."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from svgen.kernels.reference import MAX_BLOCK, MAX_SCORES, attention, query_block

# Bounds are shares of the largest output. In float32 a score of size s is off by about s 2^-23, and
# so are its weight and the output, relatively; sums of K terms add sqrt(K) 2^-24. In bfloat16 the
# scaled q, the weights and the output are each rounded by 2^-9; scores of size s move by s 2^-9.
FLOAT32_ROUNDING, BFLOAT16_ROUNDING = 2.0**-23, 2.0**-9
SCORE = 6.0  # the largest score of unit q and k: D random terms / sqrt(D)


def tolerance(dtype: jnp.dtype, keys: int, score: float = SCORE) -> float:
    share = FLOAT32_ROUNDING * (score + math.sqrt(keys) + 4)
    return share if dtype == jnp.float32 else share + BFLOAT16_ROUNDING * (score + 4)


def inputs(seed: int, shape: tuple[int, ...], keys: int, dtype: jnp.dtype) -> list[jax.Array]:
    batch, heads, _, size = shape
    rng = np.random.default_rng(seed)
    shapes = (shape, (batch, heads, keys, size), (batch, heads, keys, size))
    return [jnp.asarray(rng.standard_normal(one, np.float32)).astype(dtype) for one in shapes]


def exact(q: jax.Array, k: jax.Array, v: jax.Array, bias: np.ndarray | None = None) -> np.ndarray:
    """The definition, in float64, on the same rounded inputs."""
    q, k, v = (np.asarray(one, np.float64) for one in (q, k, v))
    scores = np.einsum("band,bakd->bank", q, k) / math.sqrt(q.shape[-1])
    if bias is not None:
        scores = scores + bias
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("bank,bakd->band", weights / weights.sum(axis=-1, keepdims=True), v)


def difference(found: jax.Array, expected: np.ndarray) -> float:
    """The largest difference, as a share of the largest expected output."""
    assert found.shape == expected.shape
    return np.abs(np.asarray(found, np.float64) - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("shape", "keys"),
    [
        ((1, 1, 1, 1), 1),
        ((1, 1, 1, 8), 700),
        ((1, 2, 129, 16), 129),
        ((2, 3, 100, 12), 37),
        ((3, 1, 1023, 8), 64),
        ((1, 1, 1025, 8), 65),
        ((1, 2, 2051, 16), 5),
        ((1, 1, 300, 8), 20_011),  # fewer queries a block than fit at once
        ((2, 1, 5, 128), 512),
    ],
)
def test_attention_is_softmax_of_products(dtype, shape, keys):
    q, k, v = inputs(sum(shape) + keys, shape, keys, dtype)
    out = attention(q, k, v)
    assert out.dtype == dtype
    expected = exact(q, k, v)
    assert difference(out, expected) <= tolerance(dtype, keys)
    if keys > 1:  # another key's values, or another head's, would show
        assert difference(out, exact(q, k, v[:, :, ::-1])) > 0.3
    if math.prod(shape[:2]) > 1:
        assert difference(out, exact(q, k[::-1, ::-1], v[::-1, ::-1])) > 0.3


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_bias_is_added_to_every_row(dtype):
    q, k, v = inputs(1, (2, 2, 70, 16), 33, dtype)
    bias = np.random.default_rng(2).uniform(-3, 3, 33).astype(np.float32)
    out = attention(q, k, v, jnp.asarray(bias))
    bound = tolerance(dtype, 33, SCORE + 3)
    assert difference(out, exact(q, k, v, bias)) <= bound
    assert difference(out, exact(q, k, v)) > 5 * bound


def test_bias_of_minus_infinity_removes_a_key():
    q, k, v = inputs(3, (1, 2, 9, 8), 6, jnp.float32)
    bias = jnp.asarray([0, -jnp.inf, 0, 0, -jnp.inf, 0], jnp.float32)
    kept = np.array([0, 2, 3, 5])
    out = attention(q, k, v, bias)
    assert difference(out, exact(q, k[:, :, kept], v[:, :, kept])) <= tolerance(jnp.float32, 4)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_large_scores_do_not_overflow(dtype):
    q, k, v = inputs(4, (1, 1, 40, 16), 50, dtype)
    # Scores in the thousands, far beyond exp's reach; a row's best key then takes it all.
    large = attention(q * jnp.asarray(100, dtype), k * jnp.asarray(100, dtype), v)
    assert np.isfinite(np.asarray(large, np.float32)).all()
    scores = np.einsum("bank,bajk->banj", np.asarray(q, np.float64), np.asarray(k, np.float64))
    ordered = np.sort(scores, axis=-1)
    clear = ordered[..., -1] - ordered[..., -2] > 0.1 * np.abs(ordered[..., -1])
    best = np.take_along_axis(np.asarray(v, np.float64), scores.argmax(-1)[..., None], axis=2)
    assert clear.sum() > 10
    np.testing.assert_allclose(np.asarray(large, np.float64)[clear], best[clear], rtol=2.0**-8)


def test_scores_that_are_all_very_negative_still_weigh():
    q, k, v = inputs(5, (1, 1, 3, 8), 4, jnp.float32)
    bias = np.full(4, -1e4, np.float32)
    error = difference(attention(q, k, v, jnp.asarray(bias)), exact(q, k, v))
    assert error <= tolerance(jnp.float32, 4, 1e4)


def test_values_may_have_another_size_than_keys():
    q, k, _ = inputs(6, (1, 2, 140, 8), 30, jnp.float32)
    v = inputs(7, (1, 2, 1, 5), 30, jnp.float32)[2]
    assert difference(attention(q, k, v), exact(q, k, v)) <= tolerance(jnp.float32, 30)


def test_attention_of_large_numbers_of_keys_holds_few_scores():
    shape, keys = (1, 8, 4096, 64), 32_768
    spec = [jax.ShapeDtypeStruct((1, 8, rows, 64), jnp.bfloat16) for rows in (4096, keys, keys)]
    used = jax.jit(attention).lower(*spec).compile().memory_analysis().temp_size_in_bytes
    all_scores = 4 * math.prod(shape[:3]) * keys
    assert used < all_scores / 20


def test_block_bounds_by_hand():
    assert query_block(1, 1) == (1, 1)
    assert query_block(MAX_BLOCK, 10) == (1, MAX_BLOCK)
    assert query_block(MAX_BLOCK + 1, 10) == (2, 513)
    assert query_block(75_600, 75_600) == (600, 126)  # 4,194,304 / 75,600 = 55 rows: too few
    assert query_block(75_600, 512) == (75, 1008)  # no padding, where 74 blocks would need some
    assert query_block(32_760, 8192) == (65, 504)
    assert query_block(302_400, 302_400)[1] == 126


def test_blocks_cover_all_queries_evenly_within_the_bounds():
    sides = [1, 2, 127, 128, 129, 513, 1023, 1024, 1025, 4097, 32_760, 75_600, 302_400]
    for queries, keys in itertools.product(sides, sides):
        blocks, rows = query_block(queries, keys)
        assert blocks * rows >= queries > (blocks - 1) * rows - blocks
        assert blocks * rows - queries < blocks  # less than a row of padding a block
        assert 1 <= rows <= MAX_BLOCK
        assert rows <= 128 or rows * keys <= MAX_SCORES
