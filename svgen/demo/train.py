"""Trains the demo model in stages that can be stopped and taken up again; see `--help`."""

import time
from pathlib import Path

import click
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from svgen.demo import scenes, train_vae
from svgen.demo.sizes import FRAMES, SIZE_PX, VAE
from svgen.demo.store import load_tree, save_tree

TEST_SEED = 10**6  # no training stream starts here


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--folder", type=click.Path(path_type=Path), default="demo-training")
@click.pass_context
def main(context: click.Context, folder: Path) -> None:
    """Train the demo model. Stages: vae, latents, flow, export. Each goes on from FOLDER."""
    folder.mkdir(parents=True, exist_ok=True)
    context.obj = folder


def test_clips(count: int) -> np.ndarray:
    """Clips of combinations that training never sees, uint8 [count, T, h, w, 3]."""
    rng = np.random.default_rng(TEST_SEED)
    chosen = [scenes.sample(rng, held_out=True) for _ in range(count)]
    return np.stack([scenes.render(one, frames=FRAMES, size_px=SIZE_PX) for one in chosen])


@main.command()
@click.option("--steps", default=3000)
@click.option("--batch", default=4)
@click.option("--rate", default=2e-3)
@click.option("--seed", default=0)
@click.option("--every", default=100, help="Steps between saves and reports.")
@click.pass_obj
def vae(folder: Path, steps: int, batch: int, rate: float, seed: int, every: int) -> None:
    """Train the VAE."""
    graph, weights = nnx.split(train_vae.new_vae(VAE, seed))
    transform = train_vae.optimizer(steps, rate)
    moments, done, path = transform.init(weights), 0, folder / "vae.safetensors"
    if path.exists():
        (weights, moments), numbers = load_tree(path, (weights, moments))
        done = numbers["steps"]
    stream, losses, start = train_vae.crops(seed + done, batch), [], time.perf_counter()
    clips = test_clips(4)
    for step in range(done, steps):
        key = jax.random.key(seed * steps + step)
        frames = jnp.asarray(next(stream))
        weights, moments, value = train_vae.train_step(
            graph, transform, weights, moments, frames, key
        )
        losses.append(float(value))
        if (step + 1) % every == 0 or step + 1 == steps:
            save_tree(path, (weights, moments), steps=step + 1)
            seconds = (time.perf_counter() - start) / len(losses)
            text = f"step {step + 1}: loss {np.mean(losses[-every:]):.4f}, {seconds:.2f} s a step"
            if (step + 1) % (5 * every) == 0:
                text += f", PSNR {train_vae.psnr_db(nnx.merge(graph, weights), clips):.2f} dB"
            click.echo(text)


if __name__ == "__main__":
    main()
