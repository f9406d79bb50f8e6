"""Counts the cycles that the TPU compiler schedules for an attention kernel, without a TPU.

    echo '{"route": "temporal"}' | python -m svgen.cycles

Reads cases, one JSON object a line (the fields of `Case`), compiles each for one chip with libtpu
and prints what it found as JSON. The compiler is told to dump the final schedule: one bundle is one
cycle, waits for memory excepted. A kernel's grid loop holds one conditional region per body (first
visit, each kind of visit, last visit); what lies outside of them is counted for every visit. So a
call's time is known visit by visit. The schedule does not wait for the matrix units either: no
visit is predicted to be faster than they are.
"""

import dataclasses
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from svgen.errors import MachineError

LABEL = "predicted by the compiler's static schedule, not measured"
HOST = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v6e-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
}
TOPOLOGIES = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x4",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2x1",
    "tpu7x": "tpu7x:2x2x1",
}
HERTZ = {"v4": 1.05e9, "v5e": 1.5e9, "v5p": 1.75e9, "v6e": 1.75e9, "tpu7x": 1.9e9}
# Multiplications that the matrix units make in one cycle, and their side: by the published peaks.
MATRIX = {
    "v4": (1 << 16, 128),
    "v5e": (1 << 16, 128),
    "v5p": (1 << 16, 128),  # of one of two cores, as v4
    "v6e": (1 << 18, 256),
    "tpu7x": (1 << 18, 256),
}
BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+[A-Z]{0,2}\s*:")
REGION = re.compile(r"(Start/End empty|Start|End) region (\d+)")
UNITS = ("MXU", "XLU", "VALU", "VPOP", "EUP", "VLD", "FILL", "VST", "SPILL", "SALU")
VECTOR = tuple(UNITS.index(unit) for unit in ("MXU", "XLU", "VALU"))
BODY = 40  # bundles that a body has at least
PAIRS = 1 << 20
# Queries, keys, keys computed at a time: what suits JAX's kernel, and what fits into 16 MiB.
SPLASH, SMALL_SPLASH = (3024, 2048, 1024), (1024, 2048, 512)
LARGE_MEMORY = ("v6e", "tpu7x")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One kernel call on one geometry."""

    route: str = "dense"  # of `masks.ROUTES`, or "splash": JAX's own kernel, dense
    mode: str = "rounded"
    online: bool = False
    frames: int = 21
    positions: int = 3600
    share: float = 0.35
    heads: int = 10
    head_size: int = 128
    chip: str = "v6e"
    sizes: dict[str, int] | None = None  # of `TileSizes`; None: as tuned
    blocks: dict[str, int] | None = None  # of `Blocks`; None: as tuned


@dataclass(frozen=True, slots=True)
class Region:
    """Bundles first..last of the schedule."""

    first: int
    last: int

    @property
    def bundles(self) -> int:
        return self.last - self.first + 1

    def holds(self, other: "Region") -> bool:
        return self.first <= other.first and other.last <= self.last


def set_environment(dump: Path) -> None:
    """Set what libtpu reads when it is loaded: before jax is imported."""
    os.environ.update(HOST)
    os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true"


def read_schedule(path: Path) -> tuple[int, list[Region]]:
    """Read how many bundles there are, and the regions among them."""
    count, begun, regions = 0, {}, []
    for line in path.read_text(errors="replace").splitlines():
        count += bool(BUNDLE.match(line))
        for kind, number in REGION.findall(line):
            if kind.startswith("Start"):
                begun.setdefault(number, max(count - 1, 0))
            if "End" in kind and number in begun:
                regions.append(Region(begun[number], max(count - 1, 0)))
    return count, regions


def read_usage(path: Path) -> list[list[int]]:
    """Read how many slots of each of `UNITS` each bundle uses."""
    lines = (line.strip() for line in path.read_text().splitlines())
    return [list(map(int, line.split())) for line in lines if re.match(r"^\d+( \d+)+$", line)]


def find_bodies(regions: list[Region], usage: list[list[int]]) -> list[Region]:
    """Find the innermost regions that hold vector work, in the order of the program."""

    def works(region: Region) -> bool:
        rows = usage[region.first : region.last + 1]
        return region.bundles >= BODY and any(row[unit] for row in rows for unit in VECTOR)

    found = sorted({region for region in regions if works(region)}, key=lambda r: r.first)
    return [one for one in found if not any(one != two and one.holds(two) for two in found)]


def compile_for(chip: str, function, arguments):
    """Compile a function for one chip, arguments given as shapes."""
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip]).devices
    mesh = Mesh(np.array(devices[:1]), ("chip",))
    placed = NamedSharding(mesh, PartitionSpec())
    arguments = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed), arguments
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(function, out_shardings=placed).lower(*arguments).compile()


def build(case: Case):
    """Return the case's table, kernel call and arguments."""
    import jax
    import jax.numpy as jnp

    from svgen.attention import masks
    from svgen.kernels import splash, tuning
    from svgen.kernels.tables import TileSizes

    sizes, blocks = tuning.choose(case.chip, case.frames, case.positions)
    sizes = TileSizes(**case.sizes) if case.sizes else sizes
    blocks = splash.Blocks(**case.blocks) if case.blocks else blocks
    route = masks.ROUTES.index(case.route)
    table = masks.tables(case.frames, case.positions, case.share, sizes, case.mode)[route]

    def call(gauge, q, k, v, heads, offset, count):
        return splash.run_heads(
            (gauge, q, k, v), (heads, offset, count), table, online=case.online, blocks=blocks
        )

    heads = jax.ShapeDtypeStruct((case.heads,), jnp.int32)
    shape = (case.heads, table.tokens, case.head_size)
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    gauge = jax.ShapeDtypeStruct((case.heads, 8, case.head_size), jnp.float32)
    one = jax.ShapeDtypeStruct((1,), jnp.int32)
    return table, call, (gauge, x, x, x, heads, one, jax.ShapeDtypeStruct((), jnp.int32))


def roof(case: Case) -> float:
    """Cycles that the matrix units take for 2^20 pairs, whatever the kernel does.

    The scores' products are as long as a head is wide: what that leaves of a unit's side is idle.
    """
    per_cycle, side = MATRIX[case.chip]
    scores = -(-case.head_size // side) * side
    return PAIRS * (scores + case.head_size) / per_cycle


def predict(case: Case, table, bundles: int, bodies: list[int]) -> dict:
    """Add up a head's visits, from the bundles of the kernel and of its bodies."""
    import numpy as np

    from svgen.kernels import splash
    from svgen.kernels.tables import FIRST, LAST

    sources = splash.sources(table)
    assert len(bodies) == len(sources) + 2, (bodies, sources)
    start, *visits, finish = bodies
    outside = bundles - sum(bodies)
    pairs = table.queries.rows * table.keys.rows / PAIRS
    stretch = max(1.0, roof(case) * pairs / max(visits))
    times = np.full(table.visits, float(outside))
    for source, cost in zip(sources, visits, strict=True):
        times += stretch * cost * source.matches(table.flags)
    times += start * (table.flags & FIRST != 0) + finish * (table.flags & LAST != 0)
    return {
        "interior": round(max(visits) / pairs, 1),
        "outside": outside,
        "start": start,
        "visit": visits,
        "finish": finish,
        "per_pairs": round(times.sum() / (table.visited_pairs / PAIRS), 1),
        "cycles_per_head": int(times.sum()),
    }


def count_splash(case: Case, dump: Path) -> dict:
    """Count JAX's own kernel with a full mask: its largest body alone, for all pairs."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu import splash_attention

    queries, keys, step = SPLASH if case.chip in LARGE_MEMORY else SMALL_SPLASH
    tokens = case.frames * case.positions
    rows, columns = (-(-tokens // side) * side for side in (queries, keys))  # no ragged tiles
    mask = splash_attention.MultiHeadMask([splash_attention.FullMask((rows, columns))] * case.heads)
    blocks = splash_attention.BlockSizes(block_q=queries, block_kv=keys, block_kv_compute=step)
    kernel = splash_attention.make_splash_mha_single_device(mask, block_sizes=blocks)
    shapes = [(case.heads, side, case.head_size) for side in (rows, columns, columns)]
    start = time.perf_counter()
    compile_for(case.chip, kernel, tuple(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes))
    bodies = []
    for schedule in dump.glob("*splash*[0-9]-final_bundles.txt"):
        name = schedule.name.rsplit("-", 2)[0]
        (usage,) = dump.glob(f"{name}-*final_hlo-static-per-bundle-utilization.txt")
        found = find_bodies(read_schedule(schedule)[1], read_usage(usage))
        bodies += [region.bundles for region in found]
    interior = max(max(bodies) / (queries * keys / PAIRS), roof(case))
    cycles = int(interior * tokens**2 / PAIRS)
    return {
        "interior": round(interior, 1),
        "per_pairs": round(interior, 1),
        "cycles_per_head": cycles,
        "ms": round(cycles * case.heads / HERTZ[case.chip] * 1e3, 2),
        "compile_s": round(time.perf_counter() - start, 1),
    }


def count(case: Case, dump: Path) -> dict:
    """Compile one case and count."""
    shutil.rmtree(dump, ignore_errors=True)
    dump.mkdir()
    if case.route == "splash":
        return count_splash(case, dump)
    table, call, arguments = build(case)
    start = time.perf_counter()
    compiled = compile_for(case.chip, call, arguments)
    seconds = time.perf_counter() - start
    (schedule,) = dump.glob("*-attention*[0-9]-final_bundles.txt")
    (usage,) = dump.glob("*-attention*final_hlo-static-per-bundle-utilization.txt")
    bundles, regions = read_schedule(schedule)
    used = read_usage(usage)
    bodies = [region.bundles for region in find_bodies(regions, used)]
    found = predict(case, table, bundles, bodies)
    return {
        **found,
        "ms": round(found["cycles_per_head"] * case.heads / HERTZ[case.chip] * 1e3, 2),
        "units": dict(zip(UNITS, (sum(column) for column in zip(*used, strict=True)), strict=True)),
        "visits": table.visits,
        "density": round(table.visited_pairs / table.tokens**2, 4),
        "temporaries": compiled.memory_analysis().temp_size_in_bytes,
        "compile_s": round(seconds, 1),
    }


def count_cases(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Count cases, given as fields of `Case`, in a process of its own: where schedules are dumped
    must be said before libtpu is loaded.
    """
    lines = "".join(json.dumps(case) + "\n" for case in cases)
    done = subprocess.run(
        [sys.executable, "-m", "svgen.cycles"],
        input=lines,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    if done.returncode:
        why = done.stderr.strip().splitlines()[-1][:300] if done.stderr.strip() else ""
        raise MachineError("E_LIBRARY", "the kernels cannot be counted", why=why, hint="")
    return [json.loads(line) for line in done.stdout.splitlines()]


KERNELS = {  # what a plan of the kernel alone counts -> route, mode
    "splash": ("splash", "rounded"),
    "dense": ("dense", "rounded"),
    "naive": ("spatial", "naive"),
    "exact": ("spatial", "exact"),
    "rounded": ("spatial", "rounded"),
    "rounded_temporal": ("temporal", "rounded"),
}


def compare_kernels(chip: str, shape: tuple[int, int], heads: int, share: float) -> dict[str, Any]:
    """Count attention alone on one chip, over frames and positions of a frame, with each kind of
    mask and with JAX's Splash; plain data.
    """
    start, (frames, positions) = time.perf_counter(), shape
    tokens = frames * positions
    common = {
        "frames": frames,
        "positions": positions,
        "heads": heads,
        "share": share,
        "chip": chip,
    }
    cases = [{**common, "route": route, "mode": mode} for route, mode in KERNELS.values()]
    found = dict(zip(KERNELS, count_cases(cases), strict=True))
    return {
        "label": LABEL,
        "chip": chip,
        "tokens": tokens,
        "heads": heads,
        "band_share": share,
        "kernel": {
            name: {
                "cycles_per_mpair": one["per_pairs"],
                "interior": one["interior"],
                "visited_pairs": math.ceil(one.get("density", 1.0) * tokens**2),
                "ms": one["ms"],
            }
            for name, one in found.items()
        },
        "compile_s": time.perf_counter() - start,
    }


def main() -> None:
    """Count the cases on stdin."""
    dump = Path(tempfile.mkdtemp(prefix="svgen-cycles-"))
    set_environment(dump)
    try:
        for line in sys.stdin:
            case = Case(**json.loads(line))
            print(json.dumps({**dataclasses.asdict(case), **count(case, dump)}), flush=True)
    finally:
        shutil.rmtree(dump, ignore_errors=True)


if __name__ == "__main__":
    main()
