"""Writes the trained networks as a checkpoint folder in diffusers' layout."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from svgen.config import ModelSpecs, TextSpec, TransformerSpec, VaeSpec
from svgen.demo.vocabulary import TOKENIZER_CLASS, write_tokenizer
from svgen.models.keys import Target, text_keys, transformer_keys, vae_keys
from svgen.tensors import arrange, stored_shape

SCHEDULER = {
    "_class_name": "UniPCMultistepScheduler",
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "num_train_timesteps": 1000,
    "solver_order": 2,
    "solver_type": "bh2",
    "predict_x0": True,
    "lower_order_final": True,
    "final_sigmas_type": "zero",
    "timestep_spacing": "linspace",
}


def upstream(leaf: np.ndarray, target: Target) -> np.ndarray:
    """Undo `checkpoint.arrange`: one leaf (of one layer) in upstream's shape."""
    shape = stored_shape(target, leaf.shape)
    places = arrange(np.arange(leaf.size).reshape(shape), target)
    out = np.empty(leaf.size, leaf.dtype)
    out[places.reshape(-1)] = leaf.reshape(-1)
    return out.reshape(shape)


def tensors(module: nnx.Module, keys: Mapping[str, Target], dtype: Any) -> dict[str, np.ndarray]:
    """Every tensor of a module under upstream's name."""
    leaves = {
        path: np.asarray(leaf.get_value()) for path, leaf in nnx.to_flat_state(nnx.state(module))
    }
    found = {}
    for name, target in keys.items():
        if not target.optional:
            leaf = leaves[target.path]
            leaf = leaf if target.layer is None else leaf[target.layer]
            found[name] = np.ascontiguousarray(upstream(leaf, target).astype(dtype))
    return found


def text_config(spec: TextSpec) -> dict[str, Any]:
    """What transformers' UMT5Config reads."""
    return {
        "architectures": ["UMT5EncoderModel"],
        "model_type": "umt5",
        "vocab_size": spec.vocabulary,
        "d_model": spec.width,
        "d_ff": spec.mlp_width,
        "num_heads": spec.heads,
        "d_kv": spec.head_dim,
        "num_layers": spec.layers,
        "num_decoder_layers": spec.layers,
        "relative_attention_num_buckets": spec.buckets,
        "relative_attention_max_distance": spec.max_distance,
        "layer_norm_epsilon": spec.eps,
        "feed_forward_proj": "gated-gelu",
        "is_encoder_decoder": True,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
    }


def transformer_config(spec: TransformerSpec) -> dict[str, Any]:
    """What diffusers' WanTransformer3DModel reads."""
    return {
        "_class_name": "WanTransformer3DModel",
        "num_attention_heads": spec.heads,
        "attention_head_dim": spec.head_dim,
        "num_layers": spec.layers,
        "ffn_dim": spec.mlp_width,
        "in_channels": spec.in_channels,
        "out_channels": spec.out_channels,
        "text_dim": spec.text_width,
        "freq_dim": spec.frequency_width,
        "patch_size": list(spec.patch),
        "cross_attn_norm": spec.cross_norm,
        "qk_norm": "rms_norm_across_heads",
        "eps": spec.eps,
        "rope_max_seq_len": spec.max_positions,
    }


def vae_config(spec: VaeSpec) -> dict[str, Any]:
    """What diffusers' AutoencoderKLWan reads."""
    return {
        "_class_name": "AutoencoderKLWan",
        "base_dim": spec.base_width,
        "z_dim": spec.z_channels,
        "dim_mult": list(spec.multipliers),
        "num_res_blocks": spec.blocks,
        "temperal_downsample": list(spec.temporal_downsample),
        "latents_mean": list(spec.latents_mean),
        "latents_std": list(spec.latents_std),
        "scale_factor_spatial": spec.stride,
        "scale_factor_temporal": spec.frame_stride,
    }


def model_index() -> dict[str, Any]:
    """What DiffusionPipeline.from_pretrained reads."""
    return {
        "_class_name": "WanPipeline",
        "boundary_ratio": None,
        "expand_timesteps": False,
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", TOKENIZER_CLASS],
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "transformer_2": [None, None],
        "vae": ["diffusers", "AutoencoderKLWan"],
    }


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n")


def write_checkpoint(
    folder: Path,
    specs: ModelSpecs,
    parts: Mapping[str, nnx.Module],
    *,
    dtype: Any,
    sampling: Mapping[str, Any],
) -> int:
    """Write a whole checkpoint; `sampling` becomes its svgen.json. Returns the bytes of its
    weights.
    """
    described = {
        "text_encoder": (text_config(specs.text), text_keys(specs.text), "model"),
        "transformer": (
            transformer_config(specs.transformer),
            transformer_keys(specs.transformer),
            "diffusion_pytorch_model",
        ),
        "vae": (vae_config(specs.vae), vae_keys(specs.vae), "diffusion_pytorch_model"),
    }
    size = 0
    for part, (config, keys, stem) in described.items():
        _write_json(folder / part / "config.json", config)
        found = tensors(parts[part], keys, dtype)
        save_file(found, folder / part / f"{stem}.safetensors", {"format": "pt"})
        size += sum(math.prod(one.shape) * one.itemsize for one in found.values())
    _write_json(folder / "scheduler" / "scheduler_config.json", SCHEDULER)
    _write_json(folder / "model_index.json", model_index())
    _write_json(folder / "svgen.json", sampling)
    write_tokenizer(folder / "tokenizer")
    return size


def sampling_json(sampling: Any) -> dict[str, Any]:
    """A `catalog.Sampling` as the values of svgen.json."""
    return {name: value for name, value in asdict(sampling).items() if value not in (None, (), "")}
