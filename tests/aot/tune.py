"""Tries tile sides for the attention kernel, by the static count: what `tuning.py` holds, chosen.

    python tests/aot/tune.py spatial 21 3600 [v6e]

Prints a line per candidate, then the best. `all` counts everything: grid steps, first and last
visits, ragged tiles. Sides that gain little over smaller ones are not worth it: a band of large
tiles follows the mask less closely, and they take longer to compile.
"""

import itertools
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from svgen.cycles import Case, count, set_environment

# queries, keys, strip: all but v4 have the same 128 or 64 MiB of VMEM and share candidates
CONTIGUOUS = itertools.product((2048, 3328, 4096), (2048, 3072), (512, 1024))
STRIDED_ROWS = itertools.product((2048, 3072, 4096), (2560, 3840), (1024,))
SMALL = itertools.product((1024, 2048), (1024, 2048), (512, 1024))  # 16 MiB


def candidates(route: str, frames: int, chip: str) -> list[dict]:
    """Pick sides and strips to try, as fields of `TileSizes` and `Blocks`."""
    found = []
    large = STRIDED_ROWS if route == "temporal" else CONTIGUOUS
    for queries, keys, strip in SMALL if chip == "v4" else large:
        sides = [
            rows // lines // 16 * 16 for rows, lines in ((queries, frames), (keys, frames - 1))
        ]
        sizes = {
            "queries": queries,
            "keys": keys,
            "strided_queries": sides[0],
            "strided_keys": sides[1],
            "sink": (frames - 1) * sides[1],
        }
        found.append({"sizes": sizes, "blocks": {"strip": strip}})
    return found


def main(route: str, frames: int, positions: int, chip: str) -> None:
    """Count every candidate."""
    dump = Path(tempfile.mkdtemp(prefix="svgen-tune-"))
    set_environment(dump)
    best = None
    try:
        for one in candidates(route, frames, chip):
            case = Case(route=route, frames=frames, positions=positions, chip=chip, **one)
            try:
                found = count(case, dump)
            except RuntimeError as error:  # what does not fit into VMEM
                print(f"{str(error).strip().splitlines()[-1][:60]} {one}", flush=True)
                continue
            line = f"all {found['per_pairs']} interior {found['interior']} ms {found['ms']} {one}"
            print(line, flush=True)
            best = min(best or (found["per_pairs"], line), (found["per_pairs"], line))
    finally:
        shutil.rmtree(dump, ignore_errors=True)
    print(f"best: {best[1]}")


if __name__ == "__main__":
    route, frames, positions, *chip = sys.argv[1:]
    main(route, int(frames), int(positions), *(chip or ["v6e"]))
