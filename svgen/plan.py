"""Predicts a run on TPUs that are not attached, by compiling its very programs with libtpu.

Memory is what the compiler says. Time per step is the sum of

    kernels       counted in the final schedule, cycle by cycle (`cycles`)
    the rest      the compiler's estimate of each fusion (`hlo`)
    all-to-alls   bytes over the interconnect; weights are gathered while other work goes on

Nothing here was measured on a TPU. libtpu reads its environment when it is loaded: call
`prepare_environment` before anything imports jax.
"""

import json
import math
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

from svgen import cycles
from svgen.config import ModelSpecs, SparsitySchedule
from svgen.errors import MachineError, UsageError
from svgen.grid import Grid

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from svgen.hlo import Cost

TEXT_ROWS = 128  # a prompt of up to 127 tokens
USABLE = 31.25 / 32  # of a chip's memory
BETWEEN = {  # kernels besides attention -> calls in a layer, cycles of a token and head on a v6e
    "normed_heads": (3, 0.40),
    "split_heads": (1, 0.10),
    "join_heads": (2, 0.10),
}
GAUGE = 0.70  # cycles a token to measure a head's bound, counted (kernels/NOTES.md)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tpu:
    """One generation: what its makers publish, and how its slices are called."""

    chip: str  # of `cycles.TOPOLOGIES`
    hbm_gib: float
    hbm_gbs: float
    link_gbs: float  # of one chip to all its neighbours, both ways together, GB/s
    cores: int = 1  # that a name counts for each chip
    shapes: dict[int, str]  # chips -> topology


FLAT = {4: "2x2x1", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
FLAT_V5E = {**FLAT, 4: "2x4"}  # its smallest topology that compiles; four chips of it are taken
SOLID = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4"}
TPUS = {
    "v5e": Tpu(chip="v5e", hbm_gib=16, hbm_gbs=819, link_gbs=200, shapes=FLAT_V5E),
    "v5p": Tpu(chip="v5p", hbm_gib=95, hbm_gbs=2765, link_gbs=600, cores=2, shapes=SOLID),
    "v6e": Tpu(chip="v6e", hbm_gib=32, hbm_gbs=1640, link_gbs=448, shapes=FLAT),
    "v7x": Tpu(chip="tpu7x", hbm_gib=96, hbm_gbs=7380, link_gbs=600, shapes=SOLID),
}
NAME = re.compile(r"(v\d+[a-z]*)-(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """Chips of one name: `v6e-8`."""

    name: str
    tpu: Tpu
    chips: int

    @property
    def topology(self) -> str:
        """The topology to compile for; one chip is taken out of the smallest."""
        shapes = self.tpu.shapes
        return f"{self.tpu.chip}:{shapes.get(self.chips, shapes[min(shapes)])}"


def parse_slice(name: str) -> Slice:
    """Read the name of TPU chips; raises UsageError (E_TPU_NAME)."""
    match = NAME.fullmatch(name)
    tpu = TPUS.get(match[1]) if match else None
    chips = int(match[2]) / tpu.cores if tpu else 0
    if tpu and (chips == 1 or chips in tpu.shapes):
        return Slice(name=name, tpu=tpu, chips=int(chips))
    known = ", ".join(f"{one}-N" for one in TPUS)
    counts = ", ".join(str(count * tpu.cores) for count in (1, *tpu.shapes)) if tpu else ""
    raise UsageError(
        "E_TPU_NAME",
        f"--tpu {name[:40]} is not known",
        why=f"N of {match[1]} is one of {counts}" if tpu else f"names are {known}",
        hint="--tpu v6e-8",
    )


def prepare_environment() -> None:
    """Let libtpu compile without a TPU. Call it before anything imports jax."""
    os.environ.update(cycles.HOST)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What is to be predicted."""

    specs: ModelSpecs
    grid: Grid
    steps: int
    branches: int  # 2 with guidance
    sparsity: SparsitySchedule | None
    slice: Slice
    mesh: str = "auto"
    dtype: str = "bfloat16"


def predict(job: Job) -> dict[str, Any]:
    """Compile and count; returns the plan as plain data. Takes minutes."""
    from svgen.sharding import choose_split

    transformer, start = job.specs.transformer, time.perf_counter()
    split = choose_split(job.slice.chips, transformer.heads, job.branches, job.mesh)
    programs = {
        name: Compiled.of(job, split, sparsity)
        for name, sparsity in (("dense", None), ("sparse", job.sparsity))
        if name == "dense" or sparsity
    }
    attention = count_attention(job)
    heads = transformer.heads // split.seq * (job.branches // split.cfg)
    last = programs.get("sparse", programs["dense"])
    others = between_seconds(job, split)
    steps = step_seconds(job, programs, attention, heads)
    steps = {name: seconds + others for name, seconds in steps.items()}
    memory = last.memory
    limit = job.slice.tpu.hbm_gib * USABLE
    dense_steps = min(job.sparsity.dense_steps, job.steps) if job.sparsity else job.steps
    total = dense_steps * steps["dense"] + (job.steps - dense_steps) * steps["sparse"]
    return {
        "label": cycles.LABEL,
        "tpu": job.slice.name,
        "chips": split.chips,
        "mesh": str(split),
        "hbm_gib_per_chip": memory,
        "hbm_limit_gib": limit,
        "fits": memory["total"] <= limit,
        "would_fit": would_fit(job, memory, limit),
        "attention": attention_summary(job, attention, heads),
        "collectives": {name: dict(last.cost.moved) for name, last in programs.items()},
        "step_s": {name: steps[name] for name in ("dense", "sparse")},
        "denoise_s": total,
        "denoise_dense_s": job.steps * steps["dense"],
        "denoise_splash_s": job.steps * steps["splash"],
        "speedup": job.steps * steps["splash"] / total,
        "compile_s": time.perf_counter() - start,
    }


def would_fit(job: Job, memory: Mapping[str, float], limit: float) -> dict[str, Any]:
    """What would fit where this does not, by proportion: the name of more chips, over which weights
    and temporaries are spread alike, or fewer frames, which shrink temporaries alone. Empty where
    it fits.
    """
    from svgen.sharding import choose_split

    found: dict[str, Any] = {}
    if memory["total"] <= limit:
        return found
    tpu, heads = job.slice.tpu, job.specs.transformer.heads
    used = choose_split(job.slice.chips, heads, job.branches, job.mesh).chips
    more = [
        chips
        for chips in sorted(tpu.shapes)
        if choose_split(chips, heads, job.branches, "auto").chips >= used * memory["total"] / limit
    ]
    if more:
        found["tpu"] = f"{job.slice.name.partition('-')[0]}-{more[0] * tpu.cores}"
    grid = job.grid
    latent = int(grid.latent_frames * (limit - memory["arguments"]) / memory["temporaries"])
    if latent > 1:
        found["frames"] = 1 + (latent - 1) * (grid.frames - 1) // (grid.latent_frames - 1)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """One step, compiled: the memory of a chip in GiB, and what its parts cost."""

    memory: dict[str, float]
    cost: "Cost"  # of a sparse step, or of a dense one without sparsity

    @classmethod
    def of(cls, job: Job, split: Any, sparsity: SparsitySchedule | None) -> "Compiled":
        """Compile the step for shapes alone."""
        from svgen import hlo

        compiled = compile_step(job, split, sparsity)
        text, memory = compiled.as_text(), compiled.memory_analysis()
        weights = memory.argument_size_in_bytes / 2**30
        temporaries = (memory.temp_size_in_bytes + memory.generated_code_size_in_bytes) / 2**30
        return cls(
            memory={
                "arguments": weights,
                "temporaries": temporaries,
                "total": weights + temporaries,
            },
            cost=hlo.cost(text),
        )


def compile_step(job: Job, split: Any, sparsity: SparsitySchedule | None) -> Any:
    """Compile `programs.denoise_step` for the chips of a job."""
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from jax.sharding import NamedSharding, PartitionSpec

    from svgen import programs, sharding
    from svgen.attention.attend import Setting

    mesh = mesh_of(job, split)
    module = programs.abstract_parts(job.specs, jnp.dtype(job.dtype))["transformer"]
    graph, weights = nnx.split(module)
    specs = sharding.weight_specs(sharding.weight_axes(weights, mesh.size))

    def placed(leaf: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    text = jax.ShapeDtypeStruct((job.branches, TEXT_ROWS, job.specs.text.width), jnp.float32)
    inputs = (
        programs.abstract_state(job.grid, job.specs.vae.z_channels),
        text,
        programs.abstract_table(job.steps),
        jax.ShapeDtypeStruct((), jnp.float32),
        jax.ShapeDtypeStruct((), jnp.uint32),
    )
    inputs = jax.tree.map(lambda leaf: placed(leaf, PartitionSpec()), inputs)
    weights = jax.tree.map(placed, weights, specs)
    setting = Setting(sparsity, job.slice.tpu.chip)
    on_mesh = mesh if mesh.size > 1 else None
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = programs.denoise_step.lower(
            graph, weights, *inputs, setting=setting, mesh=on_mesh
        )
        return lowered.compile()


def mesh_of(job: Job, split: Any) -> "Mesh":
    """The mesh of a job, of chips that are not there."""
    from jax.experimental import topologies

    from svgen.sharding import make_mesh

    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=job.slice.topology)
    except Exception as error:
        raise MachineError(
            "E_LIBRARY",
            f"libtpu cannot compile for {job.slice.name}",
            why=str(error).strip().splitlines()[0][:300],
            hint="pip install --upgrade 'jax[tpu]', on Linux x86-64",
        ) from error
    return make_mesh(split, found.devices)


def count_attention(job: Job) -> dict[str, dict[str, Any]]:
    """Count the kernels of one head, each route and JAX's Splash."""
    grid, spec = job.grid, job.specs.transformer
    common = {
        "frames": grid.latent_frames,
        "positions": grid.tokens // grid.latent_frames,
        "heads": 1,
        "head_size": spec.head_dim,
        "chip": job.slice.tpu.chip,
    }
    share = {"share": job.sparsity.band_share} if job.sparsity else {}
    routes = ["dense", "splash", *(["spatial", "temporal"] if job.sparsity else [])]
    counted = cycles.count_cases([{**common, **share, "route": route} for route in routes])
    return dict(zip(routes, counted, strict=True))


def step_seconds(
    job: Job,
    programs: dict[str, Compiled],
    attention: dict[str, dict[str, Any]],
    heads: int,
) -> dict[str, float]:
    """Predict a dense and a sparse step, and a dense one with Splash for its attention."""
    hertz = cycles.HERTZ[job.slice.tpu.chip]
    layers = job.specs.transformer.layers
    gauge = heads * GAUGE * job.grid.tokens

    def seconds(cost: "Cost", kernels: float) -> float:
        return (cost.cycles + kernels) / hertz + exchange_seconds(job, cost)

    def per_layer(*routes: str) -> float:
        return heads * sum(attention[route]["cycles_per_head"] for route in routes) / len(routes)

    dense = programs["dense"].cost
    found = {
        "dense": seconds(dense, layers * (per_layer("dense") + gauge)),
        "splash": seconds(dense, layers * per_layer("splash")),
    }
    if job.sparsity is None:
        return found | {"sparse": found["dense"]}
    first = min(job.sparsity.dense_layers, layers)
    kernels = first * per_layer("dense") + (layers - first) * per_layer("spatial", "temporal")
    return found | {"sparse": seconds(programs["sparse"].cost, kernels + layers * gauge)}


def between_seconds(job: Job, split: Any) -> float:
    """The time of a step's kernels between projections and attention: that of their memory traffic,
    or of their cycles where that is longer.
    """
    from svgen.kernels.heads import HEAD_DIM

    spec = job.specs.transformer
    if spec.head_dim != HEAD_DIM:
        return 0.0
    tokens = math.ceil(job.grid.tokens / split.seq) * (job.branches // split.cfg)
    moved = 2 * 2 * tokens * spec.width  # bytes, bfloat16, in and out
    hertz, bandwidth = cycles.HERTZ[job.slice.tpu.chip], job.slice.tpu.hbm_gbs * 1e9
    return spec.layers * sum(
        calls * max(moved / bandwidth, each * tokens * spec.heads / hertz)
        for calls, each in BETWEEN.values()
    )


def exchange_seconds(job: Job, cost: "Cost") -> float:
    """The time of all-to-alls. Each chip sends all but its own part; of what its links carry both
    ways, half goes out, and on a torus of few chips about half of that is reached.
    """
    return cost.moved["all-to-all"] / (job.slice.tpu.link_gbs * 1e9 / 4)


def attention_summary(job: Job, attention: dict[str, dict[str, Any]], heads: int) -> dict[str, Any]:
    """What is said of one layer's attention on one chip."""
    tokens = job.grid.tokens
    kept = attention.get("spatial", {}).get("density", 1.0)
    hertz = cycles.HERTZ[job.slice.tpu.chip]
    ms = {r: heads * found["cycles_per_head"] / hertz * 1e3 for r, found in attention.items()}
    sparse = (ms["spatial"] + ms["temporal"]) / 2 if job.sparsity else ms["dense"]
    return {
        "tokens": tokens,
        "heads_per_chip": heads,
        "kept_pairs": kept,
        "visited_pairs": math.ceil(kept * tokens**2),
        "cycles_per_mpair": {route: found["per_pairs"] for route, found in attention.items()},
        "dense_ms": ms["dense"],
        "sparse_ms": sparse,
        "splash_ms": ms["splash"],
    }


def fingerprint(asked: Any) -> str:
    """What was asked and what compiles it, as text: the name under which a plan may be kept."""
    return json.dumps([asked, *map(_version, ("jax", "libtpu"))], sort_keys=True, default=str)


def _version(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return ""
