"""The sizes of the demo model: as small as its world allows, in the make of Wan 2.1."""

from svgen.config import VaeSpec

SIZE_PX, FRAMES, FPS = 128, 33, 16
Z_CHANNELS = 6

VAE = VaeSpec(  # 4 pixels a cell, 4 frames a latent frame; the transformer's patch of 4x4 does the rest
    base_width=16,
    z_channels=Z_CHANNELS,
    multipliers=(1, 2, 4),
    blocks=1,
    temporal_downsample=(True, True),
    latents_mean=(0.0,) * Z_CHANNELS,  # replaced by those of the trained encoder
    latents_std=(1.0,) * Z_CHANNELS,
)
