"""The entry for attention: the axes of its arguments, and text without its padding."""

import jax.numpy as jnp
import numpy as np
import pytest

from svgen.attention.attend import dense, to_text
from svgen.config import TEXT_TOKENS

# Float32: scores up to 6 and sums over up to 512 keys, each rounded to 2^-23 of its size.
TOLERANCE = 2.0**-23 * (6 + 512**0.5) * 2


def draw(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def exact(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """softmax(q k^T / sqrt(D)) v of [B, N, A, D], in float64."""
    q, k, v = (np.asarray(one, np.float64) for one in (q, k, v))
    scores = np.einsum("bnad,bkad->bank", q, k) / np.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("bank,bkad->bnad", weights, v)


def test_dense_lets_every_query_look_at_every_key():
    q, k, v = (draw(seed, 2, 45, 3, 8) for seed in range(3))
    out, record = dense(*map(jnp.asarray, (q, k, v)), jnp.int32(4))
    assert record == () and out.shape == q.shape and out.dtype == jnp.float32
    np.testing.assert_allclose(out, exact(q, k, v), atol=TOLERANCE)
    for key in range(45):  # dropping any one key would show
        rest = np.delete(np.arange(45), key)
        assert np.abs(exact(q, k[:, rest], v[:, rest]) - out).max() > 100 * TOLERANCE


def test_dense_does_not_depend_on_the_layer():
    q, k, v = (jnp.asarray(draw(seed, 1, 5, 2, 4)) for seed in range(3))
    first, last = dense(q, k, v, jnp.int32(0))[0], dense(q, k, v, jnp.int32(39))[0]
    np.testing.assert_array_equal(first, last)


@pytest.mark.parametrize("rows", [1, 2, 64, 65, 128, 448, 511, 512])
def test_text_without_most_padding_equals_all_512_rows(rows):
    q = draw(1, 2, 33, 2, 8)
    k, v = draw(2, 2, rows, 2, 8), draw(3, 2, rows, 2, 8)
    # The last row is padding; upstream has it again and again, up to 512 rows.
    whole = [np.concatenate([one, *[one[:, -1:]] * (TEXT_TOKENS - rows)], axis=1) for one in (k, v)]
    assert whole[0].shape[1] == TEXT_TOKENS
    out = to_text(*map(jnp.asarray, (q, k, v)), TEXT_TOKENS)
    np.testing.assert_allclose(out, exact(q, *whole), atol=TOLERANCE)
    if 1 < rows < TEXT_TOKENS:  # the left out rows do weigh
        assert np.abs(exact(q, k, v) - out).max() > 1000 * TOLERANCE


def test_text_when_cut_further_gives_the_same():
    """A prompt of 20 tokens, padded with one row to 64 or 192 or 21 rows."""
    q, pad_k, pad_v = draw(1, 1, 9, 2, 8), draw(2, 1, 1, 2, 8), draw(3, 1, 1, 2, 8)
    k, v = draw(4, 1, 20, 2, 8), draw(5, 1, 20, 2, 8)
    found = []
    for rows in (21, 64, 192):
        padded = [np.concatenate([k, *[pad_k] * (rows - 20)], axis=1)]
        padded += [np.concatenate([v, *[pad_v] * (rows - 20)], axis=1)]
        found.append(to_text(jnp.asarray(q), *map(jnp.asarray, padded), TEXT_TOKENS))
    np.testing.assert_allclose(found[1], found[0], atol=TOLERANCE)
    np.testing.assert_allclose(found[2], found[0], atol=TOLERANCE)


def test_text_keeps_the_type_of_the_queries():
    q, k, v = (jnp.asarray(draw(seed, 1, 4, 2, 8)).astype(jnp.bfloat16) for seed in range(3))
    out = to_text(q, k, v, TEXT_TOKENS)
    assert (out.dtype, out.shape) == (jnp.bfloat16, q.shape)
