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

from svgen import cycles

ROWS = [  # name, route, mode, published ms
    ("B0 dense", "dense", "rounded", 78.70),
    ("B1 naive", "spatial", "naive", 96.37),
    ("B2 exact", "spatial", "exact", 54.12),
    ("B3 rounded", "spatial", "rounded", 32.76),
    ("B3 rounded", "temporal", "rounded", 32.76),
]


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
        found = cycles.count(cycles.Case(route="splash"), dump)
        print(f"| JAX Splash | dense | {found['interior']:,.0f} | | {found['ms']:.1f} | 78.70 |")
    finally:
        shutil.rmtree(dump, ignore_errors=True)


if __name__ == "__main__":
    main()
