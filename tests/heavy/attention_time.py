"""Times self-attention on this CPU: dense against the schedules of two presets, side by side.

    python tests/heavy/attention_time.py [--frames 21 --positions 432 --rounds 5]

The reference path, routing included; half of the heads look at their frame and half along their
position, so that no schedule's budget keeps them dense. A ratio is that of times over that of the
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


def attends(frames: int, positions: int, size: int) -> dict[str, tuple[Attend, np.ndarray]]:
    """What to time, each with the share of all pairs that a head of each route visits."""
    numbers = {"seed": jnp.uint32(0), "step": jnp.int32(1000)}  # past all dense steps
    shape = (frames, positions, size)
    found = {"dense": (make(Setting(), shape, **numbers), np.ones(3))}
    for name in NAMES:
        schedule = load_preset(name).sparsity.counted(50)
        made = tables(frames, positions, schedule.band_share, tile_sizes(frames, positions))
        pairs = [table.visited_pairs / table.tokens**2 for table in made]
        found[name] = (make(Setting(schedule), shape, **numbers), np.array(pairs))
    return found


def planted(frames: int, positions: int, heads: int, size: int) -> list[jax.Array]:
    """Draw q, k, v [1, A, N, D]: even heads look at their frame, odd ones along their position."""
    rng, tokens = np.random.default_rng(0), np.arange(frames * positions)
    q = np.empty((1, heads, len(tokens), size), np.float32)
    for head in range(heads):
        features = rng.standard_normal((max(frames, positions), size))
        features *= 12 / np.linalg.norm(features, axis=1, keepdims=True)
        q[0, head] = features[tokens % positions if head % 2 else tokens // positions]
    return [jnp.asarray(x) for x in (q, q, rng.standard_normal(q.shape).astype(np.float32))]


@click.command()
@click.option("--frames", default=21)
@click.option("--positions", default=432)
@click.option("--heads", default=4)
@click.option("--size", default=64)
@click.option("--rounds", default=5)
def main(frames: int, positions: int, heads: int, size: int, rounds: int) -> None:
    """Print the median of the ratios, and their spread."""
    q, k, v = planted(frames, positions, heads, size)
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
    for name, (_, by_route) in parts.items():
        routes = np.asarray(jitted[name](q, k, v, layer)[1].routes)
        pairs = by_route[routes].mean()
        ratios = np.array(times[name]) / np.array(times["dense"]) / pairs
        share = np.median(np.array(times[name]) / np.array(times["dense"]))
        spread = f"{ratios.min():.2f} to {ratios.max():.2f}"
        print(
            f"{name:<20}{pairs:>8.1%}{np.median(times[name]):>9.2f}s{share:>10.2f}"
            f"{np.median(ratios):>10.2f}{spread:>14}"
        )


if __name__ == "__main__":
    main()
