"""Routing: which rows are looked at, what errors they give, and whether planted heads are found."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from svgen.attention.masks import (
    DENSE,
    MODES,
    SPATIAL,
    TEMPORAL,
    Tables,
    as_array,
    dense_table,
    spatial_table,
    tables,
    temporal_table,
)
from svgen.attention.routing import (
    choose,
    kept_keys,
    mask_errors,
    route,
    row_key,
    sample_rows,
)
from svgen.kernels.reference import tile_sizes
from svgen.kernels.tables import TileSizes, VisitTable

FRAMES, POSITIONS, SIZE = 21, 120, 32
TOKENS = FRAMES * POSITIONS
SIZES = TileSizes(queries=14, keys=11, strided_queries=4, strided_keys=3, sink=8)
# Relative errors of float32 outputs: scores up to 6 and sums of up to 2,520 terms.
TOLERANCE = 2.0**-23 * (6 + math.sqrt(TOKENS) + 8)


def rows_of(seed: int, step: int = 0, layer: int = 0, count: int = 64) -> np.ndarray:
    key = row_key(jnp.uint32(seed), jnp.int32(step), jnp.int32(layer))
    return np.asarray(sample_rows(key, FRAMES, POSITIONS, count))


def mask_of(table: VisitTable, route_of: int) -> np.ndarray:
    """Draw what a table keeps, from its visits."""
    mask = np.zeros((table.tokens, table.tokens), bool)
    for visit in range(table.visits):
        view = table.sink if table.from_sink[visit] else table.keys
        rows = table.queries.tokens(table.query_tile[visit])
        mask[np.ix_(rows, view.tokens(table.key_tile[visit]))] = True
    if table.masked.any():
        positions = table.sink_tokens
        mask &= as_array(table.tokens // positions, positions, table.width, route_of)
    return mask


def exact_error(q, k, v, mask: np.ndarray) -> float:
    """|sparse - dense| / |dense| in float64."""
    q, k, v = (np.asarray(one, np.float64) for one in (q, k, v))
    scores = q @ k.T / math.sqrt(q.shape[-1])
    outs = []
    for allowed in (np.ones_like(mask), mask):
        kept = np.where(allowed, scores, -np.inf)
        weights = np.exp(kept - kept.max(axis=1, keepdims=True))
        outs.append(weights / weights.sum(axis=1, keepdims=True) @ v)
    return np.linalg.norm(outs[1] - outs[0]) / np.linalg.norm(outs[0])


def test_rows_are_one_from_each_stratum_of_frames_and_positions():
    for seed in range(20):
        rows = rows_of(seed)
        assert rows.dtype == np.int32 and rows.min() >= 0 and rows.max() < TOKENS
        by_frame = np.bincount(rows // POSITIONS, minlength=FRAMES)
        assert by_frame.min() >= 2 and by_frame.max() <= 5  # 64 / 21 = 3.05, one more at each end
        ordered = np.sort(rows % POSITIONS)
        edges = np.arange(65) * POSITIONS / 64
        assert ((ordered >= np.floor(edges[:-1])) & (ordered <= edges[1:])).all()


def test_rows_are_equally_likely_and_pair_frames_with_all_positions():
    counts = np.zeros((FRAMES, 10))
    draw = jax.jit(jax.vmap(lambda key: sample_rows(key, FRAMES, POSITIONS)))
    rows = np.asarray(draw(jax.random.split(jax.random.key(0), 2000)))
    np.add.at(counts, (rows // POSITIONS, rows % POSITIONS // 12), 1)
    expected = rows.size / counts.size
    assert np.abs(counts / expected - 1).max() < 5 / math.sqrt(expected)


def test_rows_depend_on_seed_step_and_layer_and_on_nothing_else():
    base = rows_of(7, 3, 11)
    np.testing.assert_array_equal(base, rows_of(7, 3, 11))
    for other in (rows_of(8, 3, 11), rows_of(7, 4, 11), rows_of(7, 3, 12), rows_of(7, 11, 3)):
        assert (other != base).mean() > 0.9


def test_rows_of_tiny_videos():
    key = jax.random.key(0)
    assert np.asarray(sample_rows(key, 1, 1, 1)).tolist() == [0]
    assert sorted(np.asarray(sample_rows(key, 6, 1, 6)).tolist()) == list(range(6))
    with pytest.raises(ValueError, match="7 rows cannot be drawn from 6 tokens"):
        sample_rows(key, 2, 3, 7)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("frames", "positions", "width"), [(5, 13, 14), (3, 23, 9), (1, 17, 4)])
def test_kept_keys_are_the_rows_of_the_drawn_mask(frames, positions, width, mode):
    found = {
        DENSE: dense_table(frames, positions, SIZES),
        SPATIAL: spatial_table(frames, positions, width, SIZES, mode),
        TEMPORAL: temporal_table(frames, positions, width, SIZES, mode),
    }
    rows = np.arange(frames * positions, dtype=np.int32)[::-1].copy()
    for kind, table in found.items():
        mask = mask_of(table, kind)
        assert mask.all() == (kind == DENSE or frames == 1)
        np.testing.assert_array_equal(kept_keys(table, jnp.asarray(rows)), mask[rows])


def test_errors_are_those_of_float64():
    rng = np.random.default_rng(0)
    q = rng.standard_normal((64, SIZE), np.float32)
    k, v = (rng.standard_normal((TOKENS, SIZE), np.float32) for _ in range(2))
    kept = [rng.random((64, TOKENS)) < share for share in (0.3, 0.9, 2)]
    found = mask_errors(*map(jnp.asarray, (q, k, v)), tuple(map(jnp.asarray, kept)))
    assert found.dtype == jnp.float32
    for error, mask in zip(found, kept, strict=True):
        assert abs(error - exact_error(q, k, v, mask)) <= TOLERANCE
    assert found[0] > 10 * found[1] / 3 > 0.1 and found[2] == 0


def test_errors_of_bfloat16_inputs_are_not_rounded_to_bfloat16():
    rng = np.random.default_rng(1)
    parts = [
        jnp.asarray(rng.standard_normal((rows, SIZE), np.float32)).astype(jnp.bfloat16)
        for rows in (64, TOKENS, TOKENS)
    ]
    mask = rng.random((64, TOKENS)) < 0.99
    (found,) = mask_errors(*parts, (jnp.asarray(mask),))
    assert abs(found - exact_error(*parts, mask)) <= TOLERANCE


def test_errors_stay_finite_when_kept_keys_lie_far_below_the_best():
    q = jnp.full((2, 4), 30.0)
    k = jnp.concatenate([jnp.full((3, 4), 30.0), jnp.full((3, 4), -30.0)])
    v = jnp.asarray(np.random.default_rng(2).standard_normal((6, 4), np.float32))
    low = jnp.asarray([[False] * 3 + [True] * 3] * 2)
    (found,) = mask_errors(q, k, v, (low,))
    assert 0.1 < found < 100
    assert abs(found - exact_error(q, k, v, np.asarray(low))) <= TOLERANCE * 100


def test_values_of_zero_give_no_error():
    zeros = jnp.zeros((6, 4))
    (found,) = mask_errors(zeros[:2], zeros, zeros, (jnp.ones((2, 6), bool),))
    assert found == 0


def test_choice_by_hand():
    errors = jnp.asarray([[[0.1, 0.2], [0.2, 0.1]], [[0.5, 0.5], [0.3, 0.9]]])
    assert choose(errors).tolist() == [[SPATIAL, TEMPORAL], [SPATIAL, SPATIAL]]
    assert choose(errors).dtype == jnp.int32
    assert choose(errors, 0.25).tolist() == [[SPATIAL, TEMPORAL], [DENSE, DENSE]]
    assert choose(errors, 0.1).tolist() == [[SPATIAL, TEMPORAL], [DENSE, DENSE]]
    assert choose(errors, 0.05).tolist() == [[DENSE, DENSE], [DENSE, DENSE]]


def planted(rng: np.random.Generator, kind: int, heads: int, sharp=(1.0, 4.0)) -> list[np.ndarray]:
    """Draw q, k, v [heads, N, D] that look at near frames, or near positions, and at noise.

    Random Fourier features: their products fall off like a Gaussian of the distance, here of 0.5 to
    1.2 frames, or 5 to 16 of the 120 positions; scores reach `sharp` above 0.
    """
    tokens = np.arange(TOKENS)
    place = tokens // POSITIONS if kind == SPATIAL else tokens % POSITIONS
    reach = rng.uniform(*((0.5, 1.2) if kind == SPATIAL else (5, 16)), heads)
    waves = rng.standard_normal((heads, 1, SIZE // 2)) / reach[:, None, None]
    phases = place[None, :, None] * waves
    features = np.concatenate([np.cos(phases), np.sin(phases)], axis=-1)
    height = rng.uniform(*sharp, heads)[:, None, None]
    features *= np.sqrt(height * math.sqrt(SIZE) / (SIZE / 2))
    noise = rng.uniform(0.5, 1, (heads, 1, 1))
    q, k = (features + noise * rng.standard_normal(features.shape) for _ in range(2))
    v = rng.standard_normal(features.shape)
    return [one.astype(np.float32) for one in (q, k, v)]


@pytest.fixture(scope="module")
def chosen() -> Tables:
    found = tables(FRAMES, POSITIONS, 0.35, tile_sizes(FRAMES, POSITIONS))
    assert max(found.spatial.density, found.temporal.density) < 0.45
    return found


@pytest.fixture(scope="module")
def heads() -> tuple[list[jax.Array], np.ndarray]:
    """200 planted heads, as two branches of 100, kinds mixed differently in each."""
    rng = np.random.default_rng(11)
    parts = [planted(rng, kind, 100) for kind in (SPATIAL, TEMPORAL)]
    kinds = np.repeat([SPATIAL, TEMPORAL], 100)
    order = rng.permutation(200)
    q, k, v = (
        np.concatenate(both)[order].reshape(2, 100, TOKENS, SIZE)
        for both in zip(*parts, strict=True)
    )
    return [jnp.asarray(one) for one in (q, k, v)], kinds[order].reshape(2, 100)


route_heads = jax.jit(route, static_argnames=("tables", "budget", "heads_at_once"))


def test_planted_heads_are_found(chosen, heads):
    parts, kinds = heads
    right = []
    for seed in range(3):
        found = route_heads(*parts, jnp.asarray(rows_of(seed)), chosen)
        right.append(found.routes == kinds)
    assert np.mean(right) >= 0.99
    errors = np.asarray(found.errors)
    small = np.where(kinds == SPATIAL, errors[..., 0], errors[..., 1])
    large = np.where(kinds == SPATIAL, errors[..., 1], errors[..., 0])
    assert np.median(small) < 0.65 and np.median(large) > 1.5 * np.median(small)


def public_masks(rows: np.ndarray) -> list[np.ndarray]:
    """The profile masks of public code: a band of 2 frames whatever the band share is, and a sink
    of the first frame's length, both in each head's own order.
    """
    tokens = np.arange(TOKENS)
    masks = []
    for order in (tokens, tokens % POSITIONS * FRAMES + tokens // POSITIONS):
        near = np.abs(order[rows, None] - order) < 2 * POSITIONS
        masks.append(near | (order < POSITIONS)[None])
    return masks


def share_found(parts, kinds, rows: np.ndarray, kept: list[np.ndarray]) -> dict[int, float]:
    """How many heads of each kind are found from given rows and masks."""
    errors = jax.jit(jax.vmap(jax.vmap(mask_errors, (0, 0, 0, None)), (0, 0, 0, None)))(
        parts[0][:, :, rows], parts[1], parts[2], tuple(map(jnp.asarray, kept))
    )
    routes = np.asarray(choose(errors))
    return {kind: float((routes == kind)[kinds == kind].mean()) for kind in (SPATIAL, TEMPORAL)}


def test_public_defects_tilt_heads_to_temporal(chosen, heads):
    """Rows of frame 0 alone see half a spatial band but a whole temporal one: 11 % against 22 %."""
    parts, kinds = heads
    early = np.sort(np.random.default_rng(3).permutation(int(0.69 * POSITIONS))[:64])
    spread = rows_of(0)
    unequal = [mask.mean() for mask in public_masks(early)]
    np.testing.assert_allclose(unequal, [0.11, 0.22], atol=0.005)
    public = share_found(parts, kinds, early, public_masks(early))
    assert public[SPATIAL] < 0.9 and public[TEMPORAL] == 1
    tables_of_rows = {
        name: [np.asarray(kept_keys(table, jnp.asarray(rows))) for table in chosen[1:]]
        for name, rows in (("early", early), ("spread", spread))
    }
    # Rows of frame 0 are no better under our masks, whose sink is their own frame.
    first = share_found(parts, kinds, early, tables_of_rows["early"])
    assert first[SPATIAL] < 0.6 and first[TEMPORAL] == 1
    ours = tables_of_rows["spread"]
    assert abs(ours[0].mean() / ours[1].mean() - 1) < 0.1
    mine = share_found(parts, kinds, spread, ours)
    assert min(mine.values()) >= 0.99


def test_each_branch_and_head_is_decided_alone(chosen, heads):
    (q, k, v), _ = heads
    rows = jnp.asarray(rows_of(5))
    some = [one[:, :6] for one in (q, k, v)]
    base = route_heads(*some, rows, chosen)
    assert len({tuple(row) for row in base.routes.tolist()}) == 2  # the branches differ
    alone = route_heads(*[one[1:, 4:5] for one in some], rows, chosen)
    assert alone.routes[0, 0] == base.routes[1, 4]
    np.testing.assert_allclose(alone.errors[0, 0], base.errors[1, 4], rtol=TOLERANCE)
    changed = [one.at[0, 2].set(one[0, 2, ::-1] * 3) for one in some]
    after = route_heads(*changed, rows, chosen)
    same = np.ones((2, 6), bool)
    same[0, 2] = False
    np.testing.assert_array_equal(after.errors[same], base.errors[same])
    assert (after.errors[0, 2] != base.errors[0, 2]).all()


def test_heads_at_once_change_speed_only(chosen, heads):
    some = [one[:, :5] for one in heads[0]]
    rows = jnp.asarray(rows_of(6))
    base = route_heads(*some, rows, chosen)
    for at_once in (3, 10, 50):
        found = route_heads(*some, rows, chosen, heads_at_once=at_once)
        np.testing.assert_array_equal(found.routes, base.routes)
        np.testing.assert_allclose(found.errors, base.errors, rtol=10 * TOLERANCE)


def test_guard_keeps_heads_dense_that_neither_mask_serves(chosen):
    rng = np.random.default_rng(4)
    clear = [planted(rng, kind, 3, sharp=(8.0, 9.0)) for kind in (SPATIAL, TEMPORAL)]
    vague = [rng.standard_normal((3, TOKENS, SIZE)).astype(np.float32) for _ in range(3)]
    parts = [jnp.asarray(np.concatenate(three))[None] for three in zip(*clear, vague, strict=True)]
    rows = jnp.asarray(rows_of(1))
    guarded = route_heads(*parts, rows, chosen, budget=0.5).routes[0].tolist()
    assert guarded == [SPATIAL] * 3 + [TEMPORAL] * 3 + [DENSE] * 3
    free = route_heads(*parts, rows, chosen).routes[0].tolist()
    assert free[:6] == guarded[:6] and DENSE not in free


def test_errors_are_of_the_tables_that_run(chosen, heads):
    """Not of the exact masks: rounded tables give other errors, and those are reported."""
    parts = [one[:1, :2] for one in heads[0]]
    rows = rows_of(9)
    found = route_heads(*parts, jnp.asarray(rows), chosen)
    for head in range(2):
        q, k, v = (np.asarray(one[0, head]) for one in parts)
        for kind, table in ((SPATIAL, chosen.spatial), (TEMPORAL, chosen.temporal)):
            error = found.errors[0, head, kind - 1]
            run = exact_error(q[rows], k, v, mask_of(table, kind)[rows])
            ideal = as_array(FRAMES, POSITIONS, table.width, kind)[rows]
            assert abs(error - run) <= TOLERANCE
            assert abs(error - exact_error(q[rows], k, v, ideal)) > 20 * TOLERANCE


def test_band_share_of_one_has_no_error(heads):
    whole = tables(FRAMES, POSITIONS, 1.0, tile_sizes(FRAMES, POSITIONS))
    found = route_heads(*[one[:, :2] for one in heads[0]], jnp.asarray(rows_of(0)), whole)
    assert np.asarray(found.errors).max() <= TOLERANCE


def largest_array(jaxpr) -> int:
    """The largest number of elements of any value that a program makes, loops included."""
    sizes = [math.prod(value.aval.shape) for one in jaxpr.eqns for value in one.outvars]
    for one in jaxpr.eqns:
        for inner in jaxprs_in_params(one.params):
            sizes.append(largest_array(inner))
    return max(sizes, default=0)


def test_nothing_of_all_pairs_is_ever_made():
    """At 720p: nothing beyond rows x tokens but the inputs themselves."""
    frames, positions, size = 21, 3600, 128
    found = tables(frames, positions, 0.35, tile_sizes(frames, positions), "exact")
    tokens = frames * positions
    shape = jax.ShapeDtypeStruct((2, 1, tokens, size), jnp.bfloat16)
    rows = jax.ShapeDtypeStruct((64,), jnp.int32)
    program = jax.make_jaxpr(lambda q, k, v, rows: route(q, k, v, rows, found))
    largest = largest_array(program(shape, shape, shape, rows).jaxpr)
    assert largest <= 2 * tokens * size  # q, k and v; rows x tokens is a quarter of that
