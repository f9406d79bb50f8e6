"""Profiles of heads: planted heads are found in the dump and in the picture."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from svgen.attention.attend import Record, sparse
from svgen.attention.masks import DENSE, SPATIAL, TEMPORAL, tables
from svgen.attention.mass import head_view
from svgen.config import Request, SparsitySchedule
from svgen.head_pictures import (
    COLORS,
    PALEST,
    UNROUTED,
    cell_colors,
    even_shares,
    margin_scale,
    routes_picture,
    shown_steps,
    views_picture,
)
from svgen.kernels.reference import tile_sizes
from svgen.profile_heads import Profile, Seen, as_json, as_npz, summary

FRAMES, ROWS, COLUMNS, SIZE = 9, 6, 10, 16
POSITIONS = ROWS * COLUMNS
look = jax.jit(head_view, static_argnames="grid")
TOKENS = np.arange(FRAMES * POSITIONS)
GRID = (FRAMES, ROWS, COLUMNS)
KINDS = np.array([[SPATIAL, TEMPORAL, SPATIAL], [TEMPORAL, TEMPORAL, SPATIAL]])  # branch, head
REQUEST = Request(
    prompt="planted",
    model="none",
    width_px=160,
    height_px=96,
    frames=33,
    fps=16.0,
    steps=4,
    guidance=2.0,
    shift=1.0,
    seed=0,
    schedule="mine",
    sparsity=SparsitySchedule(band_share=0.3, dense_steps=1, dense_layers=1),
)


def planted(kind: int, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Draw q, k, v [N, D] of a head that looks at its own frame, or along its own position."""
    place = TOKENS // POSITIONS if kind == SPATIAL else TOKENS % POSITIONS
    features = rng.standard_normal((POSITIONS, SIZE))
    features *= 7 / np.linalg.norm(features, axis=1, keepdims=True)
    q = features[place]
    return q, q, rng.standard_normal((len(TOKENS), SIZE))


@pytest.fixture(scope="module")
def found() -> Profile:
    """Four steps of two layers; the first step and the first layer are dense by schedule."""
    rng = np.random.default_rng(3)
    heads = [[planted(kind, rng) for kind in row] for row in KINDS]
    q, k, v = (
        jnp.asarray(np.stack([[h[i] for h in row] for row in heads]), jnp.float32) for i in range(3)
    )
    both = tables(FRAMES, POSITIONS, 0.3, tile_sizes(FRAMES, POSITIONS))

    @jax.jit
    def attend(step: jax.Array, layer: jax.Array) -> Record:
        numbers = {"seed": jnp.uint32(0), "step": step, "dense_steps": 1, "dense_layers": 1}
        return sparse(both, **numbers)(q, k, v, layer)[1]

    records = []
    for step in range(4):
        layers = [attend(jnp.int32(step), jnp.int32(layer)) for layer in range(2)]
        records.append(jax.tree.map(lambda *x: np.stack(x), *layers))
    return Profile.of(records)


def test_planted_heads_are_in_the_dump_as_what_they_are(found):
    dump = json.loads(json.dumps(as_json(found, REQUEST), allow_nan=False))
    assert dump["route_names"] == ["dense", "spatial", "temporal"]
    assert dump["branches"] == ["prompt", "negative prompt"]
    assert dump["sampled"] == [[False, False]] + [[False, True]] * 3
    for step in (1, 2, 3):
        assert dump["routes"][step] == [[[DENSE] * 3] * 2, KINDS.tolist()]
        errors = np.array(dump["errors"][step][1])
        other = np.take_along_axis(errors, (2 - KINDS)[..., None], -1)[..., 0]
        own = np.take_along_axis(errors, (KINDS - 1)[..., None], -1)[..., 0]
        assert (own < 0.3).all() and (other > 0.5).all()
        np.testing.assert_allclose(dump["margins"][step][1], (other - own) / other, rtol=1e-4)
    assert dump["stability"] == [[[None] * 3] * 2, [[1.0] * 3] * 2]
    assert dump["noise_levels"][0] == 0.999999 and len(dump["noise_levels"]) == 4


def test_npz_holds_the_same_as_json(found, tmp_path):
    path = tmp_path / "heads.npz"
    path.write_bytes(as_npz(found, REQUEST))
    with np.load(path) as file:
        header = json.loads(str(file["header"]))
        assert header["request"] == REQUEST.as_json()
        assert set(header["axes"]) == set(file.files) - {"header"}
        for name, axes in header["axes"].items():
            assert file[name].ndim == len(axes)
        np.testing.assert_array_equal(file["routes"], found.routes)
        np.testing.assert_array_equal(file["errors"], found.errors)
        np.testing.assert_array_equal(file["stability"], found.stability)


def test_summary_counts_the_last_routed_step(found):
    dense, routed = summary(found)
    assert dense == {
        **{"layer": 0, "dense": 6, "spatial": 0, "temporal": 0},
        **{"margin": None, "stability": None, "routed_steps": 0},
    }
    assert (routed["spatial"], routed["temporal"], routed["dense"]) == (3, 3, 0)
    assert (routed["stability"], routed["routed_steps"]) == (1.0, 3)
    assert routed["margin"] == pytest.approx(found.margins[3, 1].mean(), rel=1e-4)


def made(routes, sampled=None, errors=None) -> Profile:
    """A profile from routes [S, L, B, A]."""
    routes = np.array(routes, np.int8)
    sampled = np.ones(routes.shape[:2], bool) if sampled is None else np.array(sampled)
    errors = np.zeros((*routes.shape, 2), np.float32) if errors is None else np.array(errors)
    return Profile(routes=routes, errors=errors.astype(np.float32), sampled=sampled)


def test_stability_counts_only_steps_that_routed_the_head():
    routes = [[[[1, 1]]], [[[1, 2]]], [[[2, 0]]], [[[1, 2]]]]
    assert made(routes).stability.tolist() == [[[0.75, 0.5]]]
    part = made(routes, [[False], [True], [True], [True]]).stability
    np.testing.assert_allclose(part, [[[2 / 3, 2 / 3]]], rtol=1e-6)
    assert np.isnan(made(routes, [[False]] * 4).stability).all()


def test_margin_is_the_share_by_which_the_better_mask_is_better():
    errors = [[[[[0.1, 0.4], [0.4, 0.3], [0, 0], [0.2, 0]]]]]
    margins = made([[[[1, 2, 1, 2]]]], errors=errors).margins
    np.testing.assert_allclose(margins, [[[[0.75, 0.25, 0, 1]]]], rtol=1e-6)


def test_shares_of_a_step_say_what_the_schedule_left_dense():
    shares = made([[[[0, 0]], [[0, 1]]], [[[2, 1]], [[1, 1]]]], [[False, True], [True, True]])
    assert shares.shares().tolist() == [[0.25, 0.25, 0, 0.5], [0, 0.75, 0.25, 0]]


# Pictures.


def rgb(color: str) -> np.ndarray:
    return np.array([int(color[at : at + 2], 16) for at in (1, 3, 5)])


def test_picture_has_the_colors_of_the_planted_heads_in_their_cells(found):
    figure = routes_picture(found)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())
    upper = figure.subfigs[0].axes
    assert len(upper) == 2 * 3  # two branches, three routed steps
    scale = margin_scale(found)
    for branch in range(2):
        axes = upper[branch * 3 + 2]
        for head, kind in enumerate(KINDS[branch]):
            column, row = axes.transData.transform((head, 1))
            pixel = pixels[pixels.shape[0] - int(row), int(column), :3]
            depth = PALEST + (1 - PALEST) * min(found.margins[3, 1, branch, head] / scale, 1)
            full = rgb(COLORS["spatial" if kind == SPATIAL else "temporal"])
            assert depth > 0.4
            np.testing.assert_allclose(pixel, 255 - depth * (255 - full), atol=1.5)
        column, row = axes.transData.transform((1, 0))
        pixel = pixels[pixels.shape[0] - int(row), int(column), :3]
        np.testing.assert_array_equal(pixel, rgb(UNROUTED))


def test_cell_is_the_paler_the_smaller_its_margin_and_dense_by_budget_is_dark():
    errors = [[[[[0.5, 0.5], [0.4, 0.5], [0.5, 0.1], [0.9, 0.8]]]]]
    cells = cell_colors(made([[[[1, 1, 2, 0]]]], errors=errors), 0, 0, 0.5) * 255
    blue, orange, dark = (rgb(COLORS[name]) for name in ("spatial", "temporal", "dense"))
    paler = [255 - depth * (255 - blue) for depth in (PALEST, PALEST + (1 - PALEST) * 0.4)]
    np.testing.assert_allclose(cells[0], [*paler, orange, dark], atol=1e-4)


def test_panels_are_few_and_hold_the_first_and_the_last_routed_step():
    steps = 20
    sampled = [[step >= 6] for step in range(steps)]
    assert shown_steps(made([[[[1]]]] * steps, sampled)) == [6, 9, 11, 14, 16, 19]


def test_even_shares_are_those_of_even_attention():
    zeros = jnp.zeros((len(TOKENS), 4), jnp.float32)
    view = look(zeros, zeros, jnp.asarray(TOKENS, jnp.int32), GRID)
    along_time, on_frame = even_shares(GRID)
    np.testing.assert_allclose(view.along_time, along_time, rtol=1e-4)
    np.testing.assert_allclose(view.on_frame, on_frame, rtol=1e-4)


def test_picture_of_a_head_shows_its_attention_in_both_orders(found):
    q, k, _ = (jnp.asarray(x, jnp.float32) for x in planted(SPATIAL, np.random.default_rng(5)))
    view = look(q, k, jnp.asarray(TOKENS, jnp.int32), GRID)
    view = type(view)(*map(np.asarray, view))
    seen = [Seen(layer=layer, head=0, grid=GRID, view=view) for layer in (1, 0)]
    figure = views_picture(found, seen)
    maps = [axes.images[0].get_array() for axes in figure.axes[:2]]
    bins = maps[0].shape[1]
    np.testing.assert_allclose(maps[0], view.frame_major * bins)
    np.testing.assert_allclose(maps[1], view.position_major * bins)
    bars = [bar.get_height() for bar in figure.axes[3].patches]
    assert bars[0] == pytest.approx(100 * view.along_time[0]) and bars[0] > 80
    titles = [figure.axes[row * 4].get_title(loc="left") for row in range(2)]
    assert titles[0].startswith("layer 1, head 0: spatial (error spatial 0.")
    assert titles[1] == "layer 0, head 0: dense by schedule"
