"""Frozen descriptions of a run: the three networks, a preset, a request. Read from JSON, checked on
construction.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Self

from svgen.errors import DownloadError, SvgenError, shown

TEXT_TOKENS = (
    512  # the text encoder reads, and cross-attention sees, this many tokens (padding included)
)
MAX_DIMENSION = 1 << 20  # no single size in a config is larger; anything above is a corrupt file
MAX_REPEATS = {"num_layers": 1024, "num_res_blocks": 64}  # each is built, or named by tensor
MAX_LEVELS = 8  # of the VAE
SHOWN_LETTERS = 100  # of a value in a message
DENSE = "dense"  # the schedule that every model is made for
DTYPES = ("bfloat16", "float32")  # of weights and products
SPARSITY_RANGES: dict[str, tuple[float, float]] = {
    "band_share": (0.01, 1.0),
    "dense_steps": (0, 1000),
    "dense_layers": (0, 1000),
    "rows": (1, 4096),
    "budget": (0.001, 100.0),
}
SMALL_PARAMETERS = 5_000_000_000  # models below it lose more to sparsity: presets have values apart


def _corrupt(name: str, value: object, rule: str) -> SvgenError:
    return DownloadError(
        "E_CHECKPOINT",
        f"config.json has {name} = {shown(value, SHOWN_LETTERS)}",
        why=rule,
        hint="fetch the model again with `svgen models verify NAME`, or use another checkpoint",
    )


def _check_sizes(spec: Any) -> None:
    """Every `int` (or tuple of them) of a spec is a size: positive and not absurd."""
    for item in fields(spec):
        value = getattr(spec, item.name)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, bool) or not isinstance(number, int):
                continue
            _check_size(item.name, number)


def _check_size(name: str, number: int) -> None:
    most = MAX_REPEATS.get(name, MAX_DIMENSION)
    if not 1 <= number <= most:
        raise _corrupt(name, number, f"it must lie between 1 and {most}")


def _check_product(name: str, *factors: int) -> None:
    """Sizes that are fine one by one may still make a width that no file can hold."""
    if math.prod(factors) > MAX_DIMENSION:
        raise _corrupt(name, factors, f"their product must be at most {MAX_DIMENSION}")


def _check_eps(name: str, eps: float) -> None:
    if not 0 < eps < 1:
        raise _corrupt(name, eps, "it must lie between 0 and 1")


def _read(config: Mapping[str, Any], name: str, kind: type, default: Any = None) -> Any:
    """Take one typed value from an upstream config; a missing one needs a default."""
    value = config.get(name, default)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) < 1e300 else math.inf
    if isinstance(value, float) and not math.isfinite(value):
        raise _corrupt(name, value, "it must be finite")
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise _corrupt(name, value, f"it must be of type {kind.__name__}")
    if kind is int:
        _check_size(name, value)
    return value


def _read_list(config: Mapping[str, Any], name: str, kind: type, default: Any = None) -> tuple:
    values = config.get(name, default)
    if not isinstance(values, (list, tuple)) or not 0 < len(values) <= 1024:
        raise _corrupt(name, values, "it must be a list of 1 to 1024 values")
    return tuple(_read({name: value}, name, kind) for value in values)


def _require(config: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Fail on a config that asks for something this code does not compute. Absent keys are fine."""
    for name, value in expected.items():
        if name in config and config[name] != value:
            raise _corrupt(name, config[name], f"svgen computes only {value!r} here")


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSpec:
    """UMT5 encoder (`text_encoder/config.json`)."""

    vocabulary: int
    width: int
    mlp_width: int
    heads: int
    head_dim: int
    layers: int
    buckets: int = 32
    max_distance: int = 128
    eps: float = 1e-6

    def __post_init__(self) -> None:
        _check_sizes(self)
        _check_eps("layer_norm_epsilon", self.eps)
        _check_product("num_heads, d_kv", self.heads, self.head_dim)
        if self.buckets < 4 or self.max_distance <= self.buckets // 4:
            value = (self.buckets, self.max_distance)
            rule = "4 buckets at least, and a distance beyond a quarter of them"
            name = "relative_attention_num_buckets, relative_attention_max_distance"
            raise _corrupt(name, value, rule)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read transformers' UMT5 config; raises DownloadError for what is missing or not computed
        here.
        """
        _require(config, {"is_gated_act": True, "dense_act_fn": "gelu_new", "model_type": "umt5"})
        _require(config, {"feed_forward_proj": "gated-gelu"})
        return cls(
            vocabulary=_read(config, "vocab_size", int),
            width=_read(config, "d_model", int),
            mlp_width=_read(config, "d_ff", int),
            heads=_read(config, "num_heads", int),
            head_dim=_read(config, "d_kv", int),
            layers=_read(config, "num_layers", int),
            buckets=_read(config, "relative_attention_num_buckets", int, 32),
            max_distance=_read(config, "relative_attention_max_distance", int, 128),
            eps=_read(config, "layer_norm_epsilon", float, 1e-6),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerSpec:
    """Wan's diffusion transformer (`transformer/config.json`)."""

    heads: int
    head_dim: int
    layers: int
    mlp_width: int
    in_channels: int = 16
    out_channels: int = 16
    text_width: int = 4096
    frequency_width: int = 256
    patch: tuple[int, int, int] = (1, 2, 2)  # latent frames, rows, columns that make one token
    cross_norm: bool = True
    eps: float = 1e-6
    max_positions: int = 1024  # along each axis of the grid

    def __post_init__(self) -> None:
        _check_sizes(self)
        _check_eps("eps", self.eps)
        if len(self.patch) != 3:
            raise _corrupt("patch_size", self.patch, "it must hold three numbers")
        if self.head_dim % 2 or self.head_dim < 6:
            raise _corrupt("attention_head_dim", self.head_dim, "it must be even and at least 6")
        if self.frequency_width % 2:
            raise _corrupt("freq_dim", self.frequency_width, "it must be even")
        _check_product("num_attention_heads, attention_head_dim", self.heads, self.head_dim)
        cells = math.prod(self.patch)
        _check_product("patch_size, channels", cells, max(self.in_channels, self.out_channels))

    @property
    def width(self) -> int:
        """Width of the residual stream, A*D."""
        return self.heads * self.head_dim

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read diffusers' WanTransformer3DModel config; raises DownloadError for image-to-video
        models and the like.
        """
        _require(config, {"qk_norm": "rms_norm_across_heads", "image_dim": None})
        _require(config, {"added_kv_proj_dim": None, "pos_embed_seq_len": None})
        channels = _read(config, "in_channels", int, 16)
        return cls(
            heads=_read(config, "num_attention_heads", int),
            head_dim=_read(config, "attention_head_dim", int),
            layers=_read(config, "num_layers", int),
            mlp_width=_read(config, "ffn_dim", int),
            in_channels=channels,
            out_channels=_read(config, "out_channels", int, channels),
            text_width=_read(config, "text_dim", int, 4096),
            frequency_width=_read(config, "freq_dim", int, 256),
            patch=_read_list(config, "patch_size", int, [1, 2, 2]),
            cross_norm=_read(config, "cross_attn_norm", bool, True),
            eps=_read(config, "eps", float, 1e-6),
            max_positions=_read(config, "rope_max_seq_len", int, 1024),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class VaeSpec:
    """Wan 2.1's causal video autoencoder (`vae/config.json`)."""

    base_width: int
    z_channels: int
    multipliers: tuple[int, ...] = (1, 2, 4, 4)
    blocks: int = 2  # residual blocks per level
    temporal_downsample: tuple[bool, ...] = (False, True, True)
    latents_mean: tuple[float, ...]
    latents_std: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_sizes(self)
        if len(self.multipliers) > MAX_LEVELS:
            raise _corrupt("dim_mult", self.multipliers, f"it must hold {MAX_LEVELS} at most")
        _check_product("base_dim, dim_mult", self.base_width, max(self.multipliers))
        if len(self.temporal_downsample) != len(self.multipliers) - 1:
            rule = f"it must hold {len(self.multipliers) - 1} values, one less than dim_mult"
            raise _corrupt("temperal_downsample", self.temporal_downsample, rule)
        for name in ("latents_mean", "latents_std"):
            if len(getattr(self, name)) != self.z_channels:
                rule = f"it must hold z_dim = {self.z_channels} values"
                raise _corrupt(name, getattr(self, name), rule)
        if min(self.latents_std) <= 0:
            raise _corrupt("latents_std", self.latents_std, "every value must be positive")

    @property
    def stride(self) -> int:
        """Pixels per latent cell, along rows and columns."""
        return 2 ** (len(self.multipliers) - 1)

    @property
    def frame_stride(self) -> int:
        """Frames per latent frame (the first latent frame holds one)."""
        return 2 ** sum(self.temporal_downsample)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read diffusers' AutoencoderKLWan config; raises DownloadError for Wan 2.2's residual
        variant.
        """
        _require(config, {"is_residual": False, "patch_size": None, "attn_scales": []})
        _require(config, {"in_channels": 3, "out_channels": 3, "decoder_base_dim": None})
        return cls(
            base_width=_read(config, "base_dim", int),
            z_channels=_read(config, "z_dim", int),
            multipliers=_read_list(config, "dim_mult", int, [1, 2, 4, 4]),
            blocks=_read(config, "num_res_blocks", int, 2),
            temporal_downsample=_read_list(config, "temperal_downsample", bool),
            latents_mean=_read_list(config, "latents_mean", float),
            latents_std=_read_list(config, "latents_std", float),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpecs:
    """The three networks of one checkpoint folder."""

    text: TextSpec
    transformer: TransformerSpec
    vae: VaeSpec

    def __post_init__(self) -> None:
        channels = (self.transformer.in_channels, self.transformer.out_channels)
        if channels != (self.vae.z_channels, self.vae.z_channels):
            rule = f"the transformer must read and write the VAE's {self.vae.z_channels} channels"
            raise _corrupt("in_channels, out_channels", channels, rule)
        if self.text.width != self.transformer.text_width:
            rule = f"the text encoder gives {self.text.width} channels"
            raise _corrupt("text_dim", self.transformer.text_width, rule)


@dataclass(frozen=True, kw_only=True, slots=True)
class SparsitySchedule:
    """Which attention calls of a run are sparse, and how sparse.

    The first steps and the first layers of every step are dense, counted in steps and layers, never
    in noise. A preset may give `dense_steps` as a share of the steps (a float); a request holds the
    count. A head whose error under both masks exceeds `budget` stays dense; None: none does.
    """

    band_share: float  # of all pairs, that the band holds: `attention.masks.band_width`
    dense_steps: int | float = 0
    dense_layers: int = 0
    rows: int = 64  # query rows that are sampled to route a head
    budget: float | None = None  # |sparse - dense| / |dense|

    def __post_init__(self) -> None:
        for name, (least, most) in SPARSITY_RANGES.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ValueError(f"{name} = {value} must lie between {least} and {most}")

    def counted(self, steps: int) -> Self:
        """The schedule with `dense_steps` as a whole number, a share of `steps` rounded up."""
        if isinstance(self.dense_steps, int):
            return self
        return replace(self, dense_steps=math.ceil(self.dense_steps * steps))


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """What one TOML preset decides: a resolution and how it is denoised. `None` leaves the model's
    default.
    """

    name: str
    width_px: int
    height_px: int
    made_px: tuple[int, int] | None = None  # the size it was made for, if it was given another
    schedule: str = DENSE
    sparsity: SparsitySchedule | None = None  # None: every call is dense
    small_sparsity: SparsitySchedule | None = None  # for models below `SMALL_PARAMETERS`
    frames: int | None = None
    steps: int | None = None
    shift: float | None = None
    description: str = ""
    source: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Everything that decides the pixels of one video, and nothing else. It is the recipe inside
    the MP4.
    """

    prompt: str
    negative: str = ""
    model: str  # catalog name, organisation/repository, or path
    revision: str | None = None
    width_px: int
    height_px: int
    frames: int
    fps: float
    steps: int
    guidance: float
    shift: float
    seed: int
    item: int = 0
    preset: str | None = None
    schedule: str = DENSE  # a name; what it means is in `sparsity`
    sparsity: SparsitySchedule | None = None
    dtype: str = "float32"
    truncate: bool = False

    def as_json(self) -> dict[str, Any]:
        """Plain values, in field order."""
        return asdict(self)

    @property
    def fingerprint(self) -> str:
        """SHA-256 over every field: equal exactly when two requests ask for the same pixels."""
        text = json.dumps(self.as_json(), sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class Effective:
    """A request with where each of its values came from (`flag`, `recipe`, `preset`, `model`,
    `drawn`).
    """

    request: Request
    origin: Mapping[str, str] = field(default_factory=dict)
