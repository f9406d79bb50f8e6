"""The programs of a run, as jitted functions, and their abstract inputs. What is planned or timed
is what runs.

    embed         ids, lengths               -> text [B, L, C]
    denoise_step  DenoiseState, text, table  -> Step
    observe       DenoiseState, text, table  -> View (where heads look, for `profile-heads`)
    decode        latents, chunk by chunk    -> uint8 frames, finite?       (decode_first, then
    decode_next)

A module is passed in two halves, as `nnx.split` gives them: its graph is static, its weights are an
argument.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from svgen.attention.attend import Attend, Record, Setting, make
from svgen.attention.mass import View, watching
from svgen.config import ModelSpecs, TransformerSpec
from svgen.grid import Grid
from svgen.models.text_encoder import TextEncoder
from svgen.models.transformer import ONE_CHIP, Layout, Transformer
from svgen.models.vae import Vae, denormalize_latents
from svgen.scheduler import DenoiseState, SolverTable, update
from svgen.sharding import (
    CFG,
    SEQ,
    STACKED,
    Spread,
    gather,
    gather_outer,
    weight_axes,
    weight_specs,
)

Weights = nnx.State
Graph = nnx.GraphDef
DENSE = Setting()
HEADS = P(None, CFG, SEQ)  # how arrays [layers, B, A, ...] lie on a mesh


class StepTable(NamedTuple):
    """A `SolverTable` on the device; row i belongs to step i."""

    sigmas: jax.Array  # float32 [steps]
    times: jax.Array  # float32 [steps]
    correct: jax.Array  # float32 [steps, 5]
    predict: jax.Array  # float32 [steps, 3]

    @classmethod
    def of(cls, table: SolverTable) -> "StepTable":
        """Put a table on the device."""
        rows = (table.sigmas[:-1], table.times, table.correct, table.predict)
        return cls(*(jax.device_put(np.asarray(row, np.float32)) for row in rows))


def abstract_parts(specs: ModelSpecs, dtype: jnp.dtype) -> dict[str, nnx.Module]:
    """The three networks without weights, by upstream folder name. The VAE is float32, whatever
    `dtype`.
    """
    rngs = partial(nnx.Rngs, 0)
    return {
        "text_encoder": nnx.eval_shape(lambda: TextEncoder(specs.text, dtype=dtype, rngs=rngs())),
        "transformer": nnx.eval_shape(
            lambda: Transformer(specs.transformer, dtype=dtype, rngs=rngs())
        ),
        "vae": nnx.eval_shape(lambda: Vae(specs.vae, dtype=jnp.float32, rngs=rngs())),
    }


def abstract_state(grid: Grid, channels: int, items: int = 1) -> DenoiseState:
    """The shapes of a `DenoiseState` for videos on `grid`."""
    shape = (items, grid.latent_frames, grid.rows, grid.columns, channels)
    latents = jax.ShapeDtypeStruct(shape, jnp.float32)
    return DenoiseState(jax.ShapeDtypeStruct((), jnp.int32), latents, latents, latents, latents)


def abstract_table(steps: int) -> StepTable:
    """The shapes of a `StepTable`."""
    shapes = ((steps,), (steps,), (steps, 5), (steps, 3))
    return StepTable(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))


@partial(jax.jit, static_argnames=("graph", "mesh"))
def embed(
    graph: Graph, weights: Weights, ids: jax.Array, lengths: jax.Array, *, mesh: Mesh | None = None
) -> jax.Array:
    """Encode int32 ids [B, L] of true lengths [B] as text [B, L, C], zero past each length.

    On a mesh every chip encodes all of the (few) rows; what is spread are the weights.
    """
    if mesh is None:
        return nnx.merge(graph, weights)(ids, lengths)
    axes = weight_axes(weights, mesh.size)

    def part(weights: Weights, ids: jax.Array, lengths: jax.Array) -> jax.Array:
        model = nnx.merge(graph, gather_outer(weights, axes))
        return model(ids, lengths, partial(gather, axes=axes[STACKED], layer=True))

    specs = (weight_specs(axes), P(), P())
    return jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)(
        weights, ids, lengths
    )


class Step(NamedTuple):
    """What one denoising step gives. One that goes bad leaves the state as it was."""

    state: DenoiseState
    finite: jax.Array  # bool []: whether the latents are that it came to
    record: Record  # of the attention, stacked over layers: how each head ran
    branches: jax.Array  # bool [B]: whether the velocity of each branch is finite


@partial(jax.jit, static_argnames=("graph", "setting", "mesh"), donate_argnames=("state",))
def denoise_step(
    graph: Graph,
    weights: Weights,
    state: DenoiseState,
    text: jax.Array,  # [B, L, C], or [2B, L, C] with guidance: the prompts, then the negative ones
    table: StepTable,
    guidance: jax.Array,  # float32 []
    seed: jax.Array,  # uint32 [], draws the rows that route heads
    *,
    setting: Setting = DENSE,
    mesh: Mesh | None = None,
) -> Step:
    """Take the step that `state` is at, on one chip or on all of a mesh (`sharding`).

    With guidance g the velocity is u + g (c - u), of the conditional branch c and the unconditional
    u, which run as one batch (classifier-free guidance, arXiv 2207.12598).
    """
    inputs = StepInputs(state, text, table, guidance, seed)
    if mesh is None:
        return _step((graph, setting), weights, inputs)
    everywhere = P()
    given = Step(everywhere, everywhere, Record(HEADS, HEADS, everywhere), everywhere)
    return _on_mesh(mesh, _step, given)((graph, setting), weights, inputs)


@partial(jax.jit, static_argnames=("graph", "setting", "mesh"))
def observe(
    graph: Graph,
    weights: Weights,
    state: DenoiseState,
    text: jax.Array,
    table: StepTable,
    guidance: jax.Array,
    seed: jax.Array,
    *,
    setting: Setting = DENSE,
    mesh: Mesh | None = None,
) -> View:
    """Look at every head in the step that `denoise_step` takes with the same arguments: arrays
    [layers, B, A, ...]. The state stays as it is.
    """
    inputs = StepInputs(state, text, table, guidance, seed)
    if mesh is None:
        return _look((graph, setting), weights, inputs)
    return _on_mesh(mesh, _look, HEADS)((graph, setting), weights, inputs)


class StepInputs(NamedTuple):
    """What `denoise_step` takes besides the weights."""

    state: DenoiseState
    text: jax.Array
    table: StepTable
    guidance: jax.Array
    seed: jax.Array


def _predict(
    model: Transformer, inputs: StepInputs, attend: Attend, layout: Layout
) -> tuple[jax.Array, Any]:
    """The velocity of all branches, and what `attend` records."""
    state, text, table, _, _ = inputs
    items = state.latents.shape[0]
    branches = text.shape[0] // items
    time = jnp.broadcast_to(table.times[state.step], (branches * items,))
    return model(jnp.concatenate([state.latents] * branches), time, text, attend, layout)


def _step(
    static: tuple[Graph, Setting], weights: Weights, inputs: StepInputs, layout: Layout = ONE_CHIP
) -> Step:
    """Take a step with the branches, tokens and weights that `layout` puts on this chip."""
    (graph, setting), (state, _, table, guidance, seed) = static, inputs
    items, row = state.latents.shape[0], state.step
    model = nnx.merge(graph, weights)
    attend = make(setting, _token_shape(model.spec, state.latents), seed=seed, step=row)
    velocity, record = _predict(model, inputs, attend, layout)
    velocity = layout.join_branches(velocity)
    branches = jnp.isfinite(velocity).all(axis=(1, 2, 3, 4))
    if velocity.shape[0] == 2 * items:
        wanted, unwanted = jnp.split(velocity, 2)
        velocity = unwanted + guidance * (wanted - unwanted)
    after = update(state, velocity, table.sigmas[row], table.correct[row], table.predict[row])
    finite = jnp.isfinite(after.latents).all()
    # The buffers of `state` are reused: here is the last chance to keep what was good.
    state = jax.tree.map(partial(jnp.where, finite), after, state)
    return Step(state, finite, record, branches)


def _look(
    static: tuple[Graph, Setting], weights: Weights, inputs: StepInputs, layout: Layout = ONE_CHIP
) -> View:
    """See where the heads look that `layout` puts on this chip."""
    (graph, setting), state = static, inputs.state
    model = nnx.merge(graph, weights)
    moment = {"seed": inputs.seed, "step": state.step}
    attend = make(setting, _token_shape(model.spec, state.latents), **moment)
    attend = watching(attend, _token_grid(model.spec, state.latents), **moment)
    return _predict(model, inputs, attend, layout)[1]


def _on_mesh(mesh: Mesh, run: Callable, given: Any) -> Callable:
    """Let every chip of a mesh run its part: branches over `cfg`, tokens and heads over `seq`.
    `given` says how what `run` gives lies on the chips.
    """

    def spread(static: tuple[Graph, Setting], weights: Weights, inputs: StepInputs) -> Any:
        axes = weight_axes(weights, mesh.size)
        spec = nnx.merge(static[0], weights).spec
        layout = Spread(
            tokens=math.prod(_token_grid(spec, inputs.state.latents)),
            cfg=mesh.shape[CFG],
            seq=mesh.shape[SEQ],
            layer_axes=axes[STACKED],
        )

        def part(weights: Weights, inputs: StepInputs) -> Any:
            return run(static, gather_outer(weights, axes), inputs, layout)

        everywhere = P()
        taken = StepInputs(everywhere, P(CFG), everywhere, everywhere, everywhere)
        return jax.shard_map(
            part,
            mesh=mesh,
            in_specs=(weight_specs(axes), taken),
            out_specs=given,
            check_vma=False,
        )(weights, inputs)

    return spread


def _token_grid(spec: TransformerSpec, latents: jax.Array) -> tuple[int, int, int]:
    """Frames, rows and columns of the token grid."""
    sides = zip(latents.shape[1:4], spec.patch, strict=True)
    frames, rows, columns = (side // patch for side, patch in sides)
    return frames, rows, columns


def _token_shape(spec: TransformerSpec, latents: jax.Array) -> tuple[int, int, int]:
    """Frames of the token grid, positions of a frame, and the size of a head."""
    frames, rows, columns = _token_grid(spec, latents)
    return frames, rows * columns, spec.head_dim


def _to_uint8(frames: jax.Array) -> tuple[jax.Array, jax.Array]:
    levels = jnp.round((frames.clip(-1, 1) * 0.5 + 0.5) * 255)
    return levels.astype(jnp.uint8), jnp.isfinite(frames).all()


@partial(jax.jit, static_argnames=("graph",))
def decode_first(graph: Graph, weights: Weights, z: jax.Array) -> tuple[jax.Array, jax.Array, Any]:
    """Decode the first latent frame [B, 1, H, W, Z]: uint8 [B, 1, h, w, 3], finite?, cache."""
    vae = nnx.merge(graph, weights)
    frames, cache = vae.decode_first(denormalize_latents(z, vae.spec))
    return *_to_uint8(frames), cache


@partial(jax.jit, static_argnames=("graph",), donate_argnames=("cache",))
def decode_next(
    graph: Graph, weights: Weights, z: jax.Array, cache: Any
) -> tuple[jax.Array, jax.Array, Any]:
    """Decode one later latent frame [B, 1, H, W, Z]: uint8 [B, 4, h, w, 3], finite?, cache."""
    vae = nnx.merge(graph, weights)
    frames, cache = vae.decode_next(denormalize_latents(z, vae.spec), cache)
    return *_to_uint8(frames), cache


def decode(
    graph: Graph, weights: Weights, latents: jax.Array | np.ndarray
) -> Iterator[tuple[jax.Array, jax.Array]]:
    """Decode latents [B, F, H, W, Z] latent frame by latent frame; yields uint8 frames and whether
    they are finite.
    """
    frames, finite, cache = decode_first(graph, weights, latents[:, :1])
    yield frames, finite
    for index in range(1, latents.shape[1]):
        z = latents[:, index : index + 1]
        frames, finite, cache = decode_next(graph, weights, z, cache)
        yield frames, finite
