"""The UMT5 encoder: buckets by hand, masking, padding, true shapes, equality with transformers."""

import dataclasses
import json
import math
import warnings
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from svgen.config import TEXT_TOKENS, TextSpec
from svgen.models.keys import IGNORED, Target, text_keys
from svgen.models.text_encoder import TextEncoder, relative_buckets
from svgen.tokenizer import bucket_length

TINY = TextSpec(vocabulary=64, width=24, mlp_width=40, heads=3, head_dim=8, layers=2)
UMT5_XXL = TextSpec(
    vocabulary=256384, width=4096, mlp_width=10240, heads=64, head_dim=64, layers=24
)
UMT5_XXL_PARAMETERS = 5_680_910_336
UMT5_XXL_TENSORS = 242
PADDING_TOLERANCE = 1e-5  # of outputs of unit mean square: float32 sums in another order
BF16_TOLERANCE = 0.1  # 2 layers of 8-bit mantissas (2**-8 each) around outputs up to about 4
PARITY = 2e-4  # of the value range of the reference


# (key - query, bucket) for 32 buckets and distance 128: up to 7 exactly, then
# 8 + floor(8 * log(d / 8) / log(16)), at most 15; keys after the query add 16.
BY_HAND = [
    *[(0, 0), (-1, 1), (-7, 7), (-8, 8), (-11, 8), (-12, 9), (-15, 9), (-16, 10), (-31, 11)],
    *[(-32, 12), (-63, 13), (-64, 14), (-90, 14), (-91, 15), (-128, 15), (-500, 15)],
    *[(1, 17), (7, 23), (8, 24), (16, 26), (64, 30), (128, 31), (511, 31)],
]


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(scope="module")
def encoder() -> TextEncoder:
    return lively(TextEncoder(TINY, dtype=jnp.float32, rngs=nnx.Rngs(0)))


def lively(encoder: TextEncoder) -> TextEncoder:
    """Enlarge the distance bias and roughen the norms, which start with little or no effect."""
    keys = iter(jax.random.split(jax.random.key(7), 4))
    for module, name in (
        (encoder, "norm"),
        (encoder.layers, "attention_norm"),
        (encoder.layers, "mlp_norm"),
    ):
        scale = getattr(module, name)
        noise = jax.random.uniform(next(keys), scale.shape, minval=0.5, maxval=1.5)
        setattr(module, name, nnx.Param(noise.astype(scale.dtype)))
    bias = encoder.layers.distance_bias
    noise = jax.random.normal(next(keys), bias.shape)
    encoder.layers.distance_bias = nnx.Param(noise.astype(bias.dtype))
    return encoder


@jax.jit
def run(encoder: TextEncoder, ids: jax.Array, lengths: jax.Array) -> jax.Array:
    return encoder(ids, lengths)


def padded(rows: list[list[int]], length: int, filler: int = 0) -> tuple[jax.Array, jax.Array]:
    ids = np.full((len(rows), length), filler, np.int32)
    for target, row in zip(ids, rows, strict=True):
        target[: len(row)] = row
    return jnp.asarray(ids), jnp.asarray([len(row) for row in rows], jnp.int32)


def encode(encoder: TextEncoder, rows: list[list[int]], length: int, filler: int = 0) -> np.ndarray:
    return np.asarray(run(encoder, *padded(rows, length, filler)))


def test_buckets_when_small_match_a_drawn_matrix():
    # rows are queries, columns keys; 8 buckets: 0-3 for keys at or before the query, 4-7 after it.
    expected = [
        [0, 5, 6, 6, 7],
        [1, 0, 5, 6, 6],
        [2, 1, 0, 5, 6],
        [2, 2, 1, 0, 5],
        [3, 2, 2, 1, 0],
    ]
    assert relative_buckets(5, 8, 8).tolist() == expected


@pytest.mark.parametrize(
    ("distance", "bucket"),
    BY_HAND,
)
def test_buckets_at_umt5_sizes_match_the_formula_by_hand(distance, bucket):
    table = relative_buckets(TEXT_TOKENS, 32, 128)
    query = max(0, -distance)
    assert table[query, query + distance] == bucket


@pytest.mark.parametrize(("buckets", "distance"), [(2, 128), (3, 128), (32, 8)])
def test_buckets_when_the_scheme_is_impossible_are_refused(buckets, distance):
    with pytest.raises(ValueError, match="buckets up to distance"):
        relative_buckets(4, buckets, distance)


def test_padding_ids_when_changed_change_nothing(encoder):
    rows = [[5, 9, 33, 1], [1]]
    plain, filled = encode(encoder, rows, 64), encode(encoder, rows, 64, filler=17)
    np.testing.assert_array_equal(plain, filled)
    longer, _ = padded(rows, 64, filler=17)
    unmasked = np.asarray(run(encoder, longer, jnp.asarray([64, 64], jnp.int32)))
    assert np.abs(unmasked[0, :4] - plain[0, :4]).max() > 0.01  # the mask is what did it


def test_bucket_when_longer_gives_the_same_rows(encoder):
    rows = [list(range(2, 50)), [7, 1]]
    short, long = encode(encoder, rows, 64), encode(encoder, rows, TEXT_TOKENS)
    assert short.std() > 0.1
    np.testing.assert_allclose(long[:, :64], short, atol=PADDING_TOLERANCE, rtol=0)
    assert not long[:, 64:].any()


def test_rows_past_the_true_length_are_zero(encoder):
    text = encode(encoder, [[5, 9, 33, 1], [1]], 64, filler=3)
    assert text.dtype == np.float32
    assert not text[0, 4:].any()
    assert not text[1, 1:].any()
    assert text[0, :4].all(axis=-1).all()


def test_row_of_length_zero_is_zero_and_finite(encoder):
    assert not encode(encoder, [[], [4]], 64)[0].any()


def test_rows_of_a_batch_do_not_depend_on_each_other(encoder):
    both = encode(encoder, [[5, 9, 33, 1], [8, 2, 1]], 64)
    alone = encode(encoder, [[8, 2, 1]], 64)
    np.testing.assert_allclose(both[1:], alone, atol=PADDING_TOLERANCE, rtol=0)


def test_order_of_tokens_changes_the_text_only_through_the_distance_bias(encoder):
    forward, backward = encode(encoder, [[5, 9, 33]], 64), encode(encoder, [[33, 9, 5]], 64)
    assert np.abs(forward[0, :3] - backward[0, 2::-1]).max() > 0.01
    blind = nnx.clone(encoder)
    blind.layers.distance_bias = nnx.Param(jnp.zeros_like(encoder.layers.distance_bias[...]))
    forward, backward = encode(blind, [[5, 9, 33]], 64), encode(blind, [[33, 9, 5]], 64)
    np.testing.assert_allclose(forward[0, :3], backward[0, 2::-1], atol=PADDING_TOLERANCE)


def test_every_leaf_changes_the_text(encoder):
    rows = [[5, 9, 33, 1]]
    plain = encode(encoder, rows, 64)
    for path, leaf in nnx.to_flat_state(nnx.state(encoder)):
        state = nnx.state(encoder)
        other = {path: leaf.replace(jnp.flip(leaf[...], axis=-1))}
        changed = nnx.clone(encoder)
        nnx.update(changed, nnx.from_flat_state({**dict(nnx.to_flat_state(state)), **other}))
        assert np.abs(encode(changed, rows, 64) - plain).max() > 1e-3, path


def test_bfloat16_weights_stay_near_float32(encoder):
    low = nnx.clone(encoder)
    nnx.update(low, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), nnx.state(low)))
    exact, text = encode(encoder, [[5, 9, 33, 1]], 64), encode(low, [[5, 9, 33, 1]], 64)
    assert text.dtype == np.float32
    np.testing.assert_allclose(text, exact, atol=BF16_TOLERANCE)


def abstract(spec: TextSpec) -> TextEncoder:
    return nnx.eval_shape(lambda: TextEncoder(spec, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))


def test_depth_does_not_change_the_size_of_the_program():
    def program(layers: int) -> int:
        spec = dataclasses.replace(TINY, layers=layers)
        model = nnx.eval_shape(lambda: TextEncoder(spec, dtype=jnp.float32, rngs=nnx.Rngs(0)))
        ids, lengths = padded([[1, 2]], 64)
        return len(run.lower(model, ids, lengths).as_text().splitlines())

    assert program(2) == program(24)


def leaves(model: TextEncoder) -> dict[tuple, tuple[int, ...]]:
    return {path: leaf.shape for path, leaf in nnx.to_flat_state(nnx.state(model))}


def test_bfloat16_layers_are_never_all_copied_to_float32():
    spec = dataclasses.replace(TINY, width=256, mlp_width=512, layers=16)
    memory = run.lower(abstract(spec), *padded([[1, 2]], 64)).compile().memory_analysis()
    assert memory.temp_size_in_bytes < memory.argument_size_in_bytes / 2


def test_true_size_has_umt5_xxl_shapes_and_parameters():
    model = abstract(UMT5_XXL)
    shapes = leaves(model)
    assert sum(math.prod(shape) for shape in shapes.values()) == UMT5_XXL_PARAMETERS
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype("bfloat16")}
    assert shapes["embedding",] == (256384, 4096)
    assert shapes["layers", "distance_bias"] == (24, 32, 64)
    ids = jax.ShapeDtypeStruct((2, TEXT_TOKENS), jnp.int32)
    text = jax.eval_shape(run, model, ids, jax.ShapeDtypeStruct((2,), jnp.int32))
    assert (text.shape, text.dtype) == ((2, TEXT_TOKENS, 4096), jnp.float32)


def test_keys_fill_every_part_of_every_leaf_once():
    shapes = leaves(abstract(UMT5_XXL))
    keys = text_keys(UMT5_XXL)
    required = [target for target in keys.values() if not target.optional]
    assert len(required) == UMT5_XXL_TENSORS
    filled = Counter((target.path, target.layer) for target in required)
    expected = {
        (path, layer)
        for path, shape in shapes.items()
        for layer in (range(shape[0]) if path[0] == "layers" else (None,))
    }
    assert filled == Counter(expected)
    aliases = {name: target.path for name, target in keys.items() if target.optional}
    assert aliases == {"encoder.embed_tokens.weight": ("embedding",)}


def fill(model: TextEncoder, tensors: dict[str, np.ndarray], keys: dict[str, Target]) -> None:
    """Put upstream tensors into a model, with no loader in between."""
    stacks: dict[tuple, dict] = {}
    for name, tensor in tensors.items():
        target = keys[name]
        tensor = tensor if target.axes is None else tensor.transpose(target.axes)
        stacks.setdefault(target.path, {})[target.layer] = tensor
    flat = {}
    for path, leaf in nnx.to_flat_state(nnx.state(model)):
        parts = stacks.pop(path)
        value = parts[None] if None in parts else np.stack([parts[i] for i in range(len(parts))])
        assert value.shape == leaf.shape, path
        flat[path] = leaf.replace(jnp.asarray(value))
    assert not stacks
    nnx.update(model, nnx.from_flat_state(flat))


def reference(config: dict, folder):
    """Build a random UMT5EncoderModel whose every tensor matters, and save it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch = pytest.importorskip("torch")
        transformers = pytest.importorskip("transformers")
        torch.manual_seed(0)
        model = transformers.UMT5EncoderModel(transformers.UMT5Config(**config)).eval()
        with torch.no_grad():
            for name, tensor in model.named_parameters():
                if "norm" in name:
                    tensor.uniform_(0.5, 1.5)
                elif "relative" in name:
                    tensor.normal_(0, 1)
        model.save_pretrained(folder)
    return torch, model


@pytest.mark.parity
@pytest.mark.parametrize(
    "sizes",
    [
        {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 4, "num_layers": 2},
        {"d_model": 48, "d_ff": 40, "d_kv": 16, "num_heads": 2, "num_layers": 4}
        | {"relative_attention_num_buckets": 16, "relative_attention_max_distance": 64},
        {"d_model": 40, "d_ff": 96, "d_kv": 12, "num_heads": 5, "num_layers": 3}
        | {"relative_attention_num_buckets": 20, "relative_attention_max_distance": 200},
        {"d_model": 64, "d_ff": 128, "d_kv": 64, "num_heads": 1, "num_layers": 1}
        | {"relative_attention_num_buckets": 9, "layer_norm_epsilon": 1e-5},
    ],
    ids=["4heads", "16buckets", "5heads", "1head"],
)
def test_text_equals_transformers(sizes, tmp_path):
    from safetensors.numpy import load_file

    torch, model = reference({"vocab_size": 96, **sizes}, tmp_path)
    spec = TextSpec.from_config(json.loads((tmp_path / "config.json").read_text()))
    tensors = load_file(tmp_path / "model.safetensors")
    keys = text_keys(spec)
    missing = {name for name, target in keys.items() if not target.optional} - set(tensors)
    assert (missing, set(tensors) - set(keys), IGNORED["text_encoder"]) == (set(), set(), ())
    ours = TextEncoder(spec, dtype=jnp.float32, rngs=nnx.Rngs(1))
    fill(ours, tensors, keys)

    rng = np.random.default_rng(0)
    rows = [rng.integers(2, 96, n).tolist() for n in (1, 4, 63, 200, TEXT_TOKENS)]
    ids, lengths = padded(rows, TEXT_TOKENS)
    mask = torch.arange(TEXT_TOKENS)[None] < torch.tensor(np.array(lengths))[:, None]
    with torch.no_grad():
        theirs = model(torch.tensor(np.array(ids)), mask.long()).last_hidden_state
    theirs = (theirs * mask[..., None]).numpy()
    span = theirs.max() - theirs.min()
    error = np.abs(np.asarray(run(ours, ids, lengths)) - theirs).max() / span
    print(f"\nmax difference / range: {error:.2e} at {TEXT_TOKENS}")
    assert error <= PARITY
    for row, text in zip(rows, theirs, strict=True):
        short = encode(ours, [row], bucket_length(len(row)))[0]
        error = np.abs(short - text[: len(short)]).max() / span
        print(f"max difference / range: {error:.2e} for {len(row)} tokens at {len(short)}")
        assert error <= PARITY


@pytest.mark.parity
@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (16, 64), (20, 200), (9, 128)])
def test_buckets_equal_transformers_at_every_distance(buckets, distance, tmp_path):
    config = {"vocab_size": 8, "d_model": 8, "d_ff": 8, "d_kv": 4, "num_heads": 2, "num_layers": 1}
    config |= {"relative_attention_num_buckets": buckets}
    config |= {"relative_attention_max_distance": distance}
    torch, model = reference(config, tmp_path)
    attention = model.encoder.block[0].layer[0].SelfAttention
    position = torch.arange(TEXT_TOKENS)
    theirs = attention._relative_position_bucket(position[None, :] - position[:, None])
    np.testing.assert_array_equal(relative_buckets(TEXT_TOKENS, buckets, distance), theirs.numpy())
