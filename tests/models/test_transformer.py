"""The transformer's shapes, names, positions and text, each against something written out here.

Equality with diffusers is tested on golden values elsewhere.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from svgen.attention.attend import Attend, dense
from svgen.config import TEXT_TOKENS, TransformerSpec
from svgen.kernels.heads import rms_norm, rotate
from svgen.models.keys import IGNORED, transformer_keys
from svgen.models.layers import (
    layer_norm,
    rotary_angles,
    rotary_split,
    time_features,
)
from svgen.models.transformer import Layer, Transformer

WAN_1_3B = TransformerSpec(heads=12, head_dim=128, layers=30, mlp_width=8960)
WAN_14B = TransformerSpec(heads=40, head_dim=128, layers=40, mlp_width=13824)
TINY = TransformerSpec(
    heads=3,
    head_dim=12,
    layers=2,
    mlp_width=40,
    in_channels=4,
    out_channels=4,
    text_width=20,
    frequency_width=16,
)
PLAIN = dataclasses.replace(TINY, cross_norm=False, patch=(1, 1, 1))
SUMS = 2e-5  # outputs of size 1 after a few float32 sums of tens of terms, in another order
BF16 = 2.0**-8


def abstract(spec: TransformerSpec, dtype: jnp.dtype = jnp.bfloat16) -> Transformer:
    return nnx.eval_shape(lambda: Transformer(spec, dtype=dtype, rngs=nnx.Rngs(0)))


def leaves(model: nnx.Module) -> dict[tuple, nnx.Variable]:
    return dict(nnx.to_flat_state(nnx.state(model)))


def filled(
    spec: TransformerSpec, make: Callable[[tuple, tuple[int, ...]], np.ndarray], dtype: jnp.dtype
) -> Transformer:
    """A transformer with the leaves that `make(path, shape)` gives."""
    graph, state = nnx.split(abstract(spec, dtype))
    flat = {
        path: leaf.replace(jnp.asarray(make(path, leaf.shape)).astype(leaf.dtype))
        for path, leaf in dict(nnx.to_flat_state(state)).items()
    }
    return nnx.merge(graph, nnx.from_flat_state(flat))


@cache
def lively(spec: TransformerSpec, dtype: jnp.dtype = jnp.float32) -> Transformer:
    """A random transformer in which every leaf matters, the same in each dtype but for rounding."""
    rng = np.random.default_rng(1)

    def make(path: tuple, shape: tuple[int, ...]) -> np.ndarray:
        noise = rng.standard_normal(shape, np.float32)
        if path[-1] == "kernel":
            return noise * np.float32(1.5 / math.sqrt(shape[-2]))
        return np.float32("scale" in path[-1]) + np.float32(0.3) * noise

    return filled(spec, make, dtype)


@partial(jax.jit, static_argnames=("attend",))
def run_with(
    model: Transformer, latents: jax.Array, time: jax.Array, text: jax.Array, attend: Attend
) -> tuple[jax.Array, object]:
    return model(latents, time, text, attend)


def run(model: Transformer, latents: jax.Array, time: jax.Array, text: jax.Array) -> jax.Array:
    return run_with(model, latents, time, text, dense)[0]


def draw(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def padded(seed: int, tokens: int, rows: int, batch: int = 1, width: int = 20) -> jax.Array:
    """Text of so many tokens, and zeros past them."""
    return jnp.pad(draw(seed, batch, tokens, width), ((0, 0), (0, rows - tokens), (0, 0)))


# True sizes


@pytest.mark.parametrize(
    ("spec", "parameters"),
    [(WAN_1_3B, 1_418_996_800), (WAN_14B, 14_288_491_584)],
    ids=["1.3b", "14b"],
)
def test_true_size_has_wans_number_of_parameters(spec, parameters):
    model = abstract(spec)
    assert sum(math.prod(leaf.shape) for leaf in leaves(model).values()) == parameters
    latents = jax.ShapeDtypeStruct((2, 21, 90, 160, 16), jnp.float32)
    text = jax.ShapeDtypeStruct((2, 64, 4096), jnp.float32)
    out = jax.eval_shape(run, model, latents, jax.ShapeDtypeStruct((2,), jnp.float32), text)
    assert (out.shape, out.dtype) == ((2, 21, 90, 160, 16), jnp.float32)


def test_weights_are_bfloat16_but_for_norms_modulation_and_time():
    exact = {path for path, leaf in leaves(abstract(WAN_14B)).items() if leaf.dtype != jnp.bfloat16}
    time = {(part, name) for part in ("time_in", "time_out") for name in ("kernel", "bias")}
    attentions = ("self_attention", "text_attention")
    scales = {("layers", part, f"{one}_scale") for part in attentions for one in "qk"}
    rest = {("layers", "norm_scale"), ("layers", "norm_bias"), ("layers", "modulation")}
    assert exact == time | scales | rest | {("modulation",)}
    assert {leaf.dtype for leaf in leaves(abstract(WAN_14B)).values()} == {
        jnp.dtype(jnp.bfloat16),
        jnp.dtype(jnp.float32),
    }


def upstream_names(spec: TransformerSpec) -> set[str]:
    """The tensors that diffusers' WanTransformer3DModel saves, written out."""
    both = ("weight", "bias")
    embedder = "condition_embedder"
    top = [f"{embedder}.time_embedder.linear_{i}" for i in (1, 2)]
    top += [f"{embedder}.text_embedder.linear_{i}" for i in (1, 2)]
    top += [f"{embedder}.time_proj", "patch_embedding", "proj_out"]
    names = {f"{name}.{one}" for name in top for one in both} | {"scale_shift_table"}
    for layer in range(spec.layers):
        names.add(f"blocks.{layer}.scale_shift_table")
        inside = ["ffn.net.0.proj", "ffn.net.2", *(["norm2"] if spec.cross_norm else [])]
        for part in ("attn1", "attn2"):
            inside += [f"{part}.to_{one}" for one in ("q", "k", "v", "out.0")]
            names |= {f"blocks.{layer}.{part}.norm_{one}.weight" for one in "qk"}
        names |= {f"blocks.{layer}.{name}.{one}" for name in inside for one in both}
    return names


@pytest.mark.parametrize(
    ("spec", "tensors"),
    [(WAN_14B, 1095), (WAN_1_3B, 825), (PLAIN, 15 + 2 * 25)],
    ids=["14b", "1.3b", "no text norm"],
)
def test_keys_are_upstreams_names_and_fill_every_leaf_once(spec, tensors):
    keys = transformer_keys(spec)
    assert len(keys) == tensors
    assert set(keys) == upstream_names(spec)
    assert IGNORED["transformer"] == ()
    assert not any(target.optional for target in keys.values())
    filled = Counter((target.path, target.layer) for target in keys.values())
    expected = {
        (path, layer)
        for path, leaf in leaves(abstract(spec)).items()
        for layer in (range(leaf.shape[0]) if path[0] == "layers" else (None,))
    }
    assert filled == Counter(expected)


@pytest.mark.parametrize("spec", [TINY, PLAIN], ids=["text norm", "no text norm"])
def test_every_leaf_changes_the_velocity(spec):
    model = lively(spec)
    latents, text = draw(1, 1, 2, 4, 6, 4), padded(2, 5, 9)
    time = jnp.asarray([500], jnp.float32)
    plain = run(model, latents, time, text)
    state = leaves(model)
    for path, leaf in state.items():
        changed = nnx.clone(model)
        other = leaf.replace(jnp.flip(leaf[...], axis=-1))
        nnx.update(changed, nnx.from_flat_state(state | {path: other}))
        difference = np.abs(run(changed, latents, time, text) - plain).max()
        if path[-2:] == ("k", "bias") and path[1] == "text_attention":
            assert difference > 1e-6, path  # a shift of all keys: only its norm is felt
        else:
            assert difference > 1e-4, path


# Depth and memory


def test_depth_does_not_change_the_size_of_the_program():
    def program(layers: int) -> int:
        model = abstract(dataclasses.replace(TINY, layers=layers))
        args = (draw(1, 1, 2, 4, 6, 4), jnp.zeros(1, jnp.float32), padded(2, 5, 9))
        return len(run_with.lower(model, *args, dense).as_text().splitlines())

    assert program(2) == program(20)


# Patches


def silent(spec: TransformerSpec) -> Transformer:
    """A transformer whose layers add nothing and whose patch projections are the identity."""

    def make(path: tuple, shape: tuple[int, ...]) -> np.ndarray:
        if path in (("patch_in", "kernel"), ("patch_out", "kernel")):
            return np.eye(*shape, dtype=np.float32)
        return np.zeros(shape, np.float32)

    return filled(spec, make, jnp.float32)


@pytest.mark.parametrize("patch", [(1, 1, 1), (1, 2, 2), (2, 3, 4)])
def test_patches_come_back_where_they_were(patch):
    """With layers that do nothing, tokens are only normed: each patch, by hand."""
    spec = dataclasses.replace(TINY, patch=patch, heads=8, layers=1)
    latents = draw(3, 2, 4, 6, 8, 4)
    out = run(silent(spec), latents, jnp.zeros(2, jnp.float32), padded(1, 2, 3, batch=2))
    assert out.shape == latents.shape
    t, h, w = patch
    expected = np.zeros(latents.shape)
    values = np.asarray(latents, np.float64)
    for b, f, y, x in np.ndindex(2, 4 // t, 6 // h, 8 // w):
        where = np.s_[b, f * t : f * t + t, y * h : y * h + h, x * w : x * w + w]
        token = np.zeros(spec.width)
        token[: values[where].size] = values[where].ravel()
        token = (token - token.mean()) / np.sqrt(token.var() + spec.eps)
        expected[where] = token[: values[where].size].reshape(values[where].shape)
    np.testing.assert_allclose(out, expected, atol=SUMS)


def test_output_channels_may_differ_from_input_channels():
    spec = dataclasses.replace(TINY, out_channels=6)
    out = run(lively(spec), draw(1, 1, 2, 4, 6, 4), jnp.zeros(1, jnp.float32), padded(2, 5, 9))
    assert out.shape == (1, 2, 4, 6, 6)


# Time and positions


def test_time_features_by_hand():
    found = np.asarray(time_features(jnp.asarray([0.0, 731.0], jnp.float32), 8))
    angles = [731.0 / 10000 ** (i / 4) for i in range(4)]  # 731, 73.1, 7.31, 0.731
    expected = [[1] * 4 + [0] * 4, [math.cos(a) for a in angles] + [math.sin(a) for a in angles]]
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=731 * 2.0**-23)


@pytest.mark.parametrize(
    ("head_dim", "pairs"),
    [(128, (22, 21, 21)), (12, (2, 2, 2)), (64, (12, 10, 10)), (18, (3, 3, 3)), (6, (1, 1, 1))],
)
def test_pairs_are_shared_among_the_axes_as_upstream_does(head_dim, pairs):
    side = 2 * (head_dim // 6)  # channels of rows and of columns
    assert pairs == ((head_dim - 2 * side) // 2, side // 2, side // 2)
    assert rotary_split(head_dim) == pairs


@pytest.mark.parametrize(("head_dim", "grid"), [(128, (3, 4, 5)), (12, (2, 1, 3)), (64, (5, 7, 2))])
def test_rotation_is_upstreams_through_the_reordering(head_dim, grid):
    """Upstream turns neighbours as complex numbers; here they lie half a head apart."""
    tokens, heads = math.prod(grid), 2
    x = np.random.default_rng(0).standard_normal((2, tokens, heads, head_dim))
    side = 2 * (head_dim // 6)
    turns = []
    for channels, axis in ((head_dim - 2 * side, 0), (side, 1), (side, 2)):
        position = np.indices(grid)[axis].ravel()
        frequency = 1 / 10000 ** (np.arange(0, channels, 2) / channels)
        turns.append(np.exp(1j * np.outer(position, frequency)))
    turns = np.concatenate(turns, axis=1)[None, :, None]
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * turns
    upstream = np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)

    order = np.arange(head_dim).reshape(-1, 2).T.ravel()  # 0 2 4 ... 1 3 5 ...
    angles = rotary_angles(grid, head_dim)
    assert (angles.shape, angles.dtype) == ((tokens, head_dim // 2), jnp.float32)
    ours = rotate(jnp.asarray(x[..., order], jnp.float32), jnp.cos(angles), jnp.sin(angles))
    np.testing.assert_allclose(ours, upstream[..., order], atol=SUMS)
    scores = [np.einsum("bnad,bmad->banm", one, one[::-1]) for one in (ours, upstream)]
    np.testing.assert_allclose(*scores, atol=SUMS * head_dim)


def test_reordering_of_projections_is_the_one_that_rotation_needs():
    spec = dataclasses.replace(TINY, heads=2, head_dim=6)
    order = [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    keys = transformer_keys(spec)
    for letter in "qk":
        vector = np.arange(12)
        for name in (f"to_{letter}.bias", f"norm_{letter}.weight"):
            target = keys[f"blocks.0.attn1.{name}"]
            moved = vector.reshape(target.split).transpose(target.axes).reshape(target.shape)
            assert moved.tolist() == order
        target = keys[f"blocks.0.attn1.to_{letter}.weight"]
        matrix = np.arange(144).reshape(12, 12)  # [out, in]
        moved = matrix.reshape(target.split).transpose(target.axes).reshape(target.shape)
        np.testing.assert_array_equal(moved, matrix[order].T)
        assert keys[f"blocks.0.attn2.to_{letter}.weight"].split is None  # text has no positions


def test_scores_depend_on_the_distance_only():
    q, k = draw(1, 12), draw(2, 12)
    grid = (4, 4, 4)
    angles = rotary_angles(grid, 12)
    both = [
        rotate(jnp.broadcast_to(one, (1, 64, 1, 12)), jnp.cos(angles), jnp.sin(angles))
        for one in (q, k)
    ]
    scores = np.einsum("nd,md->nm", *(np.asarray(one)[0, :, 0] for one in both))
    scores = scores.reshape(*grid, *grid)
    near = scores[0, 1, 0, 1, 3, 1]
    assert abs(scores[2, 0, 2, 3, 2, 3] - near) < SUMS
    assert abs(scores[2, 0, 2, 3, 3, 3] - near) > 100 * SUMS


# Norms


def test_norms_by_hand():
    x = jnp.asarray([[3, -4, 0, 1]], jnp.float32)
    mean_square = (9 + 16 + 0 + 1) / 4
    scale = jnp.asarray([1, 2, 3, 4], jnp.float32)
    expected = np.array([[3, -8, 0, 4]]) / math.sqrt(mean_square + 0.5)
    np.testing.assert_allclose(rms_norm(x, scale, 0.5), expected, rtol=1e-6)
    np.testing.assert_allclose(  # mean 0, variance 6.5
        layer_norm(x, 0.5), np.array([[3, -4, 0, 1]]) / math.sqrt(7), rtol=1e-6
    )
    shifted = layer_norm(x + jnp.float32(100), 0.5)
    np.testing.assert_allclose(shifted, layer_norm(x, 0.5), atol=100 * 2.0**-22)


def test_queries_are_normed_over_all_heads_together():
    spec = dataclasses.replace(TINY, heads=2, head_dim=6)
    part = Layer(spec, dtype=jnp.float32, rngs=nnx.Rngs(0)).self_attention
    x = draw(4, 1, 5, 12)
    q = np.asarray(part.queries(x))
    assert q.shape == (1, 2, 5, 6)
    np.testing.assert_allclose(np.square(q).mean(axis=(1, 3)), 1, atol=1e-3)
    assert np.abs(np.square(q).mean(axis=3) - 1).max() > 0.1  # one head alone is not


# Text


@pytest.mark.parametrize("rows", [8, 64])
def test_velocity_does_not_depend_on_how_far_text_is_padded(rows):
    model, latents = lively(TINY), draw(1, 1, 2, 4, 6, 4)
    time = jnp.asarray([731], jnp.float32)
    text = padded(2, 7, TEXT_TOKENS)
    plain = run(model, latents, time, text)
    np.testing.assert_allclose(run(model, latents, time, text[:, :rows]), plain, atol=SUMS)


def test_last_row_of_text_counts_as_padding():
    """It stands for every row up to 512, so a real token must not lie there."""
    model, latents = lively(TINY), draw(1, 1, 2, 4, 6, 4)
    time = jnp.asarray([731], jnp.float32)
    text = padded(2, 7, TEXT_TOKENS)
    plain = run(model, latents, time, text)
    assert np.abs(run(model, latents, time, text[:, :7]) - plain).max() > 100 * SUMS
    full = draw(2, 1, TEXT_TOKENS, 20)  # 512 tokens: the last row stands for itself alone
    changed = full.at[:, -1].set(0)
    both = [run(model, latents, time, one) for one in (full, changed)]
    assert np.abs(both[0] - both[1]).max() > 1e-7


def test_padding_takes_part_in_attention_as_upstream_has_it():
    """Zero rows become the text embedder's constant; without them the velocity is another."""
    model, latents = lively(TINY), draw(1, 1, 2, 4, 6, 4)
    time = jnp.asarray([731], jnp.float32)
    few = run(model, latents, time, padded(2, 7, 8))
    changed = padded(2, 7, 8).at[:, -1].set(1)
    assert np.abs(run(model, latents, time, changed) - few).max() > 100 * SUMS


# Batch, types, records


def test_rows_of_a_batch_do_not_depend_on_each_other():
    model = lively(TINY)
    latents, text = draw(1, 3, 2, 4, 6, 4), padded(2, 7, 9, batch=3)
    time = jnp.asarray([999, 500, 3], jnp.float32)
    together = run(model, latents, time, text)
    for row in range(3):
        one = slice(row, row + 1)
        alone = run(model, latents[one], time[one], text[one])
        np.testing.assert_allclose(together[one], alone, atol=SUMS)
    assert np.abs(together[0] - together[1]).max() > 100 * SUMS
    mixed = run(model, latents, time[::-1], text)
    assert np.abs(mixed - together)[[0, 2]].max() > 100 * SUMS  # time belongs to its row
    np.testing.assert_allclose(mixed[1], together[1], atol=SUMS)


@pytest.mark.parametrize("spec", [TINY, PLAIN], ids=["text norm", "no text norm"])
def test_bfloat16_stays_near_float32(spec):
    args = (draw(1, 1, 2, 4, 6, 4), jnp.asarray([731], jnp.float32), padded(2, 7, 9))
    exact, low = run(lively(spec), *args), run(lively(spec, jnp.bfloat16), *args)
    assert exact.dtype == low.dtype == jnp.float32
    difference = np.abs(exact - low).max() / np.abs(exact).max()
    assert 2.0**-12 < difference < 10 * BF16  # some ten roundings in a row, two layers deep


def test_records_of_attention_come_back_by_layer():
    model = lively(TINY)

    def attend(q, k, v, layer):
        return dense(q, k, v, layer)[0], {"layer": layer, "mean": q.mean(axis=(2, 3))}

    args = (draw(1, 2, 2, 4, 6, 4), jnp.zeros(2, jnp.float32), padded(2, 7, 9, batch=2))
    velocity, records = run_with(model, *args, attend)
    assert records["layer"].tolist() == [0, 1]
    assert records["mean"].shape == (2, 2, 3)
    np.testing.assert_allclose(velocity, run(model, *args), atol=SUMS)


def test_attention_gets_rotated_queries_and_keys_and_plain_values():
    def attend(q, k, v, layer):
        return jnp.zeros_like(v), (q, k, v)

    model = lively(dataclasses.replace(TINY, layers=1))
    latents = jnp.ones((1, 2, 4, 6, 4), jnp.float32)  # every token is the same
    args = (latents, jnp.zeros(1, jnp.float32), padded(2, 7, 9))
    _, records = run_with(model, *args, attend)
    q, k, v = (np.asarray(one)[0, 0].swapaxes(0, 1) for one in records)
    assert q.shape == k.shape == v.shape == (12, 3, 12)
    np.testing.assert_allclose(v, np.broadcast_to(v[:1], v.shape), atol=SUMS)
    angles = rotary_angles((2, 2, 3), 12)
    for one in (q, k):
        same = jnp.broadcast_to(one[:1], one.shape)[None]
        turned = rotate(same, jnp.cos(angles), jnp.sin(angles))
        np.testing.assert_allclose(turned[0], one, atol=SUMS)
        assert np.abs(one - one[:1]).max() > 0.1
