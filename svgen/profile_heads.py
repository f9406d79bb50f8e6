"""Which way each head ran in a run, how clearly, and how steadily: the records of its own program.

The arrays are indexed by S steps, L layers, B branches (the prompt's and, with guidance, the
negative prompt's) and A heads.
"""

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from svgen.attention.attend import Record
from svgen.attention.masks import ROUTES
from svgen.attention.mass import View
from svgen.config import Request
from svgen.pipeline import Pipeline
from svgen.scheduler import flow_sigmas

SCHEMA = "svgen.heads/1"
BRANCHES = ("prompt", "negative prompt")
DIGITS = 6  # of a number in JSON
AXES = {
    "sampled": ("step", "layer"),
    "routes": ("step", "layer", "branch", "head"),
    "errors": ("step", "layer", "branch", "head", "spatial or temporal"),
    "margins": ("step", "layer", "branch", "head"),
    "stability": ("layer", "branch", "head"),
    "noise_levels": ("step",),
}
Head = tuple[int, int]  # layer and head, from 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """How every head ran in every step."""

    routes: np.ndarray  # int8 [S, L, B, A], as in `masks.ROUTES`
    errors: np.ndarray  # float32 [S, L, B, A, 2], spatial and temporal; zero where not sampled
    sampled: np.ndarray  # bool [S, L]: routed, not dense by schedule

    @classmethod
    def of(cls, records: Sequence[Record]) -> "Profile":
        """Gather the records of all steps, each stacked over layers."""
        routes, errors, sampled = (
            np.stack([np.asarray(getattr(record, name)) for record in records])
            for name in Record._fields
        )
        return cls(routes=routes.astype(np.int8), errors=errors, sampled=sampled)

    @property
    def margins(self) -> np.ndarray:
        """How much better the better mask was, float32 [S, L, B, A]: (larger - smaller) / larger
        error. 0: either would do as well; 1: the better one loses nothing.
        """
        larger, smaller = self.errors.max(axis=-1), self.errors.min(axis=-1)
        return (larger - smaller) / np.where(larger > 0, larger, 1)

    @property
    def stability(self) -> np.ndarray:
        """In which share of the steps that routed it a head had its most frequent route, float32
        [L, B, A]; NaN where none did.
        """
        routed = self.sampled[:, :, None, None]
        counts = [np.sum((self.routes == route) & routed, axis=0) for route in range(len(ROUTES))]
        steps = routed.sum(axis=0).astype(np.float32)
        return np.where(steps > 0, np.max(counts, axis=0) / np.maximum(steps, 1), np.nan)

    @property
    def routed_steps(self) -> np.ndarray:
        """The steps in which some layer was routed, from 0."""
        return np.flatnonzero(self.sampled.any(axis=1))

    def shares(self) -> np.ndarray:
        """Share of the head calls of each step that ran by each route, and that were dense by
        schedule: float64 [S, 4].
        """
        routed = np.broadcast_to(self.sampled[:, :, None, None], self.routes.shape)
        kinds = np.where(routed, self.routes, len(ROUTES)).reshape(len(self.routes), -1)
        return np.stack([(kinds == kind).mean(axis=1) for kind in range(len(ROUTES) + 1)], axis=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """Where one head looks in the last step, in the prompt's branch."""

    layer: int
    head: int
    grid: tuple[int, int, int]  # frames, rows and columns of tokens
    view: View


def profile(
    pipeline: Pipeline,
    request: Request,
    *,
    heads: Sequence[Head] = (),
    on_step: Callable[[], None] = lambda: None,
) -> tuple[Profile, list[Seen]]:
    """Denoise a request's video, keep how each head ran, and look at some heads in the last step.
    `on_step` is called after each one.
    """
    text, last = pipeline.embed(request), None
    records = []
    for step in pipeline.denoise(request, text):
        records.append(jax.tree.map(np.asarray, step.record))
        if heads and len(records) == request.steps - 1:
            last = jax.tree.map(jnp.array, step.state)  # its buffers are reused
        on_step()
    if not heads:
        return Profile.of(records), []
    states = [pipeline.start(request) if last is None else last]
    (views,) = pipeline.observe(request, text, states)
    grid = _token_grid(pipeline, request)
    seen = []
    for layer, head in heads:
        view = View(*(np.asarray(array[layer, 0, head]) for array in views))
        seen.append(Seen(layer=layer, head=head, grid=grid, view=view))
    return Profile.of(records), seen


def _token_grid(pipeline: Pipeline, request: Request) -> tuple[int, int, int]:
    grid, patch = pipeline.grid(request), pipeline.specs.transformer.patch
    return grid.latent_frames // patch[0], grid.rows // patch[1], grid.columns // patch[2]


def summary(found: Profile) -> list[dict[str, Any]]:
    """A row per layer: how many head calls ran by each route in the last routed step, the mean
    margin there, the mean stability, and how many steps routed the layer.
    """
    step = found.routed_steps[-1]
    margins, stability = found.margins[step], found.stability
    rows = []
    for layer, routes in enumerate(found.routes[step]):
        counts = {name: int((routes == route).sum()) for route, name in enumerate(ROUTES)}
        routed = bool(found.sampled[step, layer])
        means = (margins[layer].mean(), stability[layer].mean()) if routed else (None, None)
        names = ("margin", "stability")
        numbers = {
            name: None if mean is None else round(float(mean), DIGITS)
            for name, mean in zip(names, means, strict=True)
        }
        steps = int(found.sampled[:, layer].sum())
        rows.append({"layer": layer, **counts, **numbers, "routed_steps": steps})
    return rows


def as_arrays(found: Profile, request: Request) -> dict[str, np.ndarray]:
    """The arrays of a dump; `AXES` names their axes."""
    arrays = {name: getattr(found, name) for name in AXES if name != "noise_levels"}
    return {**arrays, "noise_levels": flow_sigmas(request.steps, request.shift)}


def header(found: Profile, request: Request) -> dict[str, Any]:
    """What a dump says besides its arrays."""
    return {
        "schema": SCHEMA,
        "request": request.as_json(),
        "route_names": list(ROUTES),
        "branches": list(BRANCHES[: found.routes.shape[2]]),
        "axes": {name: list(axes) for name, axes in AXES.items()},
    }


def as_json(found: Profile, request: Request) -> dict[str, Any]:
    """The dump as plain values; null stands for no number."""
    arrays = as_arrays(found, request).items()
    return {**header(found, request), **{name: _plain(array) for name, array in arrays}}


def as_npz(found: Profile, request: Request) -> bytes:
    """The dump as an NPZ file, whose `header` is JSON text."""
    file, text = io.BytesIO(), json.dumps(header(found, request))
    np.savez_compressed(file, header=np.array(text), **as_arrays(found, request))
    return file.getvalue()


def _plain(array: np.ndarray) -> Any:
    if array.dtype.kind != "f":
        return array.tolist()
    numbers = [float(f"{x:.{DIGITS}g}") if np.isfinite(x) else None for x in array.reshape(-1)]
    shaped = np.empty(array.size, object)
    shaped[:] = numbers
    return shaped.reshape(array.shape).tolist()
