"""Convolutions of frames and videos against plain loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from svgen.models.convolution import (
    convolve_frames,
    convolve_video,
    convolve_video_at_once,
    convolve_video_by_taps,
    convolve_video_by_winograd,
)

ROUNDING = 5e-5  # float32, 54 products of order 1, in any order


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def convolve_by_loops(x, kernel):
    """Sum over taps: x [B, T+2, h, w, C], kernel [3, 3, 3, C, O], a margin of zeros around."""
    frames, rows, columns = x.shape[1] - 2, *x.shape[2:4]
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1), (0, 0)))
    y = np.zeros((x.shape[0], frames, rows, columns, kernel.shape[-1]))
    for t, i, j in np.ndindex(3, 3, 3):
        part = padded[:, t : t + frames, i : i + rows, j : j + columns]
        y += np.einsum("bthwc,co->bthwo", part, kernel[t, i, j])
    return y


@pytest.mark.parametrize(
    ("convolve", "frames"),
    [
        (convolve_video_at_once, 3),
        (convolve_video_by_taps, 3),
        (convolve_video_by_winograd, 2),
        (convolve_video_by_winograd, 4),
        (convolve_video_by_winograd, 6),
        (convolve_video, 1),
        (convolve_video, 4),
    ],
)
def test_convolution_over_time_equals_loops(convolve, frames):
    kernel, x = draw(9, 3, 3, 3, 2, 3), draw(10, 1, frames + 2, 4, 5, 2)
    y = jax.jit(convolve)(x, kernel)
    np.testing.assert_allclose(y, convolve_by_loops(x, kernel), atol=ROUNDING)


@pytest.mark.parametrize("convolve", [convolve_video_at_once, convolve_video_by_taps])
def test_convolution_over_time_skips_frames_when_strided(convolve):
    kernel, x = draw(1, 3, 1, 1, 2, 3), draw(2, 1, 5, 2, 2, 2)
    every = convolve(x, kernel)
    np.testing.assert_allclose(convolve(x, kernel, stride=2), every[:, ::2], atol=ROUNDING)


def test_convolution_of_frames_keeps_odd_sizes_unless_told():
    x, kernel = draw(3, 1, 2, 5, 7, 2), draw(4, 3, 3, 2, 3)
    y = convolve_frames(x, kernel)
    assert y.shape == (1, 2, 5, 7, 3)
    halved = convolve_frames(x, kernel, stride=2, padding=(0, 1))
    np.testing.assert_allclose(halved[:, :, :2, :3], y[:, :, 1:4:2, 1:6:2], atol=ROUNDING)


def test_convolution_over_time_is_one_operation_on_a_tpu():
    x, kernel = draw(5, 1, 6, 4, 4, 2), draw(6, 3, 3, 3, 2, 2)
    traced = jax.jit(convolve_video).trace(x, kernel)
    counts = {
        platform: traced.lower(lowering_platforms=(platform,)).as_text().count("convolution(")
        for platform in ("tpu", "cpu")
    }
    assert counts == {"tpu": 1, "cpu": 6}
