"""The three programs at true sizes, by shapes alone; and small runs of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from svgen import programs
from svgen.attention.attend import Setting
from svgen.config import ModelSpecs, SparsitySchedule, TextSpec, TransformerSpec, VaeSpec
from svgen.grid import RESOLUTIONS, WAN21, Rules, grid_of
from svgen.plan import TEXT_ROWS
from svgen.scheduler import solver_table, start_state
from svgen.shapes import SPECS

STEPS = 50


def shape(*sizes: int, dtype: jnp.dtype = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


@pytest.mark.parametrize("model", SPECS)
def test_embed_at_true_size(model):
    graph, weights = nnx.split(programs.abstract_parts(SPECS[model], jnp.bfloat16)["text_encoder"])
    ids, lengths = shape(2, TEXT_ROWS, dtype=jnp.int32), shape(2, dtype=jnp.int32)
    text = jax.eval_shape(programs.embed, graph, weights, ids, lengths)
    assert (text.shape, text.dtype) == ((2, TEXT_ROWS, 4096), jnp.float32)


@pytest.mark.parametrize("resolution", RESOLUTIONS)
@pytest.mark.parametrize("model", SPECS)
def test_step_at_true_size(model, resolution):
    specs = SPECS[model]
    grid = grid_of(*RESOLUTIONS[resolution], 81, WAN21)
    graph, weights = nnx.split(programs.abstract_parts(specs, jnp.bfloat16)["transformer"])
    state = programs.abstract_state(grid, 16)
    text = shape(2, TEXT_ROWS, 4096)
    table = programs.abstract_table(STEPS)
    made = jax.eval_shape(
        programs.denoise_step, graph, weights, state, text, table, shape(), shape(dtype=jnp.uint32)
    )
    assert made.state == state
    assert (made.finite.shape, made.finite.dtype) == ((), jnp.bool_)
    heads = (specs.transformer.layers, 2, specs.transformer.heads)
    assert made.record.routes.shape == heads


@pytest.mark.parametrize("resolution", RESOLUTIONS)
def test_decode_at_true_size(resolution):
    grid = grid_of(*RESOLUTIONS[resolution], 81, WAN21)
    width, height = grid.computed_px
    graph, weights = nnx.split(programs.abstract_parts(SPECS["wan2.1-14b"], jnp.bfloat16)["vae"])
    z = shape(1, 1, grid.rows, grid.columns, 16)
    first, _, cache = jax.eval_shape(programs.decode_first, graph, weights, z)
    later, _, cache_after = jax.eval_shape(programs.decode_next, graph, weights, z, cache)
    assert (first.shape, first.dtype) == ((1, 1, height, width, 3), jnp.uint8)
    assert later.shape == (1, 4, height, width, 3)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), cache_after) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), cache
    ), "one program decodes every later chunk, so memory does not grow with the frames"


TINY = ModelSpecs(
    text=TextSpec(vocabulary=8, width=16, mlp_width=16, heads=2, head_dim=8, layers=1),
    transformer=TransformerSpec(
        heads=2,
        head_dim=12,
        layers=2,
        mlp_width=32,
        in_channels=4,
        out_channels=4,
        text_width=16,
        frequency_width=16,
    ),
    vae=VaeSpec(base_width=4, z_channels=4, latents_mean=(0.0,) * 4, latents_std=(1.0,) * 4),
)


def tiny_parts():
    """The weights of a small transformer, and the state that its run begins with."""
    grid = grid_of(32, 32, 5, Rules.of(TINY.transformer, TINY.vae))
    abstract = programs.abstract_parts(TINY, jnp.float32)["transformer"]
    graph, weights = nnx.split(abstract)
    rng = np.random.default_rng(0)
    weights = jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(0, 0.3, leaf.shape), leaf.dtype), weights
    )
    shape = (1, grid.latent_frames, grid.rows, grid.columns, 4)
    state = start_state(jnp.asarray(rng.normal(size=shape), jnp.float32))
    return graph, weights, state


def tiny_start():
    return tiny_parts()[2]


def tiny_step(text: jax.Array, guidance: float, setting=programs.DENSE, seed=0):
    graph, weights, state = tiny_parts()
    rows = programs.StepTable.of(solver_table(4, 5.0))
    fixed = (text, rows, jnp.float32(guidance), jnp.uint32(seed))
    return programs.denoise_step(graph, weights, state, *fixed, setting=setting)


def test_guidance_mixes_the_two_branches():
    rng = np.random.default_rng(1)
    wanted, unwanted = (jnp.asarray(rng.normal(size=(1, 64, 16)), jnp.float32) for _ in range(2))
    alone = tiny_step(wanted, 1.0).state
    other = tiny_step(unwanted, 1.0).state
    both = jnp.concatenate([wanted, unwanted])
    for guidance in (1.0, 3.0):
        mixed, finite, _, branches = tiny_step(both, guidance)
        # The first step is linear in the velocity, so the latents mix like the velocities.
        expected = other.latents + guidance * (alone.latents - other.latents)
        assert bool(finite) and branches.tolist() == [True, True]
        assert jnp.abs(alone.latents - other.latents).max() > 0.01
        np.testing.assert_allclose(mixed.latents, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
@pytest.mark.parametrize("rows", [[0], [1], [0, 1]])
def test_step_says_which_branch_is_not_finite_and_keeps_the_state(rows, bad):
    rng = np.random.default_rng(3)
    text = jnp.asarray(rng.normal(size=(2, 64, 16)), jnp.float32)
    good = tiny_step(text, 3.0)
    made = tiny_step(text.at[jnp.asarray(rows), 0, 0].set(bad), 3.0)
    assert not bool(made.finite)
    assert made.branches.tolist() == [row not in rows for row in range(2)]
    assert int(made.state.step) == 0 and int(good.state.step) == 1
    begun = tiny_start()
    for kept, was in zip(made.state, begun, strict=True):
        np.testing.assert_array_equal(kept, was)
    assert not np.array_equal(good.state.latents, begun.latents)


def test_step_whose_guidance_overflows_blames_no_branch():
    rng = np.random.default_rng(4)
    text = jnp.asarray(rng.normal(size=(2, 64, 16)), jnp.float32)
    made = tiny_step(text, np.inf)
    assert (bool(made.finite), made.branches.tolist()) == (False, [True, True])


def test_step_attends_as_its_setting_says():
    rng = np.random.default_rng(2)
    text = jnp.asarray(rng.normal(size=(2, 64, 16)), jnp.float32)
    dense = tiny_step(text, 3.0)
    assert not dense.record.sampled.any()

    def latents(**schedule):
        setting = Setting(SparsitySchedule(**schedule))
        made = tiny_step(text, 3.0, setting)
        return made.state.latents, made.record

    narrow, record = latents(band_share=0.2, dense_layers=1)
    assert record.sampled.tolist() == [False, True]
    assert set(np.unique(record.routes[0])) == {0}
    assert set(np.unique(record.routes[1])) <= {1, 2}
    assert jnp.abs(narrow - dense.state.latents).max() > 1e-3
    for schedule in ({"band_share": 1.0}, {"band_share": 0.2, "dense_steps": 1}):
        same, _ = latents(**schedule)
        np.testing.assert_allclose(same, dense.state.latents, rtol=0, atol=1e-5)


def test_share_of_steps_must_be_counted_before_a_run():
    with pytest.raises(ValueError, match="not counted"):
        tiny_step(
            jnp.zeros((1, 64, 16), jnp.float32),
            1.0,
            Setting(SparsitySchedule(band_share=0.5, dense_steps=0.5)),
        )


def test_frames_are_rounded_as_diffusers_does():
    x = jnp.asarray([-2.0, -1.0, -0.5, 0.0, 0.1, 1.0, 3.0], jnp.float32)
    levels, finite = programs._to_uint8(x)
    assert levels.tolist() == [0, 0, 64, 128, 140, 255, 255]
    assert bool(finite)
    assert not bool(programs._to_uint8(jnp.asarray([0.0, jnp.nan]))[1])
