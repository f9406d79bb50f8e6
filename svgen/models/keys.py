"""Upstream tensor names (diffusers, transformers) -> leaves of our modules. They live here only."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from svgen.config import TextSpec, TransformerSpec, VaeSpec

LINEAR = (1, 0)  # [out, in] -> [in, out]
CONV2D = (2, 3, 1, 0)  # [out, in, h, w] -> [h, w, in, out]
CONV3D = (2, 3, 4, 1, 0)  # [out, in, t, h, w] -> [t, h, w, in, out]


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Where one upstream tensor goes.

    `path` names the leaf in the module's nnx state. On the way the tensor is reshaped to `split`,
    transposed by `axes` and reshaped to `shape` (each None: left as it is). `layer` is the index
    along the leading axis of a leaf that stacks all layers (None: the tensor is the whole leaf).
    `optional` tensors may be absent. `stored` is upstream's shape, given wherever the tensor is
    reshaped.
    """

    path: tuple[str | int, ...]
    split: tuple[int, ...] | None = None
    axes: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None
    layer: int | None = None
    optional: bool = False
    stored: tuple[int, ...] | None = None


# Upstream tensors that are read by nobody here, as regular expressions that match the whole name.
IGNORED: dict[str, tuple[str, ...]] = {"transformer": (), "text_encoder": (), "vae": ()}


def _linear(theirs: str, *ours: str, layer: int | None = None) -> dict[str, Target]:
    return {
        f"{theirs}.weight": Target(path=(*ours, "kernel"), axes=LINEAR, layer=layer),
        f"{theirs}.bias": Target(path=(*ours, "bias"), layer=layer),
    }


def _rotated(
    spec: TransformerSpec, theirs: str, ours: tuple[str, ...], layer: int
) -> dict[str, Target]:
    """A projection of q or k and the norm after it, with the pairs that RoPE rotates moved half a
    head apart.

    Upstream rotates neighbours: channels 0 1 2 3 4 5 of a head become 0 2 4 1 3 5 here. Scores do
    not change.
    """
    heads, half, width = spec.heads, spec.head_dim // 2, spec.width
    vector = {
        "split": (heads, half, 2),
        "axes": (0, 2, 1),
        "shape": (width,),
        "layer": layer,
        "stored": (width,),
    }
    part, letter = ours
    kernel = Target(
        path=(*ours, "kernel"),
        split=(heads, half, 2, width),
        axes=(3, 0, 2, 1),
        shape=(width, width),
        layer=layer,
        stored=(width, width),
    )
    return {
        f"{theirs}.to_{letter}.weight": kernel,
        f"{theirs}.to_{letter}.bias": Target(path=(*ours, "bias"), **vector),
        f"{theirs}.norm_{letter}.weight": Target(path=(part, f"{letter}_scale"), **vector),
    }


def _layer_keys(spec: TransformerSpec, layer: int) -> dict[str, Target]:
    """The tensors of one transformer layer."""
    keys: dict[str, Target] = {}
    for letter in "qk":
        keys |= _rotated(spec, "attn1", ("self_attention", letter), layer)
        keys |= _linear(f"attn2.to_{letter}", "text_attention", letter, layer=layer)
        scale = Target(path=("text_attention", f"{letter}_scale"), layer=layer)
        keys[f"attn2.norm_{letter}.weight"] = scale
    for theirs, ours in (("attn1", "self_attention"), ("attn2", "text_attention")):
        keys |= _linear(f"{theirs}.to_v", ours, "v", layer=layer)
        keys |= _linear(f"{theirs}.to_out.0", ours, "out", layer=layer)
    keys |= _linear("ffn.net.0.proj", "mlp_in", layer=layer)
    keys |= _linear("ffn.net.2", "mlp_out", layer=layer)
    if spec.cross_norm:
        keys["norm2.weight"] = Target(path=("norm_scale",), layer=layer)
        keys["norm2.bias"] = Target(path=("norm_bias",), layer=layer)
    keys["scale_shift_table"] = _modulation(6, spec.width, layer)
    return {
        f"blocks.{layer}.{name}": replace(target, path=("layers", *target.path))
        for name, target in keys.items()
    }


def _modulation(rows: int, width: int, layer: int | None = None) -> Target:
    return Target(path=("modulation",), shape=(rows, width), stored=(1, rows, width), layer=layer)


def transformer_keys(spec: TransformerSpec) -> dict[str, Target]:
    """Name every tensor of `transformer/` and the leaf of `models.transformer.Transformer` it
    fills.
    """
    cells = spec.patch[0] * spec.patch[1] * spec.patch[2]
    patch = Target(
        path=("patch_in", "kernel"),
        axes=CONV3D,
        shape=(cells * spec.in_channels, spec.width),
        stored=(spec.width, spec.in_channels, *spec.patch),
    )
    keys = {
        "patch_embedding.weight": patch,
        "patch_embedding.bias": Target(path=("patch_in", "bias")),
        "scale_shift_table": _modulation(2, spec.width),
    }
    keys |= _linear("condition_embedder.time_embedder.linear_1", "time_in")
    keys |= _linear("condition_embedder.time_embedder.linear_2", "time_out")
    keys |= _linear("condition_embedder.time_proj", "time_modulation")
    keys |= _linear("condition_embedder.text_embedder.linear_1", "text_in")
    keys |= _linear("condition_embedder.text_embedder.linear_2", "text_out")
    keys |= _linear("proj_out", "patch_out")
    for layer in range(spec.layers):
        keys |= _layer_keys(spec, layer)
    return keys


# Within a layer of the text encoder: upstream's name -> (leaf, axes).
TEXT_LAYER: dict[str, tuple[str, tuple[int, ...] | None]] = {
    "0.layer_norm": ("attention_norm", None),
    "0.SelfAttention.q": ("query", LINEAR),
    "0.SelfAttention.k": ("key", LINEAR),
    "0.SelfAttention.v": ("value", LINEAR),
    "0.SelfAttention.o": ("out", LINEAR),
    "0.SelfAttention.relative_attention_bias": ("distance_bias", None),
    "1.layer_norm": ("mlp_norm", None),
    "1.DenseReluDense.wi_0": ("gate", LINEAR),
    "1.DenseReluDense.wi_1": ("up", LINEAR),
    "1.DenseReluDense.wo": ("down", LINEAR),
}


def text_keys(spec: TextSpec) -> dict[str, Target]:
    """Name every tensor of `text_encoder/` and the leaf of `models.text_encoder.TextEncoder`.

    The embedding is stored as `shared.weight`, as `encoder.embed_tokens.weight` or as both: one
    leaf, two names.
    """
    keys = {
        "shared.weight": Target(path=("embedding",)),
        "encoder.embed_tokens.weight": Target(path=("embedding",), optional=True),
        "encoder.final_layer_norm.weight": Target(path=("norm",)),
    }
    for layer in range(spec.layers):
        for name, (leaf, axes) in TEXT_LAYER.items():
            target = Target(path=("layers", leaf), axes=axes, layer=layer)
            keys[f"encoder.block.{layer}.layer.{name}.weight"] = target
    return keys


def vae_keys(spec: VaeSpec) -> dict[str, Target]:
    """Name every tensor of `vae/` and the leaf of `models.vae.Vae` it fills.

    Upstream nests the decoder by levels and numbers the encoder's layers; ours are two flat chains
    in calling order.
    """
    z = spec.z_channels
    keys = _vae_pointwise("quant_conv.", ("to_moments",), 2 * z, 2 * z)
    keys |= _vae_pointwise("post_quant_conv.", ("from_latents",), z, z)
    for side, layers in (("encoder", _vae_encoder(spec)), ("decoder", _vae_decoder(spec))):
        for index, (name, list_keys) in enumerate(layers):
            keys |= list_keys(f"{side}.{name}", (side, "layers", index))
    return keys


def _vae_encoder(spec: VaeSpec) -> list[tuple[str, Callable[..., dict[str, Target]]]]:
    """List the encoder's layers: upstream prefix, and the function that names the tensors."""
    blocks = []
    width = spec.base_width
    levels = zip(spec.multipliers, (*spec.temporal_downsample, None), strict=True)
    for multiplier, temporal in levels:
        for _ in range(spec.blocks):
            out = spec.base_width * multiplier
            blocks.append(partial(_vae_residual, width=width, out=out))
            width = out
        if temporal is not None:
            blocks.append(partial(_vae_resample, temporal=temporal))
    numbered = [(f"down_blocks.{index}.", block) for index, block in enumerate(blocks)]
    last = ("", partial(_vae_normed, norm="norm_out", conv="conv_out", width=width))
    return [("conv_in.", _vae_conv), *numbered, *_vae_middle(width), last]


def _vae_decoder(spec: VaeSpec) -> list[tuple[str, Callable[..., dict[str, Target]]]]:
    """List the decoder's layers, as `_vae_encoder` does; a level's upsampling halves the width."""
    width = spec.base_width * spec.multipliers[-1]
    layers = [("conv_in.", _vae_conv), *_vae_middle(width)]
    upsample = (*reversed(spec.temporal_downsample), None)
    levels = zip(reversed(spec.multipliers), upsample, strict=True)
    for level, (multiplier, temporal) in enumerate(levels):
        for index in range(spec.blocks + 1):
            out = spec.base_width * multiplier
            block = partial(_vae_residual, width=width, out=out)
            layers.append((f"up_blocks.{level}.resnets.{index}.", block))
            width = out
        if temporal is not None:
            resample = partial(_vae_resample, temporal=temporal)
            layers.append((f"up_blocks.{level}.upsamplers.0.", resample))
            width //= 2
    last = ("", partial(_vae_normed, norm="norm_out", conv="conv_out", width=width))
    return [*layers, last]


def _vae_middle(width: int) -> list[tuple[str, Callable[..., dict[str, Target]]]]:
    residual = partial(_vae_residual, width=width, out=width)
    attention = partial(_vae_attention, width=width)
    names = ("mid_block.resnets.0.", "mid_block.attentions.0.", "mid_block.resnets.1.")
    return list(zip(names, (residual, attention, residual), strict=True))


def _vae_conv(
    name: str, path: tuple[str | int, ...], axes: tuple[int, ...] = CONV3D
) -> dict[str, Target]:
    return {
        f"{name}weight": Target(path=(*path, "kernel"), axes=axes),
        f"{name}bias": Target(path=(*path, "bias")),
    }


def _vae_pointwise(
    name: str, path: tuple[str | int, ...], width: int, out: int
) -> dict[str, Target]:
    """A 1x1x1 convolution of videos, which is one of frames here."""
    keys = _vae_conv(name, path)
    weight, stored = f"{name}weight", (out, width, 1, 1, 1)
    keys[weight] = replace(keys[weight], shape=(1, 1, width, out), stored=stored)
    return keys


def _vae_norm(path: tuple[str | int, ...], width: int, axes: int) -> Target:
    """The scale of a norm, which upstream keeps with `axes` axes of length 1 behind it."""
    stored = (width,) + (1,) * axes
    return Target(path=(*path, "norm", "scale"), shape=(width,), stored=stored)


def _vae_normed(
    name: str, path: tuple[str | int, ...], *, norm: str, conv: str, width: int
) -> dict[str, Target]:
    scale = _vae_norm(path, width, 3)
    return {f"{name}{norm}.gamma": scale} | _vae_conv(f"{name}{conv}.", (*path, "conv"))


def _vae_residual(
    name: str, path: tuple[str | int, ...], *, width: int, out: int
) -> dict[str, Target]:
    keys = _vae_normed(name, (*path, "first"), norm="norm1", conv="conv1", width=width)
    keys |= _vae_normed(name, (*path, "second"), norm="norm2", conv="conv2", width=out)
    if width != out:
        keys |= _vae_pointwise(f"{name}conv_shortcut.", (*path, "shortcut"), width, out)
    return keys


def _vae_attention(name: str, path: tuple[str | int, ...], *, width: int) -> dict[str, Target]:
    keys = {f"{name}norm.gamma": _vae_norm(path, width, 2)}
    keys |= _vae_conv(f"{name}to_qkv.", (*path, "to_qkv"), CONV2D)
    return keys | _vae_conv(f"{name}proj.", (*path, "to_out"), CONV2D)


def _vae_resample(name: str, path: tuple[str | int, ...], *, temporal: bool) -> dict[str, Target]:
    keys = _vae_conv(f"{name}resample.1.", (*path, "conv"), CONV2D)
    return keys | (_vae_conv(f"{name}time_conv.", (*path, "time")) if temporal else {})
