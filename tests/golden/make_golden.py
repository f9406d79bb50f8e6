"""Makes the small checkpoint of the tests and what diffusers computes with it. Needs the `parity`
extra.

    python tests/golden/make_golden.py        writes tests/golden/tiny/ and
    tests/golden/golden.safetensors

The weights are random, so the videos show nothing; they are there to be compared. `build` is also
used by the live parity tests, with other sizes. Versions of what made the files lie in the header
of golden.safetensors.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import tokenizers
import torch
import transformers
from safetensors.numpy import save_file
from tokenizers import models, pre_tokenizers, processors

HERE = Path(__file__).parent
PIECES = ["▁", *"abcdefghijklmnopqrstuvwxyz0123456789.,!?-'", "▁a", "▁the", "▁cat", "▁ball", "ing"]
WAN_MEAN = [-0.76, -0.71, -0.91, 0.11, -0.17, 0.97, -0.15, 1.55]
WAN_STD = [2.82, 1.45, 2.33, 2.66, 1.22, 1.77, 2.61, 2.07]
PROMPT, NEGATIVE = "a red ball moving to the right", "blurry, static"
SHIFT, STEPS, GUIDANCE = 5.0, 8, 4.0


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of one small checkpoint, and of the video that is made with it."""

    seed: int = 0
    width_px: int = 64
    height_px: int = 48
    frames: int = 9
    text: dict[str, Any] = field(
        default_factory=lambda: {
            "d_model": 32,
            "d_ff": 48,
            "num_heads": 3,
            "d_kv": 8,
            "num_layers": 2,
        }
    )
    transformer: dict[str, Any] = field(
        default_factory=lambda: {
            "num_attention_heads": 4,
            "attention_head_dim": 12,
            "num_layers": 3,
            "ffn_dim": 96,
            "freq_dim": 32,
        }
    )
    vae: dict[str, Any] = field(
        default_factory=lambda: {
            "base_dim": 4,
            "dim_mult": [1, 2, 4, 4],
            "num_res_blocks": 1,
            "temperal_downsample": [False, True, True],
        }
    )
    z_dim: int = 8


TINY = Sizes()
WIDER = Sizes(  # wide heads, deeper text, odd rows and columns of tokens, no norm before text
    seed=1,
    width_px=112,
    height_px=80,
    frames=5,
    text={"d_model": 48, "d_ff": 64, "num_heads": 2, "d_kv": 32, "num_layers": 3},
    transformer={
        "num_attention_heads": 2,
        "attention_head_dim": 64,
        "num_layers": 2,
        "ffn_dim": 96,
        "freq_dim": 64,
        "cross_attn_norm": False,
    },
    vae={
        "base_dim": 8,
        "dim_mult": [1, 2, 2, 4],
        "num_res_blocks": 2,
        "temperal_downsample": [True, True, False],
    },
    z_dim=4,
)
DEEPER = Sizes(  # many narrow heads, more layers, longer in time than in space
    seed=2,
    width_px=32,
    height_px=80,
    frames=17,
    text={"d_model": 24, "d_ff": 40, "num_heads": 4, "d_kv": 8, "num_layers": 1},
    transformer={
        "num_attention_heads": 6,
        "attention_head_dim": 18,
        "num_layers": 5,
        "ffn_dim": 80,
        "freq_dim": 16,
    },
    vae={
        "base_dim": 6,
        "dim_mult": [1, 1, 2, 3],
        "num_res_blocks": 1,
        "temperal_downsample": [False, True, True],
    },
    z_dim=6,
)


def write_tokenizer(folder: Path) -> Any:
    """Write a small tokenizer of T5's make and load it as diffusers does."""
    folder.mkdir(parents=True, exist_ok=True)
    scored = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    scored += [(piece, -len(PIECES) + 0.1 * len(piece)) for piece in PIECES]
    made = tokenizers.Tokenizer(models.Unigram(scored, unk_id=2, byte_fallback=False))
    made.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    made.add_special_tokens(["<pad>", "</s>", "<unk>"])
    made.post_processor = processors.TemplateProcessing(
        single=["$A", "</s>"], special_tokens=[("</s>", 1)]
    )
    made.save(str(folder / "tokenizer.json"))
    names = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>", "extra_ids": 0}
    config = {"tokenizer_class": "T5TokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return transformers.AutoTokenizer.from_pretrained(folder)


def _roughen(module: torch.nn.Module) -> None:
    """Give norms and biases, which start at ones and zeros, values that a mistake would show."""
    with torch.no_grad():
        for parameter in module.parameters():
            if min(parameter.shape, default=1) == 1 or parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))


def build(sizes: Sizes, folder: Path) -> diffusers.WanPipeline:
    """Save a checkpoint of random weights in diffusers' layout; return it, read back."""
    torch.manual_seed(sizes.seed)
    tokenizer = write_tokenizer(folder / "made_tokenizer")
    text_config = transformers.UMT5Config(vocab_size=3 + len(PIECES), **sizes.text)
    text_encoder = transformers.UMT5EncoderModel(text_config).eval()
    transformer = diffusers.WanTransformer3DModel(
        in_channels=sizes.z_dim,
        out_channels=sizes.z_dim,
        text_dim=sizes.text["d_model"],
        **sizes.transformer,
    ).eval()
    vae = diffusers.AutoencoderKLWan(
        z_dim=sizes.z_dim,
        latents_mean=WAN_MEAN[: sizes.z_dim],
        latents_std=WAN_STD[: sizes.z_dim],
        **sizes.vae,
    ).eval()
    for module in (text_encoder, transformer, vae):
        _roughen(module)
    scheduler = diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        num_train_timesteps=1000,
        flow_shift=3.0,  # what Wan's converter wrote; svgen must not read it
    )
    pipeline = diffusers.WanPipeline(
        tokenizer=tokenizer,
        text_encoder=text_encoder,
        transformer=transformer,
        vae=vae,
        scheduler=scheduler,
    )
    pipeline.save_pretrained(folder)
    for file in (folder / "made_tokenizer").iterdir():
        (folder / "tokenizer" / file.name).write_bytes(file.read_bytes())
        file.unlink()
    (folder / "made_tokenizer").rmdir()
    pipeline = diffusers.WanPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def noise_of(sizes: Sizes, seed: int) -> np.ndarray:
    """The first latents of a run of svgen, [1, F, H, W, Z]."""
    bits = np.random.Philox(key=np.array([seed, 0], np.uint64))
    stride = 8
    shape = (1, 1 + (sizes.frames - 1) // 4, sizes.height_px // stride, sizes.width_px // stride)
    return np.random.Generator(bits).standard_normal((*shape, sizes.z_dim), np.float32)


def clip_of(sizes: Sizes) -> np.ndarray:
    """Frames for the encoder, [1, T, h, w, 3]."""
    shape = (1, sizes.frames, sizes.height_px, sizes.width_px, 3)
    return np.random.default_rng(sizes.seed).uniform(-1, 1, shape).astype(np.float32)


def channels_first(x: np.ndarray) -> torch.Tensor:
    """[B, F, H, W, Z] -> [B, Z, F, H, W]."""
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(x, -1, 1)))


def channels_last(x: torch.Tensor) -> np.ndarray:
    """[B, Z, F, H, W] -> [B, F, H, W, Z]."""
    return np.ascontiguousarray(np.moveaxis(x.detach().numpy(), 1, -1))


@torch.no_grad()
def reference(
    pipeline: diffusers.WanPipeline, sizes: Sizes, seed: int = 7
) -> dict[str, np.ndarray]:
    """What diffusers computes, part by part and for a whole run of 8 steps."""
    noise = noise_of(sizes, seed)
    text = pipeline._get_t5_prompt_embeds([PROMPT, NEGATIVE], max_sequence_length=512)
    both = channels_first(np.concatenate([noise, noise]))
    velocity = pipeline.transformer(both, torch.tensor([731, 731]), text, return_dict=False)[0]
    clip = clip_of(sizes)
    mean = pipeline.vae.encode(channels_first(clip)).latent_dist.mode()
    decoded = pipeline.vae.decode(mean, return_dict=False)[0]
    found = {
        "noise": noise,
        "text": text[:, :64].numpy(),  # the rest is zeros, which is asserted below
        "velocity": channels_last(velocity),
        "encoded": channels_last(mean),
        "decoded": channels_last(decoded),
    }
    assert not text[:, 64:].any()
    return found | run(pipeline, sizes, noise)


def run(pipeline: diffusers.WanPipeline, sizes: Sizes, noise: np.ndarray) -> dict[str, np.ndarray]:
    """A whole run of WanPipeline: latents after every step, and the frames."""
    pipeline.scheduler = diffusers.UniPCMultistepScheduler.from_config(
        pipeline.scheduler.config, flow_shift=SHIFT
    )
    trajectory = []

    def record(_: Any, step: int, time: Any, values: dict[str, torch.Tensor]) -> dict:
        trajectory.append(channels_last(values["latents"]))
        return values

    video = pipeline(
        prompt=PROMPT,
        negative_prompt=NEGATIVE,
        height=sizes.height_px,
        width=sizes.width_px,
        num_frames=sizes.frames,
        num_inference_steps=STEPS,
        guidance_scale=GUIDANCE,
        latents=channels_first(noise),
        output_type="np",
        callback_on_step_end=record,
    ).frames[0]
    frames = np.round(video * 255).astype(np.uint8)
    return {"trajectory": np.stack(trajectory)[:, 0], "frames": frames}


def main() -> None:
    """Write the checkpoint and the golden values."""
    folder = HERE / "tiny"
    values = reference(build(TINY, folder), TINY)
    versions = {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "transformers": transformers.__version__,
    }
    values = {name: np.ascontiguousarray(value) for name, value in values.items()}
    save_file(values, HERE / "golden.safetensors", versions)


if __name__ == "__main__":
    main()
