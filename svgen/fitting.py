"""Which video's timing fits into a budget: by the operations of a round and the speed of a product.

An estimate, on the safe side by a factor of two or three on CPUs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from svgen.config import Request
from svgen.flops import stage_flops
from svgen.pipeline import Pipeline
from svgen.stopwatch import LEAST_ROUNDS, Stopwatch

PROBE_SIDE, PROBE_PRODUCTS = 1024, 8
EFFICIENCY = 0.4  # of a product's speed, that the parts of a run reach about
SMALLEST_PX = 64  # a side is not halved to less
TEXT_ROWS = 128
TIMES = {"attention": 5, "step": 2, "decode": 1}  # that a round does it, routes and schedules


def fitting(
    pipeline: Pipeline, request: Request, stages: Sequence[str], budget_s: float, *, sized: bool
) -> tuple[Request, float]:
    """The request itself, or the largest one of fewer frames (and, unless the size is wanted as it
    is, of fewer pixels) whose estimate fits a budget; the smallest one if none does. Also the
    estimate, in seconds.
    """
    speed = product_speed(request.dtype) * EFFICIENCY * pipeline.split(request).chips
    for candidate in smaller(pipeline, request, sized=sized):
        seconds = estimate_s(pipeline, candidate, stages, speed)
        if seconds <= budget_s:
            break
    return candidate, seconds


def smaller(pipeline: Pipeline, request: Request, *, sized: bool) -> Iterator[Request]:
    """The request, then with frames halved down to five at least, then the same with sides
    halved.
    """
    rules, size = pipeline.rules, (request.width_px, request.height_px)
    steps = [rules.stride * patch for patch in (rules.patch[2], rules.patch[1])]
    while True:
        frames = request.frames
        while True:
            yield replace(request, width_px=size[0], height_px=size[1], frames=frames)
            latent = (frames - 1) // rules.frame_stride // 2
            if latent < 1:
                break
            frames = 1 + latent * rules.frame_stride
        halved = tuple(side // 2 // step * step for side, step in zip(size, steps, strict=True))
        if sized or min(halved) < SMALLEST_PX:
            return
        size = halved


def estimate_s(pipeline: Pipeline, request: Request, stages: Sequence[str], speed: float) -> float:
    """About how long the least number of rounds of these stages takes at so many FLOP/s."""
    branches = 2 if request.guidance > 1 else 1
    work = stage_flops(pipeline.specs, pipeline.grid(request), TEXT_ROWS, branches)
    once = sum(TIMES.get(stage, 0) * work.get(stage, 0.0) for stage in stages)
    return (1 + LEAST_ROUNDS) * once / speed


def product_speed(dtype: str) -> float:
    """FLOP/s of the fastest of three products on one chip."""
    x = jnp.full((PROBE_SIDE, PROBE_SIDE), 0.01, dtype)
    watch = Stopwatch(0.0)
    product = jax.jit(lambda x: jax.lax.fori_loop(0, PROBE_PRODUCTS, lambda _, y: jnp.dot(y, x), x))
    watch.repeat({"product": lambda: lambda: product(x).block_until_ready()}, 1.0)
    return PROBE_PRODUCTS * 2 * PROBE_SIDE**3 / min(watch.seconds["product"])
