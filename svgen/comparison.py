"""Renders the same prompts from the same noise densely and by sparse schedules: what each schedule
costs in quality, and what it spares in pairs and in time.

    schedules: dense, floor, those of presets, those of a sweep over the band share
    render     all prompts by all schedules          -> Rendering, latents and times
    decode     prompt by prompt                      -> Compared, scores against dense and frames
    report     everything as plain values

The floor is dense attention summed in another order: every tile is read, through the visit tables.
What lies as near to dense as the floor cannot be told from it. Each network is loaded once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import jax
import numpy as np

from svgen.attention.attend import count_calls, tables_of
from svgen.attention.masks import ROUTES, Tables
from svgen.config import Request, SparsitySchedule
from svgen.pipeline import Pipeline
from svgen.quality import of_video, of_videos, psnr_db, ssim

DENSE, FLOOR, PRESET, SWEEP = KINDS = ("dense", "floor", "preset", "sweep")
EVERY_TILE = SparsitySchedule(band_share=1.0)
SEEDS = 2**63  # there are as many
GAP_PX = 4  # of black between two videos side by side

Tick = Callable[[str], None]  # one more step or frame of a schedule is done


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """One way to attend that is compared."""

    name: str
    kind: str  # one of KINDS
    sparsity: SparsitySchedule | None  # None: densely


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendering:
    """All prompts by one schedule."""

    latents: list[np.ndarray]
    seconds: list[float]  # of denoising, without loading and compiling
    calls: np.ndarray  # int64 [3], head calls by route


class Score(NamedTuple):
    """How near one video is to the dense one, float64 [T] each."""

    psnr_db: np.ndarray
    ssim: np.ndarray


class Compared(NamedTuple):
    """One prompt: the score of each schedule, and frames side by side, uint8 [T, h, w, 3]."""

    scores: dict[str, Score]
    frames: np.ndarray


def schedules_of(
    presets: Mapping[str, SparsitySchedule], shares: Sequence[float] = ()
) -> list[Schedule]:
    """Dense, the floor, the presets' schedules by name, and the last of these by band share."""
    base = list(presets.values())[-1] if presets else EVERY_TILE
    return [
        Schedule(name="dense", kind=DENSE, sparsity=None),
        Schedule(name="floor", kind=FLOOR, sparsity=EVERY_TILE),
        *(Schedule(name=name, kind=PRESET, sparsity=one) for name, one in presets.items()),
        *(
            Schedule(name=f"share {share:g}", kind=SWEEP, sparsity=replace(base, band_share=share))
            for share in shares
        ),
    ]


def requests_of(request: Request, prompts: Sequence[str]) -> list[Request]:
    """One dense request per prompt; their seeds count up, so that each can be repeated alone."""
    plain = replace(request, sparsity=None)
    return [
        replace(plain, prompt=prompt, seed=(request.seed + index) % SEEDS)
        for index, prompt in enumerate(prompts)
    ]


def tables_in(pipeline: Pipeline, request: Request, schedule: Schedule) -> Tables | None:
    """The visit tables of a schedule for videos of a request's size; None for dense."""
    if schedule.sparsity is None:
        return None
    spec, grid = pipeline.specs.transformer, pipeline.grid(request)
    frames = grid.latent_frames // spec.patch[0]
    setting = pipeline.setting(replace(request, sparsity=schedule.sparsity))
    return tables_of(setting, (frames, grid.tokens // frames, spec.head_dim))


def twins(schedules: Sequence[Schedule], tables: Mapping[str, Tables | None]) -> dict[str, str]:
    """Schedules that do exactly what a former one does, by name: on a small grid several band
    shares mean the same tiles.
    """
    first: dict[Any, str] = {}
    found = {}
    for one in schedules:
        chosen = tables[one.name]
        key = None
        if chosen is not None:
            key = (replace(one.sparsity, band_share=1.0), *map(_visits, chosen))
        if key in first:
            found[one.name] = first[key]
        first.setdefault(key, one.name)
    return found


def _visits(table: Any) -> tuple[bytes, ...]:
    """What a table reads, without the width that it was made from."""
    names = ("starts", "key_tile", "from_sink", "masked", "kept")
    return tuple(getattr(table, name).tobytes() for name in names)


def render(
    pipeline: Pipeline, requests: Sequence[Request], schedules: Sequence[Schedule], tick: Tick
) -> dict[str, Rendering]:
    """Denoise every request by every schedule."""
    with pipeline.keeping():
        texts = [pipeline.embed(request) for request in requests]
    with pipeline.keeping():
        found = {}
        for one in schedules:
            asked = [replace(request, sparsity=one.sparsity) for request in requests]
            found[one.name] = _render(pipeline, asked, texts, partial(tick, one.name))
        return found


def _render(
    pipeline: Pipeline,
    requests: Sequence[Request],
    texts: Sequence[jax.Array],
    tick: Callable[[], None],
) -> Rendering:
    """Denoise all requests of one schedule, and time it."""
    made = Rendering(latents=[], seconds=[], calls=np.zeros(len(ROUTES), np.int64))
    for request, text in zip(requests, texts, strict=True):
        pipeline.warm(request, text)
        start, latents = perf_counter(), None
        for step in pipeline.denoise(request, text):
            latents = step.state.latents
            made.calls[:] += count_calls(step.record)
            tick()
        made.seconds.append(perf_counter() - start)
        made.latents.append(np.array(latents))
    return made


def decode(
    pipeline: Pipeline,
    requests: Sequence[Request],
    renderings: Mapping[str, Rendering],  # the dense one first
    shown: Sequence[str],
    tick: Tick,
) -> Iterator[Compared]:
    """Decode prompt by prompt and score each schedule; the `shown` ones are laid side by side."""
    with pipeline.keeping():
        for index, request in enumerate(requests):
            dense, scores, beside = None, {}, []
            for name, made in renderings.items():
                frames = _decode(pipeline, made.latents[index], request)
                if dense is None:
                    dense = frames
                scores[name] = Score(psnr_db(frames, dense), ssim(frames, dense))
                beside += [frames] if name in shown else []
                tick(name)
            yield Compared(scores, side_by_side(beside))


def _decode(pipeline: Pipeline, latents: np.ndarray, request: Request) -> np.ndarray:
    frames = np.concatenate(list(pipeline.decode(latents, request)))
    return frames[:, : request.height_px, : request.width_px]


def side_by_side(videos: Sequence[np.ndarray]) -> np.ndarray:
    """Lay videos of one size in a row, with a gap between them."""
    gap = np.zeros((*videos[0].shape[:2], GAP_PX, 3), np.uint8)
    row = [part for video in videos for part in (gap, video)]
    return np.concatenate(row[1:], axis=2)


def width_of(width_px: int, columns: int) -> int:
    """Width of so many videos side by side."""
    return columns * (width_px + GAP_PX) - GAP_PX


def report(
    requests: Sequence[Request],
    schedules: Sequence[Schedule],
    tables: Mapping[str, Tables | None],
    renderings: Mapping[str, Rendering],
    compared: Sequence[Mapping[str, Score]],  # by prompt
) -> list[dict[str, Any]]:
    """What was found of each schedule, as plain values; one that does what another does is told by
    `same_as`, and has its numbers.
    """
    same = twins(schedules, tables)
    dense_s = float(np.mean(renderings["dense"].seconds))
    rows = []
    for one in schedules:
        source = same.get(one.name, one.name)
        made, scores = renderings[source], [scores[source] for scores in compared]
        seconds = float(np.mean(made.seconds))
        density = _density(tables[source])
        rows.append(
            {
                "name": one.name,
                "kind": one.kind,
                "same_as": same.get(one.name),
                "sparsity": asdict(one.sparsity) if one.sparsity else None,
                "density": dict(zip(ROUTES, density, strict=True)),
                "kept_pairs": float(made.calls @ density / made.calls.sum()),
                "calls": dict(zip(ROUTES, made.calls.tolist(), strict=True)),
                "denoise_s": seconds,
                "ratio_to_dense": seconds / dense_s,
                "psnr_db": of_videos([score.psnr_db for score in scores]),
                "ssim": of_videos([score.ssim for score in scores]),
                "videos": [
                    {
                        "prompt": request.prompt,
                        "seed": request.seed,
                        "denoise_s": spent,
                        "psnr_db": of_video(score.psnr_db),
                        "ssim": of_video(score.ssim),
                    }
                    for request, spent, score in zip(requests, made.seconds, scores, strict=True)
                ],
            }
        )
    return rows


def _density(tables: Tables | None) -> list[float]:
    """Kept pairs of a head's call by each route, as a share of all."""
    return [table.density for table in tables] if tables else [1.0] * len(ROUTES)
