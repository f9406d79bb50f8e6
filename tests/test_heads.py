"""Norm, rotation and layout of queries and keys: plain JAX and the kernel, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from svgen.kernels.heads import (
    HEAD_DIM,
    fused_heads,
    join_heads,
    moved,
    normed_heads,
    plain_heads,
    split_heads,
)

EPS = 1e-6


def case(seed: int, batch: int, tokens: int, heads: int, size: int) -> tuple:
    """x with rows of very different lengths, scale, and angles."""
    rng = np.random.default_rng(seed)
    x = (
        rng.standard_normal((batch, tokens, heads * size))
        * np.exp2(rng.integers(-9, 9, tokens))[None, :, None]
    )
    scale, angles = rng.uniform(0.5, 2, heads * size), rng.uniform(-9, 9, (tokens, size // 2))
    return jnp.asarray(x, jnp.bfloat16), jnp.asarray(scale, jnp.float32), angles


def exact(x: jax.Array, scale: jax.Array, angles: np.ndarray | None, heads: int) -> np.ndarray:
    """The same in float64, pairs as complex numbers: [B, A, N, D]."""
    x = np.asarray(x, np.float64)
    y = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + EPS) * np.asarray(scale, np.float64)
    y = y.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)
    if angles is None:
        return y
    half = y.shape[-1] // 2
    turned = (y[..., :half] + 1j * y[..., half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], -1)


def turn_of(angles: np.ndarray) -> tuple[jax.Array, jax.Array]:
    return jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)


@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize(
    ("batch", "tokens", "heads"), [(1, 128, 1), (2, 300, 3), (1, 40, 2), (2, 129, 4)]
)
def test_kernel_is_exact_to_the_rounding_of_its_output(batch, tokens, heads, rotated):
    x, scale, angles = case(tokens, batch, tokens, heads, HEAD_DIM)
    turn = turn_of(angles) if rotated else None
    wanted = exact(x, scale, angles if rotated else None, heads)
    given = {"heads": heads, "eps": EPS}
    fused = jax.jit(lambda *args: fused_heads(*args, **given, interpret=pltpu.InterpretParams()))(
        x, scale, turn
    )
    for found in (fused, plain_heads(x, scale, turn, **given)):
        assert (found.shape, found.dtype) == ((batch, heads, tokens, HEAD_DIM), jnp.bfloat16)
        # Half of bfloat16's last place, and float32's sums before it.
        error = np.abs(np.asarray(found, np.float64) - wanted)
        assert (error <= 2.0**-8 * np.abs(wanted) + 2.0**-18).all()


def test_off_a_tpu_heads_of_128_go_the_plain_way():
    x, scale, angles = case(5, 2, 24, 2, HEAD_DIM)
    found = jax.jit(lambda *args: normed_heads(*args, heads=2, eps=EPS))(x, scale, turn_of(angles))
    wanted = jax.jit(lambda *args: plain_heads(*args, heads=2, eps=EPS))(x, scale, turn_of(angles))
    np.testing.assert_array_equal(found, wanted)


def test_float32_stays_float32():
    x, scale, angles = case(6, 1, 9, 3, 8)
    found = normed_heads(x.astype(jnp.float32), scale, turn_of(angles), heads=3, eps=EPS)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, exact(x, scale, angles, 3), rtol=0, atol=2e-6)


@pytest.mark.parametrize(("batch", "tokens", "heads"), [(1, 128, 2), (2, 300, 3), (1, 40, 1)])
def test_kernel_moves_every_number_to_its_head_and_back(batch, tokens, heads):
    x, _, _ = case(tokens, batch, tokens, heads, HEAD_DIM)
    first = np.asarray(x).reshape(batch, tokens, heads, HEAD_DIM).transpose(0, 2, 1, 3)
    interpreted = {"interpret": pltpu.InterpretParams()}
    np.testing.assert_array_equal(moved(x, heads=heads, **interpreted), first)
    np.testing.assert_array_equal(split_heads(x, heads), first)
    np.testing.assert_array_equal(moved(jnp.asarray(first), heads=None, **interpreted), x)
    np.testing.assert_array_equal(join_heads(jnp.asarray(first)), x)
