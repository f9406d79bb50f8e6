"""The sizes of the models of the catalog, as their config.json files say them."""

from svgen.config import ModelSpecs, TextSpec, TransformerSpec, VaeSpec

LATENTS_MEAN = (
    -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
    0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921,
)  # fmt: skip
LATENTS_STD = (
    2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
    3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160,
)  # fmt: skip

UMT5_XXL = TextSpec(
    vocabulary=256384, width=4096, mlp_width=10240, heads=64, head_dim=64, layers=24
)
WAN_VAE = VaeSpec(base_width=96, z_channels=16, latents_mean=LATENTS_MEAN, latents_std=LATENTS_STD)
SPECS: dict[str, ModelSpecs] = {
    "wan2.1-1.3b": ModelSpecs(
        text=UMT5_XXL,
        transformer=TransformerSpec(heads=12, head_dim=128, layers=30, mlp_width=8960),
        vae=WAN_VAE,
    ),
    "wan2.1-14b": ModelSpecs(
        text=UMT5_XXL,
        transformer=TransformerSpec(heads=40, head_dim=128, layers=40, mlp_width=13824),
        vae=WAN_VAE,
    ),
}
