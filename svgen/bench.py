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
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from svgen import programs
from svgen.attention.attend import (
    Attend,
    Record,
    Setting,
    along,
    chip_of,
    count_calls,
    make,
    table_of,
)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What is known of a row besides its times."""

    chips: int = 1  # that it ran on
    flops: float | None = None  # over all of them
    pairs: float | None = None  # share of all pairs of tokens that attention visits
    calls: dict[str, int] | None = None  # of heads, by route


@dataclass(kw_only=True, slots=True)
class Bench:
    """One trial under way: what it runs on, and what it has found of each row."""

    pipeline: Pipeline
    trial: Trial
    watch: Stopwatch
    facts: dict[str, Facts] = field(default_factory=dict)

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
    peak = peak_of(jax.devices()[0].device_kind)
    return {
        "rows": {name: row(bench, name, peak) for name in watch.seconds},
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
    inputs = tuple(map(jnp.asarray, padded))
    if mesh is not None:
        inputs = replicate(mesh, inputs)
    embed = bench.watch.compile(
        "embed", lambda: programs.embed.lower(graph, weights, *inputs, mesh=mesh).compile()
    )
    bench.facts["embed"] = Facts(chips=_chips(mesh))

    def ready() -> jax.Array:
        return embed(weights, *inputs).block_until_ready()

    bench.watch.repeat({"embed": lambda: ready}, SHARES["embed"])
    return ready()


def _chips(mesh: Mesh | None) -> int:
    return 1 if mesh is None else mesh.size


def time_attention(bench: Bench) -> None:
    """Time attention alone with what one chip holds of a layer's heads, routes forced."""
    split, spec = bench.pipeline.split(bench.request), bench.pipeline.specs.transformer
    frames, positions, size = bench.token_shape
    heads = (bench.branches // split.cfg, spec.heads // split.seq)
    shape, rng = (*heads, frames * positions, size), np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal(shape, np.float32)) for _ in range(3))
    inputs = (*(x.astype(bench.request.dtype) for x in (q, k, v)), jnp.int32(0))
    variants: dict[str, Variant] = {}
    for name, (attend, share) in attention_cases(bench).items():
        pairs = share * float(frames * positions) ** 2 * heads[0] * heads[1]
        bench.facts[name] = Facts(pairs=share, flops=attention_flops(pairs, size))
        variants[name] = _attention_variant(bench, name, attend, inputs)
    bench.watch.repeat(variants, SHARES["attention"])


def attention_cases(bench: Bench) -> dict[str, tuple[Attend, float]]:
    """What attention is timed alone, each with the share of all pairs that it visits."""
    zero = {"seed": jnp.uint32(0), "step": jnp.int32(0)}
    found = {"attention_dense": (make(Setting(None, bench.chip), bench.token_shape, **zero), 1.0)}
    for schedule, sparsity in bench.trial.schedules.items():
        for route in (SPATIAL, TEMPORAL):
            kernel, table = table_of(Setting(sparsity, bench.chip), bench.token_shape, route)
            share = table.visited_pairs / table.tokens**2
            name = f"attention_{snake(schedule)}_{ROUTES[route]}"
            found[name] = (along(kernel, table), share)
    return found


def _attention_variant(
    bench: Bench, name: str, attend: Attend, inputs: tuple[jax.Array, ...]
) -> Variant:
    jitted = jax.jit(attend)
    call = bench.watch.compile(name, lambda: jitted.lower(*inputs).compile())
    return lambda: lambda: jax.block_until_ready(call(*inputs))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInputs:
    """What steps are timed with: the first step that the schedule routes."""

    graph: programs.Graph
    weights: programs.Weights
    mesh: Mesh | None
    start: DenoiseState
    fixed: tuple  # text, table, guidance, seed

    @classmethod
    def of(cls, bench: Bench, text: jax.Array) -> "StepInputs":
        """Load the transformer, and place the rest beside it."""
        request, start = bench.request, bench.pipeline.start(bench.request)
        first = min(request.sparsity.dense_steps if request.sparsity else 0, request.steps - 1)
        start = start._replace(step=jnp.int32(first))
        table = programs.StepTable.of(solver_table(request.steps, request.shift))
        fixed = (text, table, jnp.float32(request.guidance), routing_seed(request))
        graph, weights, mesh = bench.pipeline.load("transformer", request)
        if mesh is not None:
            start, fixed = replicate(mesh, (start, fixed))
        return cls(graph=graph, weights=weights, mesh=mesh, start=start, fixed=fixed)

    def copied(self) -> DenoiseState:
        """A state of its own for each call: a step reuses its buffers."""
        return jax.block_until_ready(jax.tree.map(jnp.copy, self.start))


def time_step(bench: Bench, text: jax.Array) -> None:
    """Time one step, dense and sparse."""
    inputs, records = StepInputs.of(bench, text), {}
    settings = step_settings(bench)
    variants = {
        name: _step_variant(bench, inputs, name, setting, records)
        for name, setting in settings.items()
    }
    bench.watch.repeat(variants, SHARES["step"])
    for name, record in records.items():
        record = record if inputs.mesh is None else collect(inputs.mesh, record)
        calls = dict(zip(ROUTES, count_calls(record).tolist(), strict=True))
        flops = _step_flops(bench, settings[name], calls, text.shape[1])
        bench.facts[name] = Facts(chips=_chips(inputs.mesh), calls=calls, flops=flops)
    if bench.trial.profile is not None:
        with jax.profiler.trace(str(bench.trial.profile)):
            for _ in range(2):
                variants[name]()()


def step_settings(bench: Bench) -> dict[str, Setting]:
    """The steps to time, by the names of their rows; a trace is made of the last."""
    settings = {"step_dense": Setting(None, bench.chip)}
    sparsity = bench.request.sparsity
    if sparsity is not None and sparsity.dense_steps < bench.request.steps:
        settings[f"step_{snake(bench.request.schedule)}"] = Setting(sparsity, bench.chip)
    return settings


def _step_variant(
    bench: Bench, inputs: StepInputs, name: str, setting: Setting, records: dict[str, Record]
) -> Variant:
    """Compile a step; each call leaves its record of the attention in `records`."""
    arguments = (inputs.graph, inputs.weights, inputs.copied(), *inputs.fixed)
    lower = partial(programs.denoise_step.lower, *arguments, setting=setting, mesh=inputs.mesh)
    step = bench.watch.compile(name, lambda: lower().compile())

    def prepare() -> Callable[[], None]:
        state = inputs.copied()

        def ready() -> None:
            found = step(inputs.weights, state, *inputs.fixed)
            records[name] = jax.block_until_ready(found).record

        return ready

    return prepare


def _step_flops(bench: Bench, setting: Setting, calls: dict[str, int], text_rows: int) -> float:
    """Operations of a step whose heads ran by each route so often."""
    frames, positions, size = bench.token_shape
    tokens = frames * positions
    pairs = float(calls["dense"]) * tokens**2
    if setting.sparsity is not None:
        for route in (SPATIAL, TEMPORAL):
            _, table = table_of(setting, bench.token_shape, route)
            pairs += float(calls[ROUTES[route]]) * table.visited_pairs
    spec = bench.pipeline.specs.transformer
    return step_flops(spec, tokens, text_rows, bench.branches) + attention_flops(pairs, size)


def time_decode(bench: Bench) -> None:
    """Time the first latent frame, whose program is another, and the second, until the frames are
    on the host.
    """
    graph, weights, mesh = bench.pipeline.load("vae", bench.request)
    noise = np.asarray(bench.pipeline.start(bench.request).latents)
    latents = jnp.asarray(noise) if mesh is None else place_columns(mesh, noise)
    z = [latents[:, index : index + 1] for index in range(min(latents.shape[1], 2))]
    caches: list[Any] = []  # of one call of the first program, for one of the other

    def finish(found: tuple[jax.Array, jax.Array, Any]) -> Any:
        frames, finite, cache = jax.block_until_ready(found)
        if mesh is not None:
            frames = collect(mesh, frames)
        np.asarray(frames[0]), bool(finite)
        return cache

    def first_frame() -> Callable[[], None]:
        caches.clear()  # two of them may be more than a chip holds
        return lambda: caches.append(finish(first(weights, z[0])))

    def next_frame() -> Callable[[], None]:
        cache = caches.pop()
        return lambda: finish(later(weights, z[1], cache))

    lower_first = partial(programs.decode_first.lower, graph, weights, z[0])
    first = bench.watch.compile("decode_first", lambda: lower_first().compile())
    variants: dict[str, Variant] = {"decode_first": first_frame}
    if len(z) > 1:
        first_frame()()
        lower_next = partial(programs.decode_next.lower, graph, weights, z[1])
        later = bench.watch.compile("decode_next", lambda: lower_next(caches[0]).compile())
        variants["decode_next"] = next_frame
    bench.facts |= dict.fromkeys(variants, Facts(chips=_chips(mesh)))
    bench.watch.repeat(variants, SHARES["decode"])


def row(bench: Bench, name: str, peak: float | None) -> dict[str, Any]:
    """What is told of one row; its share of the peak where both are known."""
    facts, compiling = bench.facts[name], bench.watch.compiling[name]
    found = summary(bench.watch.seconds[name])
    found |= {"compile_s": compiling.seconds, "cached": compiling.cached}
    if facts.flops is not None:
        found["tflop"] = facts.flops / 1e12
        if peak is not None:
            reached = facts.flops / (found["median_ms"] / 1e3)
            found["utilisation"] = reached / (peak * facts.chips)
    known = {"visited_pairs": facts.pairs, "calls": facts.calls}
    return found | {key: value for key, value in known.items() if value is not None}


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
    """What a whole run would take, programs compiled and weights loaded, up to the last frame (the
    MP4 is not bench's): medians added up, densely and by the schedule. Empty where a stage is not
    timed.
    """
    request, latent = bench.request, bench.pipeline.grid(bench.request).latent_frames
    ms = {name: summary(times)["median_ms"] for name, times in bench.watch.seconds.items()}
    if not {"embed", "step_dense", "decode_first"} <= ms.keys():
        return {}
    others = ms["embed"] + ms["decode_first"] + (latent - 1) * ms.get("decode_next", 0.0)
    found = {"dense": request.steps * ms["step_dense"] + others}
    sparse = ms.get(f"step_{snake(request.schedule)}")
    if sparse is not None and request.sparsity is not None:
        dense = min(request.sparsity.dense_steps, request.steps)
        steps = dense * ms["step_dense"] + (request.steps - dense) * sparse
        found[snake(request.schedule)] = steps + others
    return {name: total / 1e3 for name, total in found.items()}


def snake(name: str) -> str:
    """Spell a schedule's name as rows do."""
    return name.replace("-", "_")
