"""Trains the demo model in stages that can be stopped and taken up again; see `--help`."""

import json
import os
import shutil
import time
from dataclasses import asdict, replace
from pathlib import Path

import click
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from svgen.checkpoint import read_specs
from svgen.config import ModelSpecs
from svgen.demo import scenes, train_flow, train_vae
from svgen.demo.basis import Basis
from svgen.demo.evaluate import load
from svgen.demo.export import sampling_json, write_checkpoint
from svgen.demo.sizes import FRAMES, SAMPLING, SIZE_PX, TEXT, TRANSFORMER, VAE
from svgen.demo.store import load_tree, save_tree
from svgen.demo.vocabulary import write_tokenizer
from svgen.models.vae import Vae
from svgen.tokenizer import Tokenizer

TEST_SEED = 10**6  # no training stream starts here
START = "svgen.demo.train.start"
LATENTS = ("basis.npz", "statistics.json")  # what latents mean: they go with the networks


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--folder", type=click.Path(path_type=Path), default="demo-training")
@click.option("--devices", default=os.cpu_count(), help="Virtual devices that share the CPU.")
@click.option(
    "--from",
    "start",
    type=click.Path(path_type=Path, exists=True),
    help="An exported checkpoint: what it holds is where stages start that FOLDER has not begun.",
)
@click.pass_context
def main(context: click.Context, folder: Path, devices: int, start: Path | None) -> None:
    """Train the demo model. Stages: latents, then vae and flow, export. Each goes on from FOLDER.

    `plot` draws the losses so far; `export` at any time, then `svgen.demo.evaluate`, show samples.
    """
    jax.config.update("jax_num_cpu_devices", devices)
    folder.mkdir(parents=True, exist_ok=True)
    for name in LATENTS if start else ():
        if not (folder / name).exists():
            shutil.copy(start / name, folder / name)
    context.obj, context.meta[START] = folder, start


def _started(*parts: str) -> list[nnx.State]:
    """The weights of parts of the checkpoint that --from names, float32."""
    start = click.get_current_context().meta[START]
    found = load(start, read_specs(start)) if start else {}
    return [found[part][1] for part in parts if found]


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
@click.option("--side", default=48, help="Pixels along each side of a crop; at last 128.")
@click.option("--frames", default=17, help="Frames of a crop.")
@click.pass_obj
def vae(
    folder: Path, steps: int, batch: int, rate: float, seed: int, every: int, **crop: int
) -> None:
    """Train the VAE to write and to draw the latents of `latents`."""
    graph, weights = nnx.split(Vae(VAE, dtype=jnp.float32, rngs=nnx.Rngs(seed)))
    transform = train_vae.optimizer(steps, rate)
    moments, done, path = transform.init(weights), 0, folder / "vae.safetensors"
    if path.exists():
        (weights, moments), numbers = load_tree(path, (weights, moments))
        done = numbers["steps"]
    elif started := _started("vae"):
        (weights,) = started
    stream = train_vae.crops(Basis.load(folder / "basis.npz"), seed + done, batch, **crop)
    losses, start = [], time.perf_counter()
    clips = test_clips(4)
    for step in range(done, steps):
        key = jax.random.key(seed * steps + step)
        weights, moments, value = train_vae.train_step(
            graph, transform, weights, moments, next(stream), key
        )
        losses.append(float(value))
        if (step + 1) % every == 0 or step + 1 == steps:
            save_tree(path, (weights, moments), steps=step + 1)
            _keep_losses(folder / "vae.csv", step + 1, losses[-every:])
            seconds = (time.perf_counter() - start) / len(losses)
            text = f"step {step + 1}: loss {np.mean(losses[-every:]):.4f}, {seconds:.2f} s a step"
            if (step + 1) % (5 * every) == 0:
                text += f", PSNR {train_vae.psnr_db(nnx.merge(graph, weights), clips):.2f} dB"
            click.echo(text)


def _trained_vae(folder: Path) -> Vae:
    """The VAE as its training left it, with the statistics of its latents where they are known."""
    spec, path = VAE, folder / "vae.safetensors"
    graph, weights = nnx.split(Vae(spec, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    if path.exists() or not (started := _started("vae")):
        moments = train_vae.optimizer(100, 1e-3).init(weights)
        (weights, _), _ = load_tree(path, (weights, moments))
    else:
        (weights,) = started
    path = folder / "statistics.json"
    if path.exists():
        numbers = json.loads(path.read_text())
        spec = replace(spec, latents_mean=tuple(numbers["mean"]), latents_std=tuple(numbers["std"]))
    vae = nnx.merge(graph, weights)
    vae.spec = spec
    return vae


@main.command()
@click.option("--clips", default=4000)
@click.option("--seed", default=1)
@click.pass_obj
def latents(folder: Path, clips: int, seed: int) -> None:
    """Draw the clips that the flow is trained on, as latents; further seeds add further clips."""
    rng, path = np.random.default_rng(seed), folder / "basis.npz"
    drawn = [scenes.sample(rng) for _ in range(clips)]
    frames = (scenes.render(one, frames=FRAMES, size_px=SIZE_PX) for one in drawn)
    if not path.exists():
        first = np.stack([scenes.render(one) for one in drawn[:200]])
        Basis.fit(first, VAE.z_channels).save(path)
    basis = Basis.load(path)
    bank = np.stack([basis.latents(one).astype(np.float16) for one in frames])
    np.save(folder / f"latents-{seed}.npy", bank)
    (folder / f"latents-{seed}.json").write_text(json.dumps([asdict(one) for one in drawn]))
    if not (folder / "statistics.json").exists():  # those of the first bank stay
        sample = bank[:500].astype(np.float32)
        numbers = {
            "mean": sample.mean(axis=(0, 1, 2, 3)).tolist(),
            "std": sample.std(axis=(0, 1, 2, 3)).tolist(),
        }
        (folder / "statistics.json").write_text(json.dumps(numbers))


def _bank(folder: Path) -> tuple[np.ndarray, list[scenes.Scene]]:
    """Normalised latents of all seeds, and their scenes."""
    numbers = json.loads((folder / "statistics.json").read_text())
    mean, std = (np.asarray(numbers[name], np.float32) for name in ("mean", "std"))
    banks, drawn = [], []
    for path in sorted(folder.glob("latents-*.npy")):
        banks.append(((np.load(path, allow_pickle=False) - mean) / std).astype(np.float16))
        drawn += [scenes.Scene(**one) for one in json.loads(path.with_suffix(".json").read_text())]
    return np.concatenate(banks), drawn


@main.command()
@click.option("--steps", default=6000)
@click.option("--batch", default=16)
@click.option("--rate", default=2e-3)
@click.option("--seed", default=2)
@click.option("--every", default=100, help="Steps between saves and reports.")
@click.pass_obj
def flow(folder: Path, steps: int, batch: int, rate: float, seed: int, every: int) -> None:
    """Train the text encoder and the transformer."""
    write_tokenizer(folder / "tokenizer")
    networks, weights = train_flow.new_networks(TEXT, TRANSFORMER, seed)
    transform = train_flow.optimizer(steps, rate)
    done, path = 0, folder / "flow.safetensors"
    if not path.exists() and (started := _started("text_encoder", "transformer")):
        weights = (*started, weights[2])
    average = jax.tree.map(jnp.array, weights)
    state = train_flow.TrainState(weights, average, transform.init(weights))
    if path.exists():
        state, numbers = load_tree(path, state)
        done = numbers["steps"]
    captioner = train_flow.Captioner(Tokenizer.load(folder), seed + done)
    stream = train_flow.batches(*_bank(folder), captioner, batch)
    losses, start = [], time.perf_counter()
    for step in range(done, steps):
        key = jax.random.key(seed * steps + step)
        state, value = train_flow.train_step(
            networks, transform, state, next(stream), key, np.float32(step)
        )
        losses.append([float(part) for part in value])
        if (step + 1) % every == 0 or step + 1 == steps:
            save_tree(path, state, steps=step + 1)
            total, error = np.mean(losses[-every:], axis=0)
            _keep_losses(folder / "flow.csv", step + 1, [error])
            seconds = (time.perf_counter() - start) / len(losses)
            text = f"step {step + 1}: loss {error:.4f}, probes {total - error:.4f}"
            click.echo(f"{text}, {seconds:.2f} s a step")


def _keep_losses(path: Path, step: int, losses: list[float]) -> None:
    """Append a step and the mean loss since the last one."""
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{step},{np.mean(losses):.5f}\n")


@main.command()
@click.pass_obj
def plot(folder: Path) -> None:
    """Draw the losses of all stages as FOLDER/losses.png."""
    from matplotlib.figure import Figure

    stages = [path for path in (folder / "vae.csv", folder / "flow.csv") if path.exists()]
    figure = Figure(figsize=(5 * len(stages), 4), layout="constrained")
    for axes, path in zip(figure.subplots(1, len(stages), squeeze=False)[0], stages, strict=True):
        step, loss = np.loadtxt(path, delimiter=",", ndmin=2).T
        axes.plot(step, loss)
        axes.set(title=path.stem, xlabel="step", ylabel="mean loss", yscale="log")
    figure.savefig(folder / "losses.png")
    click.echo(folder / "losses.png")


@main.command()
@click.argument("target", type=click.Path(path_type=Path))
@click.pass_obj
def export(folder: Path, target: Path) -> None:
    """Write the averaged weights as a checkpoint folder in diffusers' layout.

    What FOLDER has not begun is taken from --from.
    """
    write_tokenizer(folder / "tokenizer")
    networks, weights = train_flow.new_networks(TEXT, TRANSFORMER, 0)
    path = folder / "flow.safetensors"
    if path.exists() or not (started := _started("text_encoder", "transformer")):
        moments = train_flow.optimizer(100, 1e-3).init(weights)
        state = train_flow.TrainState(weights, weights, moments)
        started = load_tree(path, state)[0].average
    vae = _trained_vae(folder)
    parts = {
        "text_encoder": nnx.merge(networks.text, started[0]),
        "transformer": nnx.merge(networks.transformer, started[1]),
        "vae": vae,
    }
    specs = ModelSpecs(text=TEXT, transformer=TRANSFORMER, vae=vae.spec)
    sampling = sampling_json(SAMPLING)
    size = write_checkpoint(target, specs, parts, dtype=jnp.bfloat16, sampling=sampling)
    for name in LATENTS:
        shutil.copy(folder / name, target / name)
    click.echo(f"{target}: {size / 1e6:.1f} MB of weights")


if __name__ == "__main__":
    main()
