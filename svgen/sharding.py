"""How a run is spread over chips. The one file that knows the axes of the mesh.

    axis   splits
    cfg    the two branches of guidance
    seq    video tokens outside of attention, heads inside (Ulysses, arXiv 2309.14509)
    both   weights: each chip holds a part of each large one, gathered layer by layer

The transformer runs under `shard_map`, so that its collectives are those written here: an
all-gather per large weight, four all-to-alls per layer, and one all-gather each of the velocity's
tokens and branches. Latents and the solver's history are small and lie on every chip.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from svgen.errors import UsageError

CFG, SEQ = "cfg", "seq"
CHIPS = (CFG, SEQ)
LEAST_SPLIT = 1 << 12  # values of a weight (of one layer); smaller ones lie on every chip
WHOLE = -1  # the axis of a weight that is not split
EMBEDDING = "embedding"  # a matrix [words, width]
STACKED = "layers"  # weights under this name have a leading axis of layers

Weights = Any  # a tree of arrays, as `nnx.split` gives it
Place = Callable[[tuple, tuple[int, ...], Callable], jax.Array]  # path, shape, reads a part


class Split(NamedTuple):
    """How many ways each axis of the mesh goes."""

    cfg: int
    seq: int

    @property
    def chips(self) -> int:
        """How many chips take part."""
        return self.cfg * self.seq

    def __str__(self) -> str:
        return f"{self.cfg}x{self.seq}"


def possible_splits(chips: int, heads: int, branches: int) -> list[Split]:
    """Every split that uses at most `chips` chips, those that use most of them first.

    Heads must divide evenly over `seq`, branches over `cfg`.
    """
    found = [
        Split(cfg, seq)
        for cfg in range(1, branches + 1)
        for seq in range(1, heads + 1)
        if branches % cfg == 0 and heads % seq == 0 and cfg * seq <= chips
    ]
    return sorted(found, key=lambda split: (-split.chips, -split.cfg))


def choose_split(chips: int, heads: int, branches: int, asked: str = "auto") -> Split:
    """The split that was asked for, as "CFGxSEQ", or the one that uses most chips.

    Of splits that use equally many, the branches are split first: they exchange least. Raises
    UsageError (E_MESH) for a split that cannot be made, naming those that can.
    """
    possible = possible_splits(chips, heads, branches)
    if asked == "auto":
        return possible[0]
    for split in possible:
        if str(split) == asked:
            return split
    raise UsageError(
        "E_MESH",
        f"--mesh {asked[:40]} cannot be made of {chips} chips",
        why=f"it is CFGxSEQ: CFG divides {branches} (branches of guidance), SEQ {heads} (heads)",
        hint=" or ".join(f"--mesh {split}" for split in possible[:4]),
    )


def make_mesh(split: Split, devices: Sequence[Any] | None = None) -> Mesh:
    """Lay out devices (default: those that are there) as a mesh."""
    devices = (jax.devices() if devices is None else devices)[: split.chips]
    return Mesh(np.array(devices).reshape(split), CHIPS, axis_types=(AxisType.Auto,) * 2)


# Weights.


def weight_axis(path: tuple[Any, ...], shape: tuple[int, ...], chips: int) -> int:
    """Which axis of a weight is split over all chips, of those that divide evenly; WHOLE if it is
    small.

    Files hold a matrix [in, out] as `out` rows, and the embedding as it is: a chip's part is a run
    of rows, which its host reads alone (`tensors.read_part`). Of anything else it is the longest.
    """
    names = [_name(key) for key in path]
    first = int(names[:1] == [STACKED])
    if math.prod(shape[first:]) < LEAST_SPLIT:
        return WHOLE
    even = [axis for axis in range(first, len(shape)) if shape[axis] % chips == 0]
    matrix = len(shape) == first + 2 and EMBEDDING not in names
    return max(even, key=lambda axis: axis if matrix else shape[axis], default=WHOLE)


def _name(key: Any) -> str:
    return str(getattr(key, "key", getattr(key, "name", key)))


def weight_axes(weights: Weights, chips: int) -> Weights:
    """`weight_axis` of every leaf."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: weight_axis(path, leaf.shape, chips), weights
    )


def weight_specs(axes: Weights) -> Weights:
    """What `shard_map` is told of weights that are split along `axes`."""
    return jax.tree.map(_spec, axes)


def _spec(axis: int) -> PartitionSpec:
    return PartitionSpec() if axis == WHOLE else PartitionSpec(*[None] * axis, CHIPS)


def placer(mesh: Mesh) -> Place:
    """Make the function that puts one leaf on the mesh: the parts of this process' chips are read,
    and no others.
    """

    def place(path: tuple, shape: tuple[int, ...], read: Callable) -> jax.Array:
        spec = _spec(weight_axis(path, shape, mesh.size))
        return jax.make_array_from_callback(shape, NamedSharding(mesh, spec), read)

    return place


def replicate(mesh: Mesh, tree: Any) -> Any:
    """Put arrays that every process has on every chip."""
    everywhere = NamedSharding(mesh, PartitionSpec())

    def place(value: jax.Array | np.ndarray) -> jax.Array:
        if isinstance(value, jax.Array) and value.sharding == everywhere:
            return value
        host = np.asarray(value)
        return jax.make_array_from_callback(host.shape, everywhere, lambda part: host[part])

    return jax.tree.map(place, tree)


def collect(mesh: Mesh, tree: Any) -> Any:
    """Put all of every array on every chip, so that each process can read it."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.jit(lambda tree: tree, out_shardings=everywhere)(tree)


def whole_placer(mesh: Mesh) -> Place:
    """Make the function that puts one leaf on every chip."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    return lambda path, shape, read: jax.make_array_from_callback(shape, everywhere, read)


def place_columns(mesh: Mesh, latents: np.ndarray) -> jax.Array:
    """Split latents [B, F, H, W, Z] by columns over all chips, for the VAE; put them on every chip
    where W does not divide. XLA then exchanges the edges that convolutions need.
    """
    placed = columns_of(mesh, latents.shape)
    return jax.make_array_from_callback(latents.shape, placed, lambda part: latents[part])


def columns_of(mesh: Mesh, shape: tuple[int, ...]) -> NamedSharding:
    """Where `place_columns` puts latents of a shape."""
    even = shape[3] % mesh.size == 0
    return NamedSharding(mesh, PartitionSpec(None, None, None, CHIPS) if even else PartitionSpec())


def gather(weights: Weights, axes: Weights, *, layer: bool = False) -> Weights:
    """Bring split weights together on every chip, under `shard_map`.

    Those of one layer have lost the leading axis that `axes` counts.
    """
    leaves, structure = jax.tree.flatten(weights)
    whole = [
        _gather(leaf, axis - layer) if axis != WHOLE else leaf
        for leaf, axis in zip(leaves, jax.tree.leaves(axes), strict=True)
    ]
    return jax.tree.unflatten(structure, whole)


def gather_outer(weights: Weights, axes: Weights) -> Weights:
    """Bring together what is not stacked; layers follow one by one (`Spread.gather`)."""
    names = {name: axes[name] for name in axes if name != STACKED}
    return type(weights)(
        {
            name: gather(weights[name], names[name]) if name in names else weights[name]
            for name in weights
        }
    )


def _gather(leaf: jax.Array, axis: int) -> jax.Array:
    return jax.lax.all_gather(leaf, CHIPS, axis=axis, tiled=True)


# Tokens.


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Which tokens and weights a chip holds, under `shard_map`. Tokens that pad the last chip's are
    zeros, and are cut off before anything attends to them.
    """

    tokens: int  # N
    cfg: int
    seq: int
    layer_axes: Weights  # of the stacked weights: `weight_axes`

    def gather(self, weights: Weights) -> Weights:
        """The whole weights of one layer."""
        return gather(weights, self.layer_axes, layer=True)

    @property
    def held(self) -> int:
        """Tokens on each chip, padding included."""
        return -(-self.tokens // self.seq)

    def take(self, x: jax.Array, axis: int) -> jax.Array:
        """This chip's part of an array that every chip holds, along its axis of tokens."""
        if self.seq == 1:
            return x
        start = jax.lax.axis_index(SEQ) * self.held
        return jax.lax.dynamic_slice_in_dim(self._padded(x, axis), start, self.held, axis)

    def join(self, x: jax.Array) -> jax.Array:
        """All tokens of x [B, n, ...] on every chip: [B, N, ...]."""
        if self.seq == 1:
            return x
        return jax.lax.all_gather(x, SEQ, axis=1, tiled=True)[:, : self.tokens]

    def join_branches(self, x: jax.Array) -> jax.Array:
        """Both branches of guidance on every chip."""
        if self.cfg == 1:
            return x
        return jax.lax.all_gather(x, CFG, axis=0, tiled=True)

    def attend(self, inner: Callable) -> Callable:
        """Let `inner`, an `Attend`, see all tokens of this chip's heads."""
        if self.seq == 1:
            return inner

        def exchanged(q: jax.Array, k: jax.Array, v: jax.Array, layer: jax.Array) -> tuple:
            out, record = inner(*(self._to_heads(x) for x in (q, k, v)), layer)
            back = self._padded(out, 2)
            return jax.lax.all_to_all(back, SEQ, 2, 1, tiled=True), record

        return exchanged

    def _to_heads(self, x: jax.Array) -> jax.Array:
        """[B, A, n, D] -> [B, A / seq, N, D]."""
        return jax.lax.all_to_all(x, SEQ, 1, 2, tiled=True)[:, :, : self.tokens]

    def _padded(self, x: jax.Array, axis: int) -> jax.Array:
        missing = self.held * self.seq - self.tokens
        if missing == 0:
            return x
        return jnp.pad(x, [(0, missing if at == axis else 0) for at in range(x.ndim)])
