"""Times whole runs of svgen and of diffusers on the same checkpoint, in turn, and prints the ratio
of each part.

    python tests/compare_speed.py [--rounds 5]        needs the `parity` extra, a few minutes and 3
    GB

About 100 M parameters, 2,304 video tokens, 4 steps with guidance, float32, on the CPU. Weights are
in memory and programs compiled before the clock starts, on both sides; rounds alternate, because
the speed of a shared machine drifts.
"""

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "golden")]
WIDTH, HEIGHT, FRAMES, STEPS = 256, 256, 33, 4
PARTS = ("text", "denoise", "decode")


def timed(parts: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Run the parts in order; seconds of each."""
    seconds = {}
    for name, part in parts.items():
        start = time.perf_counter()
        part()
        seconds[name] = time.perf_counter() - start
    return seconds


def diffusers_parts(pipeline, make_golden, noise: np.ndarray) -> dict[str, Callable[[], object]]:
    """The parts of a run of WanPipeline, as it calls them."""
    import torch

    held = {}

    def text() -> None:
        prompts = [make_golden.PROMPT, make_golden.NEGATIVE]
        held["text"] = pipeline._get_t5_prompt_embeds(prompts, max_sequence_length=512).split(1)

    def denoise() -> None:
        held["latents"] = pipeline(
            prompt_embeds=held["text"][0],
            negative_prompt_embeds=held["text"][1],
            height=HEIGHT,
            width=WIDTH,
            num_frames=FRAMES,
            num_inference_steps=STEPS,
            guidance_scale=4.0,
            latents=make_golden.channels_first(noise),
            output_type="latent",
        ).frames

    def decode() -> None:
        with torch.no_grad():
            held["frames"] = pipeline.vae.decode(held["latents"], return_dict=False)[0]

    return {"text": torch.no_grad()(text), "denoise": denoise, "decode": decode}


def svgen_parts(folder: Path) -> dict[str, Callable[[], object]]:
    """The parts of a run of svgen: the programs that `pipeline` drives, weights loaded before."""
    import jax.numpy as jnp

    from svgen import programs
    from svgen.pipeline import Pipeline
    from svgen.scheduler import solver_table
    from svgen.tokenizer import bucket_length, pad_ids
    from tests.equality import request_for

    pipeline = Pipeline(folder)
    request = request_for(WIDTH, HEIGHT, FRAMES)
    loaded = {part: pipeline._load(part) for part in ("text_encoder", "transformer", "vae")}
    rows = programs.StepTable.of(solver_table(STEPS, 5.0))
    held = {}

    def text() -> None:
        tokens = pipeline.tokens(request)
        ids, lengths = pad_ids(tokens, bucket_length(max(one.length for one in tokens)))
        made = programs.embed(*loaded["text_encoder"], jnp.asarray(ids), jnp.asarray(lengths))
        held["text"] = made.block_until_ready()

    def denoise() -> None:
        state = pipeline.start(request)
        for _ in range(STEPS):
            step = programs.denoise_step(
                *loaded["transformer"],
                state,
                held["text"],
                rows,
                jnp.float32(4.0),
                jnp.uint32(0),
            )
            assert bool(step.finite)
            state = step.state
        held["latents"] = state.latents

    def decode() -> None:
        for frames, _ in programs.decode(*loaded["vae"], held["latents"]):
            np.asarray(frames)

    return {"text": text, "denoise": denoise, "decode": decode}


def main() -> None:
    """Print a table: median seconds of each part on both sides, and the median of the ratios."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    warnings.simplefilter("ignore")
    import make_golden

    sizes = make_golden.Sizes(
        width_px=WIDTH,
        height_px=HEIGHT,
        frames=FRAMES,
        text={"d_model": 512, "d_ff": 1024, "num_heads": 8, "d_kv": 64, "num_layers": 6},
        transformer={
            "num_attention_heads": 12,
            "attention_head_dim": 64,
            "num_layers": 10,
            "ffn_dim": 3072,
            "freq_dim": 256,
        },
        vae={"base_dim": 32, "temperal_downsample": [False, True, True]},
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        theirs = make_golden.build(sizes, folder)
        noise = make_golden.noise_of(sizes, 7)
        modules = (theirs.text_encoder, theirs.transformer, theirs.vae)
        counts = [sum(p.numel() for p in module.parameters()) / 1e6 for module in modules]
        print("parameters, M: text {:.0f}, transformer {:.0f}, VAE {:.0f}".format(*counts))
        sides = {
            "diffusers": diffusers_parts(theirs, make_golden, noise),
            "svgen": svgen_parts(folder),
        }
        for parts in sides.values():
            timed(parts)  # warm up
        seen = [{side: timed(parts) for side, parts in sides.items()} for _ in range(rounds)]
    report(seen)


def report(seen: list[dict[str, dict[str, float]]]) -> None:
    """Print medians, and the spread of the ratios over the rounds."""
    print(f"{'part':10} {'diffusers s':>12} {'svgen s':>9} {'ratio':>7}   spread of the ratio")
    for part in (*PARTS, "whole run"):
        names = PARTS if part == "whole run" else (part,)
        theirs, ours = (
            [sum(one[side][name] for name in names) for one in seen]
            for side in ("diffusers", "svgen")
        )
        ratios = sorted(b / a for a, b in zip(theirs, ours, strict=True))
        print(
            f"{part:10} {statistics.median(theirs):12.2f} {statistics.median(ours):9.2f} "
            f"{statistics.median(ratios):7.2f}   {ratios[0]:.2f} to {ratios[-1]:.2f}"
        )


if __name__ == "__main__":
    main()
