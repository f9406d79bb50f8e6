"""Visit tables: tiles, lists and flags, by hand and against the matrices they were made of."""

import numpy as np
import pytest

from svgen.kernels.tables import FIRST, LAST, MASKED, RAGGED, SINK, Tiling, visit_table


def table_of(kinds: list[list[int]], *, sink: Tiling | None = None, width: int = 3, **other):
    queries, keys = Tiling(inner=10, size=4), Tiling(inner=10, size=3)
    matrix = np.array(kinds)
    areas = np.outer(np.diff(queries.bounds), np.diff(keys.bounds))
    return visit_table(
        queries, keys, matrix, areas * (matrix > 0), sink=sink, width=width, sink_tokens=0, **other
    )


def test_contiguous_tiles_are_runs_of_tokens():
    tiling = Tiling(inner=10, size=4)
    assert (tiling.count, tiling.rows, tiling.ragged) == (3, 4, True)
    assert [tiling.tokens(tile).tolist() for tile in range(3)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
    ]
    assert [tiling.valid(tile) for tile in range(3)] == [4, 4, 2]
    assert tiling.bounds.tolist() == [0, 4, 8, 10]


def test_strided_tiles_hold_all_of_the_outer_axis():
    tiling = Tiling(outer=3, inner=5, size=2)
    assert (tiling.count, tiling.rows) == (3, 6)
    assert tiling.tokens(0).tolist() == [0, 1, 5, 6, 10, 11]
    assert tiling.tokens(2).tolist() == [4, 9, 14]
    rest = Tiling(outer=3, inner=5, size=2, skip=1)
    assert rest.rows == 4
    assert rest.tokens(1).tolist() == [7, 8, 12, 13]
    assert Tiling(outer=1, inner=5, size=2, skip=1).tokens(0).tolist() == []


@pytest.mark.parametrize(
    "wrong", [{"size": 0}, {"inner": 0}, {"outer": 0}, {"skip": 3}, {"skip": -1}]
)
def test_tiling_refuses_what_has_no_tiles(wrong):
    with pytest.raises(ValueError, match="no tiles"):
        Tiling(**{"outer": 2, "inner": 5, "size": 2, "skip": 0, **wrong})


def test_visits_are_listed_by_query_tile_in_ascending_order():
    table = table_of([[1, 2, 0, 0], [0, 1, 0, 1], [1, 1, 1, 2]])
    assert table.starts.tolist() == [0, 2, 4, 8]
    assert table.key_tile.tolist() == [0, 1, 1, 3, 0, 1, 2, 3]
    assert table.query_tile.tolist() == [0, 0, 1, 1, 2, 2, 2, 2]
    assert table.flags.tolist() == [
        FIRST,
        LAST | MASKED,
        FIRST,
        LAST | RAGGED,
        FIRST,
        0,
        0,
        LAST | MASKED | RAGGED,
    ]
    assert table.areas.tolist() == [12, 12, 12, 4, 6, 6, 6, 2]
    assert (table.tokens, table.visits, table.visited_pairs) == (10, 8, 60)
    assert table.kept_pairs == 60 and table.density == 0.6


def test_sink_is_read_first_and_views_wait_where_nothing_is_fetched_in_vain():
    sink = Tiling(inner=5, size=3)
    table = table_of([[0, 1, 0, 0], [0, 0, 1, 1], [0, 0, 0, 2]], sink=sink)
    assert table.key_tile.tolist() == [0, 1, 1, 0, 1, 2, 3, 0, 1, 3]
    assert table.from_sink.tolist() == [True, True, False] + [True, True] + [False] * 2 + [
        True,
        True,
        False,
    ]
    keys, held = table.fetches
    assert keys.tolist() == [1, 1, 1, 2, 2, 2, 3, 3, 3, 3]
    assert held.tolist() == [0, 1, 1, 0, 1, 1, 1, 0, 1, 1]
    assert table.flags[:3].tolist() == [FIRST | SINK, SINK | RAGGED, LAST]
    assert table.flags[9] == LAST | MASKED | RAGGED
    assert table.areas.tolist() == [12, 8, 12, 12, 8, 12, 4, 6, 4, 2]


def test_fetches_without_a_sink_are_the_visits():
    table = table_of([[1, 0, 1, 0], [0, 1, 1, 1], [1, 0, 0, 0]])
    np.testing.assert_array_equal(table.fetches[0], table.key_tile)
    np.testing.assert_array_equal(table.fetches[1], 0)


def test_matrices_come_back():
    kinds = np.random.default_rng(0).integers(0, 3, (3, 4))
    kinds[:, 1] = 2
    table = table_of(kinds.tolist(), sink=Tiling(inner=4, size=2), sink_masked=True)
    np.testing.assert_array_equal(table.kinds[0], kinds)
    np.testing.assert_array_equal(table.kinds[1], np.full((3, 2), 2))
    assert table.masked[table.from_sink].all()


def test_tables_are_equal_and_hash_by_content():
    kinds = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 1]]
    one, same = table_of(kinds), table_of(kinds)
    assert one == same and hash(one) == hash(same) and one is not same
    others = [
        table_of([[2, 0, 0, 0], *kinds[1:]]),
        table_of([[0, 1, 0, 0], *kinds[1:]]),
        table_of(kinds, width=4),
        table_of(kinds, sink=Tiling(inner=3, size=3)),
    ]
    assert len({one, same, *others}) == 5
    assert one != "table"


def test_tables_cannot_be_written():
    table = table_of([[1, 0, 0, 0]] * 3)
    with pytest.raises(ValueError, match="read-only"):
        table.key_tile[0] = 1


def test_query_tile_without_a_visit_is_a_mistake():
    with pytest.raises(AssertionError):
        table_of([[1, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]])
