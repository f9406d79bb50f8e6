"""Configs of real checkpoints give the right specs; hostile ones give an error naming the key."""

import dataclasses
import json
import math

import pytest

from svgen.config import (
    MAX_DIMENSION,
    ModelSpecs,
    Request,
    SparsitySchedule,
    TextSpec,
    TransformerSpec,
    VaeSpec,
)
from svgen.errors import DownloadError
from svgen.resume import request_from_json

# As in the repositories of Wan 2.1.
TEXT = {
    "architectures": ["UMT5EncoderModel"],
    "d_ff": 10240,
    "d_kv": 64,
    "d_model": 4096,
    "dense_act_fn": "gelu_new",
    "feed_forward_proj": "gated-gelu",
    "is_gated_act": True,
    "layer_norm_epsilon": 1e-06,
    "model_type": "umt5",
    "num_heads": 64,
    "num_layers": 24,
    "relative_attention_max_distance": 128,
    "relative_attention_num_buckets": 32,
    "tie_word_embeddings": False,
    "vocab_size": 256384,
}
WAN_1_3B = {
    "_class_name": "WanTransformer3DModel",
    "added_kv_proj_dim": None,
    "attention_head_dim": 128,
    "cross_attn_norm": True,
    "eps": 1e-06,
    "ffn_dim": 8960,
    "freq_dim": 256,
    "image_dim": None,
    "in_channels": 16,
    "num_attention_heads": 12,
    "num_layers": 30,
    "out_channels": 16,
    "patch_size": [1, 2, 2],
    "pos_embed_seq_len": None,
    "qk_norm": "rms_norm_across_heads",
    "rope_max_seq_len": 1024,
    "text_dim": 4096,
}
WAN_14B = WAN_1_3B | {"num_attention_heads": 40, "num_layers": 40, "ffn_dim": 13824}
VAE = {
    "_class_name": "AutoencoderKLWan",
    "attn_scales": [],
    "base_dim": 96,
    "dim_mult": [1, 2, 4, 4],
    "dropout": 0.0,
    "latents_mean": [
        *[-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508],
        *[0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921],
    ],
    "latents_std": [
        *[2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743],
        *[3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.916],
    ],
    "num_res_blocks": 2,
    "temperal_downsample": [False, True, True],
    "z_dim": 16,
}
VAE_22 = {  # what Wan 2.2's TI2V-5B says more, or differently
    "base_dim": 160,
    "decoder_base_dim": 256,
    "in_channels": 12,
    "out_channels": 12,
    "is_residual": True,
    "patch_size": 2,
    "z_dim": 48,
}
READERS = {
    "text": (TextSpec.from_config, TEXT),
    "transformer": (TransformerSpec.from_config, WAN_14B),
    "vae": (VaeSpec.from_config, VAE),
}


def test_text_config_of_wan():
    assert TextSpec.from_config(TEXT) == TextSpec(
        vocabulary=256384,
        width=4096,
        mlp_width=10240,
        heads=64,
        head_dim=64,
        layers=24,
        buckets=32,
        max_distance=128,
        eps=1e-6,
    )


@pytest.mark.parametrize(
    ("config", "heads", "layers", "mlp_width", "width"),
    [(WAN_1_3B, 12, 30, 8960, 1536), (WAN_14B, 40, 40, 13824, 5120)],
    ids=["1.3b", "14b"],
)
def test_transformer_config_of_wan(config, heads, layers, mlp_width, width):
    spec = TransformerSpec.from_config(config)
    assert spec.width == width
    assert spec == TransformerSpec(
        heads=heads,
        head_dim=128,
        layers=layers,
        mlp_width=mlp_width,
        in_channels=16,
        out_channels=16,
        text_width=4096,
        frequency_width=256,
        patch=(1, 2, 2),
        cross_norm=True,
        eps=1e-6,
        max_positions=1024,
    )


def test_transformer_config_when_unusual_is_read_not_assumed():
    config = WAN_1_3B | {"patch_size": [2, 1, 4], "cross_attn_norm": False, "eps": 1e-5}
    config |= {"in_channels": 8, "out_channels": 8, "freq_dim": 32, "text_dim": 48}
    spec = TransformerSpec.from_config(config | {"rope_max_seq_len": 77})
    assert (spec.patch, spec.cross_norm, spec.eps) == ((2, 1, 4), False, 1e-5)
    assert (spec.in_channels, spec.out_channels, spec.frequency_width) == (8, 8, 32)
    assert (spec.text_width, spec.max_positions) == (48, 77)


def test_vae_config_of_wan():
    spec = VaeSpec.from_config(VAE)
    assert (spec.stride, spec.frame_stride) == (8, 4)
    assert spec == VaeSpec(
        base_width=96,
        z_channels=16,
        multipliers=(1, 2, 4, 4),
        blocks=2,
        temporal_downsample=(False, True, True),
        latents_mean=tuple(VAE["latents_mean"]),
        latents_std=tuple(VAE["latents_std"]),
    )


def test_optional_keys_when_absent_take_upstreams_defaults():
    needed = ("num_attention_heads", "attention_head_dim", "num_layers", "ffn_dim")
    assert TransformerSpec.from_config({name: WAN_14B[name] for name in needed}) == (
        TransformerSpec.from_config(WAN_14B)
    )
    optional = ("relative_attention_max_distance", "relative_attention_num_buckets")
    kept = {name: value for name, value in TEXT.items() if name not in optional}
    assert TextSpec.from_config(kept) == TextSpec.from_config(TEXT)


def test_whole_numbers_may_be_written_as_floats_and_the_reverse():
    assert TransformerSpec.from_config(WAN_14B | {"ffn_dim": 13824.0}).mlp_width == 13824
    mean = [1] * 16
    assert VaeSpec.from_config(VAE | {"latents_mean": mean}).latents_mean == (1.0,) * 16


SIZES = [
    *[("text", name) for name in ("vocab_size", "d_model", "d_ff", "num_heads", "d_kv")],
    *[("text", "num_layers"), ("text", "relative_attention_num_buckets")],
    ("text", "relative_attention_max_distance"),
    *[("transformer", name) for name in ("num_attention_heads", "attention_head_dim")],
    *[("transformer", name) for name in ("num_layers", "ffn_dim", "in_channels", "out_channels")],
    *[("transformer", name) for name in ("text_dim", "freq_dim", "rope_max_seq_len")],
    *[("vae", name) for name in ("base_dim", "z_dim", "num_res_blocks")],
]
NO_SIZES = [0, -1, -(10**400), MAX_DIMENSION + 1, 10**400, True, False, "12", None, [12]]
NO_SIZES += [{"a": 1}, 1.5, math.nan, math.inf, -math.inf, 1e300]


def refused(reader: str, changes: dict) -> DownloadError:
    """Read a config with changes; it must fail in the one way that is agreed."""
    read, config = READERS[reader]
    with pytest.raises(DownloadError) as caught:
        read({**config, **changes})
    error = caught.value
    assert (error.code, error.exit_code) == ("E_CHECKPOINT", 5)
    text = error.message + error.why
    assert "\n" not in text and len(text) < 400
    return error


@pytest.mark.parametrize(("reader", "name"), SIZES)
def test_size_when_hostile_is_refused_by_name(reader, name):
    for value in NO_SIZES:
        assert f"config.json has {name} = " in refused(reader, {name: value}).message, value


def test_sizes_that_are_always_needed_when_missing_are_refused_by_name():
    needed = [
        *[("text", name) for name in ("vocab_size", "d_model", "d_ff", "num_heads", "d_kv")],
        *[("transformer", name) for name in ("num_attention_heads", "attention_head_dim")],
        *[("transformer", name) for name in ("num_layers", "ffn_dim")],
        *[("vae", name) for name in ("base_dim", "z_dim", "temperal_downsample")],
        *[("vae", name) for name in ("latents_mean", "latents_std")],
    ]
    for reader, name in needed:
        read, config = READERS[reader]
        with pytest.raises(DownloadError, match=f"{name} = None"):
            read({key: value for key, value in config.items() if key != name})


@pytest.mark.parametrize(
    ("reader", "name", "value"),
    [
        ("text", "layer_norm_epsilon", "small"),
        ("text", "layer_norm_epsilon", -1e-6),
        ("text", "layer_norm_epsilon", math.nan),
        ("transformer", "eps", True),
        ("transformer", "eps", 0),
        ("transformer", "eps", 10**400),
        ("transformer", "eps", None),
        ("transformer", "cross_attn_norm", 1),
        ("transformer", "cross_attn_norm", "true"),
        ("transformer", "attention_head_dim", 7),
        ("transformer", "attention_head_dim", 4),
        ("transformer", "freq_dim", 33),
        ("transformer", "num_layers", 10**6),
        ("text", "num_layers", 10**6),
        ("vae", "num_res_blocks", 10**6),
        ("transformer", "num_attention_heads", MAX_DIMENSION),
        ("text", "num_heads", MAX_DIMENSION),
        ("vae", "base_dim", MAX_DIMENSION),
        ("text", "relative_attention_num_buckets", 3),
        ("text", "relative_attention_max_distance", 8),
        ("transformer", "patch_size", [1, 2]),
        ("transformer", "patch_size", [1, 2, 2, 1]),
        ("transformer", "patch_size", [1, 2, True]),
        ("transformer", "patch_size", [1, 2, 0]),
        ("transformer", "patch_size", [1, 2, -2]),
        ("transformer", "patch_size", [1, 1 << 10, 1 << 10]),
        ("transformer", "patch_size", []),
        ("transformer", "patch_size", 2),
        ("transformer", "patch_size", "122"),
        ("transformer", "patch_size", {"0": 1}),
        ("vae", "dim_mult", [1, 2, 4]),
        ("vae", "dim_mult", []),
        ("vae", "dim_mult", [1, 2, 4, 0]),
        ("vae", "dim_mult", [1] * 100_000),
        ("vae", "temperal_downsample", [False, True]),
        ("vae", "temperal_downsample", [0, 1, 1]),
        ("vae", "temperal_downsample", "yes"),
        ("vae", "temperal_downsample", [True] * 2000),
        ("vae", "latents_mean", [0.0] * 15),
        ("vae", "latents_mean", [0.0] * 17),
        ("vae", "latents_mean", [0.0] * 15 + [math.nan]),
        ("vae", "latents_mean", ["0"] * 16),
        ("vae", "latents_std", [1.0] * 15 + [0.0]),
        ("vae", "latents_std", [1.0] * 15 + [-1.0]),
        ("vae", "latents_std", [1.0] * 15 + [math.nan]),
        ("vae", "latents_std", [1.0] * 15 + [math.inf]),
        ("vae", "latents_std", [1.0] * 15 + [10**400]),
        ("vae", "latents_std", [1.0] * 15 + [True]),
        ("vae", "latents_std", [1.0] * 100_000),
    ],
)
def test_value_when_hostile_is_refused_by_name(reader, name, value):
    message = refused(reader, {name: value}).message
    assert name in message or (name == "dim_mult" and "temperal_downsample" in message)


def test_levels_when_many_and_consistent_are_refused():
    levels = {"dim_mult": [1] * 1000, "temperal_downsample": [True] * 999}
    assert "dim_mult" in refused("vae", levels).message


@pytest.mark.parametrize(
    ("reader", "name", "value"),
    [
        ("transformer", "image_dim", 1280),  # Wan 2.1 image-to-video
        ("transformer", "added_kv_proj_dim", 5120),
        ("transformer", "pos_embed_seq_len", 514),
        ("transformer", "qk_norm", "rms_norm"),
        ("text", "model_type", "t5"),
        ("text", "feed_forward_proj", "relu"),
        ("text", "is_gated_act", False),
        ("text", "dense_act_fn", "gelu"),
        ("vae", "attn_scales", [0.5]),
        *[
            ("vae", name, value)
            for name, value in VAE_22.items()
            if name not in ("base_dim", "z_dim")
        ],
    ],
)
def test_config_of_another_model_is_refused_by_name(reader, name, value):
    error = refused(reader, {name: value})
    assert f"{name} = {value!r}" in error.message and "svgen computes only" in error.why


def test_vae_of_wan_22_is_refused():
    assert "is_residual = True" in refused("vae", VAE_22).message


def specs(**changes: object) -> ModelSpecs:
    transformer = TransformerSpec.from_config(WAN_1_3B | changes)
    return ModelSpecs(
        text=TextSpec.from_config(TEXT), transformer=transformer, vae=VaeSpec.from_config(VAE)
    )


def test_parts_that_belong_together_are_accepted():
    assert specs().transformer.width == 1536


@pytest.mark.parametrize(
    ("name", "value"), [("in_channels", 36), ("out_channels", 8), ("text_dim", 768)]
)
def test_parts_that_do_not_fit_each_other_are_refused(name, value):
    with pytest.raises(DownloadError, match=name) as caught:
        specs(**{name: value})
    assert caught.value.code == "E_CHECKPOINT"


REQUEST = Request(
    prompt="a cat",
    negative="blurry",
    model="wan2.1-1.3b",
    revision="abc",
    width_px=832,
    height_px=480,
    frames=81,
    fps=16.0,
    steps=50,
    guidance=6.0,
    shift=8.0,
    seed=7,
    item=0,
    preset="480p",
    schedule="mine",
    sparsity=SparsitySchedule(band_share=0.3, dense_steps=10, dense_layers=1),
    dtype="float32",
    truncate=False,
)
FINGERPRINT = "f32c45c4efcfb93fb028c6fd7486e579e2524354ce67bd348e948527d68098dc"


def test_fingerprint_is_the_same_in_every_version():
    assert REQUEST.fingerprint == FINGERPRINT


def test_fingerprint_changes_with_every_single_field():
    seen = {REQUEST.fingerprint}
    nested = REQUEST.sparsity
    for item in dataclasses.fields(SparsitySchedule):
        value = getattr(nested, item.name)
        other = dataclasses.replace(nested, **{item.name: (value or 0) + 0.5})
        seen.add(dataclasses.replace(REQUEST, sparsity=other).fingerprint)
    for item in dataclasses.fields(Request):
        value = getattr(REQUEST, item.name)
        if isinstance(value, bool):
            other = not value
        elif isinstance(value, SparsitySchedule):
            other = None
        else:
            other = f"{value}x" if isinstance(value, str) else value + 1
        seen.add(dataclasses.replace(REQUEST, **{item.name: other}).fingerprint)
    fields = len(dataclasses.fields(Request)) + len(dataclasses.fields(SparsitySchedule))
    assert len(seen) == 1 + fields


def test_schedule_counts_its_dense_steps_and_keeps_to_its_ranges():
    schedule = SparsitySchedule(band_share=0.3, dense_steps=0.25)
    assert schedule.counted(50).dense_steps == 13
    assert schedule.counted(50).counted(10).dense_steps == 13
    for name, value in (("band_share", 0.0), ("rows", 0), ("budget", -1.0), ("dense_steps", -1)):
        with pytest.raises(ValueError, match=name):
            dataclasses.replace(schedule, **{name: value})


def test_fingerprint_knows_absent_from_empty_and_one_field_from_another():
    requests = [
        dataclasses.replace(REQUEST, revision=None),
        dataclasses.replace(REQUEST, revision=""),
        dataclasses.replace(REQUEST, revision="None"),
        dataclasses.replace(REQUEST, prompt="a catblurry", negative=""),
        dataclasses.replace(REQUEST, prompt="", negative="a catblurry"),
        dataclasses.replace(REQUEST, prompt="a c\u00e4t"),
        dataclasses.replace(REQUEST, prompt="a ca\u0308t"),
        dataclasses.replace(REQUEST, prompt="\ud800"),  # half of a pair, from a broken terminal
    ]
    assert len({request.fingerprint for request in requests}) == len(requests)


def test_request_survives_json():
    request = dataclasses.replace(REQUEST, prompt="\u732b \U0001f408 \"'\n\\", revision=None)
    again = request_from_json(json.loads(json.dumps(request.as_json())))
    assert again == request and again.fingerprint == request.fingerprint
