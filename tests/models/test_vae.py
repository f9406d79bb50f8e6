"""The video autoencoder: shapes, causality, chunks, key names, and equality with diffusers."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from svgen.config import VaeSpec
from svgen.models.keys import vae_keys
from svgen.models.vae import (
    CausalConvolution,
    Norm,
    Vae,
    attend_frame,
    denormalize_latents,
    normalize_latents,
    split_frames,
)

PARITY = 2e-4  # of the value range: the largest difference from diffusers allowed, both in float32
EXACT = 1e-5  # float32 sums in another order, values of order 1


def make_spec(base=4, z=2, multipliers=(1, 2), blocks=1, temporal=(True,)):
    return VaeSpec(
        base_width=base,
        z_channels=z,
        multipliers=multipliers,
        blocks=blocks,
        temporal_downsample=temporal,
        latents_mean=tuple(0.1 * i for i in range(z)),
        latents_std=tuple(1.0 + i for i in range(z)),
    )


SMALL = make_spec(multipliers=(1, 2, 2), temporal=(True, True))
WAN = make_spec(96, 16, (1, 2, 4, 4), 2, (False, True, True))


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def abstract_vae(spec):
    return nnx.eval_shape(lambda: Jitted(spec, rngs=nnx.Rngs(0)))


class Jitted(Vae):
    """A `Vae` whose chunks are compiled once per shape, as the real programs are."""

    decode_first = nnx.jit(Vae.decode_first)
    decode_next = nnx.jit(Vae.decode_next)
    encode_first = nnx.jit(Vae.encode_first)
    encode_next = nnx.jit(Vae.encode_next)


def random_vae(spec, dtype=jnp.float32):
    """Fill a model with numbers of the size that training leaves, without compiling anything."""
    vae = nnx.eval_shape(lambda: Jitted(spec, dtype=dtype, rngs=nnx.Rngs(0)))
    generator = np.random.default_rng(0)

    def fill(leaf):
        if leaf.ndim == 1:
            return jnp.asarray(1 + 0.1 * generator.standard_normal(leaf.shape), leaf.dtype)
        scale = np.prod(leaf.shape[:-1]) ** -0.5
        return jnp.asarray(scale * generator.standard_normal(leaf.shape), leaf.dtype)

    nnx.update(vae, jax.tree.map(fill, nnx.state(vae)))
    return vae


@pytest.fixture(scope="module")
def vae():
    return random_vae(SMALL)


def shape_of(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def test_decode_shapes_when_true_size():
    vae = abstract_vae(WAN)
    frame, cache = nnx.eval_shape(lambda m, z: m.decode_first(z), vae, shape_of(1, 1, 60, 104, 16))
    frames, after = nnx.eval_shape(
        lambda m, z, c: m.decode_next(z, c), vae, shape_of(1, 1, 60, 104, 16), cache
    )
    assert frame.shape == (1, 1, 480, 832, 3)
    assert frames.shape == (1, 4, 480, 832, 3) and frames.dtype == jnp.float32
    assert jax.tree.map(lambda x: x.shape, after) == jax.tree.map(lambda x: x.shape, cache)


def test_encode_shapes_when_true_size():
    vae = abstract_vae(WAN)
    (mean, _), cache = nnx.eval_shape(
        lambda m, x: m.encode_first(x), vae, shape_of(1, 1, 480, 832, 3)
    )
    (later, spread), after = nnx.eval_shape(
        lambda m, x, c: m.encode_next(x, c), vae, shape_of(1, 4, 480, 832, 3), cache
    )
    assert mean.shape == later.shape == spread.shape == (1, 1, 60, 104, 16)
    assert jax.tree.map(lambda x: x.shape, after) == jax.tree.map(lambda x: x.shape, cache)


def test_parameters_when_true_size():
    state = nnx.state(abstract_vae(WAN))
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) == 126_892_531  # as diffusers counts


@pytest.mark.parametrize(
    "spec", [WAN, SMALL, make_spec(temporal=(False,)), make_spec(multipliers=(2,), temporal=())]
)
def test_keys_cover_every_leaf_once(spec):
    paths = [target.path for target in vae_keys(spec).values()]
    leaves = [path for path, _ in nnx.to_flat_state(nnx.state(abstract_vae(spec)))]
    assert len(set(paths)) == len(paths)
    assert set(paths) == set(leaves)


def test_encode_and_decode_count_frames_when_latents_are_odd(vae):
    z = vae.encode(draw(1, 2, 9, 12, 20, 3))
    assert z.shape == (2, 3, 3, 5, 2)
    assert vae.decode(z).shape == (2, 9, 12, 20, 3)


def test_encode_rejects_frames_that_fill_no_chunk(vae):
    with pytest.raises(ValueError, match="8 frames"):
        vae.encode(draw(1, 1, 8, 8, 8, 3))


def test_decode_is_causal_and_keeps_videos_apart(vae):
    z = draw(2, 2, 4, 3, 5, 2)
    difference = jnp.abs(vae.decode(z) - vae.decode(z.at[1, 2].add(1.0))).max(axis=(2, 3, 4))
    assert not difference[0].any()
    assert not difference[1, :5].any()
    assert (difference[1, 5:] > 1e-3).all()  # and remembers


def test_encode_is_causal_and_keeps_videos_apart(vae):
    frames = draw(3, 2, 13, 12, 20, 3)
    difference = jnp.abs(vae.encode(frames) - vae.encode(frames.at[1, 5].add(1.0)))
    difference = difference.max(axis=(2, 3, 4))
    assert not difference[0].any()
    assert not difference[1, :2].any()
    assert (difference[1, 2:] > 1e-3).all()


def test_decode_clips_when_weights_are_large():
    vae = random_vae(SMALL)
    vae.decoder.layers[-1].conv.bias[...] = jnp.full((3,), 5.0)
    np.testing.assert_array_equal(vae.decode(draw(6, 2, 1, 3, 5, 2)), jnp.ones((2, 1, 12, 20, 3)))


def test_decode_computes_in_bfloat16_when_asked():
    vae = random_vae(SMALL, jnp.bfloat16)
    frames, cache = vae.decode_first(draw(7, 1, 1, 2, 2, 2))
    frames, _ = vae.decode_next(draw(8, 1, 1, 2, 2, 2), cache)
    assert frames.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(cache)} == {jnp.dtype(jnp.bfloat16)}


def test_causal_convolution_remembers_two_frames():
    conv = CausalConvolution(1, 1, size=1, dtype=jnp.float32, rngs=nnx.Rngs(0))
    conv.kernel[...] = jnp.asarray([100.0, 10.0, 1.0]).reshape(3, 1, 1, 1, 1)
    y, cache = conv(jnp.full((1, 1, 1, 1, 1), 1.0), None)
    assert y.ravel().tolist() == [1]
    y, cache = conv(jnp.asarray([2.0, 3.0]).reshape(1, 2, 1, 1, 1), cache)
    assert y.ravel().tolist() == [12, 123]
    y, cache = conv(jnp.full((1, 1, 1, 1, 1), 4.0), cache)
    assert y.ravel().tolist() == [234]
    assert cache.ravel().tolist() == [3, 4]


def test_attention_equals_softmax_when_queries_come_in_blocks(monkeypatch):
    q, k, v = draw(11, 3, 10, 4)
    scores = np.exp(np.asarray(q) @ np.asarray(k).T / 2)
    expected = scores @ np.asarray(v) / scores.sum(-1, keepdims=True)
    for block in (3, 5, 1024):
        monkeypatch.setattr("svgen.models.vae.QUERY_BLOCK", block)
        np.testing.assert_allclose(attend_frame(q, k, v), expected, atol=EXACT)


def test_split_frames_takes_first_channels_first():
    x = jnp.arange(8).reshape(1, 2, 1, 1, 4)
    assert split_frames(x).reshape(4, 2).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_norm_scales_to_unit_mean_square():
    norm = Norm(2, dtype=jnp.float32)
    y = norm(jnp.asarray([[3.0, 4.0], [0.0, 0.0]]))
    np.testing.assert_allclose(y, [[0.6 * 2**0.5, 0.8 * 2**0.5], [0, 0]], rtol=1e-6)


def test_normalize_latents_undoes_denormalize():
    z = jnp.asarray([[[[[1.0, 2.0]]]]])
    np.testing.assert_allclose(denormalize_latents(z, SMALL).ravel(), [1.0, 4.1], rtol=1e-6)
    np.testing.assert_allclose(normalize_latents(denormalize_latents(z, SMALL), SMALL), z)


PARITY_CASES = {
    "small": (SMALL, (3, 5, 7)),
    "wide": (make_spec(16, 4, (1, 2, 4, 4), 2, (False, True, True)), (3, 3, 2)),
    "one-temporal": (make_spec(6, 3, (1, 3), 2, (True,)), (5, 9, 4)),
    "first-temporal": (make_spec(10, 2, (2, 1, 2), 1, (True, False)), (3, 4, 5)),
    "spatial-only": (make_spec(8, 4, (1, 1, 2), 2, (False, False)), (5, 3, 5)),
}


@pytest.mark.parity
@pytest.mark.parametrize("name", PARITY_CASES)
def test_parity_with_diffusers(name):
    spec, (latent_frames, height, width) = PARITY_CASES[name]
    torch, theirs = upstream_vae(spec)
    ours = load(spec, theirs.state_dict())
    frames = 1 + (latent_frames - 1) * spec.frame_stride
    frames = draw(20, 2, frames, height * spec.stride, width * spec.stride, 3)
    z = 2 * draw(21, 2, latent_frames, height, width, spec.z_channels)
    with torch.inference_mode():
        posterior = theirs.encode(to_torch(torch, frames)).latent_dist
        decoded = theirs.decode(to_torch(torch, z)).sample
    assert_close(ours.encode(frames), posterior.mean)
    assert_close(ours.encode_first(frames[:, :1])[0][1], posterior.logvar[:, :, :1])
    assert_close(ours.decode(z), decoded)


def upstream_vae(spec):
    """Build diffusers' autoencoder with random weights that neither vanish nor reach the clip."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch = pytest.importorskip("torch")
        diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    model = diffusers.AutoencoderKLWan(
        base_dim=spec.base_width,
        z_dim=spec.z_channels,
        dim_mult=list(spec.multipliers),
        num_res_blocks=spec.blocks,
        temperal_downsample=list(spec.temporal_downsample),
        latents_mean=list(spec.latents_mean),
        latents_std=list(spec.latents_std),
    )
    for name, tensor in model.named_parameters():
        scale = 0.2 if tensor.ndim < 2 or "gamma" in name else (1 / tensor[0].numel()) ** 0.5
        torch.nn.init.normal_(tensor, mean=1.0 if "gamma" in name else 0.0, std=scale)
    torch.nn.init.normal_(model.decoder.conv_out.weight, std=0.02)
    return torch, model.eval()


def load(spec, tensors):
    """Fill a `Vae` from upstream tensors through the key map; every name must be used."""
    keys = vae_keys(spec)
    assert set(keys) == set(tensors)
    vae = abstract_vae(spec)
    state = nnx.state(vae)
    leaves = dict(nnx.to_flat_state(state))
    for name, target in keys.items():
        value = tensors[name].numpy()
        value = value if target.axes is None else value.transpose(target.axes)
        value = value if target.shape is None else value.reshape(target.shape)
        assert value.shape == leaves[target.path].shape, name
        leaves[target.path] = leaves[target.path].replace(jnp.asarray(value))
    nnx.update(vae, nnx.from_flat_state(leaves))
    return vae


def to_torch(torch, x):
    return torch.from_numpy(np.array(x)).permute(0, 4, 1, 2, 3)


def assert_close(ours, theirs):
    theirs = theirs.permute(0, 2, 3, 4, 1).numpy()
    assert ours.shape == theirs.shape
    span = theirs.max() - theirs.min()
    assert span > 0.1
    assert np.abs(np.asarray(ours) - theirs).max() <= PARITY * span
