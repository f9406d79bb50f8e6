"""The entry for attention: the axes of its arguments, text without its padding, sparse heads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from svgen.attention.attend import Record, count_calls, dense, sparse, to_text
from svgen.attention.masks import tables
from svgen.attention.routing import route, row_key, sample_rows
from svgen.config import TEXT_TOKENS, TransformerSpec
from svgen.kernels.reference import sparse_attention, tile_sizes
from svgen.models.transformer import Transformer

# Float32: scores up to 6 and sums over up to 512 keys, each rounded to 2^-23 of its size.
TOLERANCE = 2.0**-23 * (6 + 512**0.5) * 2


def draw(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def exact(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """softmax(q k^T / sqrt(D)) v of [B, A, N, D], in float64."""
    q, k, v = (np.asarray(one, np.float64) for one in (q, k, v))
    scores = np.einsum("band,bakd->bank", q, k) / np.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("bank,bakd->band", weights, v)


def test_dense_lets_every_query_look_at_every_key():
    q, k, v = (draw(seed, 2, 3, 45, 8) for seed in range(3))
    out, record = dense(*map(jnp.asarray, (q, k, v)), jnp.int32(4))
    assert count_calls(record).tolist() == [6, 0, 0] and not record.sampled
    assert out.shape == q.shape and out.dtype == jnp.float32
    np.testing.assert_allclose(out, exact(q, k, v), atol=TOLERANCE)
    for key in range(45):  # dropping any one key would show
        rest = np.delete(np.arange(45), key)
        assert np.abs(exact(q, k[:, :, rest], v[:, :, rest]) - out).max() > 100 * TOLERANCE


def test_dense_does_not_depend_on_the_layer():
    q, k, v = (jnp.asarray(draw(seed, 1, 2, 5, 4)) for seed in range(3))
    first, last = dense(q, k, v, jnp.int32(0))[0], dense(q, k, v, jnp.int32(39))[0]
    np.testing.assert_array_equal(first, last)


@pytest.mark.parametrize("rows", [1, 2, 64, 65, 128, 448, 511, 512])
def test_text_without_most_padding_equals_all_512_rows(rows):
    q = draw(1, 2, 2, 33, 8)
    k, v = draw(2, 2, 2, rows, 8), draw(3, 2, 2, rows, 8)
    # The last row is padding; upstream has it again and again, up to 512 rows.
    whole = [np.concatenate([one, *[one[:, :, -1:]] * (TEXT_TOKENS - rows)], 2) for one in (k, v)]
    assert whole[0].shape[2] == TEXT_TOKENS
    out = to_text(*map(jnp.asarray, (q, k, v)), TEXT_TOKENS)
    np.testing.assert_allclose(out, exact(q, *whole), atol=TOLERANCE)
    if 1 < rows < TEXT_TOKENS:  # the left out rows do weigh
        assert np.abs(exact(q, k, v) - out).max() > 1000 * TOLERANCE


def test_text_when_cut_further_gives_the_same():
    """A prompt of 20 tokens, padded with one row to 64 or 192 or 21 rows."""
    q, pad_k, pad_v = draw(1, 1, 2, 9, 8), draw(2, 1, 2, 1, 8), draw(3, 1, 2, 1, 8)
    k, v = draw(4, 1, 2, 20, 8), draw(5, 1, 2, 20, 8)
    found = []
    for rows in (21, 64, 192):
        padded = [np.concatenate([k, *[pad_k] * (rows - 20)], axis=2)]
        padded += [np.concatenate([v, *[pad_v] * (rows - 20)], axis=2)]
        found.append(to_text(jnp.asarray(q), *map(jnp.asarray, padded), TEXT_TOKENS))
    np.testing.assert_allclose(found[1], found[0], atol=TOLERANCE)
    np.testing.assert_allclose(found[2], found[0], atol=TOLERANCE)


def test_text_keeps_the_type_of_the_queries():
    q, k, v = (jnp.asarray(draw(seed, 1, 2, 4, 8)).astype(jnp.bfloat16) for seed in range(3))
    out = to_text(q, k, v, TEXT_TOKENS)
    assert (out.dtype, out.shape) == (jnp.bfloat16, q.shape)


FRAMES, POSITIONS = 7, 80
TABLES = tables(FRAMES, POSITIONS, 0.2, tile_sizes(FRAMES, POSITIONS))


@jax.jit
def sparse_step(q, k, v, seed, step, layer) -> tuple[jax.Array, Record]:
    """Two dense steps and one dense layer, 40 rows: all by traced numbers."""
    parts = {"dense_steps": 2, "dense_layers": 1, "rows": 40}
    return sparse(TABLES, seed=seed, step=step, **parts)(q, k, v, layer)


def numbers(seed: int, step: int, layer: int) -> tuple[jax.Array, ...]:
    return jnp.uint32(seed), jnp.int32(step), jnp.int32(layer)


def test_sparse_is_dense_in_the_first_steps_and_layers():
    assert TABLES.spatial.density < 0.6
    q, k, v = (jnp.asarray(draw(seed, 2, 3, 560, 8)) for seed in range(3))
    whole = dense(q, k, v, jnp.int32(0))[0]
    sampled = {}
    for step in range(4):
        for layer in range(3):
            out, record = sparse_step(q, k, v, *numbers(5, step, layer))
            sampled[step, layer] = bool(record.sampled)
            same = np.abs(out - whole).max() <= 2 * TOLERANCE
            assert same == (not record.sampled)
            assert (record.routes == 0).all() == (record.errors == 0).all() == same
    assert sampled == {(step, layer): step >= 2 and layer >= 1 for step, layer in sampled}
    assert sparse_step._cache_size() == 1  # neither step nor layer compiles again


def test_sparse_runs_each_head_by_the_route_it_records():
    q, k, v = (jnp.asarray(draw(seed, 2, 4, 560, 8)) for seed in range(3, 6))
    out, record = sparse_step(q, k, v, *numbers(9, 5, 2))
    rows = sample_rows(row_key(*numbers(9, 5, 2)), FRAMES, POSITIONS, 40)
    expected = route(q, k, v, rows, TABLES)
    np.testing.assert_array_equal(record.routes, expected.routes)
    np.testing.assert_allclose(record.errors, expected.errors, rtol=1e-5)
    found, _ = sparse_attention(q, k, v, record.routes, TABLES)
    np.testing.assert_allclose(out, found, atol=TOLERANCE)
    assert set(np.unique(record.routes)) == {1, 2}


def test_sparse_draws_other_rows_at_each_seed_step_and_layer():
    q, k, v = (jnp.asarray(draw(seed, 1, 2, 560, 8)) for seed in range(6, 9))
    errors = [
        np.asarray(sparse_step(q, k, v, *numbers(*one))[1].errors)
        for one in ((1, 3, 4), (1, 3, 4), (2, 3, 4), (1, 4, 4), (1, 3, 5), (1, 4, 3))
    ]
    np.testing.assert_array_equal(errors[0], errors[1])
    assert len({one.tobytes() for one in errors}) == 5


def test_sparse_takes_another_kernel_of_the_same_signature():
    seen = []

    def kernel(q, k, v, routes, given):
        seen.append((q.shape, routes.shape, given is TABLES))
        return v * 2, None

    q, k, v = (jnp.asarray(draw(seed, 1, 2, 560, 8)) for seed in range(3))
    attend = sparse(
        TABLES,
        seed=jnp.uint32(0),
        step=jnp.int32(0),
        dense_steps=0,
        dense_layers=0,
        budget=0.0,
        kernel=kernel,
    )
    out, record = attend(q, k, v, jnp.int32(0))
    np.testing.assert_array_equal(out, v * 2)
    assert seen == [((1, 2, 560, 8), (1, 2), True)]
    assert record.sampled and (record.routes == 0).all() and (record.errors > 0).all()


def test_transformer_stacks_the_records_of_its_layers():
    spec = TransformerSpec(heads=2, head_dim=12, layers=3, mlp_width=8, text_width=8)
    model = Transformer(spec, rngs=nnx.Rngs(0))
    latents = jnp.asarray(draw(0, 2, FRAMES, 16, 20, 16))
    text = jnp.asarray(draw(1, 2, 3, 8))
    attend = sparse(
        TABLES, seed=jnp.uint32(1), step=jnp.int32(4), dense_steps=2, dense_layers=1, rows=8
    )
    time = jnp.asarray([500.0, 500.0])
    velocity, record = jax.jit(lambda: model(latents, time, text, attend))()
    assert velocity.shape == latents.shape and np.isfinite(velocity).all()
    assert record.routes.shape == (3, 2, 2) and record.errors.shape == (3, 2, 2, 2)
    assert record.sampled.tolist() == [False, True, True]
    counts = count_calls(record).tolist()
    assert counts[0] == 4 and sum(counts) == 12


def test_calls_are_counted_by_route():
    routes = jnp.asarray([[[0, 1, 1], [2, 2, 2]], [[1, 1, 1], [1, 0, 1]]], jnp.int32)
    record = Record(routes, jnp.zeros((2, 2, 3, 2)), jnp.ones(2, bool))
    assert count_calls(record).tolist() == [2, 7, 3]
    assert count_calls(record).dtype == jnp.int32
