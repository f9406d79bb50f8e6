"""Attention in plain jax.numpy, float32 softmax: for CPU and GPU, and the twin that TPU kernels are
tested against.

One head and one block of queries at a time, so that the scores of a block stay in the cache of a
CPU core and memory does not grow with the square of the sequence. On two x86 cores this runs 2.6
times as fast as one batched product.

`attention` looks at every key; `sparse_attention` reads the tiles of a visit table, each head those
of its own route, and none that the table leaves out.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp

from svgen.kernels.tables import MASKED, RAGGED, TileSizes, Tiling, VisitTable

MAX_BLOCK = 1024  # queries
MAX_SCORES = 1 << 22  # elements of one block of scores
TILE_QUERIES, TILE_KEYS = 1024, 512  # tokens of a tile: its scores are 2 MiB
TILES = 8  # of queries at least, and twice as many of keys: so budgets are met in whole tiles
LOWEST = -1e30  # below every score, yet finite: rows of a tile may keep nothing


def query_block(queries: int, keys: int) -> tuple[int, int]:
    """Split `queries` rows into (blocks, rows per block): evenly, with no row of padding, where up
    to twice the blocks that the bounds above ask for allow it.
    """
    rows = max(128, min(MAX_BLOCK, MAX_SCORES // keys))
    least = -(-queries // rows)
    blocks = next((count for count in range(least, 2 * least) if queries % count == 0), least)
    return blocks, -(-queries // blocks)


def attention(
    q: jax.Array,  # [B, A, N, D]
    k: jax.Array,  # [B, A, K, D]
    v: jax.Array,  # [B, A, K, D]
    bias: jax.Array | None = None,  # [K], added to every row of scores
) -> jax.Array:  # [B, A, N, D]
    """Compute softmax(q k^T / sqrt(D) + bias) v, with scores and sums in float32."""
    batch, heads, queries, size = q.shape
    keys = k.shape[2]
    blocks, rows = query_block(queries, keys)
    padding = ((0, 0), (0, blocks * rows - queries), (0, 0))

    def one_head(head: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        q_head, k_head, v_head = head

        def one_block(q_rows: jax.Array) -> jax.Array:
            scores = jax.lax.dot_general(
                q_rows, k_head, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
            )
            if bias is not None:
                scores = scores + bias[None]
            weights = jnp.exp(scores - scores.max(axis=1, keepdims=True))
            total = weights.sum(axis=1, keepdims=True)
            out = jnp.dot(weights.astype(v.dtype), v_head, preferred_element_type=jnp.float32)
            return (out / total).astype(q.dtype)

        return jax.lax.map(one_block, q_head.reshape(blocks, rows, size)).reshape(-1, v.shape[-1])

    scale = jnp.asarray(size**-0.5, jnp.float32)
    scaled = (q.astype(jnp.float32) * scale).astype(q.dtype).reshape(batch * heads, queries, size)
    flat = (
        jnp.pad(scaled, padding),
        k.reshape(batch * heads, keys, size),
        v.reshape(batch * heads, keys, v.shape[-1]),
    )
    out = jax.lax.map(one_head, flat)[:, :queries]
    return out.reshape(batch, heads, queries, v.shape[-1])


def _even(length: int, most: int) -> int:
    """The side of tiles that cut `length` evenly into as few as sides up to `most` allow."""
    return -(-length // -(-length // max(1, min(most, length))))


def tile_sizes(outer: int, inner: int) -> TileSizes:
    """Choose tiles for tokens [outer, inner] that suit a CPU's cache and let budgets be met.

    Contiguous key tiles divide `inner` where they can, so that the sink is whole tiles.
    """
    tokens = outer * inner
    most = max(1, min(TILE_KEYS, tokens // (2 * TILES)))
    whole = max(size for size in range(1, most + 1) if inner % size == 0)
    return TileSizes(
        queries=_even(tokens, min(TILE_QUERIES, tokens // TILES)),
        keys=whole if 2 * whole > most else _even(tokens, most),
        strided_queries=_even(inner, min(TILE_QUERIES // outer, inner // TILES)),
        strided_keys=_even(inner, min(TILE_KEYS // outer, inner // (2 * TILES))),
        sink=_even(inner, TILE_KEYS),
    )


def sparse_attention(
    q: jax.Array,  # [B, A, N, D]
    k: jax.Array,  # [B, A, N, D]
    v: jax.Array,  # [B, A, N, D]
    routes: jax.Array,  # int32 [B, A], which of `tables` each head reads
    tables: Sequence[VisitTable],
) -> tuple[jax.Array, jax.Array]:  # [B, A, N, D], float32 [B, A, N]
    """Compute softmax(q k^T / sqrt(D)) v over the kept pairs; also the logarithm of each row's sum
    of exponentials.

    Only the tiles that a head's table lists are computed, one after the other, with a running
    maximum; scores and sums in float32.
    """
    batch, heads, tokens, size = q.shape
    assert all(table.tokens == tokens for table in tables)
    branches = [partial(_table_attention, table=table) for table in tables]

    def one_head(head: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        route, *parts = head
        return jax.lax.switch(route, branches, *parts)

    scaled = (q.astype(jnp.float32) * jnp.float32(size**-0.5)).astype(q.dtype)
    flat = [x.reshape(batch * heads, tokens, x.shape[-1]) for x in (scaled, k, v)]
    out, sums = jax.lax.map(one_head, (routes.reshape(-1), *flat))
    return out.reshape(*q.shape[:3], v.shape[-1]), sums.reshape(q.shape[:3])


def _table_attention(
    q: jax.Array,  # [N, D], scaled
    k: jax.Array,
    v: jax.Array,
    *,
    table: VisitTable,
) -> tuple[jax.Array, jax.Array]:
    """Attend as one table says: output [N, D], and float32 log-sum-exp [N]."""
    tiling = table.queries
    q_view = _view(q, tiling)
    starts, key_tile = jnp.asarray(table.starts), jnp.asarray(table.key_tile)
    flags, from_sink = jnp.asarray(table.flags), jnp.asarray(table.from_sink)
    views = [view for view in (table.keys, table.sink) if view is not None and view.rows > 0]
    sources = [(view, _view(k, view), _view(v, view)) for view in views]

    def one_tile(tile: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows = _tile(q_view, tiling, tile)

        def visit(index: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            key, flag = key_tile[index], flags[index]
            reads = [
                partial(_add_tile, rows, tile, key, flag, source=source, table=table)
                for source in sources
            ]
            if len(reads) == 1:
                return reads[0](carry)
            return jax.lax.cond(from_sink[index], reads[1], reads[0], carry)

        carry = (
            jnp.full((tiling.rows, 1), LOWEST, jnp.float32),
            jnp.zeros((tiling.rows, 1), jnp.float32),
            jnp.zeros((tiling.rows, v.shape[-1]), jnp.float32),
        )
        high, total, out = jax.lax.fori_loop(starts[tile], starts[tile + 1], visit, carry)
        return (out / total).astype(q.dtype), high + jnp.log(total)

    out, sums = jax.lax.map(one_tile, jnp.arange(tiling.count, dtype=jnp.int32))
    return _flat(out, tiling), _flat(sums, tiling)[:, 0]


def _add_tile(
    q: jax.Array,  # [rows, D]
    query_tile: jax.Array,
    key_tile: jax.Array,
    flag: jax.Array,
    carry: tuple[jax.Array, ...],
    *,
    source: tuple[Tiling, jax.Array, jax.Array],
    table: VisitTable,
) -> tuple[jax.Array, ...]:
    """Take one key tile into the running maximum, sum and output of the queries of a tile."""
    tiling, k_view, v_view = source
    k, v = _tile(k_view, tiling, key_tile), _tile(v_view, tiling, key_tile)

    def all_scores() -> jax.Array:
        return jax.lax.dot_general(
            q, k, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )

    def kept_scores() -> jax.Array:
        kept = _kept(table, tiling, query_tile, key_tile, flag)
        return jnp.where(kept, all_scores(), -jnp.inf)

    if tiling.ragged or table.masked.any():
        scores = jax.lax.cond((flag & (MASKED | RAGGED)) > 0, kept_scores, all_scores)
    else:
        scores = all_scores()
    high, total, out = carry
    higher = jnp.maximum(high, scores.max(axis=1, keepdims=True))
    weights = jnp.exp(scores - higher)
    fade = jnp.exp(high - higher)
    added = jnp.dot(weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return higher, total * fade + weights.sum(axis=1, keepdims=True), out * fade + added


def _kept(
    table: VisitTable, tiling: Tiling, query_tile: jax.Array, key_tile: jax.Array, flag: jax.Array
) -> jax.Array:
    """Which pairs of a visit count, bool [rows, columns]: `VisitTable`'s predicate, and no key past
    the ragged end.
    """
    outer = table.queries.outer
    b = (query_tile * table.queries.size + jnp.arange(table.queries.size, dtype=jnp.int32))[None]
    d = (key_tile * tiling.size + jnp.arange(tiling.size, dtype=jnp.int32))[None]
    a = jnp.arange(outer, dtype=jnp.int32)[:, None]
    c = jnp.arange(tiling.skip, tiling.outer, dtype=jnp.int32)[:, None]
    exists = jnp.broadcast_to(d < tiling.inner, (c.size, d.size)).reshape(1, -1)
    apart = (b * outer + a).reshape(-1, 1) - (d * outer + c).reshape(1, -1)
    sunk = (c * table.queries.inner + d).reshape(1, -1) < table.sink_tokens
    keep = (jnp.abs(apart) <= table.width) | sunk | ((flag & MASKED) == 0)
    return keep & exists


def _view(x: jax.Array, tiling: Tiling) -> jax.Array:
    """See the tokens of x [N, D] as whole tiles: [outer, count * size, D], zeros past the end."""
    x = x[: tiling.outer * tiling.inner].reshape(tiling.outer, tiling.inner, x.shape[-1])
    return jnp.pad(x, ((0, 0), (0, tiling.count * tiling.size - tiling.inner), (0, 0)))


def _tile(view: jax.Array, tiling: Tiling, tile: jax.Array) -> jax.Array:
    """Read one tile of a view, [rows, D]."""
    size = (tiling.outer - tiling.skip, tiling.size, view.shape[-1])
    zero = jnp.int32(0)
    start = (jnp.int32(tiling.skip), tile * tiling.size, zero)
    return jax.lax.dynamic_slice(view, start, size).reshape(tiling.rows, view.shape[-1])


def _flat(tiles: jax.Array, tiling: Tiling) -> jax.Array:
    """Lay tiles [count, rows, D] out as tokens [N, D], without what lies past the end."""
    size = tiles.shape[-1]
    x = tiles.reshape(tiling.count, tiling.outer, tiling.size, size).transpose(1, 0, 2, 3)
    x = x.reshape(tiling.outer, tiling.count * tiling.size, size)[:, : tiling.inner]
    return x.reshape(tiling.outer * tiling.inner, size)
