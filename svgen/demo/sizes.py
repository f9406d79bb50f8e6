"""The sizes of the demo model: as small as its world allows, in the make of Wan 2.1."""

from svgen.catalog import Sampling
from svgen.config import TextSpec, TransformerSpec, VaeSpec

SIZE_PX, FRAMES, FPS = 128, 33, 16
Z_CHANNELS = 8

VAE = VaeSpec(  # 8x8 pixels and 4 frames a cell, as of Wan 2.1
    base_width=16,
    z_channels=Z_CHANNELS,
    multipliers=(1, 1, 2, 4),
    blocks=1,
    temporal_downsample=(False, True, True),
    latents_mean=(0.0,) * Z_CHANNELS,  # replaced by those of the trained encoder
    latents_std=(1.0,) * Z_CHANNELS,
)

TEXT = TextSpec(vocabulary=136, width=64, mlp_width=128, heads=4, head_dim=16, layers=2)

TRANSFORMER = TransformerSpec(
    heads=4,
    head_dim=32,
    layers=6,
    mlp_width=512,
    in_channels=Z_CHANNELS,
    out_channels=Z_CHANNELS,
    text_width=TEXT.width,
    frequency_width=64,
    patch=(1, 2, 2),  # 8x8 tokens of 9 latent frames: 576
)

SAMPLING = Sampling(
    steps=8,
    guidance=2.0,
    shift=5.0,
    frames=FRAMES,
    fps=FPS,
    size_px=(SIZE_PX, SIZE_PX),
    max_frames=FRAMES,
    trained_px=((SIZE_PX, SIZE_PX),),
)
