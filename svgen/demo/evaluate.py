"""Measures whether a trained demo shows what its prompts ask for: `python -m svgen.demo.evaluate`.

Held-out combinations in held-out phrasings, fixed seeds; colour, motion and background are measured
in the pixels. `--shuffle` gives every video the prompt of another, `--mute` none: both must score
badly, or the measurement proves nothing.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from svgen import programs
from svgen.attention.attend import Setting
from svgen.catalog import UNKNOWN, Sampling, read_sampling
from svgen.checkpoint import load_module
from svgen.config import ModelSpecs, Request
from svgen.demo import captions, scenes
from svgen.demo.measure import measure
from svgen.grid import Rules, grid_of
from svgen.models.keys import text_keys, transformer_keys, vae_keys
from svgen.pipeline import Pipeline, draw_noise
from svgen.scheduler import solver_table, start_state
from svgen.tokenizer import bucket_length, pad_ids

ATTRIBUTES = ("color", "motion", "background")
SEED = 20_000_000  # of the scenes that are asked for


def load(folder: Path, specs: ModelSpecs) -> dict[str, tuple[nnx.GraphDef, nnx.State]]:
    """Load all three networks, in float32, each split into graph and weights."""
    keys = {
        "text_encoder": text_keys(specs.text),
        "transformer": transformer_keys(specs.transformer),
        "vae": vae_keys(specs.vae),
    }
    abstract = programs.abstract_parts(specs, jnp.float32)
    return {part: nnx.split(load_module(folder, part, abstract[part], keys[part])) for part in keys}


def videos(
    folder: Path,
    prompts: list[str],
    sampling: Sampling,
    *,
    batch: int,
    setting: Setting = programs.DENSE,
) -> Iterator[np.ndarray]:
    """Make one video per prompt, uint8 [T, h, w, 3]; the prompt's number is its seed."""
    pipeline = Pipeline(folder)
    parts = load(folder, pipeline.specs)
    rules = Rules.of(pipeline.specs.transformer, pipeline.specs.vae)
    grid = grid_of(*sampling.size_px, sampling.frames, rules)
    rows = programs.StepTable.of(solver_table(sampling.steps, sampling.shift))
    for first in range(0, len(prompts), batch):
        some = prompts[first : first + batch]
        texts = some + ([""] * len(some) if sampling.guidance > 1 else [])
        encode = pipeline.tokenizer.encode
        tokens = [encode(text, truncate=False, allow_empty=True) for text in texts]
        ids, lengths = pad_ids(tokens, bucket_length(max(one.length for one in tokens)))
        text = programs.embed(*parts["text_encoder"], jnp.asarray(ids), jnp.asarray(lengths))
        channels = pipeline.specs.vae.z_channels
        seeds = range(first, first + len(some))
        noise = np.concatenate([draw_noise(grid, channels, seed=seed) for seed in seeds])
        state = start_state(jnp.asarray(noise))
        guidance = jnp.float32(sampling.guidance)
        for _ in range(sampling.steps):
            fixed = (text, rows, guidance, jnp.uint32(first))
            state = programs.denoise_step(
                *parts["transformer"], state, *fixed, setting=setting
            ).state
        for item in range(len(some)):
            chunks = programs.decode(*parts["vae"], state.latents[item : item + 1])
            yield np.concatenate([np.asarray(frames[0]) for frames, _ in chunks])


def head_masses(folder: Path, prompt: str, sampling: Sampling) -> np.ndarray:
    """Where each head looks while one video is made: the share of attention inside the query's
    frame, and along its position, float32 [layers, A, 2], the mean over steps and branches.
    """
    pipeline = Pipeline(folder)
    values = {name: getattr(sampling, name) for name in ("steps", "guidance", "shift", "frames")}
    width, height = sampling.size_px
    request = Request(
        prompt=prompt, model=str(folder), width_px=width, height_px=height, fps=16, seed=0, **values
    )
    text, states = pipeline.embed(request), [pipeline.start(request)]
    for step in pipeline.denoise(request, text):
        states.append(jax.tree.map(jnp.array, step.state))
    views = pipeline.observe(request, text, states[:-1])
    found = [np.stack([view.along_time[..., 0], view.on_frame[..., 0]], axis=-1) for view in views]
    return np.mean(found, axis=(0, 2))


def score(asked: list[scenes.Scene], made: list[np.ndarray]) -> dict[str, float]:
    """Share of the videos that show each attribute asked for, and all of them."""
    right = {name: [] for name in ATTRIBUTES}
    for scene, frames in zip(asked, made, strict=True):
        seen = measure(frames)
        for name in ATTRIBUTES:
            right[name].append(getattr(seen, name) == getattr(scene, name))
    shares = {name: float(np.mean(values)) for name, values in right.items()}
    return shares | {"all three": float(np.all(list(right.values()), axis=0).mean())}


def contact_sheet(made: list[np.ndarray], path: Path, *, moments: int = 5) -> None:
    """Write a picture: one row per video, its frames spread over time."""
    from matplotlib import image

    rows = []
    for frames in made:
        chosen = np.linspace(0, len(frames) - 1, moments).round().astype(int)
        rows.append(
            np.concatenate([np.pad(frames[i], ((1, 1), (1, 1), (0, 0))) for i in chosen], 1)
        )
    image.imsave(path, np.concatenate(rows))


def _say_masses(masses: np.ndarray) -> None:
    """Print a row per layer: of each head, the share inside the frame and along the position."""
    click.echo("share of attention inside the query's frame / along its position, per head")
    for layer, heads in enumerate(masses):
        shares = "  ".join(f"{frame:6.1%} /{position:6.1%}" for frame, position in heads)
        click.echo(f"layer {layer}  {shares}")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("folder", type=click.Path(path_type=Path, exists=True))
@click.option("--prompts", default=48, show_default=True)
@click.option("--steps", type=int)
@click.option("--guidance", type=float)
@click.option("--shift", type=float)
@click.option("--shuffle", is_flag=True, help="Give every video another's prompt.")
@click.option("--mute", is_flag=True, help="Give no prompt.")
@click.option("--seen", is_flag=True, help="Combinations and phrasings of the training.")
@click.option("--batch", default=8, show_default=True)
@click.option("--heads", is_flag=True, help="Show where each head looks, instead.")
@click.option("--sheet", type=click.Path(path_type=Path), help="Write a picture of the first 8.")
def main(folder: Path, prompts: int, seen: bool, batch: int, **options: Any) -> None:
    """Print which share of the videos shows what was asked for."""
    rng = np.random.default_rng(SEED)
    asked = [scenes.sample(rng, held_out=not seen) for _ in range(prompts)]
    texts = [captions.caption(scene, rng, held_out=not seen) for scene in asked]
    sheet, heads, shuffle, mute = (options.pop(k) for k in ("sheet", "heads", "shuffle", "mute"))
    chosen = {name: value for name, value in options.items() if value is not None}
    values = {name: getattr(read_sampling(folder) or UNKNOWN, name) for name in Sampling.__slots__}
    sampling = Sampling(**(values | chosen))
    if heads:
        _say_masses(head_masses(folder, texts[0], sampling))
        return
    given = texts[1:] + texts[:1] if shuffle else [""] * prompts if mute else texts
    made = list(videos(folder, given, sampling, batch=batch))
    if sheet:
        contact_sheet(made[:8], sheet)
        for text in given[:8]:
            click.echo(text)
    shares = score(asked, made)
    setting = f"{sampling.steps} steps, guidance {sampling.guidance:g}, shift {sampling.shift:g}"
    wrong = ", shuffled" * shuffle + ", none given" * mute
    click.echo(f"{prompts} prompts, {setting}{wrong}")
    for name, share in shares.items():
        click.echo(f"{name:12}{share:7.1%}")


if __name__ == "__main__":
    main()
