"""Strict loading: everything of a checkpoint is used once, and every fault is one line of text."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from svgen import checkpoint
from svgen.checkpoint import load_module, read_json, read_specs
from svgen.errors import DownloadError
from svgen.models.keys import Target, text_keys, transformer_keys, vae_keys
from svgen.programs import abstract_parts
from svgen.sharding import WHOLE, weight_axis
from svgen.tensors import Stored, read_numbers, read_part, stored_shape
from tests.helpers import ROOT

TINY = ROOT / "tests" / "golden" / "tiny"
PARTS = ("text_encoder", "transformer", "vae")
STEM = {"text_encoder": "model"}
SHARED, ALIAS = "shared.weight", "encoder.embed_tokens.weight"
ROUNDING = {  # largest relative error of one rounding, 2 to the minus (bits of the mantissa + 1)
    np.float64: 2.0**-24,  # the leaf is float32
    np.float32: 0.0,
    np.float16: 2.0**-11,
    jnp.bfloat16: 2.0**-8,
    jnp.float8_e4m3fn: 2.0**-4,
    jnp.float8_e5m2: 2.0**-3,
}
# Leaves that are small, and the embedding's 51 words: each chip's part may be read with the rest.
SMALL = {"patch_in", "modulation", "bias", "embedding"}
TURNED = {("self_attention", letter, "kernel") for letter in "qk"}  # rows of a head change places
SMALLEST = {np.float16: 2.0**-24, jnp.float8_e4m3fn: 2.0**-9, jnp.float8_e5m2: 2.0**-16}


@pytest.fixture
def folder(tmp_path) -> Path:
    """A copy of the small checkpoint, to be broken."""
    return Path(shutil.copytree(TINY, tmp_path / "tiny"))


def single(folder: Path, part: str) -> Path:
    return folder / part / f"{STEM.get(part, 'diffusion_pytorch_model')}.safetensors"


def index_of(folder: Path, part: str) -> Path:
    return single(folder, part).with_suffix(".safetensors.index.json")


def keys_of(folder: Path, part: str) -> dict:
    specs = read_specs(folder)
    if part == "text_encoder":
        return text_keys(specs.text)
    return transformer_keys(specs.transformer) if part == "transformer" else vae_keys(specs.vae)


def load(folder: Path, part: str, dtype: jnp.dtype = jnp.float32) -> nnx.Module:
    abstract = abstract_of(read_specs(folder), dtype)[part]
    return load_module(folder, part, abstract, keys_of(folder, part))


abstract_of = cache(abstract_parts)


def leaves(module: nnx.Module) -> dict[tuple, np.ndarray]:
    return {path: np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(nnx.state(module))}


def same(first: nnx.Module, second: nnx.Module) -> bool:
    one, other = leaves(first), leaves(second)
    assert one.keys() == other.keys()
    return all(np.array_equal(one[path], other[path], equal_nan=True) for path in one)


def rewrite(folder: Path, part: str, change: Callable[[dict], None]) -> dict[str, np.ndarray]:
    """Change the tensors of an unsharded part."""
    tensors = load_file(single(folder, part))
    change(tensors)
    save_file(tensors, single(folder, part))
    return tensors


def shard(folder: Path, part: str, shards: int = 3) -> dict[str, str]:
    """Split the one file of a part into shards with an index; returns its weight map."""
    path = single(folder, part)
    tensors = load_file(path)
    files = [f"{path.stem}-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    mapping = {name: files[i % shards] for i, name in enumerate(sorted(tensors))}
    for file in files:
        chosen = {name: tensors[name] for name in tensors if mapping[name] == file}
        save_file(chosen, path.with_name(file), {"format": "pt"})
    path.unlink()
    write_index(folder, part, mapping)
    return mapping


def write_index(folder: Path, part: str, mapping: object) -> None:
    index = {"metadata": {"total_size": 1}, "weight_map": mapping}
    index_of(folder, part).write_text(json.dumps(index))


def refused(folder: Path, part: str, *texts: str) -> DownloadError:
    """Load a broken part; it must fail in the one way that is agreed, saying every one of texts."""
    with pytest.raises(DownloadError) as caught:
        load(folder, part)
    error = caught.value
    assert (error.code, error.exit_code) == ("E_CHECKPOINT", 5)
    for text in (error.message, error.why, error.hint):
        assert text and "\n" not in text and text.isprintable()
    assert len(error.problems) == 1
    for text in (part, *texts):
        assert text in f"{error.message}; {error.why}", text
    return error


# What is right


@pytest.mark.parametrize("part", PARTS)
def test_sharded_and_single_files_give_the_same_leaves(folder, part):
    whole = load(folder, part)
    shard(folder, part)
    assert same(whole, load(folder, part))


@pytest.mark.parametrize("part", PARTS)
def test_every_upstream_number_arrives_once(part):
    tensors = load_file(single(TINY, part))
    found = leaves(load(TINY, part))
    assert sum(leaf.size for leaf in found.values()) == sum(one.size for one in tensors.values())
    theirs = np.sort(np.concatenate([one.ravel() for one in tensors.values()]))
    ours = np.sort(np.concatenate([leaf.ravel() for leaf in found.values()]))
    np.testing.assert_array_equal(ours, theirs)


def test_layers_land_at_their_own_index_transposed():
    tensors = load_file(single(TINY, "transformer"))
    found = leaves(load(TINY, "transformer"))
    for layer in range(3):
        name = f"blocks.{layer}.ffn.net.2.weight"
        np.testing.assert_array_equal(found["layers", "mlp_out", "kernel"][layer], tensors[name].T)


@pytest.mark.parametrize("dtype", ROUNDING, ids=lambda dtype: np.dtype(dtype).name)
def test_stored_type_is_cast_on_the_way(folder, dtype):
    exact = leaves(load(folder, "transformer"))

    def cast(tensors: dict) -> None:
        for name in tensors:
            tensors[name] = tensors[name].astype(dtype)

    if "float8" in np.dtype(dtype).name:
        write_float8(folder, dtype)
    else:
        rewrite(folder, "transformer", cast)
    for path, leaf in leaves(load(folder, "transformer")).items():
        assert leaf.dtype == np.float32
        least = SMALLEST.get(dtype, 0) / 2
        np.testing.assert_allclose(leaf, exact[path], rtol=ROUNDING[dtype], atol=least)


def write_float8(folder: Path, dtype: type) -> None:
    """Write a file that the library reads but, for numpy, does not write."""
    tensors = load_file(single(folder, "transformer"))
    kind = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}[np.dtype(dtype).name]
    header, data = {}, b""
    for name, tensor in tensors.items():
        raw = tensor.astype(dtype).tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    single(folder, "transformer").write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_bfloat16_leaves_hold_the_nearest_numbers():
    exact = leaves(load(TINY, "transformer"))
    found = leaves(load(TINY, "transformer", jnp.bfloat16))
    kinds = {leaf.dtype for leaf in found.values()}
    assert kinds == {np.dtype(np.float32), np.dtype(jnp.bfloat16)}
    for path, leaf in found.items():
        np.testing.assert_array_equal(leaf, exact[path].astype(leaf.dtype))


def test_types_may_differ_between_tensors(folder):
    exact = load(folder, "vae")

    def widen(tensors: dict) -> None:
        for name in sorted(tensors)[::2]:
            tensors[name] = tensors[name].astype(np.float64)

    rewrite(folder, "vae", widen)
    assert same(exact, load(folder, "vae"))


def test_nan_loads_and_is_left_to_the_run(folder):
    def poison(tensors: dict) -> None:
        tensors["proj_out.weight"][0, 0] = np.nan

    rewrite(folder, "transformer", poison)
    kernel = leaves(load(folder, "transformer"))["patch_out", "kernel"]
    assert np.isnan(kernel[0, 0]) and np.isnan(kernel).sum() == 1


def test_every_leaf_is_placed_once_by_its_path():
    placed = {}

    def place(path: tuple, shape: tuple[int, ...], read: Callable) -> jax.Array:
        assert path not in placed
        placed[path] = read((slice(None),) * len(shape))
        return jnp.asarray(placed[path])

    abstract = abstract_parts(read_specs(TINY), jnp.float32)["vae"]
    module = load_module(TINY, "vae", abstract, keys_of(TINY, "vae"), place)
    assert placed.keys() == leaves(module).keys()


# Parts of leaves, for the chips of one host


@pytest.mark.parametrize("chips", [2, 4, 8])
@pytest.mark.parametrize("part", ["text_encoder", "transformer"])
def test_parts_for_the_chips_are_the_leaf_and_each_number_is_read_once(part, chips, monkeypatch):
    counts = []

    def counting(stored: Stored, first: int, size: int) -> np.ndarray:
        counts.append(size)
        return read_numbers(stored, first, size)

    def place(path: tuple, shape: tuple[int, ...], read: Callable) -> jax.Array:
        whole = read((slice(None),) * len(shape))
        axis = weight_axis(path, shape, chips)
        counts.clear()
        for chip in range(chips if axis != WHOLE else 0):
            size = shape[axis] // chips
            index = [slice(None)] * len(shape)
            index[axis] = slice(chip * size, (chip + 1) * size)
            assert np.array_equal(read(tuple(index)), whole[tuple(index)])
        if counts and not SMALL & set(path):
            read_again[path] = sum(counts) / whole.size
        return jnp.asarray(whole)

    read_again = {}
    monkeypatch.setattr("svgen.tensors.read_numbers", counting)
    monkeypatch.setattr("svgen.sharding.LEAST_SPLIT", 200)
    abstract = abstract_parts(read_specs(TINY), jnp.float32)[part]
    load_module(TINY, part, abstract, keys_of(TINY, part), place)
    assert len(read_again) >= 5
    turned = [path for path in read_again if path[1:] in TURNED]
    assert all(read_again.pop(path) < 2 for path in turned)  # up to two heads more, each time
    assert set(read_again.values()) == {1.0}


def test_part_of_a_matrix_stored_as_it_is_used_is_its_rows(tmp_path, monkeypatch):
    path = tmp_path / "matrix"
    np.arange(51 * 4, dtype=np.float32).tofile(path)
    spans = []

    def spying(stored: Stored, first: int, size: int) -> np.ndarray:
        spans.append((first, size))
        return read_numbers(stored, first, size)

    monkeypatch.setattr("svgen.tensors.read_numbers", spying)
    matrix = Stored(path, "F32", (51, 4), 0)
    found = read_part(matrix, Target(path=("embedding",)), (slice(17, 34), slice(None)))
    assert np.array_equal(found, np.arange(17 * 4, 34 * 4).reshape(17, 4))
    assert spans == [(17 * 4, 17 * 4)]


# Which files are read


def test_stray_files_beside_the_index_are_ignored(folder):
    whole = load(folder, "transformer")
    shard(folder, "transformer")
    save_file({"stray": np.ones(3)}, folder / "transformer" / "another.safetensors")
    (folder / "transformer" / "zz.safetensors").write_bytes(b"not one")
    assert same(whole, load(folder, "transformer"))


def test_index_next_to_a_single_file_wins(folder):
    kept = single(folder, "transformer").read_bytes()
    shard(folder, "transformer")
    whole = load(folder, "transformer")
    single(folder, "transformer").write_bytes(kept)
    rewrite(folder, "transformer", lambda tensors: tensors["proj_out.bias"].fill(5))
    assert same(whole, load(folder, "transformer"))
    index_of(folder, "transformer").unlink()
    assert not same(whole, load(folder, "transformer"))


@pytest.mark.parametrize("part", PARTS)
def test_part_without_files_names_the_one_it_looked_for(folder, part):
    single(folder, part).unlink()
    refused(folder, part, str(single(folder, part)), "missing")


def test_missing_shards_are_named_together(folder):
    mapping = shard(folder, "transformer", 4)
    gone = sorted(set(mapping.values()))[1:3]
    for file in gone:
        (folder / "transformer" / file).unlink()
    error = refused(folder, "transformer", *gone, "4 shards, 2 of them")
    assert error.details["files"] == gone


@pytest.mark.parametrize(
    "file",
    [
        *["../x.safetensors", "/etc/x.safetensors", "a/../x.safetensors", "x.bin", "", "..", 7],
        *[None, ["x.safetensors"], {"a": 1}, "x.safetensors\n", "a\nb/x.safetensors"],
    ],
)
def test_index_that_leads_elsewhere_is_refused(folder, file):
    mapping = shard(folder, "transformer")
    (folder / "x.safetensors").write_bytes(
        (folder / "transformer" / next(iter(mapping.values()))).read_bytes()
    )
    mapping["proj_out.bias"] = file
    write_index(folder, "transformer", mapping)
    refused(folder, "transformer", "index.json", "beside the index")


@pytest.mark.parametrize("mapping", [None, {}, [], "x", 3])
def test_index_without_a_map_is_refused(folder, mapping):
    shard(folder, "transformer")
    write_index(folder, "transformer", mapping)
    refused(folder, "transformer", "weight_map")


def test_index_with_unprintable_names_gives_one_line(folder):
    mapping = shard(folder, "transformer")
    write_index(folder, "transformer", mapping | {"a\x1b[31m\nb": "\x07\n.safetensors"})
    refused(folder, "transformer", r"\x07\n.safetensors")
    write_index(folder, "transformer", mapping | {"a\x1b[31m\nb": next(iter(mapping.values()))})
    refused(folder, "transformer", r"a\x1b[31m\nb")
    write_index(folder, "transformer", mapping | {"n" * 100_000: next(iter(mapping.values()))})
    assert len(refused(folder, "transformer", "nnn").message) < 1000


@pytest.mark.parametrize("change", ["moved", "absent", "unlisted"])
def test_stale_index_is_refused_naming_the_tensor(folder, change):
    mapping = shard(folder, "transformer")
    files = sorted(set(mapping.values()))
    if change == "moved":
        mapping["proj_out.bias"] = next(f for f in files if f != mapping["proj_out.bias"])
    elif change == "absent":
        mapping["proj_out.other"] = files[0]
    else:
        del mapping["proj_out.bias"]
    write_index(folder, "transformer", mapping)
    name = "proj_out.other" if change == "absent" else "proj_out.bias"
    assert refused(folder, "transformer", "stale", name).details["tensors"] == [name]


def test_tensor_in_two_shards_is_refused(folder):
    mapping = shard(folder, "transformer")
    files = sorted(set(mapping.values()))
    for home in files[:2]:
        name = next(name for name, file in mapping.items() if file == home)
        other = folder / "transformer" / next(file for file in files if file != home)
        kept = other.read_bytes()
        save_file(load_file(other) | {name: np.zeros(2, np.float32)}, other)
        refused(folder, "transformer", name)
        other.write_bytes(kept)


# What is in them


def test_all_complaints_come_in_one_error(folder):
    def spoil(tensors: dict) -> None:
        del tensors["blocks.1.attn2.to_q.weight"], tensors["proj_out.bias"]
        tensors["blocks.3.attn1.to_q.weight"] = np.zeros((48, 48), np.float32)
        tensors["blocks.0.attn1.add_k_proj.bias"] = np.zeros(4, np.float32)
        tensors["blocks.2.ffn.net.2.bias"] = np.zeros(7, np.float32)
        tensors["patch_embedding.weight"] = np.zeros((48, 8, 2, 2), np.float32)
        tensors["scale_shift_table"] = np.zeros((1, 2, 48), np.int32)
        tensors["blocks.0.scale_shift_table"] = np.zeros((1, 6, 48), np.uint8)

    rewrite(folder, "transformer", spoil)
    error = refused(
        folder,
        "transformer",
        "2 missing: blocks.1.attn2.to_q.weight, proj_out.bias",
        "2 unexpected: blocks.0.attn1.add_k_proj.bias, blocks.3.attn1.to_q.weight",
        "2 of another shape: ",
        "blocks.2.ffn.net.2.bias (7, for 48)",
        "patch_embedding.weight (48x8x2x2, for 32x48)",
        "2 of a type that is not float: ",
        "scale_shift_table (I32)",
        "blocks.0.scale_shift_table (U8)",
    )
    assert str(folder / "transformer") in error.message


def test_many_complaints_are_counted_and_cut(folder):
    rewrite(folder, "transformer", lambda tensors: tensors.clear() or tensors.update(_one()))
    error = refused(folder, "transformer", "1 unexpected: a")
    assert "88 more" in error.why and len(error.why) < 1000


def _one() -> dict[str, np.ndarray]:
    return {"a": np.zeros(1, np.float32)}


@pytest.mark.parametrize(
    ("part", "name", "shape"),
    [
        ("transformer", "blocks.0.attn1.to_q.weight", (48, 47)),
        ("transformer", "blocks.0.attn1.to_q.weight", (24, 96)),
        ("transformer", "blocks.0.attn1.norm_q.weight", (49,)),
        ("transformer", "blocks.0.ffn.net.2.weight", (96, 48)),  # transposed
        ("transformer", "blocks.0.scale_shift_table", (6, 49)),
        ("transformer", "proj_out.bias", ()),
        ("transformer", "proj_out.bias", (0,)),
        ("transformer", "patch_embedding.weight", (48, 8, 1, 2, 3)),
        ("transformer", "patch_embedding.weight", (48, 4, 2, 2, 2)),
        ("transformer", "patch_embedding.weight", (48, 32)),
        ("transformer", "blocks.0.scale_shift_table", (1, 48, 6)),
        ("vae", "decoder.norm_out.gamma", (2, 2, 1, 1)),
        ("text_encoder", SHARED, (51, 33)),
        ("text_encoder", "encoder.final_layer_norm.weight", (1, 33)),
        ("vae", "decoder.conv_in.weight", (16, 8, 3, 3)),
        ("vae", "post_quant_conv.weight", (8, 8, 1, 1, 2)),
    ],
)
def test_wrong_shape_is_refused_naming_the_tensor(folder, part, name, shape):
    tensors = load_file(single(folder, part))
    assert name in tensors and tensors[name].shape != shape
    save_file(tensors | {name: np.ones(shape, np.float32)}, single(folder, part))
    refused(folder, part, f"1 of another shape: {name} ({'x'.join(map(str, shape))}, for ")


@pytest.mark.parametrize("part", PARTS)
def test_every_single_tensor_is_needed(folder, part):
    tensors = load_file(single(folder, part))
    for name in sorted(tensors)[:: max(1, len(tensors) // 8)]:
        save_file({key: tensors[key] for key in tensors if key != name}, single(folder, part))
        refused(folder, part, f"1 missing: {name}")


# Damaged files


@pytest.mark.parametrize("kept", [0, 4, 8, 9, 500, -1, -70_000])
def test_truncated_file_is_refused_with_its_size(folder, kept):
    path = single(folder, "transformer")
    data = path.read_bytes()[:kept]
    path.write_bytes(data)
    error = refused(folder, "transformer", str(path), "truncated", f"{len(data)} bytes")
    assert error.details == {"bytes": len(data)}


def test_truncated_shard_is_named(folder):
    mapping = shard(folder, "transformer")
    path = folder / "transformer" / sorted(set(mapping.values()))[-1]
    path.write_bytes(path.read_bytes()[:-4])
    refused(folder, "transformer", str(path), "truncated")


def test_flipped_header_never_passes_unseen(folder):
    path = single(folder, "transformer")
    data = path.read_bytes()
    exact = leaves(load(folder, "transformer"))
    length = int.from_bytes(data[:8], "little")
    rng = np.random.default_rng(0)
    for place in [0, 3, 7, 8, 9, *rng.integers(8, 8 + length, 12).tolist()]:
        broken = bytearray(data)
        broken[place] ^= 0x15
        path.write_bytes(broken)
        try:
            found = leaves(load(folder, "transformer"))
        except DownloadError:
            refused(folder, "transformer")
        else:  # white space around the header, at most
            assert all(np.array_equal(found[path], exact[path]) for path in exact), place


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,18446744073709551615]}}',
        b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32\\n","shape":[1],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[4294967296,4294967296,4294967296],"data_offsets":[0,4]}}',
        b'{"__metadata__":{"a":1}}',
        b"\xff\xff",
        b"{" * 5000,
    ],
)
def test_hostile_header_is_refused(folder, header):
    length = len(header).to_bytes(8, "little")
    single(folder, "vae").write_bytes(length + header + b"\0\0\0\0")
    refused(folder, "vae", str(single(folder, "vae")))


def test_folder_in_place_of_a_file_is_refused(folder):
    single(folder, "vae").unlink()
    single(folder, "vae").mkdir()
    refused(folder, "vae", str(single(folder, "vae")))


def test_file_that_shrinks_after_the_check_is_refused(folder, monkeypatch):
    path = single(folder, "transformer")
    check = checkpoint._complaints

    def shrink(*args: object) -> list[str]:
        found = check(*args)
        os.truncate(path, path.stat().st_size - 100_000)
        return found

    monkeypatch.setattr(checkpoint, "_complaints", shrink)
    refused(folder, "transformer", str(path), "shorter")


def test_file_that_vanishes_after_the_check_is_refused(folder, monkeypatch):
    path = single(folder, "transformer")
    check = checkpoint._complaints
    monkeypatch.setattr(checkpoint, "_complaints", partial(_unlink_after, check, path))
    refused(folder, "transformer", str(path))


def _unlink_after(check: Callable, path: Path, *args: object) -> list[str]:
    found = check(*args)
    path.unlink()
    return found


# The text encoder


@pytest.mark.parametrize(
    "name", [SHARED, "encoder.block.1.layer.0.SelfAttention.v.weight", "relative_attention_bias"]
)
def test_all_zero_matrix_of_the_text_encoder_is_refused(folder, name):
    tensors = load_file(single(folder, "text_encoder"))
    name = next(key for key in sorted(tensors) if name in key)
    save_file(tensors | {name: np.zeros_like(tensors[name])}, single(folder, "text_encoder"))
    refused(folder, "text_encoder", name, str(single(folder, "text_encoder")), "zeros")


def test_zeros_elsewhere_are_allowed(folder):
    rewrite(folder, "transformer", lambda tensors: tensors["proj_out.weight"].fill(0))
    load(folder, "transformer")
    name = "encoder.final_layer_norm.weight"
    rewrite(folder, "text_encoder", lambda tensors: tensors[name].fill(0))
    load(folder, "text_encoder")


def rename(tensors: dict) -> None:
    tensors[ALIAS] = tensors.pop(SHARED)


def test_embedding_under_its_other_name_alone_is_read(folder):
    whole = load(folder, "text_encoder")
    rewrite(folder, "text_encoder", rename)
    assert same(whole, load(folder, "text_encoder"))


def test_embedding_under_neither_name_is_missing(folder):
    rewrite(folder, "text_encoder", lambda tensors: tensors.pop(SHARED))
    refused(folder, "text_encoder", f"1 missing: {SHARED}")


@pytest.mark.parametrize("sharded", [False, True])
def test_embedding_under_both_names_must_be_one(folder, sharded, monkeypatch):
    monkeypatch.setattr(checkpoint, "CHUNK", 100)  # of 51 x 32 numbers
    whole = load(folder, "text_encoder")
    tensors = load_file(single(folder, "text_encoder"))
    for place, equal in ((None, True), ((0, 0), False), ((50, 31), False), ((3, 4), False)):
        other = tensors[SHARED].copy()
        if place is not None:
            other[place] += 1
        save_file(tensors | {ALIAS: other}, single(folder, "text_encoder"))
        if sharded:
            shard(folder, "text_encoder")
        if equal:
            assert same(whole, load(folder, "text_encoder"))
        else:
            error = refused(folder, "text_encoder", SHARED, ALIAS, "differ", ".safetensors")
            assert error.details["tensors"] == [SHARED, ALIAS]
        if sharded:
            index_of(folder, "text_encoder").unlink()


def test_embedding_under_both_names_in_two_types_is_compared_as_it_is_used(folder):
    tensors = load_file(single(folder, "text_encoder"))
    low = tensors[SHARED].astype(jnp.bfloat16)
    save_file(tensors | {ALIAS: low}, single(folder, "text_encoder"))
    refused(folder, "text_encoder", "differ")
    load(folder, "text_encoder", jnp.bfloat16)
    tensors[SHARED][1, 1] = np.nan
    both = tensors | {ALIAS: tensors[SHARED].astype(np.float64)}
    save_file(both, single(folder, "text_encoder"))
    load(folder, "text_encoder")  # NaN equals NaN here; the run finds it


def test_embedding_under_both_names_in_two_shapes_is_refused(folder):
    tensors = load_file(single(folder, "text_encoder"))
    save_file(tensors | {ALIAS: tensors[SHARED][:-1]}, single(folder, "text_encoder"))
    refused(folder, "text_encoder", f"1 of another shape: {ALIAS} (50x32, for 51x32)")


# Configs


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"a": "\xff"}', "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"9" * 10_000, "not valid JSON"),
        (b"[]", "holds list"),
        (b"null", "holds NoneType"),
        (b" " * (checkpoint.MAX_JSON_BYTES + 1), "bytes"),
    ],
    ids=["empty", "cut", "encoding", "deep", "number", "list", "null", "huge"],
)
def test_json_that_is_no_object_is_refused(folder, data, why):
    for path in (folder / "vae" / "config.json", index_of(folder, "transformer")):
        kept = path.read_bytes() if path.exists() else None
        path.write_bytes(data)
        refused(folder, path.parent.name, str(path), why)
        path.unlink() if kept is None else path.write_bytes(kept)


def test_missing_config_is_named(folder):
    (folder / "transformer" / "config.json").unlink()
    with pytest.raises(DownloadError, match=r"transformer/config\.json cannot be read") as caught:
        read_specs(folder)
    assert caught.value.why == "No such file or directory"


def test_json_object_is_read():
    assert read_json(TINY / "vae" / "config.json")["z_dim"] == 8


# Memory


MEASURE = """
import resource, sys
from pathlib import Path

import jax.numpy as jnp

from svgen.checkpoint import load_module, read_specs
from svgen.models.keys import transformer_keys
from svgen.programs import abstract_parts

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

folder = Path(sys.argv[1])
specs = read_specs(folder)
keys = transformer_keys(specs.transformer)
abstract = abstract_parts(specs, jnp.dtype(sys.argv[2]))["transformer"]
jnp.zeros(8).block_until_ready()
before = peak()
module = load_module(folder, "transformer", abstract, keys)
print(peak() - before)
"""
# A process begins with the peak of the one that started it: start it from a small one.
RELAY = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]], check=True)"
CONSTANT_BYTES = 64 << 20  # the largest stored tensor, its cast, and the allocator's slack


def write_big(folder: Path) -> tuple[int, int]:
    """Make a sharded transformer of random float32; returns its numbers, and those of the largest
    leaf.
    """
    config = read_json(folder / "transformer" / "config.json")
    sizes = {"num_attention_heads": 6, "attention_head_dim": 128, "ffn_dim": 2304, "num_layers": 12}
    (folder / "transformer" / "config.json").write_text(json.dumps(config | sizes))
    abstract = abstract_parts(read_specs(folder), jnp.float32)["transformer"]
    shapes = upstream_shapes(abstract, keys_of(folder, "transformer"))
    shards = [list(shapes)[start::4] for start in range(4)]
    mapping, rng = {}, np.random.default_rng(0)
    for number, names in enumerate(shards):
        file = f"diffusion_pytorch_model-{number + 1:05}-of-00004.safetensors"
        tensors = {name: rng.random(shapes[name], np.float32) for name in names}
        save_file(tensors, folder / "transformer" / file)
        mapping |= dict.fromkeys(names, file)
    single(folder, "transformer").unlink()
    write_index(folder, "transformer", mapping)
    sizes = [leaf.size for leaf in jax.tree.leaves(nnx.state(abstract))]
    return sum(sizes), max(sizes)


def upstream_shapes(abstract: nnx.Module, keys: dict) -> dict[str, tuple[int, ...]]:
    """The shape that each tensor has upstream."""
    ours = {path: leaf.shape for path, leaf in nnx.to_flat_state(nnx.state(abstract))}
    found = {}
    for name, target in keys.items():
        shape = ours[target.path]
        found[name] = stored_shape(target, shape if target.layer is None else shape[1:])
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_host_memory_stays_near_the_target_and_one_leaf(folder, dtype):
    numbers, largest = write_big(folder)
    assert 380e6 < 4 * numbers < 440e6
    done = subprocess.run(
        [sys.executable, "-c", RELAY, "-c", MEASURE, str(folder), dtype],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    width = jnp.dtype(dtype).itemsize
    assert int(done.stdout) < width * (numbers + largest) + CONSTANT_BYTES
    assert width * largest + CONSTANT_BYTES < 0.4 * 4 * numbers  # so a second copy would show
