"""Convolutions of frames and of videos, channels-last, in the form that suits the machine.

B batch, T frames, h w rows and columns, C channels in, O channels out, k rows of the kernel.
"""

from functools import partial, reduce
from operator import add

import jax
import jax.numpy as jnp
from jax import lax

TIME_TAPS = 3  # frames a convolution over time sees: the current one and two before it

Matrix = tuple[tuple[float, ...], ...]
# Frames at a time -> what multiplies their inputs, the three taps, and the products.
WINOGRAD: dict[int, tuple[Matrix, Matrix, Matrix]] = {
    2: (
        ((1, 0, -1, 0), (0, 1, 1, 0), (0, -1, 1, 0), (0, 1, 0, -1)),
        ((1, 0, 0), (1 / 2, 1 / 2, 1 / 2), (1 / 2, -1 / 2, 1 / 2), (0, 0, 1)),
        ((1, 1, 1, 0), (0, 1, -1, -1)),
    ),
    4: (
        (
            (4, 0, -5, 0, 1, 0),
            (0, -4, -4, 1, 1, 0),
            (0, 4, -4, -1, 1, 0),
            (0, -2, -1, 2, 1, 0),
            (0, 2, -1, -2, 1, 0),
            (0, 4, 0, -5, 0, 1),
        ),
        (
            (1 / 4, 0, 0),
            (-1 / 6, -1 / 6, -1 / 6),
            (-1 / 6, 1 / 6, -1 / 6),
            (1 / 24, 1 / 12, 1 / 6),
            (1 / 24, -1 / 12, 1 / 6),
            (0, 0, 1),
        ),
        ((1, 1, 1, 1, 1, 0), (0, 1, -1, 2, -2, 0), (0, 1, 1, 4, 4, 0), (0, 1, -1, 8, -8, 1)),
    ),
}


def convolve_frames(
    x: jax.Array, kernel: jax.Array, *, stride: int = 1, padding: tuple[int, int] | None = None
) -> jax.Array:
    """Convolve each frame of x [B, T, h, w, C] with a kernel [k, k, C, O].

    `padding` is zeros before and after, along rows and columns alike; None keeps the size.
    """
    before, after = padding or (kernel.shape[0] // 2,) * 2
    y = lax.conv_general_dilated(
        x.reshape(-1, *x.shape[2:]),
        kernel,
        (stride, stride),
        ((before, after), (before, after)),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    return y.reshape(*x.shape[:2], *y.shape[1:])


def convolve_video(x: jax.Array, kernel: jax.Array, *, stride: int = 1) -> jax.Array:
    """Convolve x [B, T+2, h, w, C] with a kernel [3, k, k, C, O] -> [B, T, h, w, O].

    `stride` is in time. XLA is fastest with one convolution on a TPU, with frames apart on a CPU;
    there float32 products are exact enough for Winograd's sums, as a TPU's bfloat16 ones are not.
    """
    frames = x.shape[1] - TIME_TAPS + 1
    on_cpu = partial(convolve_video_by_taps, stride=stride)
    can_group = stride == 1 and frames % min(WINOGRAD) == 0 and kernel.shape[1] > 1
    if can_group and x.dtype == jnp.float32:
        on_cpu = convolve_video_by_winograd
    at_once = partial(convolve_video_at_once, stride=stride)
    return lax.platform_dependent(x, kernel, cpu=on_cpu, default=at_once)


def convolve_video_at_once(x: jax.Array, kernel: jax.Array, *, stride: int = 1) -> jax.Array:
    """Leave rows, columns and time to one convolution."""
    sides = (kernel.shape[1] // 2,) * 2
    layout = ("NDHWC", "DHWIO", "NDHWC")
    padding = ((0, 0), sides, sides)
    return lax.conv_general_dilated(x, kernel, (stride, 1, 1), padding, dimension_numbers=layout)


def convolve_video_by_taps(x: jax.Array, kernel: jax.Array, *, stride: int = 1) -> jax.Array:
    """Add up three convolutions of single frames, one for each tap in time."""
    frames = x.shape[1] - TIME_TAPS + 1
    parts = (x[:, tap : tap + frames : stride] for tap in range(TIME_TAPS))
    return reduce(add, (convolve_frames(p, kernel[tap]) for tap, p in enumerate(parts)))


def convolve_video_by_winograd(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Convolve over time by Winograd's minimal filtering, m frames at a time with m + 2 products.

    Lavin and Gray 2015 (arXiv 1509.09308), equations 4 to 8: F(2, 3) or F(4, 3), which take 2/3 or
    1/2 of the direct sum's products.
    """
    frames = x.shape[1] - TIME_TAPS + 1
    m = max(size for size in WINOGRAD if frames % size == 0)
    inputs, taps, outputs = WINOGRAD[m]
    parts = [x[:, start : start + frames : m] for start in range(m + TIME_TAPS - 1)]
    kernels = _combine(taps, list(kernel))
    products = [
        convolve_frames(p, k) for p, k in zip(_combine(inputs, parts), kernels, strict=True)
    ]
    y = jnp.stack(_combine(outputs, products), axis=2)
    return y.reshape(y.shape[0], frames, *y.shape[3:])


def _combine(rows: Matrix, parts: list[jax.Array]) -> list[jax.Array]:
    """Multiply a matrix with a vector of arrays."""
    return [
        reduce(add, (c * part for c, part in zip(row, parts, strict=True) if c)) for row in rows
    ]
