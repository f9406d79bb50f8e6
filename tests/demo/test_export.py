"""A checkpoint that the trainer of the demo writes reads back as it was."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from svgen import programs
from svgen.catalog import read_sampling
from svgen.checkpoint import load_module, read_specs
from svgen.config import ModelSpecs
from svgen.demo.export import sampling_json, upstream, write_checkpoint
from svgen.demo.sizes import SAMPLING, TEXT, TRANSFORMER, VAE
from svgen.models.keys import Target, text_keys, transformer_keys, vae_keys
from svgen.tensors import arrange, stored_shape

SPECS = ModelSpecs(
    text=replace(TEXT, layers=1),
    transformer=replace(TRANSFORMER, layers=2),
    vae=replace(VAE, base_width=4),
)
KEYS = {
    "text_encoder": text_keys(SPECS.text),
    "transformer": transformer_keys(SPECS.transformer),
    "vae": vae_keys(SPECS.vae),
}


def rough(module: nnx.Module) -> nnx.Module:
    """A module whose leaves hold random numbers that bfloat16 holds too."""
    graph, state = nnx.split(module)
    rng = np.random.default_rng(0)
    leaves = jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.bfloat16).astype(jnp.float32),
        state,
    )
    return nnx.merge(graph, leaves)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("snapshot")
    abstract = programs.abstract_parts(SPECS, jnp.float32)
    parts = {name: rough(module) for name, module in abstract.items()}
    sampling = sampling_json(SAMPLING)
    size = write_checkpoint(folder, SPECS, parts, dtype=jnp.bfloat16, sampling=sampling)
    return folder, parts, size


@pytest.mark.parametrize("part", KEYS)
def test_weights_read_back_equal(written, part):
    folder, parts, _ = written
    abstract = programs.abstract_parts(read_specs(folder), jnp.float32)[part]
    loaded = load_module(folder, part, abstract, KEYS[part])
    ours, theirs = nnx.state(parts[part]), nnx.state(loaded)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), ours, theirs))


def test_specs_and_sampling_read_back(written):
    folder, _, size = written
    assert read_specs(folder) == SPECS
    assert read_sampling(folder) == SAMPLING
    stored = sum(file.stat().st_size for file in folder.glob("*/*.safetensors"))
    assert size < stored < size + 100_000
    assert json.loads((folder / "model_index.json").read_text())["_class_name"] == "WanPipeline"


@pytest.mark.parametrize(
    "target",
    [
        Target(path=("a",)),
        Target(path=("a",), axes=(1, 0)),
        Target(path=("a",), axes=(2, 3, 1, 0)),
        Target(path=("a",), split=(2, 3, 2), axes=(0, 2, 1), shape=(12,), stored=(12,)),
        Target(path=("a",), split=(2, 3, 2, 5), axes=(3, 0, 2, 1), shape=(5, 12), stored=(12, 5)),
    ],
)
def test_upstream_undoes_arrange(target):
    shapes = {None: (4, 3), 2: (3, 4), 4: (2, 3, 4, 5), 3: (12,)}
    leaf = shapes[None] if target.axes is None else shapes[len(target.axes)]
    stored = target.stored or stored_shape(target, leaf)
    tensor = np.random.default_rng(1).normal(size=stored)
    assert np.array_equal(upstream(arrange(tensor, target), target), tensor)
