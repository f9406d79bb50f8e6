"""A run on several chips makes what one chip makes, with the collectives that were planned."""

import re
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from svgen import programs, sharding
from svgen.attention.attend import Setting
from svgen.config import SparsitySchedule, TransformerSpec
from svgen.errors import UsageError
from svgen.pipeline import Pipeline
from svgen.scheduler import solver_table, start_state
from svgen.sharding import WHOLE, Split, choose_split, make_mesh, possible_splits, weight_axis
from tests.equality import request_for
from tests.helpers import ROOT

TINY = ROOT / "tests/golden/tiny"
SPLITS = (Split(1, 1), Split(2, 1), Split(1, 4), Split(2, 4), Split(1, 8))
SPEC = TransformerSpec(
    heads=8,
    head_dim=12,
    layers=2,
    mlp_width=192,
    in_channels=4,
    out_channels=4,
    text_width=16,
    frequency_width=16,
)
SPARSE = Setting(SparsitySchedule(band_share=0.3, dense_layers=1, rows=8))
TOLERANCE = 1e-5  # of the value range
LATENTS = (1, 3, 4, 6, 4)  # 18 tokens: 4 and 8 chips hold some padding


def inputs() -> tuple:
    """A model of random weights, and what a step takes."""
    abstract = nnx.eval_shape(
        lambda: programs.Transformer(SPEC, dtype=jnp.float32, rngs=nnx.Rngs(0))
    )
    graph, weights = nnx.split(abstract)
    rng = np.random.default_rng(0)
    weights = jax.tree.map(
        lambda leaf: np.asarray(rng.normal(0, 0.2, leaf.shape), np.float32), weights
    )
    text = np.asarray(rng.normal(size=(2, 64, 16)), np.float32)
    noise = np.asarray(rng.normal(size=LATENTS), np.float32)
    return graph, weights, text, noise


def lowered(split: Split | None, setting: Setting, steps: int = 2):
    graph, weights, text, noise = inputs()
    mesh = None if split is None else make_mesh(split)
    if mesh is not None:
        place = sharding.placer(mesh)
        weights = jax.tree_util.tree_map_with_path(
            lambda path, leaf: place(path, leaf.shape, leaf.__getitem__), weights
        )
    rows = programs.StepTable.of(solver_table(steps, 5.0))
    state = start_state(jnp.asarray(noise))
    fixed = (jnp.asarray(text), rows, jnp.float32(3), jnp.uint32(5))
    options = {"setting": setting, "mesh": mesh}
    return (graph, weights, state, *fixed), options


def run(split: Split | None, setting: Setting) -> tuple[np.ndarray, np.ndarray]:
    (graph, weights, state, *fixed), options = lowered(split, setting)
    routes = []
    for _ in range(2):
        step = programs.denoise_step(graph, weights, state, *fixed, **options)
        state = step.state
        assert bool(step.finite)
        routes.append(np.asarray(step.record.routes))
    return np.asarray(state.latents), np.array(routes)


@pytest.fixture(scope="module")
def alone() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    return {"dense": run(None, programs.DENSE), "sparse": run(None, SPARSE)}


@pytest.mark.parametrize("kind", ["dense", "sparse"])
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_chips_make_what_one_makes(alone, split, kind):
    latents, routes = run(split, SPARSE if kind == "sparse" else programs.DENSE)
    expected, expected_routes = alone[kind]
    assert np.abs(latents - expected).max() <= TOLERANCE * np.ptp(expected)
    assert np.array_equal(routes, expected_routes)
    assert np.abs(alone["sparse"][0] - alone["dense"][0]).max() > 1e-3, "the masks matter"


def collectives(split: Split, setting: Setting) -> Counter:
    arguments, options = lowered(split, setting)
    text = programs.denoise_step.lower(*arguments, **options).compile().as_text()
    names = "all-to-all|all-gather|all-reduce|collective-permute|reduce-scatter"
    return Counter(re.findall(rf"^ .*? = .*? ({names})(?:-start)?\(", text, flags=re.M))


@pytest.mark.parametrize("setting", [programs.DENSE, SPARSE], ids=["dense", "sparse"])
def test_collectives_are_those_planned(setting):
    _, weights, *_ = inputs()
    axes = sharding.weight_axes(weights, 8)
    split_weights = sum(axis != WHOLE for axis in jax.tree.leaves(axes))
    assert split_weights > 12
    found = collectives(Split(2, 4), setting)
    # Per layer (one scan): q, k and v to heads, and the output back. At the end: tokens, branches.
    assert found == {"all-to-all": 4, "all-gather": split_weights + 2}


def test_one_branch_per_chip_exchanges_no_tokens():
    found = collectives(Split(2, 1), programs.DENSE)
    assert found["all-to-all"] == 0


def test_each_chip_holds_its_part_of_the_weights():
    (_, weights, *_), _ = lowered(Split(2, 4), programs.DENSE)
    held = sum(leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(weights))
    total = sum(leaf.size for leaf in jax.tree.leaves(weights))
    assert held < 0.2 * total


@pytest.mark.parametrize(
    ("path", "shape", "axis"),
    [
        (("layers", "q"), (30, 1536, 1536), 2),
        (("layers", "mlp_in"), (30, 1536, 8960), 2),
        (("layers", "mlp_out"), (30, 8960, 1536), 2),
        (("layers", "narrow"), (30, 1536, 12), 1),
        (("layers", "scale"), (30, 1536), WHOLE),
        (("layers", "odd"), (32, 1025, 1027), WHOLE),
        (("patch_in",), (64, 1536), 1),
        (("embedding",), (256384, 4096), 0),
        (("bias",), (1536,), WHOLE),
    ],
)
def test_large_weight_is_split_along_an_even_axis(path, shape, axis):
    assert weight_axis(path, shape, 8) == axis


@pytest.mark.parametrize(
    ("chips", "heads", "branches", "split"),
    [
        (1, 12, 2, (1, 1)),
        (8, 12, 2, (2, 4)),
        (8, 40, 2, (2, 4)),
        (16, 40, 2, (2, 8)),
        (8, 40, 1, (1, 8)),
        (16, 12, 2, (2, 6)),
        (4, 3, 1, (1, 3)),
    ],
)
def test_auto_uses_most_chips_and_splits_branches_first(chips, heads, branches, split):
    assert choose_split(chips, heads, branches) == split


def test_split_is_taken_as_asked_or_refused_with_those_that_work():
    assert choose_split(8, 12, 2, "1x6") == (1, 6)
    for asked in ("2x5", "3x1", "2x8", "x", "1x0"):
        with pytest.raises(UsageError) as caught:
            choose_split(8, 12, 2, asked)
        assert caught.value.code == "E_MESH"
        assert caught.value.hint.startswith("--mesh 2x4 or --mesh ")
    assert all(split.chips <= 8 for split in possible_splits(8, 12, 2))


def test_whole_run_on_eight_chips_is_that_of_one(tmp_path):
    """Text, every step and the frames, of a checkpoint on disk: 4 heads, so 2 x 4 chips."""
    request = request_for(64, 48, 9)

    def make(mesh: str) -> tuple[list[np.ndarray], np.ndarray]:
        pipeline = Pipeline(TINY, mesh=mesh)
        pipeline.check(request)
        text = pipeline.embed(request)
        steps = [np.asarray(step.state.latents) for step in pipeline.denoise(request, text)]
        return steps, np.concatenate(list(pipeline.decode(steps[-1], request)))

    steps, frames = make("2x4")
    alone, alone_frames = make("1x1")
    for ours, theirs in zip(steps, alone, strict=True):
        assert np.abs(ours - theirs).max() <= TOLERANCE * np.ptp(theirs)
    assert np.abs(frames.astype(int) - alone_frames).max() <= 1


def test_impossible_mesh_is_found_with_the_other_problems():
    with pytest.raises(UsageError) as caught:
        Pipeline(TINY, mesh="2x3").check(replace(request_for(65, 48, 9), prompt=""))
    assert {problem.code for problem in caught.value.problems} >= {"E_MESH", "E_SIZE"}
