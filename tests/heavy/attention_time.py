"""Times self-attention on this CPU: dense against the schedules of two presets, side by side.

    python tests/heavy/attention_time.py [--frames 21 --positions 432 --rounds 5]

The reference path, routing included, all heads sparse. A ratio is that of times over that of the
pairs visited: 1 means that what is skipped costs nothing.
"""

import os
import sys
import time
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import click
import jax
import jax.numpy as jnp
import numpy as np

from svgen.attention.attend import Attend, Setting, make
from svgen.attention.masks import tables
from svgen.kernels.reference import tile_sizes
from svgen.presets import load_preset

NAMES = ("480p-conservative", "480p-aggressive", "1440p-aggressive")


def attends(frames: int, positions: int, size: int) -> dict[str, tuple[Attend, float]]:
    """What to time, each with the share of all pairs that it visits."""
    numbers = {"seed": jnp.uint32(0), "step": jnp.int32(1000)}  # past all dense steps
    shape = (frames, positions, size)
    found = {"dense": (make(Setting(), shape, **numbers), 1.0)}
    for name in NAMES:
        schedule = load_preset(name).sparsity.counted(50)
        made = tables(frames, positions, schedule.band_share, tile_sizes(frames, positions))
        pairs = made.spatial.visited_pairs / made.spatial.tokens**2
        found[name] = (make(Setting(schedule), shape, **numbers), pairs)
    return found


@click.command()
@click.option("--frames", default=21)
@click.option("--positions", default=432)
@click.option("--heads", default=4)
@click.option("--size", default=64)
@click.option("--rounds", default=5)
def main(frames: int, positions: int, heads: int, size: int, rounds: int) -> None:
    """Print the median of the ratios, and their spread."""
    rng = np.random.default_rng(0)
    shape = (1, heads, frames * positions, size)
    q, k, v = (jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(3))
    layer = jnp.int32(1000)
    parts = attends(frames, positions, size)
    jitted = {name: jax.jit(attend) for name, (attend, _) in parts.items()}
    times: dict[str, list[float]] = {name: [] for name in parts}
    for turn in range(rounds + 1):
        for name, attend in jitted.items():
            start = time.perf_counter()
            jax.block_until_ready(attend(q, k, v, layer))
            if turn:  # the first compiles
                times[name].append(time.perf_counter() - start)
    print(f"{frames * positions} tokens, {heads} heads of {size}, {rounds} rounds")
    print(f"{'schedule':<20}{'pairs':>8}{'time':>10}{'of dense':>10}{'to pairs':>10}{'spread':>14}")
    for name, (_, pairs) in parts.items():
        ratios = np.array(times[name]) / np.array(times["dense"]) / pairs
        share = np.median(np.array(times[name]) / np.array(times["dense"]))
        spread = f"{ratios.min():.2f} to {ratios.max():.2f}"
        print(
            f"{name:<20}{pairs:>8.1%}{np.median(times[name]):>9.2f}s{share:>10.2f}"
            f"{np.median(ratios):>10.2f}{spread:>14}"
        )


if __name__ == "__main__":
    main()
