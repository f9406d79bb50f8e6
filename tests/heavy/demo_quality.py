"""Renders the demo model densely and by schedules from the same seeds, and says how near they are.

    python tests/heavy/demo_quality.py [--prompts 12]

PSNR over the frames of each video, its mean and worst over prompts; the floor is dense attention
summed in another order (every tile read, through the visit tables).
"""

import os
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import click
import numpy as np

from svgen import programs
from svgen.attention.attend import Setting
from svgen.attention.masks import tables
from svgen.catalog import read_sampling
from svgen.config import SparsitySchedule
from svgen.demo import captions, scenes
from svgen.demo.evaluate import SEED, score, videos
from svgen.hub.source import DEMO
from svgen.kernels.reference import tile_sizes
from svgen.presets import load_preset
from svgen.quality import psnr_db, ssim

FRAMES, POSITIONS = 9, 64


def settings(steps: int, extra: list[float]) -> dict[str, Setting]:
    """The floor, the schedules of the presets as the demo gets them, and further band shares."""
    found = {"floor": Setting(SparsitySchedule(band_share=1.0))}
    for name in ("conservative", "aggressive"):
        preset = load_preset(name, (128, 128))
        found[name] = Setting(preset.small_sparsity.counted(steps))
    base = found["aggressive"].sparsity
    for share in extra:
        schedule = SparsitySchedule(
            band_share=share, dense_steps=base.dense_steps, dense_layers=base.dense_layers
        )
        found[f"share {share:g}"] = Setting(schedule)
    return found


@click.command()
@click.option("--prompts", default=12)
@click.option("--share", multiple=True, type=float, help="A further band share to render.")
def main(prompts: int, share: tuple[float, ...]) -> None:
    """Print a table."""
    rng = np.random.default_rng(SEED)
    asked = [scenes.sample(rng, held_out=True) for _ in range(prompts)]
    texts = [captions.caption(scene, rng, held_out=True) for scene in asked]
    sampling = read_sampling(DEMO)

    def render(setting: Setting) -> list[np.ndarray]:
        return list(videos(DEMO, texts, sampling, batch=6, setting=setting))

    dense = render(programs.DENSE)
    print(f"dense: all three right {score(asked, dense)['all three']:.0%} of {prompts} prompts")
    print(f"{'schedule':<14}{'kept':>7}{'PSNR mean':>11}{'worst':>8}{'SSIM':>7}{'right':>7}")
    for name, setting in settings(sampling.steps, list(share)).items():
        made = render(setting)
        psnr = [psnr_db(a, b).mean() for a, b in zip(made, dense, strict=True)]
        likeness = [ssim(a, b).mean() for a, b in zip(made, dense, strict=True)]
        shares = tables(
            FRAMES, POSITIONS, setting.sparsity.band_share, tile_sizes(FRAMES, POSITIONS)
        )
        right = score(asked, made)["all three"]
        print(
            f"{name:<14}{shares.spatial.density:>7.1%}{np.mean(psnr):>8.1f} dB{min(psnr):>8.1f}"
            f"{np.mean(likeness):>7.3f}{right:>7.0%}"
        )


if __name__ == "__main__":
    main()
