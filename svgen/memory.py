"""What a run needs of memory at least, from sizes alone, before anything is loaded.

Counted is what must lie there at the same time, whatever the compiler does:

    embed      the text encoder's weights
    denoise    the transformer's weights and the state; the largest tensors of one layer
    decode     the VAE's weights and its cache; the tensors around its last convolutions

Weights lie in parts on the chips of a mesh, but the VAE's, whole on each. Less than that no run
takes, so a check against it refuses nothing that would fit. What a run really takes was measured to
be below `likely`, by which settings that fit are chosen.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from svgen import programs
from svgen.config import ModelSpecs, TransformerSpec, VaeSpec
from svgen.grid import Grid
from svgen.sharding import Split

EMBED, DENOISE, DECODE = "embed", "denoise", "decode"
STATE = 4  # arrays of a `DenoiseState`, float32 like the latents
FLOAT32 = 4  # bytes
# What a run takes over what is counted: of weights, for what lies between them; of tensors, for all
# the others that live at the same time; and of the host, for the compiler.
OVER_WEIGHTS, OVER_TENSORS, COMPILER = 1.1, 5.5, 2**28


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """Bytes of one chip in one stage."""

    fixed: int  # weights, state, cache
    moving: int  # tensors that come and go
    leaf: int  # the largest of the weights, as it is read

    @property
    def least(self) -> int:
        """What no run can do without."""
        return self.fixed + self.moving

    @property
    def likely(self) -> int:
        """What a run hardly exceeds."""
        numbers = OVER_WEIGHTS * (self.fixed + self.leaf) + OVER_TENSORS * self.moving
        return int(numbers) + COMPILER


def needs_of(
    specs: ModelSpecs, grid: Grid, *, branches: int, dtype: str, split: Split | None = None
) -> dict[str, Need]:
    """Count what each stage of a run needs, with 2 `branches` where it is guided."""
    split = split or Split(1, 1)
    weights = weight_bytes(specs, dtype)
    chips = {"text_encoder": split.chips, "transformer": split.chips, "vae": 1}
    tokens = math.ceil(grid.tokens / split.seq) * max(1, branches // split.cfg)
    size = jnp.dtype(dtype).itemsize

    def need(part: str, fixed: int, moving: int) -> Need:
        total, leaf = weights[part]
        return Need(fixed=total // chips[part] + fixed, moving=moving, leaf=leaf)

    cells = FLOAT32 * cache_cells(specs.vae, grid)
    return {
        EMBED: need("text_encoder", 0, 0),
        DENOISE: need(
            "transformer",
            state_bytes(specs, grid),
            size * layer_cells(specs.transformer, tokens),
        ),
        DECODE: need(
            "vae",
            cells // split.chips,
            FLOAT32 * last_cells(specs.vae, grid) // split.chips,
        ),
    }


@lru_cache(maxsize=8)
def weight_bytes(specs: ModelSpecs, dtype: str) -> dict[str, tuple[int, int]]:
    """Bytes of the weights of each part, and of its largest leaf."""
    parts = programs.abstract_parts(specs, jnp.dtype(dtype))
    sizes = {
        name: [_bytes(leaf) for leaf in jax.tree.leaves(nnx.state(part))]
        for name, part in parts.items()
    }
    return {name: (sum(some), max(some)) for name, some in sizes.items()}


def _bytes(leaf: Any) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize


def state_bytes(specs: ModelSpecs, grid: Grid) -> int:
    """The bytes of a `DenoiseState`."""
    cells = grid.latent_frames * grid.rows * grid.columns
    return STATE * cells * specs.vae.z_channels * FLOAT32


def layer_cells(spec: TransformerSpec, tokens: int) -> int:
    """Numbers in the largest tensors of one layer that live together: tokens and the inside of its
    MLP, or tokens, queries, keys and values.
    """
    return tokens * max(spec.width + spec.mlp_width, 4 * spec.width)


def last_cells(spec: VaeSpec, grid: Grid) -> int:
    """Numbers around a convolution of the VAE's last block: what goes round it, its input with the
    two frames before, and its output.
    """
    width, height = grid.computed_px
    frames = spec.frame_stride if grid.latent_frames > 1 else 1
    return (3 * frames + 2) * spec.base_width * spec.multipliers[0] * width * height


def cache_cells(spec: VaeSpec, grid: Grid) -> int:
    """Numbers in the cache of the VAE's decoder: two frames of what each causal convolution reads
    (`models.vae.build_decoder`).
    """
    width = spec.base_width * spec.multipliers[-1]
    area = grid.rows * grid.columns
    cells = area * (spec.z_channels + 4 * width)  # the first, and those of two residual blocks
    upsample = (*reversed(spec.temporal_downsample), None)
    for multiplier, temporal in zip(reversed(spec.multipliers), upsample, strict=True):
        out = spec.base_width * multiplier
        cells += area * (width + out + spec.blocks * 2 * out)
        if temporal is not None:
            cells += area * out * temporal
            width, area = out // 2, 4 * area
    return 2 * (cells + area * spec.base_width * spec.multipliers[0])
