"""Where heads look, against masses worked out by hand."""

import jax.numpy as jnp
import numpy as np

from svgen.attention.attend import dense
from svgen.attention.mass import head_mass, measuring

FRAMES, POSITIONS = 3, 4


def test_even_attention_has_the_share_of_a_frame_and_of_a_position():
    k = jnp.zeros((FRAMES * POSITIONS, 8), jnp.float32)
    rows = jnp.asarray([0, 7, 11], jnp.int32)
    found = head_mass(k[rows], k, rows, POSITIONS)
    np.testing.assert_allclose(found, [1 / FRAMES, 1 / POSITIONS], rtol=1e-6)


def test_planted_heads_are_told_apart():
    tokens = np.arange(FRAMES * POSITIONS)
    rows = jnp.asarray(tokens, jnp.int32)
    for index, place in ((0, tokens // POSITIONS), (1, tokens % POSITIONS)):
        k = jnp.asarray(30 * np.eye(4)[place], jnp.float32)
        found = head_mass(k, k, rows, POSITIONS)
        assert found[index] > 0.999
        # The token itself is of both; the rest of its frame (of its position) is not.
        other = [1 / POSITIONS, 1 / FRAMES][index]
        np.testing.assert_allclose(found[1 - index], other, rtol=1e-3)


def test_measuring_attends_densely():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 3, 12, 8)), jnp.float32) for _ in range(3))
    attend = measuring(FRAMES, POSITIONS, seed=jnp.uint32(0), step=jnp.int32(0), rows=12)
    out, mass = attend(q, k, v, jnp.int32(0))
    np.testing.assert_array_equal(out, dense(q, k, v, jnp.int32(0))[0])
    assert mass.shape == (2, 3, 2)
    assert len(np.unique(np.round(np.asarray(mass[..., 0]), 6))) == 6
