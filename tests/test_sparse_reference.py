"""Sparse attention in jax.numpy against a masked softmax in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from svgen.attention.masks import (
    DENSE,
    MODES,
    SPATIAL,
    TEMPORAL,
    Tables,
    as_array,
    band_width,
    dense_table,
    spatial_pairs,
    spatial_table,
    tables,
    temporal_table,
)
from svgen.kernels.reference import attention, sparse_attention, tile_sizes
from svgen.kernels.tables import TileSizes, VisitTable

# Shares of the largest output. A float32 score of size s is off by about s 2^-23, and so are its
# weight and the output; sums of K terms add sqrt(K) 2^-24, each key tile one more rounding.
FLOAT32_ROUNDING, BFLOAT16_ROUNDING = 2.0**-23, 2.0**-9
SCORE = 6.0  # the largest score of unit q and k

run = jax.jit(sparse_attention, static_argnames="tables")


def tolerance(tokens: int, score: float = SCORE) -> float:
    return FLOAT32_ROUNDING * (score + math.sqrt(tokens) + 8)


def draw(seed: int, batch: int, heads: int, tokens: int, size: int) -> list[jax.Array]:
    rng = np.random.default_rng(seed)
    shape = (batch, heads, tokens, size)
    return [jnp.asarray(rng.standard_normal(shape, np.float32)) for _ in range(3)]


def exact(q, k, v, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Masked softmax of one head in float64, and its log-sum-exp."""
    q, k, v = (np.asarray(one, np.float64) for one in (q, k, v))
    scores = np.where(mask, q @ k.T / math.sqrt(q.shape[-1]), -np.inf)
    high = scores.max(axis=1, keepdims=True)
    weights = np.exp(scores - high)
    total = weights.sum(axis=1, keepdims=True)
    return weights / total @ v, (high + np.log(total))[:, 0]


def mask_of(table: VisitTable, frames: int, positions: int, route: int) -> np.ndarray:
    """Draw what a table keeps."""
    mask = np.zeros((table.tokens, table.tokens), bool)
    for visit in range(table.visits):
        view = table.sink if table.from_sink[visit] else table.keys
        rows = table.queries.tokens(table.query_tile[visit])
        mask[np.ix_(rows, view.tokens(table.key_tile[visit]))] = True
    if table.masked.any():
        mask &= as_array(frames, positions, table.width, route)
    return mask


def check(found: tuple[jax.Array, jax.Array], q, k, v, masks_of_heads, bound: float) -> None:
    """Every head against its own mask, and never equal to the unmasked answer unless it is."""
    out, sums = (np.asarray(one, np.float64) for one in found)
    for (item, head), mask in masks_of_heads.items():
        parts = (q[item, head], k[item, head], v[item, head])
        expected, log = exact(*parts, mask)
        largest = np.abs(expected).max()
        assert np.abs(out[item, head] - expected).max() <= bound * largest
        assert np.abs(sums[item, head] - log).max() <= bound * max(1, np.abs(log).max())
        if not mask.all():
            unmasked, _ = exact(*parts, np.ones_like(mask))
            assert np.abs(unmasked - expected).max() > 100 * bound * largest


SIZES = TileSizes(queries=14, keys=11, strided_queries=4, strided_keys=3, sink=8)
SHAPES = [  # (frames, positions, band half width): none divides the tiles above
    (5, 13, 14),
    (9, 11, 20),
    (2, 6, 1),
    (1, 17, 4),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("frames", "positions", "width"), SHAPES)
def test_each_head_attends_by_its_own_route(frames, positions, width, mode):
    """Batch 2 with other routes in each item, in every mode, over ragged tiles."""
    chosen = Tables(
        dense_table(frames, positions, SIZES),
        spatial_table(frames, positions, width, SIZES, mode),
        temporal_table(frames, positions, width, SIZES, mode),
    )
    routes = np.array([[SPATIAL, TEMPORAL, DENSE], [TEMPORAL, DENSE, SPATIAL]], np.int32)
    q, k, v = draw(frames, 2, 3, frames * positions, 8)
    drawn = [mask_of(chosen[route], frames, positions, route) for route in range(3)]
    if mode != "rounded":
        for route in (SPATIAL, TEMPORAL):
            mask = as_array(frames, positions, width, route)
            np.testing.assert_array_equal(drawn[route], mask)
    heads = {index: drawn[route] for index, route in np.ndenumerate(routes)}
    found = run(q, k, v, jnp.asarray(routes), chosen)
    assert (found[0].dtype, found[1].dtype) == (jnp.float32, jnp.float32)
    check(found, q, k, v, heads, tolerance(frames * positions))


def test_random_geometries():
    rng = np.random.default_rng(3)
    sparse = 0
    for seed in range(6):
        frames, positions = int(rng.integers(1, 7)), int(rng.integers(1, 20))
        width = int(rng.integers(0, frames * positions))
        sides = [int(side) for side in rng.integers(1, 12, 5)]
        names = ("queries", "keys", "strided_queries", "strided_keys", "sink")
        sizes = TileSizes(**dict(zip(names, sides, strict=True)))
        mode = MODES[seed % 3]
        chosen = (
            spatial_table(frames, positions, width, sizes, mode),
            temporal_table(frames, positions, width, sizes, mode),
        )
        q, k, v = draw(seed, 1, 2, frames * positions, 4)
        drawn = [mask_of(chosen[one], frames, positions, one + 1) for one in (0, 1)]
        heads = {(0, 0): drawn[1], (0, 1): drawn[0]}
        found = run(q, k, v, jnp.asarray([[1, 0]], jnp.int32), chosen)
        check(found, q, k, v, heads, tolerance(frames * positions))
        sparse += sum(not mask.all() for mask in drawn)
    assert sparse >= 5


@pytest.mark.parametrize("route", [DENSE, SPATIAL, TEMPORAL])
def test_band_share_of_one_equals_dense(route):
    frames, positions = 5, 37
    chosen = tables(frames, positions, 1.0, SIZES)
    q, k, v = draw(1, 1, 2, frames * positions, 16)
    out, _ = run(q, k, v, jnp.full((1, 2), route, jnp.int32), chosen)
    everything = attention(q, k, v)
    bound = 2 * tolerance(frames * positions)
    assert np.abs(out - everything).max() <= bound * np.abs(everything).max()


def test_keys_beyond_a_ragged_end_count_nothing():
    """Rows far below zero everywhere: a padded key of zeros would take all the weight."""
    frames, positions = 3, 13
    chosen = tables(frames, positions, 1.0, SIZES)
    q, k, v = draw(2, 1, 3, frames * positions, 8)
    q, k = jnp.abs(q) * 10 + 10, -jnp.abs(k) * 10 - 10
    everything = np.ones((39, 39), bool)
    heads = {(0, head): everything for head in range(3)}
    found = run(q, k, v, jnp.asarray([[0, 1, 2]], jnp.int32), chosen)
    assert np.asarray(found[1]).max() < -100
    check(found, q, k, v, heads, tolerance(39, 1000))


@pytest.mark.parametrize("mode", ["exact", "rounded"])
def test_rows_whose_kept_keys_are_all_far_below_the_best(mode):
    """Dropped keys score hundreds above the kept ones; tiles may begin with rows that keep none."""
    frames, positions, width = 6, 14, 9
    chosen = Tables(
        dense_table(frames, positions, SIZES),
        spatial_table(frames, positions, width, SIZES, mode),
        temporal_table(frames, positions, width, SIZES, mode),
    )
    q, k, v = draw(5, 1, 2, 84, 8)
    drawn = [mask_of(chosen[route], frames, positions, route) for route in (1, 2)]
    lost = ~(drawn[0] | drawn[1]).any(axis=0)
    assert not lost.any()  # every key is kept by someone, so raise those that row 50 has lost
    row = 50
    for head, mask in enumerate(drawn):
        away = jnp.asarray(~mask[row])[:, None]
        k = k.at[0, head].add(jnp.where(away, q[0, head, row] * 100, jnp.float32(0)))
    scores = np.einsum("d,nd->n", q[0, 0, row], k[0, 0]) / math.sqrt(8)
    assert scores[~drawn[0][row]].min() > scores[drawn[0][row]].max() + 100
    found = run(q, k, v, jnp.asarray([[1, 2]], jnp.int32), chosen)
    heads = {(0, 0): drawn[0], (0, 1): drawn[1]}
    check(found, q, k, v, heads, tolerance(84, 500))


def test_constant_rows_average_what_they_keep():
    frames, positions, width = 4, 9, 5
    table = temporal_table(frames, positions, width, SIZES, "exact")
    q, _, v = draw(6, 1, 1, 36, 8)
    out, sums = run(q, jnp.zeros_like(q), v, jnp.zeros((1, 1), jnp.int32), (table,))
    mask = as_array(frames, positions, width, TEMPORAL)
    expected = mask @ np.asarray(v[0, 0], np.float64) / mask.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(out[0, 0], expected, atol=tolerance(36))
    np.testing.assert_allclose(sums[0, 0], np.log(mask.sum(axis=1)), atol=tolerance(36))


def test_bfloat16_rounds_inputs_and_weights_only():
    frames, positions = 5, 40
    chosen = tables(frames, positions, 0.35, SIZES)
    q, k, v = (one.astype(jnp.bfloat16) for one in draw(7, 1, 3, 200, 16))
    drawn = [mask_of(chosen[route], frames, positions, route) for route in range(3)]
    found = run(q, k, v, jnp.asarray([[0, 1, 2]], jnp.int32), chosen)
    assert (found[0].dtype, found[1].dtype) == (jnp.bfloat16, jnp.float32)
    out, _ = (np.asarray(one, np.float64) for one in found)
    for head in range(3):
        expected, _ = exact(q[0, head], k[0, head], v[0, head], drawn[head])
        bound = BFLOAT16_ROUNDING * (SCORE + 4) * np.abs(expected).max()
        assert np.abs(out[0, head] - expected).max() <= bound


def test_sums_merge_two_halves_of_the_keys():
    """What the log-sum-exp is for: disjoint tables, run apart, make one softmax."""
    frames, positions, width = 4, 12, 7
    table = spatial_table(frames, positions, width, SIZES, "exact")
    rest = ~as_array(frames, positions, width, SPATIAL)
    q, k, v = draw(8, 1, 1, 48, 8)
    out, sums = run(q, k, v, jnp.zeros((1, 1), jnp.int32), (table,))
    other = exact(q[0, 0], k[0, 0], v[0, 0], rest | (rest.sum(axis=1, keepdims=True) == 0))
    part = 1 / (1 + np.exp(other[1] - np.asarray(sums[0, 0], np.float64)))[:, None]
    merged = part * np.asarray(out[0, 0], np.float64) + (1 - part) * other[0]
    whole, _ = exact(q[0, 0], k[0, 0], v[0, 0], np.ones((48, 48), bool))
    some = rest.any(axis=1)
    assert some.sum() > 10
    np.testing.assert_allclose(merged[some], whole[some], atol=tolerance(48))


def test_only_the_chosen_route_is_computed():
    """A tile that no visit lists is never read: what it holds does not reach the output."""
    frames, positions, width = 6, 20, 6
    table = temporal_table(frames, positions, width, SIZES, "rounded")
    q, k, v = draw(9, 1, 1, 120, 8)
    mask = mask_of(table, frames, positions, TEMPORAL)
    row = 7
    dropped = jnp.asarray(~mask[row])[None, None, :, None]
    assert dropped.sum() > 30
    poison = jnp.where(dropped, jnp.float32(jnp.nan), v)
    clean, _ = run(q, k, v, jnp.zeros((1, 1), jnp.int32), (table,))
    out, _ = run(q, k, poison, jnp.zeros((1, 1), jnp.int32), (table,))
    np.testing.assert_array_equal(out[0, 0, row], clean[0, 0, row])
    assert np.isnan(out).any()


@pytest.mark.parametrize(
    ("frames", "positions"), [(21, 3600), (21, 1560), (5, 144), (9, 64), (7, 13), (1, 5), (600, 4)]
)
def test_tiles_for_a_cpu_meet_the_budget(frames, positions):
    sizes = tile_sizes(frames, positions)
    assert max(sizes.queries, sizes.strided_queries * frames) <= max(1024, frames)
    assert max(sizes.keys, sizes.strided_keys * frames, sizes.sink) <= max(512, frames)
    width = band_width(frames, positions, 0.35)
    budget = spatial_pairs(frames, positions, width)
    for table in tables(frames, positions, 0.35, sizes)[1:]:
        # Of four positions, a temporal tile holds a quarter of all keys: nothing comes nearer.
        assert abs(table.kept_pairs - budget) <= max(0.02 * budget, table.kept.max() / 2)
    if positions > 1000:  # the sink is whole tiles
        assert positions % sizes.keys == 0 and sizes.keys > 256


def test_memory_does_not_grow_with_all_pairs():
    frames, positions = 9, 1024
    tokens = frames * positions
    chosen = tables(frames, positions, 0.3, tile_sizes(frames, positions))
    shape = jax.ShapeDtypeStruct((1, 8, tokens, 64), jnp.float32)
    routes = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    compiled = run.lower(shape, shape, shape, routes, chosen).compile()
    held = 5 * math.prod(shape.shape) * 4  # scaled q, the output, and what the loops carry
    assert compiled.memory_analysis().temp_size_in_bytes < held + tokens**2
