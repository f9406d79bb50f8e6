"""Compiles one denoising step for a TPU that is not there, with libtpu; prints its memory as JSON.

    python tests/aot/compile_step.py wan2.1-1.3b 480p v6e:2x2x1 [aggressive]

The whole step (both guidance branches, one chip, bfloat16 weights), from shapes alone. Environment
first: libtpu reads it.
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ.update(
    JAX_PLATFORMS="cpu",
    TPU_SKIP_MDS_QUERY="1",
    TPU_ACCELERATOR_TYPE="v6e-4",
    TPU_WORKER_HOSTNAMES="localhost",
    ALLOW_MULTIPLE_LIBTPU_LOAD="true",
)
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from svgen import programs
from svgen.attention.attend import Setting
from svgen.grid import RESOLUTIONS, WAN21, grid_of
from svgen.plan import TEXT_ROWS
from svgen.presets import load_preset
from svgen.shapes import SPECS


def main(model: str, resolution: str, topology: str, schedule: str = "dense") -> None:
    """Compile and print."""
    preset = load_preset(f"{resolution}-{schedule}")
    chosen = preset.small_sparsity if "1.3b" in model else preset.sparsity
    setting = Setting(chosen.counted(50) if chosen else None, topology.partition(":")[0])
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = Mesh(np.array(devices[:1]), ("chip",))
    placed = NamedSharding(mesh, PartitionSpec())
    specs = SPECS[model]
    grid = grid_of(*RESOLUTIONS[resolution], 81, WAN21)
    module = programs.abstract_parts(specs, jnp.bfloat16)["transformer"]
    graph, weights = nnx.split(module)
    text = jax.ShapeDtypeStruct((2, TEXT_ROWS, specs.text.width), jnp.float32)
    arguments = (
        weights,
        programs.abstract_state(grid, specs.vae.z_channels),
        text,
        programs.abstract_table(50),
        jax.ShapeDtypeStruct((), jnp.float32),
        jax.ShapeDtypeStruct((), jnp.uint32),
    )
    arguments = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed), arguments
    )
    start = time.perf_counter()
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = programs.denoise_step.lower(graph, *arguments, setting=setting).compile()
    memory = compiled.memory_analysis()
    found = {
        "model": model,
        "resolution": resolution,
        "topology": topology,
        "schedule": schedule,
        "kernels": compiled.as_text().count('custom_call_target="tpu_custom_call"'),
        "jax": jax.__version__,
        "compile_s": round(time.perf_counter() - start, 1),
        "arguments_gib": memory.argument_size_in_bytes / 2**30,
        "temporaries_gib": memory.temp_size_in_bytes / 2**30,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
