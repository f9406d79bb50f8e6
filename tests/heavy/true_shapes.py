"""Checkpoints of the true sizes, made on disk from random values, then loaded and run on the CPU.

    python tests/heavy/true_shapes.py FOLDER            20 GB of disk, 16 GB of memory, some minutes

Prints the peak memory of each case, measured in a process of its own:

    transformer of Wan 2.1 1.3B, one bfloat16 file and two float32 shards with an index: load, and
    one denoising step with guidance at 256x256, 5 frames text encoder UMT5-XXL, three bfloat16
    shards: load and encode a prompt
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from svgen.shapes import SPECS

SPEC = SPECS["wan2.1-1.3b"]
CASES = {  # name -> (part, type, number of shards, type it is loaded as)
    "1.3b-bf16": ("transformer", "bfloat16", 1, "bfloat16"),
    "1.3b-fp32-sharded": ("transformer", "float32", 2, "bfloat16"),
    "1.3b-fp32-sharded-as-fp32": ("transformer", "float32", 2, "float32"),
    "umt5-xxl-bf16": ("text_encoder", "bfloat16", 3, "bfloat16"),
}
GIB = 2**30


def upstream_shapes(part: str) -> dict[str, tuple[int, ...]]:
    """The shape of every upstream tensor, from the leaves of our modules and the key map read
    backwards.
    """
    import jax.numpy as jnp
    from flax import nnx

    from svgen import programs
    from svgen.models.keys import text_keys, transformer_keys
    from svgen.tensors import stored_shape

    module = programs.abstract_parts(SPEC, jnp.bfloat16)[part]
    leaves = dict(nnx.to_flat_state(nnx.state(module)))
    keys = transformer_keys(SPEC.transformer) if part == "transformer" else text_keys(SPEC.text)
    shapes = {}
    for name, target in keys.items():
        if target.optional:
            continue
        leaf = leaves[target.path].shape
        shapes[name] = stored_shape(target, leaf if target.layer is None else leaf[1:])
    return shapes


def values(shapes: dict[str, tuple[int, ...]], kind: str) -> Iterator[tuple[str, np.ndarray]]:
    """Random tensors with about the deviation of trained ones, cut from one block of a million."""
    block = np.random.default_rng(0).normal(0, 0.02, 1 << 20)
    block = block.astype(ml_dtypes.bfloat16 if kind == "bfloat16" else np.float32)
    for name, shape in shapes.items():
        yield name, np.resize(block, shape)


def make(folder: Path, case: str) -> None:
    """Write the checkpoint of a case, unless it is there."""
    from safetensors.numpy import save_file

    part, kind, shards, _ = CASES[case]
    target = folder / part
    stem = "model" if part == "text_encoder" else "diffusion_pytorch_model"
    if target.exists():
        return
    target.mkdir(parents=True)
    shapes = upstream_shapes(part)
    names = list(shapes)
    per_shard = -(-len(names) // shards)
    index = {}
    for number in range(shards):
        some = names[number * per_shard : (number + 1) * per_shard]
        suffix = "" if shards == 1 else f"-{number + 1:05}-of-{shards:05}"
        file = f"{stem}{suffix}.safetensors"
        save_file(dict(values({name: shapes[name] for name in some}, kind)), target / file)
        index |= dict.fromkeys(some, file)
    if shards > 1:
        body = {"metadata": {}, "weight_map": index}
        (target / f"{stem}.safetensors.index.json").write_text(json.dumps(body))


def run(folder: Path, case: str) -> dict[str, object]:
    """Load a case and run its program once; seconds and peak memory."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from svgen import programs
    from svgen.checkpoint import load_module
    from svgen.models.keys import text_keys, transformer_keys

    part, _, _, loaded_as = CASES[case]
    before = peak_gib()
    module = programs.abstract_parts(SPEC, jnp.dtype(loaded_as))[part]
    keys = transformer_keys(SPEC.transformer) if part == "transformer" else text_keys(SPEC.text)
    start = time.perf_counter()
    graph, weights = nnx.split(load_module(folder, part, module, keys))
    jax.block_until_ready(weights)
    loaded, load_peak = time.perf_counter() - start, peak_gib()
    out = (step if part == "transformer" else encode)(graph, weights)
    assert bool(jnp.isfinite(out).all())
    return {
        "case": case,
        "imports_gib": round(before, 2),
        "weights_gib": round(sum(leaf.nbytes for leaf in jax.tree.leaves(weights)) / GIB, 2),
        "load_s": round(loaded, 1),
        "load_peak_gib": round(load_peak, 2),
        "run_s": round(time.perf_counter() - start - loaded, 1),
        "run_peak_gib": round(peak_gib(), 2),
    }


def step(graph, weights):
    """One denoising step with guidance, 256x256, 5 frames."""
    import jax.numpy as jnp

    from svgen import programs
    from svgen.grid import WAN21, grid_of
    from svgen.pipeline import draw_noise
    from svgen.scheduler import solver_table, start_state

    grid = grid_of(256, 256, 5, WAN21)
    state = start_state(jnp.asarray(draw_noise(grid, 16, seed=0)))
    text = np.random.default_rng(1).normal(size=(2, 64, 4096)).astype(np.float32)
    rows = programs.StepTable.of(solver_table(50, 8.0))
    step = programs.denoise_step(
        graph, weights, state, jnp.asarray(text), rows, jnp.float32(6), jnp.uint32(0)
    )
    return step.state.latents


def encode(graph, weights):
    """One prompt of 20 tokens and an empty one."""
    import jax.numpy as jnp

    from svgen import programs

    ids = np.zeros((2, 64), np.int32)
    ids[0, :20] = np.random.default_rng(2).integers(2, 256384, 20)
    ids[:, 19] = ids[1, 0] = 1
    return programs.embed(graph, weights, jnp.asarray(ids), jnp.asarray([20, 1], jnp.int32))


def peak_gib() -> float:
    """Peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    """Make the checkpoints and run every case in a process of its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--case", choices=CASES)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(run(arguments.folder, arguments.case)))
        return
    for case, (part, kind, shards, _) in CASES.items():
        folder = arguments.folder / f"{part}-{kind}-{shards}"
        make(folder, case)
        child = [sys.executable, __file__, str(folder), "--case", case]
        print(subprocess.run(child, capture_output=True, text=True, check=True).stdout, end="")


if __name__ == "__main__":
    main()
