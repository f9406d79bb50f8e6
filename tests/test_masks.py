"""Masks: visit tables against drawn matrices on tiny grids, and against known densities."""

import numpy as np
import pytest

from svgen.attention import masks
from svgen.attention.masks import (
    DENSE,
    MODES,
    SPATIAL,
    TEMPORAL,
    as_array,
    band_width,
    dense_table,
    spatial_pairs,
    spatial_table,
    tables,
    temporal_table,
    temporal_width,
)
from svgen.kernels.tables import MASKED, TileSizes, Tiling, VisitTable

REALISTIC = [
    TileSizes(queries=3600, keys=1200, strided_queries=144, strided_keys=48, sink=1008),
    TileSizes(queries=2048, keys=1024, strided_queries=96, strided_keys=96, sink=960),
    TileSizes(queries=1024, keys=1024, strided_queries=48, strided_keys=48, sink=512),
    TileSizes(queries=512, keys=512, strided_queries=16, strided_keys=32, sink=512),
]
SPEC = {  # (positions, s) -> (W, density in percent), 21 frames; arXiv 2502.01776's predicate
    (3600, 0.20): (8064, 24.34),
    (3600, 0.25): (10240, 29.26),
    (3600, 0.30): (12416, 34.02),
    (3600, 0.35): (14720, 38.87),
    (3600, 0.50): (22144, 53.26),
    (14400, 0.20): (32000, 24.19),
    (14400, 0.25): (40576, 29.05),
    (14400, 0.30): (49408, 33.88),
    (14400, 0.35): (58624, 38.74),
    (14400, 0.50): (88576, 53.26),
}


def drawn(table: VisitTable) -> tuple[np.ndarray, np.ndarray]:
    """How often a table computes each pair, and whether it keeps it: [N, N], from its words."""
    shape = (table.tokens, table.tokens)
    times, kept = np.zeros(shape, int), np.zeros(shape, bool)
    outer, inner = table.queries.outer, table.queries.inner
    order = np.arange(table.tokens) % inner * outer + np.arange(table.tokens) // inner
    near = np.abs(order[:, None] - order) <= table.width
    allowed = near | (np.arange(table.tokens) < table.sink_tokens)
    for visit in range(table.visits):
        rows = table.queries.tokens(table.query_tile[visit])
        view = table.sink if table.from_sink[visit] else table.keys
        block = np.ix_(rows, view.tokens(table.key_tile[visit]))
        times[block] += 1
        keep = allowed[block] if table.flags[visit] & MASKED else np.ones_like(allowed[block])
        kept[block] |= keep
        assert (table.areas[visit], table.kept[visit]) == (keep.size, keep.sum())
    return times, kept


def random_geometries(seed: int, count: int):
    """Tiny (frames, positions, width, sizes): ragged tiles, tiles larger than all, one frame."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        frames, positions = int(rng.integers(1, 7)), int(rng.integers(1, 17))
        width = int(rng.integers(0, frames * positions + 2))
        sides = [int(side) for side in rng.integers(1, 14, 5)]
        yield (
            frames,
            positions,
            width,
            TileSizes(
                queries=sides[0],
                keys=sides[1],
                strided_queries=sides[2],
                strided_keys=sides[3],
                sink=sides[4],
            ),
        )


def both(frames: int, positions: int, width: int, sizes: TileSizes, mode: str):
    yield SPATIAL, spatial_table(frames, positions, width, sizes, mode)
    yield TEMPORAL, temporal_table(frames, positions, width, sizes, mode)


def test_picture_in_the_docstring_is_what_the_predicate_draws():
    frames, positions, width = 3, 4, 3
    lines = masks.__doc__.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("    t 0  p 0"))
    for line, (frame, position) in zip(lines[start:], [(0, 0), (1, 2), (2, 3)], strict=False):
        query = frame * positions + position
        assert line[4:12] == f"t {frame}  p {position}" and line[42:50] == line[4:12]
        for route, column in ((SPATIAL, 17), (TEMPORAL, 55)):
            kept = as_array(frames, positions, width, route)[query]
            picture = "".join(line[column : column + 14].split())
            assert [letter != "." for letter in picture] == kept.tolist()
            keys = np.arange(12)
            order = keys if route == SPATIAL else keys % positions * frames + keys // positions
            near = np.abs(order - order[query]) <= width
            assert [letter == "x" for letter in picture] == near.tolist()


@pytest.mark.parametrize("mode", ["exact", "naive"])
def test_exact_and_naive_tables_keep_what_the_predicate_keeps(mode):
    """No pair twice, none missing, none too many; the diagonal and frame 0 are among them."""
    sparse = 0
    for frames, positions, width, sizes in random_geometries(1, 120):
        for route, table in both(frames, positions, width, sizes, mode):
            mask = as_array(frames, positions, width, route)
            times, kept = drawn(table)
            assert times.max() == 1
            np.testing.assert_array_equal(kept, mask)
            assert kept.diagonal().all() and kept[:, :positions].all()
            assert table.kept_pairs == mask.sum()
            assert table.visited_pairs == times.sum()
            assert table.density == pytest.approx(mask.mean())
            sparse += not mask.all()
            if mode == "naive":
                assert table.masked.all()
            else:  # masked only where it must be, and nothing is read in vain
                full = table.kept == table.areas
                np.testing.assert_array_equal(table.masked, ~full)
            assert table.kept.min() > 0
    assert sparse > 100


def test_naive_and_exact_tables_read_the_same_tiles():
    for frames, positions, width, sizes in random_geometries(2, 20):
        exact = dict(both(frames, positions, width, sizes, "exact"))
        for route, table in both(frames, positions, width, sizes, "naive"):
            np.testing.assert_array_equal(table.key_tile, exact[route].key_tile)
            np.testing.assert_array_equal(table.starts, exact[route].starts)


def test_rounded_tables_keep_whole_tiles_with_diagonal_and_sink():
    for frames, positions, width, sizes in random_geometries(3, 120):
        for route, table in both(frames, positions, width, sizes, "rounded"):
            times, kept = drawn(table)
            assert times.max() == 1
            np.testing.assert_array_equal(times == 1, kept)
            assert kept.diagonal().all() and kept[:, :positions].all()
            assert not table.masked.any()
            assert table.kept_pairs == table.visited_pairs == kept.sum()
            mask = as_array(frames, positions, width, route)
            if mask.all():
                assert kept.all()


def test_rounding_takes_the_fullest_tiles_nearest_to_the_budget():
    for frames, positions, width, sizes in random_geometries(4, 120):
        for route, table in both(frames, positions, width, sizes, "rounded"):
            mask = as_array(frames, positions, width, route)
            kinds = table.kinds[0]
            fullness, forced = np.zeros(kinds.shape), np.zeros(kinds.shape, bool)
            area = np.zeros(kinds.shape, int)
            for query, key in np.ndindex(kinds.shape):
                rows, columns = table.queries.tokens(query), table.keys.tokens(key)
                block = mask[np.ix_(rows, columns)]
                area[query, key] = block.size
                fullness[query, key] = block.mean() if block.size else 0
                meets = np.intersect1d(rows % table.queries.inner, columns % table.queries.inner)
                forced[query, key] = len(meets) > 0 or (
                    route == SPATIAL and min(columns) < positions
                )
            forced &= area > 0
            assert kinds[forced].all()
            free = ~forced
            taken, left = fullness[free & (kinds > 0)], fullness[free & (kinds == 0)]
            if taken.size and left.size:
                assert taken.min() >= left.max() - 1e-12
            # One tile more or less would be no nearer.
            missing = mask.sum() - table.kept_pairs
            next_area = area[free & (kinds == 0) & (fullness == left.max(initial=0))]
            if missing > 0 and left.max(initial=0) > 0:
                assert 2 * missing <= next_area.max()
            if missing < 0 and taken.size:
                assert 2 * -missing <= area[free & (kinds > 0) & (fullness == taken.min())].max()


def test_equally_full_tiles_are_spread_over_the_video():
    """Of the 40 tiles at the two edges of the band about half are needed: not the first half."""
    sizes = TileSizes(queries=100, keys=100, strided_queries=4, strided_keys=4, sink=100)
    table = spatial_table(21, 100, 350, sizes, "rounded")
    exact = spatial_table(21, 100, 350, sizes, "exact")
    partial = [tuple(pair) for pair in np.argwhere(exact.kinds[0] == 2)]
    rows = [query for query, key in partial if table.kinds[0][query, key]]
    assert 0.3 < len(rows) / len(partial) < 0.7
    assert 8 < np.mean(rows) < 12 and min(rows) <= 3 and max(rows) >= 17
    for third in (range(7), range(7, 14), range(14, 21)):
        assert sum(row in third for row in rows) >= len(rows) / 5


@pytest.mark.parametrize("mode", MODES)
def test_band_share_of_one_keeps_everything(mode):
    sizes = TileSizes(queries=7, keys=5, strided_queries=3, strided_keys=2, sink=4)
    for table in tables(5, 9, 1.0, sizes, mode):
        assert table.kept_pairs == table.visited_pairs == 45**2


@pytest.mark.parametrize("mode", MODES)
def test_single_frame_is_all_sink(mode):
    sizes = TileSizes(queries=200, keys=100, strided_queries=50, strided_keys=50, sink=90)
    for table in tables(1, 1000, 0.25, sizes, mode):
        assert table.kept_pairs == table.visited_pairs == 1000**2
    assert tables(1, 1000, 0.25, sizes).temporal.from_sink.all()


def test_dense_table_reads_each_key_once():
    for frames, positions, _, sizes in random_geometries(5, 20):
        table = dense_table(frames, positions, sizes)
        assert not table.masked.any()
        times, kept = drawn(table)
        np.testing.assert_array_equal(times, 1)
        np.testing.assert_array_equal(kept, as_array(frames, positions, 0, DENSE))


@pytest.mark.parametrize(("positions", "share"), SPEC)
def test_widths_and_densities_are_the_published_ones(positions, share):
    width, density = SPEC[positions, share]
    assert band_width(21, positions, share) == width
    exact = tables(21, positions, share, REALISTIC[0], "exact")
    assert exact.spatial.width == width
    assert 100 * exact.spatial.density == pytest.approx(density, abs=0.005)
    assert exact.spatial.kept_pairs == spatial_pairs(21, positions, width)
    assert 100 * exact.temporal.density == pytest.approx(density, abs=0.01)
    assert width <= exact.temporal.width < 1.1 * width


@pytest.mark.parametrize(
    ("sizes", "visited", "partial"),
    [
        ((1024, 1024), 30.9, 10.9),
        ((2048, 1024), 32.0, 17.7),
        ((3328, 1024), 34.1, 29.7),
        ((3328, 2816), 37.4, 42.2),
    ],
)
def test_720p_shares_of_tiles_visited_and_masked(sizes, visited, partial):
    queries, keys = sizes
    sides = TileSizes(queries=queries, keys=keys, strided_queries=16, strided_keys=16, sink=512)
    table = spatial_table(21, 3600, 10_240, sides, "exact")
    tiles = table.queries.count * table.keys.count
    assert 100 * table.visits / tiles == pytest.approx(visited, abs=0.05)
    assert 100 * table.masked.mean() == pytest.approx(partial, abs=0.05)


def test_same_width_would_leave_temporal_heads_less():
    """Why their width differs: frame 0 overlaps the temporal band more."""
    table = temporal_table(21, 3600, 14_720, REALISTIC[0], "exact")
    assert 100 * table.density == pytest.approx(38.24, abs=0.005)


def test_temporal_width_comes_nearest_to_the_spatial_budget():
    for frames, positions, width, sizes in random_geometries(6, 60):
        budget = spatial_pairs(frames, positions, width)
        assert budget == as_array(frames, positions, width, SPATIAL).sum()
        pairs = [as_array(frames, positions, one, TEMPORAL).sum() for one in range(101)]
        chosen = temporal_width(frames, positions, width)
        assert abs(pairs[chosen] - budget) == min(abs(one - budget) for one in pairs)
        assert temporal_table(frames, positions, chosen, sizes, "exact").kept_pairs == pairs[chosen]


def test_rounded_budgets_are_within_two_percent_at_real_sizes():
    rng = np.random.default_rng(7)
    worst = 0.0
    sizes_of_videos = [(30, 52), (45, 80), (68, 120), (90, 160)]
    for _ in range(60):
        rows, columns = sizes_of_videos[rng.integers(4)]
        frames, share = int(rng.integers(9, 42)), float(rng.uniform(0.2, 0.6))
        sizes = REALISTIC[rng.integers(len(REALISTIC))]
        rounded = tables(frames, rows * columns, share, sizes)
        budget = spatial_pairs(frames, rows * columns, band_width(frames, rows * columns, share))
        for table in rounded[1:]:
            assert not table.masked.any()
            worst = max(worst, abs(table.kept_pairs / budget - 1))
    assert worst <= 0.02


@pytest.mark.parametrize("share", [0.0, -0.1, 1.01])
def test_band_share_must_be_a_share(share):
    with pytest.raises(ValueError, match="band share"):
        band_width(21, 3600, share)


def test_mode_must_be_known():
    with pytest.raises(ValueError, match="'fast' must be one of rounded, exact, naive"):
        tables(2, 3, 0.5, REALISTIC[0], "fast")


def test_tables_are_the_same_each_time():
    assert tables(9, 1560, 0.3, REALISTIC[1]) == tables(9, 1560, 0.3, REALISTIC[1])


def test_temporal_keys_leave_out_frame_0():
    table = tables(5, 300, 0.3, REALISTIC[3]).temporal
    assert table.keys == Tiling(outer=5, inner=300, size=32, skip=1)
    assert table.sink == Tiling(inner=300, size=512)
