"""A model that is not on disk, for what depends on its shapes alone: its sizes are those of the
catalog, its weights mean nothing.
"""

from collections.abc import Callable
from contextlib import nullcontext

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from svgen import programs
from svgen.config import ModelSpecs, Request
from svgen.pipeline import Pipeline, Stage
from svgen.sharding import placer, whole_placer
from svgen.tokenizer import TokenIds

VALUES = 1 << 20  # drawn once and repeated: a large model would take minutes to draw
SCALE = 0.02  # small enough that no number of a run leaves its range
TEXT_TOKENS = 100  # of a prompt, and of a negative one


class StandIn(Pipeline):
    """A pipeline without a checkpoint."""

    def __init__(
        self,
        specs: ModelSpecs,
        *,
        dtype: str = "float32",
        stage: Stage = nullcontext,
        mesh: str = "auto",
    ):
        self._set_up(specs, dtype, stage, mesh)
        self._values = np.random.default_rng(0).standard_normal(VALUES, np.float32) * SCALE

    def tokens(self, request: Request) -> list[TokenIds]:
        """Ids that are as many as those of a prompt."""
        ids = np.arange(1, TEXT_TOKENS + 1, dtype=np.int32)
        prompt = TokenIds(ids=ids, text=request.prompt)
        return [prompt] * (2 if request.guidance > 1 else 1)

    def _load(self, part: str, mesh: Mesh | None = None) -> tuple[programs.Graph, programs.Weights]:
        graph, weights = nnx.split(self._abstract[part])
        place = _put
        if mesh is not None:
            place = whole_placer(mesh) if part == "vae" else placer(mesh)

        def fill(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
            values = np.resize(self._values.astype(leaf.dtype), leaf.shape)
            return jax.block_until_ready(place(path, values.shape, values.__getitem__))

        with self.stage(f"make up {part.replace('_', ' ')}"):
            return graph, jax.tree_util.tree_map_with_path(fill, weights)


def _put(_: tuple, shape: tuple[int, ...], read: Callable) -> jax.Array:
    return jax.device_put(read((slice(None),) * len(shape)))
