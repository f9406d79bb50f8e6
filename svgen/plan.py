"""Predicts a run on TPUs that are not attached, by compiling its very programs with libtpu.

Memory is what the compiler says. Time per step is the sum of

    kernels       counted in the final schedule, cycle by cycle (`cycles`)
    the rest      the compiler's estimate of each fusion (`hlo`)
    all-to-alls   bytes over the interconnect; weights are gathered while other work goes on

The VAE's part, which XLA splits by itself, is the compiler's estimate and the bytes exchanged.
Nothing here was measured on a TPU. libtpu reads its environment when it is loaded: call
`prepare_environment` before anything imports jax.
"""

import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, Any

from svgen import __version__, cycles
from svgen.config import ModelSpecs, SparsitySchedule
from svgen.errors import MachineError
from svgen.grid import Grid
from svgen.tpus import Slice

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
        name: Compiled.of(compile_step(job, split, sparsity))
        for name, sparsity in (("dense", None), ("sparse", job.sparsity))
        if name == "dense" or sparsity
    }
    attention = count_attention(job)
    heads = transformer.heads // split.seq * (job.branches // split.cfg)
    last, decoding = programs.get("sparse", programs["dense"]), Decoding.of(job, split)
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
        "decode_gib_per_chip": decoding.memory,
        "fits": max(memory["total"], decoding.memory["total"]) <= limit,
        "would_fit": would_fit(job, memory, limit) or would_decode(job, decoding.memory, limit),
        "attention": attention_summary(job, attention, heads),
        "collectives": {name: dict(last.cost.moved) for name, last in programs.items()},
        "step_s": {name: steps[name] for name in ("dense", "sparse")},
        "denoise_s": total,
        "denoise_dense_s": job.steps * steps["dense"],
        "denoise_splash_s": job.steps * steps["splash"],
        "speedup": job.steps * steps["splash"] / total,
        "decode_s": decoding.seconds,
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


def would_decode(job: Job, memory: Mapping[str, float], limit: float) -> dict[str, Any]:
    """What would decode where this does not: more chips. Fewer frames would not: the VAE holds one
    latent frame at a time.
    """
    return {k: v for k, v in would_fit(job, memory, limit).items() if k != "frames"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """A program, compiled: the memory of a chip in GiB, and what its parts cost."""

    memory: dict[str, float]
    cost: "Cost"

    @classmethod
    def of(cls, compiled: Any) -> "Compiled":
        """Read what the compiler says of a program."""
        from svgen import hlo

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoding:
    """All latent frames through the VAE: the memory of a chip in GiB, and the time."""

    memory: dict[str, float]
    seconds: float

    @classmethod
    def of(cls, job: Job, split: Any) -> "Decoding":
        """Compile the VAE's programs for the first latent frame and for a later one."""
        first, later = (Compiled.of(one) for one in compile_decode(job, split))
        others = job.grid.latent_frames - 1
        seconds = [
            one.cost.cycles / cycles.HERTZ[job.slice.tpu.chip]
            + moving_seconds(job, sum(one.cost.moved.values()))
            for one in (first, later)
        ]
        return cls(memory=later.memory, seconds=seconds[0] + others * seconds[1])


def compile_decode(job: Job, split: Any) -> tuple[Any, Any]:
    """Compile `programs.decode_first` and `decode_next` for the chips of a job."""
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from jax.sharding import NamedSharding, PartitionSpec

    from svgen import programs, sharding

    mesh, grid = mesh_of(job, split), job.grid
    graph, weights = nnx.split(programs.abstract_parts(job.specs, jnp.dtype(job.dtype))["vae"])

    def placed(leaf: Any, where: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

    everywhere = NamedSharding(mesh, PartitionSpec())
    weights = jax.tree.map(lambda leaf: placed(leaf, everywhere), weights)
    latent = (1, 1, grid.rows, grid.columns, job.specs.vae.z_channels)
    z = jax.ShapeDtypeStruct(latent, jnp.float32, sharding=sharding.columns_of(mesh, latent))
    first = programs.decode_first.lower(graph, weights, z).compile()
    _, _, cache = jax.eval_shape(partial(programs.decode_first, graph), weights, z)
    cache = jax.tree.map(placed, cache, first.output_shardings[2])
    return first, programs.decode_next.lower(graph, weights, z, cache).compile()


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
    """The time of all-to-alls, in which each chip sends all but its own part."""
    return moving_seconds(job, cost.moved["all-to-all"])


def moving_seconds(job: Job, moved: float) -> float:
    """The time for so many bytes to arrive at each chip. Of what its links carry both ways, half
    goes out, and on a torus of few chips about half of that is reached.
    """
    return moved / (job.slice.tpu.link_gbs * 1e9 / 4)


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
    made_by = [__version__, *map(_version, ("jax", "libtpu"))]
    return json.dumps([asked, *made_by], sort_keys=True, default=str)


def _version(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return ""
