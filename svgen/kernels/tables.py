"""Visit tables: which key tiles each query tile reads, as static numbers that kernels take.

Tokens are an array [outer, inner] in memory order: token = a * inner + b. A tile takes a run of the
inner axis and all of the outer one, but for its first `skip`:

    Tiling(outer=1, inner=10, size=4)         0 1 2 3 | 4 5 6 7 | 8 9

    Tiling(outer=3, inner=5, size=2)          0  1  |  2  3  |  4
                                              5  6  |  7  8  |  9
                                             10 11  | 12 13  | 14

    Tiling(outer=3, inner=5, size=2, skip=1)  the same without its first line

The first is a contiguous tile; the others are strided ones. The last tile may be ragged: only
`valid(tile)` of its `size` are there, and what lies past them is anything, not zeros.
"""

import hashlib
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

FIRST, LAST, MASKED, SINK, RAGGED = 1, 2, 4, 8, 16  # bits of `VisitTable.flags`


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiling:
    """How a token array [outer, inner] is cut into tiles [outer - skip, size]."""

    outer: int = 1
    inner: int
    size: int
    skip: int = 0

    def __post_init__(self) -> None:
        if self.outer < 1 or self.inner < 1 or self.size < 1 or not 0 <= self.skip <= self.outer:
            raise ValueError(f"{self} has no tiles: sizes must be positive, skip within outer")

    @property
    def count(self) -> int:
        """How many tiles there are."""
        return -(-self.inner // self.size)

    @property
    def rows(self) -> int:
        """Tokens of a whole tile."""
        return (self.outer - self.skip) * self.size

    @property
    def ragged(self) -> bool:
        """Whether the last tile is shorter than the others."""
        return self.inner % self.size != 0

    @property
    def bounds(self) -> np.ndarray:
        """Where along the inner axis tiles begin, and where the last one ends: int64 [count + 1]"""
        return np.minimum(np.arange(self.count + 1, dtype=np.int64) * self.size, self.inner)

    def valid(self, tile: int) -> int:
        """How many of the tile's `size` there are along the inner axis."""
        return min(self.size, self.inner - tile * self.size)

    def tokens(self, tile: int) -> np.ndarray:
        """The tile's tokens, in the order of its rows."""
        inner = tile * self.size + np.arange(self.valid(tile))
        return (np.arange(self.skip, self.outer)[:, None] * self.inner + inner).reshape(-1)


@dataclass(frozen=True, kw_only=True, eq=False)
class VisitTable:
    """Which key tiles each query tile reads. Static: equal and hashed by content.

    Visits of query tile q are `starts[q] : starts[q + 1]`: those of the sink first, both kinds in
    ascending order; no query tile is without one. A visit reads tile `key_tile` of `keys`, or of
    `sink` where `from_sink`. A visit that is not `masked` keeps all its pairs. A masked one keeps
    query (a, b) and key (c, d) of arrays [outer, inner] if

        |(b * outer + a) - (d * outer + c)| <= width   or   c * inner + d < sink_tokens

    where outer and inner are those of `queries`, and a pair from the sink is always kept.
    """

    queries: Tiling
    keys: Tiling
    sink: Tiling | None = None  # a second view of the keys: the first `sink.inner` tokens
    starts: np.ndarray  # int32 [Q + 1]
    key_tile: np.ndarray  # int32 [V]
    from_sink: np.ndarray  # bool [V]
    masked: np.ndarray  # bool [V]
    kept: np.ndarray  # int64 [V], pairs that each visit keeps
    width: int
    sink_tokens: int
    digest: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        shapes = {one.shape for one in (self.key_tile, self.from_sink, self.masked, self.kept)}
        assert shapes == {(int(self.starts[-1]),)} and len(self.starts) == self.queries.count + 1
        assert (np.diff(self.starts) > 0).all()
        content = hashlib.sha256(
            repr((self.queries, self.keys, self.sink, self.width, self.sink_tokens)).encode()
        )
        for array in (self.starts, self.key_tile, self.from_sink, self.masked, self.kept):
            array.setflags(write=False)
            content.update(str(array.dtype).encode() + array.tobytes())
        object.__setattr__(self, "digest", content.digest())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VisitTable) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def tokens(self) -> int:
        """N: rows of q, k and v."""
        return self.queries.outer * self.queries.inner

    @property
    def visits(self) -> int:
        """V: how many tiles are read, by all query tiles together."""
        return len(self.key_tile)

    @cached_property
    def query_tile(self) -> np.ndarray:
        """The query tile of each visit, int32 [V]."""
        return np.repeat(np.arange(self.queries.count, dtype=np.int32), np.diff(self.starts))

    @cached_property
    def flags(self) -> np.ndarray:
        """FIRST and LAST visit of a query tile, MASKED, SINK, RAGGED key tile: int32 [V]."""
        flags = MASKED * self.masked + SINK * self.from_sink
        flags[self.starts[:-1]] |= FIRST
        flags[self.starts[1:] - 1] |= LAST
        for tiling, chosen in ((self.keys, ~self.from_sink), (self.sink, self.from_sink)):
            if tiling is not None and tiling.ragged:
                flags[chosen & (self.key_tile == tiling.count - 1)] |= RAGGED
        return flags.astype(np.int32)

    @cached_property
    def fetches(self) -> tuple[np.ndarray, np.ndarray]:
        """What to hold of `keys` and of `sink` during each visit, int32 [V] each.

        The view that a visit does not read stays where nothing is fetched for nothing: keys at the
        next tile that will be read, the sink at the last one that was.
        """
        steps = np.arange(self.visits)
        ahead = np.where(self.from_sink, self.visits, steps)
        ahead = np.minimum.accumulate(ahead[::-1])[::-1]
        behind = np.maximum.accumulate(np.where(self.from_sink, steps, -1))
        last = self.visits - 1
        keys = np.where(ahead <= last, self.key_tile[np.minimum(ahead, last)], 0)
        sink = np.where(behind >= 0, self.key_tile[np.maximum(behind, 0)], 0)
        return keys.astype(np.int32), sink.astype(np.int32)

    @cached_property
    def areas(self) -> np.ndarray:
        """Pairs of tokens that each visit computes, ragged ends left out: int64 [V]."""
        rows = np.diff(self.queries.bounds) * self.queries.outer
        columns = np.diff(self.keys.bounds)[np.where(self.from_sink, 0, self.key_tile)]
        columns = columns * (self.keys.outer - self.keys.skip)
        if self.sink is not None:
            sizes = np.diff(self.sink.bounds)
            columns = np.where(
                self.from_sink, sizes[np.where(self.from_sink, self.key_tile, 0)], columns
            )
        return rows[self.query_tile] * columns

    @property
    def visited_pairs(self) -> int:
        """Pairs of tokens that are computed."""
        return int(self.areas.sum())

    @property
    def kept_pairs(self) -> int:
        """Pairs of tokens that count."""
        return int(self.kept.sum())

    @property
    def density(self) -> float:
        """Kept pairs as a share of all pairs."""
        return self.kept_pairs / self.tokens**2

    @cached_property
    def kinds(self) -> tuple[np.ndarray, np.ndarray]:
        """The table as matrices, int8 [Q, tiles] of `keys` and of `sink`: 0 where a tile is not
        read, 1 where it is, 2 where it is masked.
        """
        found = []
        for tiling, chosen in ((self.keys, ~self.from_sink), (self.sink, self.from_sink)):
            matrix = np.zeros((self.queries.count, tiling.count if tiling else 0), np.int8)
            matrix[self.query_tile[chosen], self.key_tile[chosen]] = 1 + self.masked[chosen]
            matrix.setflags(write=False)
            found.append(matrix)
        return found[0], found[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class TileSizes:
    """Sides of tiles, in tokens (contiguous tiles) or positions (strided ones)."""

    queries: int  # contiguous: dense and spatial routes
    keys: int
    strided_queries: int
    strided_keys: int
    sink: int  # contiguous tiles of the sink that strided queries read


def visit_table(
    queries: Tiling,
    keys: Tiling,
    kinds: np.ndarray,  # [Q, tiles of keys]: 0 not read, 1 read, 2 masked
    kept: np.ndarray,  # [Q, tiles of keys], pairs kept where read
    *,
    sink: Tiling | None = None,
    sink_masked: bool = False,
    width: int,
    sink_tokens: int,
) -> VisitTable:
    """Lay matrices out as a visit list; every query tile reads all of `sink` before its keys."""
    count = sink.count if sink else 0
    rows = np.diff(queries.bounds) * queries.outer
    sink_kept = rows[:, None] * np.diff(sink.bounds) if sink else np.zeros((len(rows), 0), np.int64)
    sink_kinds = np.full((len(rows), count), 1 + sink_masked)
    all_kinds = np.concatenate([sink_kinds, kinds], axis=1)
    all_kept = np.concatenate([sink_kept, kept], axis=1)
    query_tile, column = np.nonzero(all_kinds)
    from_sink = column < count
    visits = np.bincount(query_tile, minlength=len(rows))
    return VisitTable(
        queries=queries,
        keys=keys,
        sink=sink,
        starts=np.concatenate([[0], np.cumsum(visits)]).astype(np.int32),
        key_tile=np.where(from_sink, column, column - count).astype(np.int32),
        from_sink=from_sink,
        masked=all_kinds[query_tile, column] == 2,
        kept=all_kept[query_tile, column].astype(np.int64),
        width=width,
        sink_tokens=sink_tokens,
    )
