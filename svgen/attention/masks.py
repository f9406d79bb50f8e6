"""Which pairs of tokens each route keeps, as visit tables. NumPy only, and never an N x N array.

A video of F frames of P positions is N = F * P tokens, frame after frame. A sparse head keeps

    keep(i, j) = |order(i) - order(j)| <= W   or   j in frame 0

with order(i) = i for a spatial head, so that it looks at near frames, and order(i) = p * F + t for
a temporal one (token i is position p of frame t), so that it looks at near positions of every
frame. Frame 0 is the sink of both. F = 3, P = 4, W = 3, x the band and s the sink alone:

    spatial      keys of frame            temporal     keys of frame
    query          0    1    2            query          0    1    2
    t 0  p 0     xxxx .... ....           t 0  p 0     xxss x... x...
    t 1  p 2     sssx xxxx xx..           t 1  p 2     ssxx .xxx .xx.
    t 2  p 3     ssss .... xxxx           t 2  p 3     sssx ...x ..xx

Source: Sparse VideoGen, arXiv 2502.01776; there the temporal sink is the first P keys of `order`.
Frame 0 lies at the edge of the spatial order and all over the temporal one, where the band covers
more of it: the temporal W is widened until both routes keep the same number of pairs.

Temporal tables read tiles of all frames but frame 0 (`Tiling.skip`) and frame 0 as a view of its
own, so that no key is counted twice.
"""

import bisect
import math
from typing import NamedTuple

import numpy as np

from svgen.kernels.tables import TileSizes, Tiling, VisitTable, visit_table

WIDTH_STEP = 128  # the band's half width is a multiple of this
STEPS_A_FRAME = 12  # at least, so that small frames have more than one width
ROUTES = ("dense", "spatial", "temporal")
DENSE, SPATIAL, TEMPORAL = range(3)  # as routes are stored
MODES = ("rounded", "exact", "naive")


class Tables(NamedTuple):
    """One visit table per route, in the order of `ROUTES`."""

    dense: VisitTable
    spatial: VisitTable
    temporal: VisitTable


def band_width(frames: int, positions: int, share: float) -> int:
    """W: the band's half width for a band share s, 128 ceil(m P / 128) with m = F (1 - sqrt(1-s)).

    The band alone then holds about s of all pairs. SVG's papers call s the sparsity. Where a frame
    has fewer than 1,536 tokens, a twelfth of it takes the place of 128.
    """
    if not 0 < share <= 1:
        raise ValueError(f"band share {share} must lie above 0 and be at most 1")
    reach = frames * (1 - math.sqrt(1 - share)) * positions
    step = max(1, min(WIDTH_STEP, positions // STEPS_A_FRAME))
    return step * math.ceil(reach / step)


def spatial_pairs(frames: int, positions: int, width: int) -> int:
    """How many pairs a spatial head keeps: the band, and what of the sink lies outside of it."""
    tokens = frames * positions
    after = max(tokens - 1 - width, 0)  # queries beyond the band of key 0
    before = max(positions - 1 - width, 0)  # queries that come before the band of frame 0's last
    part = min(positions, after)
    band = tokens**2 - after * (after + 1)
    return band + part * after - part * (part - 1) // 2 + before * (before + 1) // 2


def temporal_width(frames: int, positions: int, width: int) -> int:
    """The half width with which a temporal head keeps about as many pairs as a spatial one does.

    At 720p and s = 0.35 that is 38.87 % of all; with the same W for both, temporal heads would keep
    38.24 %, and the two would be compared at unequal budgets.
    """
    tokens = frames * positions
    budget = spatial_pairs(frames, positions, width) - tokens * positions  # without the sink
    distances = positions - np.abs(np.arange(1 - positions, positions))

    def surplus(wider: int) -> int:
        return int(distances @ _pairs_by_offset(frames, 1, positions, wider)) - budget

    enough = bisect.bisect_left(range(tokens), 0, key=surplus)
    return min(max(enough - 1, 0), enough, key=lambda wider: abs(surplus(wider)))


def tables(
    frames: int, positions: int, share: float, sizes: TileSizes, mode: str = "rounded"
) -> Tables:
    """Make the visit tables of all routes for one geometry and band share.

    `rounded` keeps tiles whole or not at all, as many pairs as the band holds; `exact` reads every
    tile that holds a kept pair and masks those that hold others too; `naive` masks all it reads.
    """
    if mode not in MODES:
        raise ValueError(f"mode {mode!r} must be one of {', '.join(MODES)}")
    width = band_width(frames, positions, share)
    return Tables(
        dense_table(frames, positions, sizes),
        spatial_table(frames, positions, width, sizes, mode),
        temporal_table(frames, positions, temporal_width(frames, positions, width), sizes, mode),
    )


def dense_table(frames: int, positions: int, sizes: TileSizes) -> VisitTable:
    """Every query tile reads every key tile."""
    tokens = frames * positions
    queries, keys = Tiling(inner=tokens, size=sizes.queries), Tiling(inner=tokens, size=sizes.keys)
    areas = _areas(queries, keys)
    kinds = np.ones(areas.shape, np.int8)
    return visit_table(queries, keys, kinds, areas, width=tokens, sink_tokens=0)


def spatial_table(
    frames: int, positions: int, width: int, sizes: TileSizes, mode: str = "rounded"
) -> VisitTable:
    """Contiguous tiles near the diagonal, and those of frame 0."""
    tokens = frames * positions
    queries, keys = Tiling(inner=tokens, size=sizes.queries), Tiling(inner=tokens, size=sizes.keys)
    begin, end = keys.bounds[:-1], keys.bounds[1:]
    counts = _band_pairs(queries, np.maximum(begin, positions), np.maximum(end, positions), width)
    sink_keys = np.minimum(end, positions) - np.minimum(begin, positions)
    counts += np.diff(queries.bounds)[:, None] * sink_keys
    always = _meets_diagonal(queries, keys) | (begin < positions)
    kinds, kept = _choose(counts, _areas(queries, keys), always, mode)
    return visit_table(queries, keys, kinds, kept, width=width, sink_tokens=positions)


def temporal_table(
    frames: int, positions: int, width: int, sizes: TileSizes, mode: str = "rounded"
) -> VisitTable:
    """Tiles of near positions in every frame but the first, and all tiles of frame 0."""
    queries = Tiling(outer=frames, inner=positions, size=sizes.strided_queries)
    keys = Tiling(outer=frames, inner=positions, size=sizes.strided_keys, skip=1)
    counts = _band_pairs(queries, keys.bounds[:-1], keys.bounds[1:], width, skip=1)
    always = _meets_diagonal(queries, keys)
    kinds, kept = _choose(counts, _areas(queries, keys), always, mode)
    sink = Tiling(inner=positions, size=sizes.sink)
    return visit_table(
        queries,
        keys,
        kinds,
        kept,
        sink=sink,
        sink_masked=mode == "naive",
        width=width,
        sink_tokens=positions,
    )


def _areas(queries: Tiling, keys: Tiling) -> np.ndarray:
    """Pairs in each pair of tiles, int64 [Q, K]."""
    rows = np.diff(queries.bounds) * queries.outer
    return np.outer(rows, np.diff(keys.bounds) * (keys.outer - keys.skip))


def _meets_diagonal(queries: Tiling, keys: Tiling) -> np.ndarray:
    """Which pairs of tiles hold a token and itself, bool [Q, K]."""
    return (queries.bounds[:-1, None] < keys.bounds[1:]) & (
        keys.bounds[:-1] < queries.bounds[1:, None]
    )


def _pairs_by_offset(outer: int, skip: int, inner: int, width: int) -> np.ndarray:
    """How many pairs (a, b), (c, d) with a < outer, skip <= c < outer lie in the band, by b - d
    from 1 - inner to inner - 1.
    """
    offsets = np.arange(1 - inner, inner)
    across = np.arange(outer)[:, None] - np.arange(skip, outer)
    apart, times = np.unique(across, return_counts=True)
    pairs = np.zeros(len(offsets), np.int64)
    for one, count in zip(apart, times, strict=True):
        pairs += count * (np.abs(offsets * outer + one) <= width)
    return pairs


def _band_pairs(
    queries: Tiling, begin: np.ndarray, end: np.ndarray, width: int, skip: int = 0
) -> np.ndarray:
    """Pairs of the band between each query tile and each run begin:end of keys, int64 [Q, K].

    They depend on the offset b - d alone, so a tile is a second difference of a double running sum:
    exact, whatever N.
    """
    inner = queries.inner
    by_offset = _pairs_by_offset(queries.outer, skip, inner, width)
    once = np.concatenate([[0], np.cumsum(by_offset)])  # offsets below x, x from 1 - inner
    twice = np.concatenate([[0], np.cumsum(once)])

    def below(edges: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Sum over b < edge of the pairs with d >= end."""
        return twice[edges[:, None] - ends + inner]

    low, high = queries.bounds[:-1], queries.bounds[1:]
    return below(high, begin) - below(low, begin) - below(high, end) + below(low, end)


def _choose(
    counts: np.ndarray, areas: np.ndarray, always: np.ndarray, mode: str
) -> tuple[np.ndarray, np.ndarray]:
    """Pick tiles by the pairs they should keep: kinds and kept pairs, [Q, K] each."""
    if mode == "naive":
        return np.where(counts > 0, 2, 0), counts
    if mode == "exact":
        return np.where(counts == areas, 1, 2) * (counts > 0), counts
    kinds = _round(counts, areas, always & (areas > 0))
    return kinds, areas * kinds


def _round(counts: np.ndarray, areas: np.ndarray, always: np.ndarray) -> np.ndarray:
    """Keep the fullest tiles whole, as many as come nearest to the number of pairs to keep.

    Of equally full tiles, of which a band has many, those taken are spread evenly (multiples of the
    golden ratio, modulo 1), not the first ones.
    """
    candidates = np.flatnonzero((counts > 0) & ~always)
    fullness = counts.reshape(-1)[candidates] / areas.reshape(-1)[candidates]
    spread = np.arange(len(candidates)) * ((math.sqrt(5) - 1) / 2) % 1
    order = candidates[np.lexsort((spread, -fullness))]
    totals = areas[always].sum() + np.concatenate([[0], np.cumsum(areas.reshape(-1)[order])])
    taken = np.argmin(np.abs(totals - counts.sum()))
    kinds = always.astype(np.int8)
    kinds.reshape(-1)[order[:taken]] = 1
    return kinds


def as_array(frames: int, positions: int, width: int, route: int) -> np.ndarray:
    """Draw a route's mask, bool [N, N] of queries and keys: for tiny grids, what tables are tested
    against.
    """
    tokens = np.arange(frames * positions)
    if route == DENSE:
        return np.ones((len(tokens), len(tokens)), bool)
    order = tokens if route == SPATIAL else tokens % positions * frames + tokens // positions
    return (np.abs(order[:, None] - order) <= width) | (tokens < positions)
