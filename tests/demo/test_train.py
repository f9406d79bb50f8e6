"""The trainers of the demo: gradients, a loss that falls, states that can be taken up again."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from svgen.attention.attend import dense
from svgen.demo import scenes, train_flow, train_vae
from svgen.demo.basis import Basis
from svgen.demo.sizes import TEXT, TRANSFORMER, VAE
from svgen.demo.store import load_tree, save_tree
from svgen.demo.vocabulary import write_tokenizer
from svgen.models.vae import Vae
from svgen.tokenizer import Tokenizer


@pytest.fixture(autouse=True)
def standard():
    """Optax leaves its promotions to JAX."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


SMALL_TEXT = replace(TEXT, width=16, mlp_width=16, heads=2, head_dim=8, layers=1)
SMALL = replace(TRANSFORMER, heads=2, head_dim=8, layers=4, mlp_width=32, text_width=16)


def test_attention_has_the_gradient_of_dense_attention():
    rng = np.random.default_rng(0)
    q, k, v, w = (jnp.asarray(rng.normal(size=(2, 3, 12, 8)), jnp.float32) for _ in range(4))
    layer = jnp.zeros((), jnp.int32)

    def pulled(attend, parts):
        return (attend(*parts, layer)[0] * w).sum()

    ours, theirs = (
        jax.grad(partial(pulled, attend))((q, k, v))
        for attend in (train_flow.attend_head_by_head, dense)
    )
    for mine, other in zip(ours, theirs, strict=True):
        assert jnp.abs(other).max() > 0.1
        np.testing.assert_allclose(mine, other, rtol=0, atol=2e-6)


def test_flow_learns_one_batch(tmp_path):
    networks, weights = train_flow.new_networks(SMALL_TEXT, SMALL, 0)
    transform = train_flow.optimizer(80, 1e-2)
    average = jax.tree.map(jnp.array, weights)
    state = train_flow.TrainState(weights, average, transform.init(weights))
    rng = np.random.default_rng(1)
    latents = np.repeat(rng.normal(size=(1, 2, 4, 4, 8)), 4, axis=0).astype(np.float32)
    some = [scenes.sample(rng) for _ in range(4)]
    write_tokenizer(tmp_path / "tokenizer")
    captioner = train_flow.Captioner(Tokenizer.load(tmp_path), 0)
    stream = train_flow.batches(latents, some, captioner, 4)
    losses = []
    for step in range(80):
        key = jax.random.key(step)
        done = np.float32(step)
        state, value = train_flow.train_step(networks, transform, state, next(stream), key, done)
        losses.append([float(part) for part in value])
    assert (np.mean(losses[-5:], axis=0) < 0.8 * np.mean(losses[:5], axis=0)).all()
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), state.average, state.weights)
    assert max(jax.tree.leaves(moved)) > 0, "the average lags behind"


def test_a_tenth_of_the_captions_is_empty(tmp_path):
    write_tokenizer(tmp_path / "tokenizer")
    captioner = train_flow.Captioner(Tokenizer.load(tmp_path), 0)
    rng = np.random.default_rng(2)
    ids, lengths = captioner([scenes.sample(rng) for _ in range(600)])
    assert ids.shape == (600, train_flow.TEXT_ROWS)
    assert lengths.max() < train_flow.TEXT_ROWS, "one row of padding is left"
    assert 0.06 < (lengths == 1).mean() < 0.14


def test_places_run_from_corner_to_corner():
    places = train_flow.places((3, 4, 8), (1, 2, 2))
    assert places.shape == (3 * 2 * 4, 3)
    assert places[0].tolist() == [-1, -1, -1]
    assert places[-1].tolist() == [1, 1, 1]
    assert places[1] - places[0] == pytest.approx([0, 0, 2 / 3])


@pytest.fixture(scope="module")
def basis() -> Basis:
    rng = np.random.default_rng(0)
    return Basis.fit(np.stack([scenes.render(scenes.sample(rng)) for _ in range(4)]), 8)


QUICK = replace(VAE, base_width=4, multipliers=(1, 1), temporal_downsample=(True,))  # halves all


def test_later_chunks_may_go_through_the_vae_as_one():
    graph, weights = nnx.split(Vae(QUICK, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    frames = jnp.asarray(np.random.default_rng(0).uniform(-1, 1, (1, 5, 8, 8, 3)), jnp.float32)

    @jax.jit
    def both(weights):
        vae = nnx.merge(graph, weights)
        z = vae.encode(frames)
        at_once = train_vae.encode_at_once(vae, frames), train_vae.decode_at_once(vae, z)
        return (z, vae.decode(z)), at_once

    for chunked, whole in zip(*both(weights), strict=True):
        assert np.ptp(chunked[:, 1:]) > 0.1
        np.testing.assert_allclose(whole, chunked, rtol=0, atol=1e-5)


def test_vae_learns_to_write_and_draw_the_latents(basis):
    graph, weights = nnx.split(Vae(QUICK, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    frames, latents = next(train_vae.crops(basis, 0, 2, side=32, frames=9))
    crop = train_vae.Crops(frames[:, :5, :8, :8], latents[:, :3, :4, :4])
    transform = train_vae.optimizer(30, 1e-2)
    moments, losses = transform.init(weights), []
    for step in range(30):
        key = jax.random.key(step)
        weights, moments, loss = train_vae.train_step(graph, transform, weights, moments, crop, key)
        losses.append(float(loss))
    assert losses[-1] < 0.8 * losses[0]


def test_crops_come_from_the_seed_with_their_latents(basis):
    sizes = {"side": 48, "frames": 17}
    first, again = (next(train_vae.crops(basis, 3, 2, **sizes)) for _ in range(2))
    assert np.array_equal(first.frames, again.frames)
    assert not np.array_equal(first.frames, next(train_vae.crops(basis, 4, 2, **sizes)).frames)
    assert first.frames.shape == (2, 17, 48, 48, 3)
    assert -1 <= first.frames.min() < first.frames.max() <= 1
    pixels = np.round((first.frames[1] + 1) * 127.5).astype(np.uint8)
    assert np.array_equal(first.latents[1], basis.latents(pixels))


def test_state_is_stored_whole_and_checked(tmp_path):
    tree = {"a": jnp.arange(6.0).reshape(2, 3), "b": (jnp.ones((), jnp.int32),)}
    path = tmp_path / "state.safetensors"
    save_tree(path, tree, steps=7)
    loaded, numbers = load_tree(path, jax.tree.map(jnp.zeros_like, tree))
    assert numbers == {"steps": 7}
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), tree, loaded))
    with pytest.raises(ValueError, match="other sizes"):
        load_tree(path, {"a": jnp.zeros((3, 2)), "b": (jnp.ones((), jnp.int32),)})
    assert [file.name for file in tmp_path.iterdir()] == ["state.safetensors"]
