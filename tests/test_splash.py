"""The TPU kernel, interpreted on the CPU: small tiles, ragged ends, every split of heads.

What a tile does not hold is NaN there, so that a padding row that is read spoils the result.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from svgen.attention import masks
from svgen.kernels import gauge, reference, splash, tuning
from svgen.kernels.tables import TileSizes

INTERPRET = pltpu.InterpretParams(out_of_bounds_reads="uninitialized")
# q, k, v are exact; weights and the output are rounded to bfloat16, once each.
TOLERANCE = 2 * 2**-8
LSE_TOLERANCE = 2e-5


def sizes_of(frames: int) -> TileSizes:
    return TileSizes(
        queries=64, keys=48, strided_queries=16, strided_keys=16, sink=16 * (frames - 1)
    )


def narrow_tables(frames: int, positions: int, width: int, mode: str = "rounded") -> masks.Tables:
    """Tables with a band so narrow that tiles are left out of these small videos."""
    sizes = sizes_of(frames)
    return masks.Tables(
        masks.dense_table(frames, positions, sizes),
        masks.spatial_table(frames, positions, width, sizes, mode),
        masks.temporal_table(frames, positions, width, sizes, mode),
    )


def mask_of(table, positions: int) -> np.ndarray:
    """Draw what a table says, [N, N]."""
    route = masks.TEMPORAL if table.sink else masks.SPATIAL
    exact = masks.as_array(table.tokens // positions, positions, table.width, route)
    drawn = np.zeros((table.tokens, table.tokens), bool)
    for visit in range(table.visits):
        tiling = table.sink if table.from_sink[visit] else table.keys
        pairs = np.ix_(
            table.queries.tokens(table.query_tile[visit]), tiling.tokens(table.key_tile[visit])
        )
        drawn[pairs] = exact[pairs] if table.masked[visit] else True
    return drawn


def draw(heads: int, tokens: int, size: int, seed: int = 0):
    """Draw q (scaled), k and v: independent, bfloat16, of unit variance."""
    keys = jax.random.split(jax.random.key(seed), 3)
    q, k, v = (jax.random.normal(key, (heads, tokens, size), jnp.bfloat16) for key in keys)
    return splash.fold_scale(q), k, v


def expected(q, k, v, mask: np.ndarray):
    """Attend in float64: the output, and the log-sum-exp."""
    scores = np.asarray(q, np.float64) @ np.asarray(k, np.float64).swapaxes(1, 2) * math.log(2)
    scores = np.where(mask, scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    return weights / total @ np.asarray(v, np.float64), (top + np.log(total))[..., 0]


def assert_close(found, wanted, v) -> None:
    out, lse = found
    bound = TOLERANCE * float(np.abs(np.asarray(v, np.float64)).max())
    assert np.abs(np.asarray(out, np.float64) - wanted[0]).max() < bound
    relative = np.abs(np.asarray(lse) - wanted[1]) / np.maximum(1, np.abs(wanted[1]))
    assert relative.max() < LSE_TOLERANCE


@functools.partial(jax.jit, static_argnames=("tables", "blocks"))
def attend(q, k, v, routes, tables, blocks=splash.DEFAULT):
    return splash.attention(
        q, k, v, routes, tables, blocks=blocks, with_lse=True, interpret=INTERPRET
    )


@functools.partial(jax.jit, static_argnames=("table", "online", "blocks"))
def attend_one_way(q, k, v, table, online, blocks=splash.DEFAULT):
    """Every head along one table and with one softmax."""
    heads = jnp.arange(len(q), dtype=jnp.int32)
    chosen = heads, jnp.zeros(1, jnp.int32), jnp.int32(len(q))
    measured = gauge.measure(q, k, INTERPRET)
    out, lse = splash.run_heads(
        (measured.gauge, q, k, v),
        chosen,
        table,
        online=online,
        blocks=blocks,
        with_lse=True,
        interpret=INTERPRET,
    )
    return out, splash.unfold(table.queries, lse, q.shape[1])


@pytest.mark.parametrize(
    ("frames", "positions", "size"), [(5, 40, 64), (9, 24, 128), (13, 20, 64), (21, 32, 64)]
)
def test_output_is_that_of_the_drawn_mask_for_every_split_of_heads(frames, positions, size):
    tables = narrow_tables(frames, positions, frames * positions // 5)
    drawn = [mask_of(table, positions) for table in tables]
    assert drawn[0].all() and not drawn[1].all() and not drawn[2].all()
    q, k, v = draw(3, frames * positions, size)
    k = k.at[1].multiply(20)  # beyond the bounded softmax
    everything = expected(q, k, v, drawn[0])[0]
    for sparse in drawn[1:]:
        assert np.abs(expected(q, k, v, sparse)[0] - everything).max() > 10 * TOLERANCE
    splits = [[0, 0, 0], [0, 1, 2], [2, 2, 1], [2, 2, 2], [1, 1, 1]]
    for routes in splits:
        wanted = expected(q, k, v, np.stack([drawn[route] for route in routes]))
        found = attend(q, k, v, jnp.asarray(routes, jnp.int32), tables)
        assert_close(found, wanted, v)


@pytest.mark.parametrize("online", [False, True])
@pytest.mark.parametrize("mode", ["exact", "naive"])
@pytest.mark.parametrize("route", [masks.SPATIAL, masks.TEMPORAL])
def test_output_is_that_of_the_exact_mask_when_tiles_are_masked(route, mode, online):
    frames, positions = 5, 40
    table = narrow_tables(frames, positions, 50, mode)[route]
    mask = masks.as_array(frames, positions, 50, route)
    assert 0.2 < mask.mean() < 0.8
    q, k, v = draw(1, frames * positions, 64)
    assert_close(attend_one_way(q, k, v, table, online), expected(q, k, v, mask), v)


@pytest.mark.parametrize("online", [False, True])
def test_blocks_change_speed_only(online):
    table = narrow_tables(5, 40, 50)[masks.TEMPORAL]
    q, k, v = draw(1, 200, 64)
    found = [
        np.asarray(attend_one_way(q, k, v, table, online, splash.Blocks(strip=strip))[0], float)
        for strip in (16, 32, 1024)
    ]
    assert max(np.abs(one - found[0]).max() for one in found) < TOLERANCE


def adversaries(tokens: int, size: int) -> dict[str, tuple]:
    """q, k, v that break a careless bound."""
    q, k, v = draw(1, tokens, size)
    far = k.at[:, 0].set(40 * jnp.sign(q[:, 70]))  # one key far from all others, kept by few
    apart = jnp.where(jnp.arange(tokens)[None, :, None] % 2 == 0, k + 30, k - 30)
    return {
        "large norms": (q * 30, k * 30, v),
        "kept keys far below the bound": (-jnp.abs(q) * 8, jnp.abs(k) * 8, v),
        "one long key": (q * 4, far, v),
        "two clusters": (q, apart, v),
        "constant rows": (jnp.ones_like(q), jnp.ones_like(k) * 3, v),
        "large mean": (q, k + 100, v),
        "zero": (q * 0, k * 0, v),
    }


@pytest.mark.parametrize("name", list(adversaries(200, 64)))
def test_output_is_right_for_adversarial_rows(name):
    frames, positions = 5, 40
    tables = narrow_tables(frames, positions, 50)
    drawn = [mask_of(table, positions) for table in tables]
    q, k, v = (jnp.tile(x, (3, 1, 1)) for x in adversaries(200, 64)[name])
    found = attend(q, k, v, jnp.arange(3, dtype=jnp.int32), tables)
    assert_close(found, expected(q, k, v, np.stack(drawn)), v)


def test_heads_take_the_bounded_softmax_only_where_it_is_safe():
    q, k, _ = draw(4, 200, 64)
    scale = jnp.asarray([1, 30, 1, 1], jnp.bfloat16)[:, None, None]
    measured = gauge.measure(q * scale, k.at[2].add(100).at[3, 5].set(jnp.inf), INTERPRET)
    assert measured.online.tolist() == [False, True, False, True]


@pytest.mark.parametrize("tokens", [1, 40, 200, 520, 5000])
def test_gauge_bounds_every_score(tokens):
    q, k, _ = draw(2, tokens, 64)
    k = k * 3 + 7
    measured = gauge.measure(q, k, INTERPRET)
    centre, radius = (np.asarray(measured.gauge[:, line], np.float64) for line in (0, 1))
    q64, k64 = np.asarray(q, np.float64), np.asarray(k, np.float64)
    scores = q64 @ k64.swapaxes(1, 2)
    along = np.einsum("and,ad->an", q64, centre)
    bound = along + np.linalg.norm(q64, axis=-1) * radius[:, :1]
    assert (scores.max(axis=-1) <= bound).all()
    below = (bound - np.einsum("and,and->an", q64, k64)).max(axis=-1)
    assert (below <= np.asarray(measured.spread)).all()
    assert (np.asarray(measured.spread) < 3 * below + 3).all()


def test_twin_agrees_when_rows_of_a_batch_take_different_routes():
    frames, positions = 5, 32
    tables = narrow_tables(frames, positions, 40)
    q, k, v = (
        x.reshape(2, 2, -1, 64)
        for x in jax.random.normal(jax.random.key(1), (3, 4, frames * positions, 64), jnp.bfloat16)
    )
    routes = jnp.asarray([[0, 2], [1, 2]], jnp.int32)
    run = functools.partial(splash.sparse_attention, with_lse=True, interpret=INTERPRET)
    out, lse = jax.jit(run, static_argnums=4)(q, k, v, routes, tables)
    twin_out, twin_lse = reference.sparse_attention(q, k, v, routes, tables)
    # The scale is rounded into q: 2^-9 of scores of up to about 4.
    assert np.abs(np.asarray(out, float) - np.asarray(twin_out, float)).max() < 2 * TOLERANCE * 4
    assert np.abs(np.asarray(lse) - np.asarray(twin_lse)).max() < 2**-9 * 4


@pytest.mark.parametrize("frames", [1, 5, 21, 41])
@pytest.mark.parametrize("positions", [15, 1560, 14400])
@pytest.mark.parametrize("chip", list(tuning.CHIPS))
def test_chosen_tiles_suit_the_kernel(chip, frames, positions):
    sizes, _ = tuning.choose(chip, frames, positions)
    assert all(side % 16 == 0 for side in dataclasses.astuple(sizes))
    assert sizes.sink == max(frames - 1, 1) * sizes.strided_keys
    assert max(frames * sizes.strided_queries, sizes.queries) <= 4096
    table = masks.tables(frames, positions, 0.35, sizes).temporal
    assert table.sink.rows == table.keys.rows or frames == 1


def test_unknown_chip_is_named():
    with pytest.raises(ValueError, match=r"'v9'.*v6e"):
        tuning.choose("v9", 21, 3600)


@pytest.mark.parametrize(("size", "sink"), [(64, 48), (48, 64)])
def test_call_is_refused_when_the_kernel_cannot_do_it(size, sink):
    sizes = dataclasses.replace(sizes_of(5), sink=sink)
    q, k, v = draw(1, 200, size)
    with pytest.raises(ValueError, match=r"sink tiles|head size"):
        attend(q, k, v, jnp.zeros(1, jnp.int32), masks.tables(5, 40, 0.3, sizes))
