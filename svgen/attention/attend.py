"""The one entry for attention. The transformer calls it and knows nothing of how it is done.

A transformer is given an `Attend`: a function of (q, k, v, layer) that returns the output and a
record of what was done; records come back stacked over layers. `dense` attends to everything;
`sparse` makes one that routes each head; `make` chooses between them, and the kernel that suits the
device.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from svgen.attention.masks import ROUTES, Tables, dense_table, tables
from svgen.attention.routing import ROWS, Routing, route, row_key, sample_rows
from svgen.config import SparsitySchedule
from svgen.kernels import reference, splash, tuning
from svgen.kernels.tables import TileSizes, VisitTable

# (q [B, A, N, D], k, v of the same shape, layer []) -> (out [B, A, N, D], record)
Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]

# (q [B, A, N, D], k, v, routes [B, A], tables) -> (out [B, A, N, D], log-sum-exp [B, A, N])
Kernel = Callable[..., tuple[jax.Array, jax.Array]]


class Record(NamedTuple):
    """What was done in one layer; stacked, each array gains a leading axis of layers."""

    routes: jax.Array  # int32 [B, A], as in `masks.ROUTES`: how each head ran
    errors: jax.Array  # float32 [B, A, 2], of `routing.Routing`; zero where nothing was sampled
    sampled: jax.Array  # bool []: whether the layer was routed, not dense by schedule


def _all_dense(batch: int, heads: int) -> Record:
    routing = Routing(
        jnp.zeros((batch, heads), jnp.int32), jnp.zeros((batch, heads, 2), jnp.float32)
    )
    return Record(*routing, jnp.zeros((), bool))


def dense(
    q: jax.Array,  # [B, A, N, D]
    k: jax.Array,
    v: jax.Array,
    layer: jax.Array,
) -> tuple[jax.Array, Record]:
    """Let every query look at every key."""
    del layer
    return reference.attention(q, k, v), _all_dense(*q.shape[:2])


def along(kernel: Kernel, table: VisitTable) -> Attend:
    """Make an `Attend` that lets every head read one table, whatever its data, by a kernel."""

    def attend(
        q: jax.Array, k: jax.Array, v: jax.Array, layer: jax.Array
    ) -> tuple[jax.Array, Record]:
        del layer
        record = _all_dense(*q.shape[:2])
        out, _ = kernel(q, k, v, record.routes, (table,))
        return out, record

    return attend


def to_text(
    q: jax.Array,  # [B, A, N, D]
    k: jax.Array,  # [B, A, L, D]
    v: jax.Array,  # [B, A, L, D]
    text_tokens: int,
) -> jax.Array:  # [B, A, N, D]
    """Attend to text that upstream pads to `text_tokens` rows and does not mask.

    All padding rows are the same row, so L < text_tokens rows suffice: the last one, which must be
    padding, stands for itself and all that were left out, by adding the logarithm of their number
    to its scores. Exact, and 8 times less work for a prompt of 50 tokens.
    """
    rows = k.shape[2]
    count = jnp.asarray(text_tokens - rows + 1, jnp.float32)
    bias = jnp.zeros(rows, jnp.float32).at[-1].set(jnp.log(count))
    return reference.attention(q, k, v, bias)


def sparse(
    route_tables: Tables,
    *,
    seed: jax.Array,  # uint32 []
    step: jax.Array,  # int32 []
    dense_steps: int,
    dense_layers: int,
    rows: int = ROWS,
    budget: float | None = None,
    kernel: Kernel = reference.sparse_attention,
) -> Attend:
    """Make an `Attend` that routes each head anew and lets it read its route's table.

    In the first `dense_steps` steps, and in the first `dense_layers` layers of any step, nothing is
    sampled and every head is dense. Elsewhere `rows` query rows decide (`routing.route`); a head
    whose error exceeds `budget` under both masks stays dense.
    """
    tiling = route_tables.temporal.queries
    frames, positions = tiling.outer, tiling.inner
    count = min(rows, frames * positions)

    def attend(
        q: jax.Array, k: jax.Array, v: jax.Array, layer: jax.Array
    ) -> tuple[jax.Array, Record]:
        def decide() -> Routing:
            key = row_key(seed, step, layer)
            drawn = sample_rows(key, frames, positions, count)
            return route(q, k, v, drawn, route_tables, budget=budget)

        def stay_dense() -> Routing:
            return Routing(*_all_dense(*q.shape[:2])[:2])

        sampled = (step >= dense_steps) & (layer >= dense_layers)
        routing = jax.lax.cond(sampled, decide, stay_dense)
        out, _ = kernel(q, k, v, routing.routes, route_tables)
        return out, Record(*routing, sampled)

    return attend


class Setting(NamedTuple):
    """How a run attends. Static, and hashed by content: it names a program."""

    sparsity: SparsitySchedule | None = None  # None: densely
    chip: str | None = None  # a key of `tuning.CHIPS`; None: not a TPU


def make(
    setting: Setting,
    shape: tuple[int, int, int],  # F, H * W of the token grid, and D
    *,
    seed: jax.Array,  # uint32 []
    step: jax.Array,  # int32 []
) -> Attend:
    """Make the `Attend` of one step: dense or sparse, with the TPU's kernel where there is one.

    Raises ValueError for a schedule whose dense steps are a share, not counted.
    """
    frames, positions, head_dim = shape
    kernel, sizes = _kernel(setting.chip, frames, positions, head_dim)
    schedule = setting.sparsity
    if schedule is None:
        if kernel is reference.sparse_attention:
            return dense
        return along(kernel, dense_table(1, frames * positions, sizes))
    if not isinstance(schedule.dense_steps, int):
        raise ValueError(f"dense_steps {schedule.dense_steps} is not counted")
    return sparse(
        tables_of(setting, shape),
        seed=seed,
        step=step,
        dense_steps=schedule.dense_steps,
        dense_layers=schedule.dense_layers,
        rows=schedule.rows,
        budget=schedule.budget,
        kernel=kernel,
    )


def tables_of(setting: Setting, shape: tuple[int, int, int]) -> Tables:
    """The visit tables by which a sparse setting attends to tokens of `shape` (see `make`)."""
    frames, positions, _ = shape
    _, sizes = _kernel(setting.chip, *shape)
    return tables(frames, positions, setting.sparsity.band_share, sizes)


def table_of(
    setting: Setting, shape: tuple[int, int, int], route: int
) -> tuple[Kernel, VisitTable]:
    """The kernel of a sparse setting, and the table that its heads of one route read: for `along`,
    where no data decide.
    """
    kernel, _ = _kernel(setting.chip, *shape)
    return kernel, tables_of(setting, shape)[route]


def kernel_name(chip: str | None, head_dim: int) -> str:
    """Which file of `kernels` computes attention: splash, where there is one for the chip."""
    return "reference" if chip is None or head_dim not in splash.HEAD_DIMS else "splash"


def chip_of(kind: str) -> str | None:
    """Name the chip of a device, by the kind that JAX gives; None unless it is a known TPU."""
    return tuning.DEVICE_KINDS.get(kind)


def _kernel(
    chip: str | None, frames: int, positions: int, head_dim: int
) -> tuple[Kernel, TileSizes]:
    """Choose a kernel and its tiles: that of TPUs for the head sizes that it takes."""
    if kernel_name(chip, head_dim) == "reference":
        return reference.sparse_attention, reference.tile_sizes(frames, positions)
    sizes, blocks = tuning.choose(chip, frames, positions)
    return partial(splash.sparse_attention, blocks=blocks), sizes


def count_calls(record: Record) -> np.ndarray:
    """Count how many head calls ran by each of `masks.ROUTES`, int32 [3], in any stack of
    records; on the host.
    """
    routes = np.asarray(record.routes).ravel()
    return np.bincount(routes, minlength=len(ROUTES)).astype(np.int32)
