"""Floating-point operations of a run's parts, counted from shapes, and chips' published peaks.

Only products are counted, each multiplication and addition as one. Attention counts the pairs that
it visits.
"""

from svgen.config import ModelSpecs, TransformerSpec
from svgen.grid import Grid

PEAKS = (  # published dense bf16 peak of what JAX calls one device, in FLOP/s, by its kind
    ("TPU v4", 275e12),
    ("TPU v5 lite", 197e12),
    ("TPU v5e", 197e12),
    ("TPU v5p", 459e12),
    ("TPU v5", 459e12),  # a v5p
    ("TPU v6 lite", 918e12),
    ("TPU v6e", 918e12),
    ("TPU7x", 1153.5e12),  # one of two cores of a chip, which has 2,307
    ("NVIDIA B200", 2250e12),
    ("NVIDIA H200", 989e12),
    ("NVIDIA H100 PCIe", 756e12),
    ("NVIDIA H100", 989e12),
    ("NVIDIA A100", 312e12),
    ("NVIDIA L4", 121e12),
)
CONVOLUTIONS = 24  # of the VAE's base width at full size, that decoding amounts to; for estimates


def peak_of(kind: str) -> float | None:
    """The peak of a device, by the kind that JAX gives; None if it is not known."""
    for name, peak in PEAKS:
        if kind == name or kind.startswith((f"{name} ", f"{name}-")):
            return peak
    return None


def attention_flops(pairs: float, head_dim: int) -> float:
    """Of so many pairs of tokens, summed over heads: scores, and their sums over values."""
    return 4.0 * pairs * head_dim


def step_flops(spec: TransformerSpec, tokens: int, text_rows: int, branches: int) -> float:
    """Of one step without its self-attention."""
    width = spec.width
    cells = spec.patch[0] * spec.patch[1] * spec.patch[2]
    video = 6 * width**2 + 2 * width * spec.mlp_width + 2 * width * text_rows
    text = 2 * width**2
    ends = width * cells * (spec.in_channels + spec.out_channels)
    each = spec.layers * (tokens * video + text_rows * text) + tokens * ends
    return 2.0 * branches * each


def stage_flops(specs: ModelSpecs, grid: Grid, text_rows: int, branches: int) -> dict[str, float]:
    """Of one layer's dense attention, one dense step and one decoded latent frame: for an estimate
    of their time.
    """
    spec = specs.transformer
    pairs = branches * spec.heads * float(grid.tokens) ** 2
    attention = attention_flops(pairs, spec.head_dim)
    width, height = grid.computed_px
    pixels = width * height * specs.vae.frame_stride
    return {
        "attention": attention,
        "step": step_flops(spec, grid.tokens, text_rows, branches) + spec.layers * attention,
        "decode": 2.0 * CONVOLUTIONS * 27 * specs.vae.base_width**2 * pixels,
    }
