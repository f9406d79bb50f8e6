"""Where heads look, against shares worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np

from svgen.attention.attend import dense
from svgen.attention.mass import BINS, head_view, rings, watching

GRID = (3, 2, 4)
FRAMES, POSITIONS = 3, 8
TOKENS = np.arange(FRAMES * POSITIONS)
look = jax.jit(head_view, static_argnames="grid")


def view_of(features: np.ndarray):
    k = jnp.asarray(features, jnp.float32)
    return look(k, k, jnp.asarray(TOKENS, jnp.int32), GRID)


def test_even_attention_has_the_share_of_each_distance():
    view = view_of(np.zeros((24, 8)))
    # Of 3 x 3 pairs of frames 3, 4 and 2 are 0, 1 and 2 apart.
    np.testing.assert_allclose(view.along_time, [3 / 9, 4 / 9, 2 / 9], rtol=1e-5)
    # Of 8 x 8 pairs on a frame of 2 x 4: itself; 2 steps of 1 down or right and diagonals (1.4);
    # 2 right, and 2 right 1 down (2.2); 3 right, and 3 right 1 down (3.2).
    np.testing.assert_allclose(view.on_frame, [8 / 64, 32 / 64, 16 / 64, 8 / 64], rtol=1e-5)
    assert rings(2, 4) == 4
    np.testing.assert_allclose(view.frame_major, 1 / 24, rtol=1e-5)
    np.testing.assert_allclose(view.position_major, 1 / 24, rtol=1e-5)


def test_planted_heads_are_blocks_on_the_diagonal_of_their_own_order():
    places = (TOKENS // POSITIONS, TOKENS % POSITIONS)
    for place, size in zip(places, (8, 3), strict=True):
        view = view_of(30 * np.eye(8)[place])
        maps = [np.asarray(view.frame_major), np.asarray(view.position_major)]
        own, other = maps if size == 8 else maps[::-1]
        blocks = np.equal.outer(TOKENS // size, TOKENS // size) / size
        np.testing.assert_allclose(own, blocks, atol=1e-6)
        assert np.abs(other - blocks).max() > 0.1
        first = (view.along_time if size == 8 else view.on_frame)[0]
        np.testing.assert_allclose(first, 1, rtol=1e-5)


def test_keys_are_summed_in_equal_runs_and_lose_nothing():
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(n, 4)), jnp.float32) for n in (5, 3 * BINS))
    tokens = jnp.asarray([0, 7, 99, 300, 383], jnp.int32)
    view = look(q, k, tokens, (3, 8, 16))
    scores = np.asarray(q) @ np.asarray(k).T / 2
    weights = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(view.frame_major, weights.reshape(5, BINS, 3).sum(2), rtol=1e-4)
    # Position after position, a run of three keys is one position in all frames. The queries are at
    # positions 0, 7, 99, 44 and 127.
    along = weights.reshape(5, 3, 128).sum(1)[[0, 1, 3, 2, 4]]
    np.testing.assert_allclose(view.position_major, along, rtol=1e-4)


def test_watching_attends_as_the_inner_one_does_and_records_every_head():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 3, 24, 8)), jnp.float32) for _ in range(3))
    attend = watching(dense, GRID, seed=jnp.uint32(0), step=jnp.int32(0), rows=12)
    out, view = jax.jit(attend)(q, k, v, jnp.int32(0))
    np.testing.assert_array_equal(out, jax.jit(dense)(q, k, v, jnp.int32(0))[0])
    assert view.along_time.shape == (2, 3, 3) and view.frame_major.shape == (2, 3, 12, 24)
    assert len(np.unique(np.round(np.asarray(view.on_frame[..., 0]), 6))) == 6
