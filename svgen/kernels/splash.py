"""Attention over visit tables on a TPU, forward only, in Pallas.

Each grid step is one visit: one query tile against one key tile. Scores are taken transposed,
S^T = K Q^T, a strip of keys at a time; P^T = 2^(S^T - m) goes into O^T += V^T P^T, so that both
products fill the matrix unit and a query's numbers lie along lanes. q comes scaled (`fold_scale`)
so that scores are exponents of 2.

m is not the running maximum but a bound known before the first score is (*bounded* softmax): with
any centre c and R = max_j |k_j - c|,

    q_i k_j <= q_i c + |q_i| R        m_i = q_i c + |q_i| R + 1 - HEADROOM

Nothing overflows, and nothing is rescaled. What could happen instead is that all weights of a row
vanish, if its true maximum lies far below the bound. A query keeps itself as a key in every table,
so that maximum is at least q_i k_i: `gauge.py` finds per head how far below the bound that can be,
and heads beyond a limit take the *online* softmax, slower and always right.

Heads differ at run time, tables do not: there is one call per route and softmax, over a traced
number of heads whose list is prefetched, and each call writes its heads into the output of the one
before. Tokens are never permuted: tiles of temporal heads are strided blocks.

Memory traffic of a head: q and the output once, k and v once per visit, in tiles, while the visit
before computes. Prefetched scalars: the head list, and per visit query tile, key tile, sink tile
and flags. NOTES.md has the counted cycles.
"""

import functools
import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from svgen.kernels.gauge import HEADROOM, SAFETY, measure
from svgen.kernels.tables import FIRST, LAST, MASKED, RAGGED, SINK, Tiling, VisitTable

UNSEEN = -1e30  # a running maximum before the first score
HEAD_DIMS = (64, 128, 192, 256)
SUBLANES = 8
PACKED = 16  # rows of a bfloat16 register tile

_BY_LAST = (((1,), (1,)), ((), ()))  # [M, D] x [N, D] -> [M, N]
_BY_FIRST = (((0,), (0,)), ((), ()))  # [M, D] x [M, N] -> [D, N]
_matmul = functools.partial(jax.lax.dot_general, preferred_element_type=jnp.float32)


def fold_scale(q: jax.Array) -> jax.Array:
    """Scale queries for `attention`: by log2(e) / sqrt(D), rounded once."""
    scale = jnp.float32(math.log2(math.e) / math.sqrt(q.shape[-1]))
    return (q.astype(jnp.float32) * scale).astype(q.dtype)


class Blocks(NamedTuple):
    """What changes speed only."""

    strip: int = 1024  # keys per matrix product, about
    online_strip: int = 256  # the same with the online softmax
    vmem_mib: int = 60


DEFAULT = Blocks()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Call:
    """The static half of one kernel call."""

    table: VisitTable
    online: bool
    blocks: Blocks
    lse: bool

    @property
    def limit(self) -> int:
        """How many keys a strip has, about."""
        return self.blocks.online_strip if self.online else self.blocks.strip


class _Strip(NamedTuple):
    """A run of a key tile's rows: `low:high` of the axis that it is cut along."""

    low: int
    high: int
    line: int  # rows of one step along that axis, once flat

    @property
    def rows(self) -> int:
        return (self.high - self.low) * self.line


class _Source(NamedTuple):
    """What one kind of visit reads."""

    sink: bool | None  # None: either, chosen by the visit's flag
    masked: bool
    ragged: bool

    def matches(self, flags):
        """Whether visits with these flags are of this kind."""
        found = (flags & RAGGED != 0) == self.ragged
        found &= (flags & MASKED != 0) == self.masked
        return found if self.sink is None else found & ((flags & SINK != 0) == self.sink)


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


def _cut(tiling: Tiling, ragged: bool, limit: int) -> list[_Strip]:
    """Cut a tile into even strips of about `limit` rows.

    Strided tiles are cut along the outer axis, by whole lines. Of a ragged tile only what is there
    is taken, but for up to 15 rows of a line that are masked.
    """
    size = _round_up(tiling.valid(tiling.count - 1) if ragged else tiling.size, PACKED)
    strided = tiling.outer > 1
    steps = tiling.outer - tiling.skip if strided else size // PACKED
    line, unit = (size, 1) if strided else (1, PACKED)
    parts = min(steps, max(1, round(steps * line * unit / limit)))
    edges = [round(part * steps / parts) * unit for part in range(parts + 1)]
    return [_Strip(low, high, line) for low, high in itertools.pairwise(edges)]


def _iota(shape: tuple[int, int], axis: int) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def _inner_outer(tiling: Tiling, strip: _Strip, tile: jax.Array, row: jax.Array):
    """Where a strip's rows are in the token array, along the inner and the outer axis."""
    if tiling.outer == 1:
        return tile * tiling.size + strip.low + row, jnp.zeros_like(row)
    inner = tile * tiling.size + row % strip.line
    return inner, tiling.skip + strip.low + row // strip.line


def _keep(call: _Call, source: _Source, strip: _Strip, tiles: tuple[jax.Array, jax.Array]):
    """Which pairs of a strip and a query tile count, [rows, queries] or [rows, 1]; None: all."""
    table = call.table
    tiling = table.sink if source.sink else table.keys
    row = _iota((strip.rows, 1), 0)
    inner, outer = _inner_outer(tiling, strip, tiles[1], row)
    valid = None
    if source.ragged and tiling.valid(tiling.count - 1) % PACKED:
        valid = inner < tiling.inner
    if not source.masked:
        return valid
    queries = table.queries
    whole = _Strip(0, queries.outer if queries.outer > 1 else queries.size, queries.size)
    lane = _iota((1, queries.rows), 1)
    query_inner, query_outer = _inner_outer(queries, whole, tiles[0], lane)
    query = query_inner * queries.outer + query_outer
    key = inner * tiling.outer + outer
    always = outer * tiling.inner + inner < table.sink_tokens
    far = 1 << 30
    inside = (query >= jnp.where(always, -far, key - table.width)) & (
        query <= jnp.where(always, far, key + table.width)
    )
    return inside if valid is None else inside & valid


def _load(tile, strip: _Strip, tiling: Tiling) -> jax.Array:  # [rows, D]
    if tiling.outer == 1:
        return tile[strip.low : strip.high]
    lines = tile[tiling.skip + strip.low : tiling.skip + strip.high, : strip.line]
    return lines.reshape(strip.rows, lines.shape[-1])


def _weigh(scores: jax.Array, keep: jax.Array | None, top: jax.Array):
    """Turn scores into weights 2^(score - m); also their sums, 8 of each query's."""
    weights = jnp.exp2(scores - top)
    if keep is not None:
        weights = jnp.where(keep, weights, 0.0)
    return weights, jnp.sum(weights.reshape(-1, SUBLANES, weights.shape[1]), axis=0)


def _read(call: _Call, source: _Source, strip: _Strip, tiles, is_sink, blocks):
    """Load a strip's keys and values, and which of its pairs count."""
    table = call.table
    tiling = table.sink if source.sink else table.keys
    if source.sink is None:
        flat = _Strip(strip.low * strip.line, strip.high * strip.line, 1)
        keys, values = (
            jnp.where(is_sink, _load(far, flat, table.sink), _load(near, strip, tiling))
            for near, far in blocks
        )
    else:
        keys, values = (_load(pair[source.sink], strip, tiling) for pair in blocks)
    keep = _keep(call, source, strip, tiles)
    if keep is not None and source.ragged:
        inner, _ = _inner_outer(tiling, strip, tiles[1], _iota((strip.rows, 1), 0))
        values = jnp.where(inner < tiling.inner, values, jnp.zeros_like(values))
    return keys, values, keep


def _visit(call: _Call, source: _Source, tiles, is_sink, refs) -> None:
    """Add one key tile to the sums of a query tile.

    With the online softmax a strip's scores are asked for before the strip before it is done with:
    else the matrix unit waits for their maximum.
    """
    q, blocks, (total, top, out) = refs
    queries = q[...].reshape(-1, q.shape[-1])
    bound, added = top[:1], total[...]

    def score(strip: _Strip):
        keys, values, keep = _read(call, source, strip, tiles, is_sink, blocks)
        scores = _matmul(keys, queries, _BY_LAST)
        if not call.online:
            return scores, values, keep, None
        if keep is not None:
            scores = jnp.where(keep, scores, UNSEEN)
        return scores, values, keep, jnp.max(scores, axis=0, keepdims=True)

    strips = _cut(call.table.sink if source.sink else call.table.keys, source.ragged, call.limit)
    ready = []
    for strip in [*strips, None]:
        if strip is not None:
            ready.append(score(strip))
        if call.online and strip is strips[0]:
            continue
        if not ready:
            break
        scores, values, keep, highest = ready.pop(0)
        if call.online:
            before, bound = bound, jnp.maximum(bound, highest)
            shrink = jnp.exp2(before - bound)
            added *= shrink
        weights, sums = _weigh(scores, keep, bound)
        added += sums
        product = _matmul(values, weights.astype(values.dtype), _BY_FIRST)
        out[...] = (out[...] * shrink if call.online else out[...]) + product
    total[...] = added
    if call.online:
        top[...] = jnp.broadcast_to(bound, top.shape)


def _bound(q: jax.Array, gauge: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """m of every query, the same in all sublanes: [8, queries]."""
    size = q.shape[1]
    ones = jnp.ones((SUBLANES, size), q.dtype)
    centre = jnp.broadcast_to(gauge[0:1], (SUBLANES, size)).astype(q.dtype)
    length = jnp.sqrt(_matmul(ones, q * q, _BY_LAST) * SAFETY)
    radius = gauge[1:2, :1]
    return _matmul(centre, q, _BY_LAST) + length * radius + (1.0 - HEADROOM)


def _kernel(heads, offset, query_tile, key_tile, sink_tile, flags, *refs, call: _Call) -> None:
    """One visit of one head."""
    table, step = call.table, pl.program_id(1)
    gauge, q, k, v, *more = refs
    state = total, top, sums = more[-3:]
    out, lse = more[-5:-3] if call.lse else (more[-4], None)
    blocks = [(k, more[0]), (v, more[1])] if table.sink else [(k,), (v,)]
    flag = flags[step]
    head = heads[offset[0] + pl.program_id(0)]

    @pl.when(flag & FIRST != 0)
    def _start():
        total[...] = jnp.zeros_like(total)
        sums[...] = jnp.zeros_like(sums)
        if call.online:
            top[...] = jnp.full_like(top, UNSEEN)
        else:
            top[...] = _bound(q[...].reshape(-1, q.shape[-1]), gauge[head], top.shape)

    is_sink = flag & SINK != 0
    for source in sources(table):
        tiles = (query_tile[step], sink_tile[step] if source.sink else key_tile[step])
        visit = functools.partial(_visit, call, source, tiles, is_sink, (q, blocks, state))
        pl.when(source.matches(flag))(visit)

    @pl.when(flag & LAST != 0)
    def _finish():
        whole = jnp.sum(total[...], axis=0, keepdims=True)
        out[...] = (sums[...] / whole).T.reshape(out.shape).astype(out.dtype)
        if lse is not None:
            lse[...] = (top[:1] + jnp.log2(whole)) * math.log(2)


def sources(table: VisitTable) -> list[_Source]:
    """The kinds of visit in a table. Whole tiles of the keys and of the sink share one."""
    flags = np.unique(table.flags & (MASKED | SINK | RAGGED))
    kinds = [(bool(flag & SINK), bool(flag & MASKED), bool(flag & RAGGED)) for flag in flags]
    found = [_Source(*kind) for kind in kinds]
    both = [_Source(sink, False, False) for sink in (False, True)]
    if all(source in found for source in both):
        found = [_Source(None, False, False)] + [one for one in found if one not in both]
    return found


def _view(tiling: Tiling, x: jax.Array) -> jax.Array:
    """Fold [A, N, D] into what the tiling's blocks are cut from."""
    return x if tiling.outer == 1 else x.reshape(x.shape[0], tiling.outer, tiling.inner, -1)


def _block(tiling: Tiling, size: int, which: int) -> pl.BlockSpec:
    """The block of one tile of a head; `which` of the prefetched arrays names the tile."""

    def index(i, step, heads, offset, *tiles):
        head, tile = heads[offset[0] + i], tiles[which][step]
        return (head, tile, 0) if tiling.outer == 1 else (head, 0, tile, 0)

    if tiling.outer == 1:
        return pl.BlockSpec((None, tiling.size, size), index)
    return pl.BlockSpec((None, tiling.outer, tiling.size, size), index)


def _operands(call: _Call, operands: tuple[jax.Array, ...]):
    """What a call reads, apart from its scalars, and in which blocks."""
    table, (gauge, q, k, v) = call.table, operands
    size = q.shape[-1]
    inputs = [gauge, _view(table.queries, q), _view(table.keys, k), _view(table.keys, v)]
    specs = [pl.BlockSpec(memory_space=pltpu.VMEM), _block(table.queries, size, 0)]
    specs += [_block(table.keys, size, 1)] * 2
    if table.sink:
        inputs += [k, v]
        specs += [_block(table.sink, size, 2)] * 2
    return inputs, specs


def _outputs(call: _Call, q: jax.Array):
    """What a call writes, and in which blocks."""
    queries = call.table.queries
    shapes = [jax.ShapeDtypeStruct(_view(queries, q).shape, q.dtype)]
    specs = [_block(queries, q.shape[-1], 0)]
    if call.lse:
        shape = q.shape[0], queries.count, 1, queries.rows
        shapes.append(jax.ShapeDtypeStruct(shape, jnp.float32))

        def index(i, step, heads, offset, tile, *_):
            return heads[offset[0] + i], tile[step], 0, 0

        specs.append(pl.BlockSpec((None, None, 1, queries.rows), index))
    return shapes, specs


def run_heads(
    operands: tuple[jax.Array, ...],  # gauge, q, k, v
    chosen: tuple[jax.Array, ...],  # heads int32 [A], from which on [1], how many []
    table: VisitTable,
    *,
    online: bool = False,
    blocks: Blocks = DEFAULT,
    with_lse: bool = False,
    previous: jax.Array | None = None,
    interpret=False,
):
    """Attend with some of the heads of a list, along one table: (output, log-sum-exp or None).

    Other heads are those of `previous`, if given, or anything. The log-sum-exp awaits `unfold`.
    """
    (_, q, *_), (heads, offset, count), queries = operands, chosen, table.queries
    call = _Call(table=table, online=online, blocks=blocks, lse=with_lse)
    inputs, specs = _operands(call, operands)
    shapes, out_specs = _outputs(call, q)
    # One entry more: where the list ends, the next head is looked up, though it never runs.
    heads = jnp.append(heads, jnp.int32(0))
    scalars = [heads, offset, table.query_tile, *table.fetches, table.flags]
    aliases = {}
    # The interpreter cannot alias what its blocks do not divide.
    merged = previous is not None and bool(interpret) and queries.ragged
    if previous is not None and not merged:
        aliases = {len(scalars) + len(inputs): 0}
        inputs += [_view(queries, previous)]
        specs += [pl.BlockSpec(memory_space=pl.ANY)]
    scratch = [(lines, queries.rows) for lines in (SUBLANES, SUBLANES, q.shape[-1])]
    found = pl.pallas_call(
        functools.partial(_kernel, call=call),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(count, table.visits),
            in_specs=specs,
            out_specs=out_specs,
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        out_shape=shapes,
        input_output_aliases=aliases,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"),
            vmem_limit_bytes=blocks.vmem_mib * 2**20,
        ),
        name="attention_online" if online else "attention",
        interpret=interpret,
    )(*scalars, *inputs)
    out = found[0].reshape(q.shape)
    return _merge(out, previous, chosen) if merged else out, found[1] if with_lse else None


def _check(size: int, tables: tuple[VisitTable, ...]) -> None:
    """Refuse what the kernel cannot do."""
    if size not in HEAD_DIMS:
        raise ValueError(f"head size {size} must be 64, 128, 192 or 256")
    for table in tables:
        tilings = table.queries, table.keys, table.sink or table.keys
        sides = [tiling.size for tiling in tilings]
        if any(side % PACKED for side in sides):
            raise ValueError(f"sides of tiles {sides} must be multiples of {PACKED}")
        if table.sink and table.sink.rows != table.keys.rows and table.keys.rows:
            raise ValueError(
                f"sink tiles of {table.sink.rows} tokens must be as large as "
                f"key tiles, {table.keys.rows}"
            )


def _merge(out: jax.Array, previous: jax.Array, chosen: tuple[jax.Array, ...]) -> jax.Array:
    heads, offset, count = chosen
    place = jnp.argsort(heads)
    mine = (place >= offset[0]) & (place < offset[0] + count)
    return jnp.where(mine[:, None, None], out, previous)


def attention(
    q: jax.Array,  # [A, N, D], scaled by `fold_scale`
    k: jax.Array,  # [A, N, D]
    v: jax.Array,  # [A, N, D]
    routes: jax.Array,  # int32 [A], which of the tables a head takes
    tables: tuple[VisitTable, ...],
    *,
    blocks: Blocks = DEFAULT,
    with_lse: bool = False,
    interpret=False,
) -> tuple[jax.Array, jax.Array | None]:
    """Attend, each head over the tiles of its table: the output [A, N, D], and the log-sum-exp of
    each query's kept scores (natural, as of q k^T / sqrt(D)), float32 [A, N], if asked for.
    """
    heads, rows, size = q.shape
    _check(size, tables)
    measured = measure(q, k, interpret)
    operands = measured.gauge, q, k, v
    kind = 2 * routes.astype(jnp.int32) + measured.online.astype(jnp.int32)
    order = jnp.argsort(kind).astype(jnp.int32)
    out, lse = None, jnp.zeros((heads, rows), jnp.float32)
    for number in range(2 * len(tables)):
        table = tables[number // 2]
        count = jnp.sum(kind == number, dtype=jnp.int32)
        offset = jnp.sum(kind < number, dtype=jnp.int32)[None]
        out, found = run_heads(
            operands,
            (order, offset, count),
            table,
            online=bool(number % 2),
            blocks=blocks,
            with_lse=with_lse,
            previous=out,
            interpret=interpret,
        )
        if with_lse:
            lse = jnp.where((kind == number)[:, None], unfold(table.queries, found, rows), lse)
    return out, lse if with_lse else None


def sparse_attention(
    q: jax.Array,  # [B, A, N, D]
    k: jax.Array,  # [B, A, N, D]
    v: jax.Array,  # [B, A, N, D]
    routes: jax.Array,  # int32 [B, A], which of the tables a head takes
    tables: tuple[VisitTable, ...],
    *,
    blocks: Blocks = DEFAULT,
    with_lse: bool = False,
    interpret=False,
) -> tuple[jax.Array, jax.Array | None]:
    """Do what `reference.sparse_attention` does, on a TPU; the log-sum-exp only if asked for."""
    batch, heads, rows, size = q.shape
    folded = (x.reshape(batch * heads, rows, size) for x in (fold_scale(q), k, v))
    out, lse = attention(
        *folded,
        routes.reshape(-1),
        tables,
        blocks=blocks,
        with_lse=with_lse,
        interpret=interpret,
    )
    return out.reshape(q.shape), None if lse is None else lse.reshape(batch, heads, rows)


def unfold(tiling: Tiling, x: jax.Array, rows: int) -> jax.Array:
    """Bring [A, tiles, 1, rows of a tile] into the order of tokens, [A, N]."""
    x = x.reshape(x.shape[0], tiling.count, tiling.outer, -1).swapaxes(1, 2)
    x = x.reshape(x.shape[0], tiling.outer, -1)[:, :, : tiling.inner]
    return x.reshape(x.shape[0], rows)
