"""Times the very programs of a run on the device that is attached, stage by stage.

    embed       the prompts
    attention   of one layer on one chip, alone: dense, and each route of each schedule
    step        one denoising step: dense, and by the schedule of the request
    decode      the first latent frame, and a later one, until the frames are on the host

Networks are loaded in turn and placed as a run does; a compiled program is called, nothing else.
What a step is given is noise, so the routes of its heads are those of noise.
"""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from svgen import programs
from svgen.attention.attend import Setting, along, chip_of, count_calls, make, table_of
from svgen.attention.masks import ROUTES, SPATIAL, TEMPORAL
from svgen.config import Request, SparsitySchedule
from svgen.flops import attention_flops, peak_of, step_flops
from svgen.pipeline import Pipeline, routing_seed
from svgen.scheduler import DenoiseState, solver_table
from svgen.sharding import collect, place_columns, replicate
from svgen.stopwatch import Stopwatch, Variant, ratio, summary
from svgen.tokenizer import bucket_length, pad_ids

STAGES = ("embed", "attention", "step", "decode")
SHARES = {"embed": 0.1, "attention": 0.3, "step": 0.6, "decode": 0.9}  # of the time then left
CACHE_HIT = "/jax/compilation_cache/cache_hits"


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What is to be timed."""

    request: Request
    schedules: Mapping[str, SparsitySchedule]  # of attention alone, by name
    stages: tuple[str, ...] = STAGES
    profile: Path | None = None  # where a trace of two steps goes


@dataclass(kw_only=True, slots=True)
class Bench:
    """One trial under way: what it runs on, and what it has found."""

    pipeline: Pipeline
    trial: Trial
    watch: Stopwatch
    flops: dict[str, float] = field(default_factory=dict)  # of a row, over all chips
    chips: dict[str, int] = field(default_factory=dict)  # that a row ran on
    pairs: dict[str, float] = field(default_factory=dict)  # share that attention visits, by row
    calls: dict[str, dict[str, int]] = field(default_factory=dict)  # of heads by route, by row

    @property
    def request(self) -> Request:
        """What is run."""
        return self.trial.request

    @property
    def chip(self) -> str | None:
        """The chip, as kernels know it."""
        return chip_of(jax.devices()[0].device_kind)

    @property
    def token_shape(self) -> tuple[int, int, int]:
        """Frames, positions of a frame, and the size of a head."""
        frames, rows, columns = self.pipeline.grid(self.request).tokens_per_axis
        return frames, rows * columns, self.pipeline.specs.transformer.head_dim

    @property
    def branches(self) -> int:
        """Two with guidance."""
        return 2 if self.request.guidance > 1 else 1


@contextmanager
def counted_hits() -> Iterator[Callable[[], int]]:
    """Count the programs that are found in the cache of compiled ones."""
    found: list[str] = []

    def listen(event: str, **_: Any) -> None:
        if event == CACHE_HIT:
            found.append(event)

    jax.monitoring.register_event_listener(listen)
    try:
        yield lambda: len(found)
    finally:
        jax.monitoring.unregister_event_listener(listen)


def measure(pipeline: Pipeline, trial: Trial, watch: Stopwatch) -> dict[str, Any]:
    """Time every stage asked for; returns rows and ratios as plain data."""
    bench = Bench(pipeline=pipeline, trial=trial, watch=watch)
    text = None
    for stage in (one for one in STAGES if one in trial.stages):
        with pipeline.stage(f"time {stage}"):
            if stage == "embed":
                text = time_embed(bench)
            elif stage == "attention":
                time_attention(bench)
            elif stage == "step":
                time_step(bench, drawn_text(bench) if text is None else text)
            else:
                time_decode(bench)
            gc.collect()  # a network is freed before the next is loaded
    return {
        "rows": {name: row(bench, name) for name in watch.seconds},
        "ratios": ratios(watch.seconds),
        "run_s": run_seconds(bench),
    }


def drawn_text(bench: Bench) -> jax.Array:
    """Stands for the text where no prompt is encoded."""
    length = bucket_length(max(one.length for one in bench.pipeline.tokens(bench.request)))
    shape = (bench.branches, length, bench.pipeline.specs.text.width)
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape, np.float32))


def time_embed(bench: Bench) -> jax.Array:
    """Time the encoding of the prompts; returns the text."""
    tokens = bench.pipeline.tokens(bench.request)
    padded = pad_ids(tokens, bucket_length(max(one.length for one in tokens)))
    graph, weights, mesh = bench.pipeline.load("text_encoder", bench.request)
    arguments = tuple(map(jnp.asarray, padded))
    if mesh is not None:
        arguments = replicate(mesh, arguments)
    embed = bench.watch.compile(
        "embed", lambda: programs.embed.lower(graph, weights, *arguments, mesh=mesh).compile()
    )
    bench.chips["embed"] = mesh.size if mesh is not None else 1

    def ready() -> jax.Array:
        return embed(weights, *arguments).block_until_ready()

    bench.watch.repeat({"embed": lambda: ready}, SHARES["embed"])
    return ready()


def time_attention(bench: Bench) -> None:
    """Time attention alone with what one chip holds of a layer's heads, routes forced."""
    split, spec = bench.pipeline.split(bench.request), bench.pipeline.specs.transformer
    shape = (bench.branches // split.cfg, spec.heads // split.seq)
    frames, positions, size = bench.token_shape
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.standard_normal((*shape, frames * positions, size), np.float32)).astype(
            bench.request.dtype
        )
        for _ in range(3)
    )
    inputs = (q, k, v, jnp.int32(0))
    zero = {"seed": jnp.uint32(0), "step": jnp.int32(0)}
    attends = {"attention_dense": make(Setting(None, bench.chip), bench.token_shape, **zero)}
    bench.pairs["attention_dense"] = 1.0
    for schedule, sparsity in bench.trial.schedules.items():
        for route in (SPATIAL, TEMPORAL):
            name = f"attention_{_snake(schedule)}_{ROUTES[route]}"
            setting = Setting(sparsity, bench.chip)
            kernel, table = table_of(setting, bench.token_shape, route)
            attends[name] = along(kernel, table)
            bench.pairs[name] = table.visited_pairs / table.tokens**2
    variants: dict[str, Variant] = {}
    for name, attend in attends.items():
        pairs = bench.pairs[name] * float(frames * positions) ** 2 * shape[0] * shape[1]
        bench.flops[name], bench.chips[name] = attention_flops(pairs, size), 1
        lowered = jax.jit(attend).lower
        call = bench.watch.compile(name, lambda lowered=lowered: lowered(*inputs).compile())
        variants[name] = lambda call=call: lambda: jax.block_until_ready(call(*inputs))
    bench.watch.repeat(variants, SHARES["attention"])


def step_settings(bench: Bench) -> dict[str, Setting]:
    """The steps to time, by the names of their rows."""
    settings = {"step_dense": Setting(None, bench.chip)}
    sparsity = bench.request.sparsity
    if sparsity is not None and sparsity.dense_steps < bench.request.steps:
        settings[_sparse_name(bench.request)] = Setting(sparsity, bench.chip)
    return settings


def _sparse_name(request: Request) -> str:
    return f"step_{_snake(request.schedule)}"


def time_step(bench: Bench, text: jax.Array) -> None:
    """Time one step, dense and sparse: the first that the schedule routes."""
    request = bench.request
    graph, weights, mesh = bench.pipeline.load("transformer", request)
    table = programs.StepTable.of(solver_table(request.steps, request.shift))
    fixed = (text, table, jnp.float32(request.guidance), routing_seed(request))
    start = bench.pipeline.start(request)
    first = min(request.sparsity.dense_steps if request.sparsity else 0, request.steps - 1)
    start = start._replace(step=jnp.int32(first))
    if mesh is not None:
        start, fixed = replicate(mesh, (start, fixed))

    def copied() -> DenoiseState:
        """A state of its own for each call: a step reuses its buffers."""
        return jax.block_until_ready(jax.tree.map(jnp.copy, start))

    def variant(step: Callable) -> Variant:
        def prepare() -> Callable[[], programs.Step]:
            state = copied()
            return lambda: jax.block_until_ready(step(weights, state, *fixed))

        return prepare

    variants: dict[str, Variant] = {}
    for name, setting in step_settings(bench).items():
        lowered = programs.denoise_step.lower(
            graph, weights, copied(), *fixed, setting=setting, mesh=mesh
        )
        step = bench.watch.compile(name, lowered.compile)
        variants[name] = variant(step)
        bench.chips[name] = mesh.size if mesh is not None else 1
        record = step(weights, copied(), *fixed).record
        record = record if mesh is None else collect(mesh, record)
        calls = np.asarray(count_calls(record)).tolist()
        bench.calls[name] = dict(zip(ROUTES, calls, strict=True))
        bench.flops[name] = _step_flops(bench, setting, calls, text.shape[1])
    bench.watch.repeat(variants, SHARES["step"])
    if bench.trial.profile is not None:
        with jax.profiler.trace(str(bench.trial.profile)):
            for _ in range(2):
                variants[name]()()


def _step_flops(bench: Bench, setting: Setting, calls: list[int], text_rows: int) -> float:
    """Operations of a step whose heads ran by each route so often."""
    frames, positions, size = bench.token_shape
    tokens = frames * positions
    pairs = float(calls[0]) * tokens**2
    if setting.sparsity is not None:
        for route in (SPATIAL, TEMPORAL):
            _, table = table_of(setting, bench.token_shape, route)
            pairs += float(calls[route]) * table.visited_pairs
    spec = bench.pipeline.specs.transformer
    return step_flops(spec, tokens, text_rows, bench.branches) + attention_flops(pairs, size)


def time_decode(bench: Bench) -> None:
    """Time the first latent frame, whose program is another, and a later one."""
    graph, weights, mesh = bench.pipeline.load("vae", bench.request)
    noise = np.asarray(bench.pipeline.start(bench.request).latents)
    latents = jnp.asarray(noise) if mesh is None else place_columns(mesh, noise)
    z = [latents[:, index : index + 1] for index in range(min(latents.shape[1], 2))]
    held: dict[str, Any] = {}

    def finish(found: tuple[jax.Array, jax.Array, Any]) -> None:
        frames, finite, held["cache"] = found
        frames = frames if mesh is None else collect(mesh, frames)
        bool(finite), np.asarray(frames[0])
        jax.block_until_ready(held["cache"])

    first = bench.watch.compile(
        "decode_first", lambda: programs.decode_first.lower(graph, weights, z[0]).compile()
    )

    def prepare_first() -> Callable[[], None]:
        held.clear()  # two caches at a time may be more than a chip holds
        return lambda: finish(first(weights, z[0]))

    def prepare_next() -> Callable[[], None]:
        cache = held.pop("cache")
        return lambda: finish(later(weights, z[1], cache))

    variants: dict[str, Variant] = {"decode_first": prepare_first}
    if len(z) > 1:
        prepare_first()()
        lower = programs.decode_next.lower
        later = bench.watch.compile(
            "decode_next", lambda: lower(graph, weights, z[1], held["cache"]).compile()
        )
        variants["decode_next"] = prepare_next
    bench.chips |= dict.fromkeys(variants, mesh.size if mesh is not None else 1)
    bench.watch.repeat(variants, SHARES["decode"])


def row(bench: Bench, name: str) -> dict[str, Any]:
    """What is told of one row."""
    seconds, compiling = bench.watch.seconds[name], bench.watch.compiling[name]
    found = {**summary(seconds), "compile_s": compiling.seconds, "cached": compiling.cached}
    peak = peak_of(jax.devices()[0].device_kind)
    if name in bench.flops:
        found["tflop"] = bench.flops[name] / 1e12
        if peak:
            reached = bench.flops[name] / (found["median_ms"] / 1e3)
            found["utilisation"] = reached / (peak * bench.chips[name])
    if name in bench.pairs:
        found["visited_pairs"] = bench.pairs[name]
    if name in bench.calls:
        found["calls"] = bench.calls[name]
    return found


def ratios(seconds: Mapping[str, list[float]]) -> dict[str, Any]:
    """Each sparse row to the dense one of its stage, round by round."""
    found = {}
    for stage in ("attention", "step"):
        dense = seconds.get(f"{stage}_dense")
        for name, times in seconds.items():
            if dense and name.startswith(f"{stage}_") and times is not dense:
                found[name] = {"to": f"{stage}_dense", **ratio(times, dense)}
    return found


def run_seconds(bench: Bench) -> dict[str, float]:
    """What a whole run would take, programs compiled and weights loaded: medians added up, densely
    and by the schedule. Empty where a stage is not timed.
    """
    request, latent = bench.request, bench.pipeline.grid(bench.request).latent_frames
    ms = {name: summary(times)["median_ms"] for name, times in bench.watch.seconds.items()}
    if not {"embed", "step_dense", "decode_first"} <= ms.keys():
        return {}
    others = ms["embed"] + ms["decode_first"] + (latent - 1) * ms.get("decode_next", 0.0)
    found = {"dense": request.steps * ms["step_dense"] + others}
    sparse = ms.get(_sparse_name(request))
    if sparse is not None and request.sparsity is not None:
        dense = min(request.sparsity.dense_steps, request.steps)
        steps = dense * ms["step_dense"] + (request.steps - dense) * sparse
        found[_snake(request.schedule)] = steps + others
    return {name: total / 1e3 for name, total in found.items()}


def _snake(name: str) -> str:
    return name.replace("-", "_")
