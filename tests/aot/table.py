"""Prints the table of attention at 720p: dense, naive, exact and rounded masks, and JAX's Splash.

    python tests/aot/table.py

Counted for one v6e, 75,600 tokens, 10 heads of 128, band share 0.35, next to the timings published
for that shape. Splash's time is that of its largest body alone, for all pairs.
"""

import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.aot import cycles

ROWS = [  # name, route, mode, published ms
    ("B0 dense", "dense", "rounded", 78.70),
    ("B1 naive", "spatial", "naive", 96.37),
    ("B2 exact", "spatial", "exact", 54.12),
    ("B3 rounded", "spatial", "rounded", 32.76),
    ("B3 rounded", "temporal", "rounded", 32.76),
]
TOKENS, HEADS, SIZE = 75600, 10, 128
SPLASH = 3024, 2048, 1024  # queries, keys, keys computed at a time


def splash(dump: Path) -> tuple[float, float]:
    """Count JAX's own kernel: cycles per 2^20 pairs, ms."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu import splash_attention

    queries, keys, step = SPLASH
    padded = -(-TOKENS // keys) * keys  # it takes no ragged tiles
    mask = splash_attention.MultiHeadMask([splash_attention.FullMask((TOKENS, padded))] * HEADS)
    blocks = splash_attention.BlockSizes(block_q=queries, block_kv=keys, block_kv_compute=step)
    kernel = splash_attention.make_splash_mha_single_device(mask, block_sizes=blocks)
    q, k = (jax.ShapeDtypeStruct((HEADS, rows, SIZE), jnp.bfloat16) for rows in (TOKENS, padded))
    shutil.rmtree(dump, ignore_errors=True)
    dump.mkdir()
    cycles.compile_for("v6e", kernel, (q, k, k))
    bodies = []
    for schedule in dump.glob("*splash*[0-9]-final_bundles.txt"):
        name = schedule.name.rsplit("-", 2)[0]
        (usage,) = dump.glob(f"{name}-*final_hlo-static-per-bundle-utilization.txt")
        found = cycles.find_bodies(cycles.read_schedule(schedule)[1], cycles.read_usage(usage))
        bodies += [region.bundles for region in found]
    per_pairs = max(bodies) / (queries * keys / cycles.PAIRS)
    pairs = HEADS * TOKENS**2 / cycles.PAIRS
    return per_pairs, pairs * per_pairs / cycles.HERTZ["v6e"] * 1e3


def main() -> None:
    """Count and print."""
    dump = Path(tempfile.mkdtemp(prefix="svgen-table-"))
    cycles.set_environment(dump)
    print("| step | route | interior | in all | ms | published ms |\n|---|---|---|---|---|---|")
    try:
        for name, route, mode, published in ROWS:
            found = cycles.count(cycles.Case(route=route, mode=mode), dump)
            numbers = f"{found['interior']:,.0f} | {found['per_pairs']:,.0f} | {found['ms']:.1f}"
            print(f"| {name} | {route} | {numbers} | {published:.2f} |", flush=True)
        per_pairs, ms = splash(dump)
        print(f"| JAX Splash | dense | {per_pairs:,.0f} | | {ms:.1f} | 78.70 |")
    finally:
        shutil.rmtree(dump, ignore_errors=True)


if __name__ == "__main__":
    main()
