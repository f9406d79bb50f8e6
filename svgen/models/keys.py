"""Upstream tensor names (diffusers, transformers) -> leaves of our modules. Upstream names live here only."""

from dataclasses import dataclass

from svgen.config import TextSpec, TransformerSpec, VaeSpec

LINEAR = (1, 0)  # [out, in] -> [in, out]
CONV2D = (2, 3, 1, 0)  # [out, in, h, w] -> [h, w, in, out]
CONV3D = (2, 3, 4, 1, 0)  # [out, in, t, h, w] -> [t, h, w, in, out]


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Where one upstream tensor goes.

    `path` names the leaf in the module's nnx state, `axes` is the transposition applied on the way, `shape` what the
    tensor is reshaped to after it (None: as it is; it must keep the number of elements), `layer` the index along the
    leading axis of a leaf that stacks all layers (None: the tensor is the whole leaf). `optional` tensors may be absent.
    """

    path: tuple[str | int, ...]
    axes: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None
    layer: int | None = None
    optional: bool = False


# Upstream tensors that are read by nobody here, as regular expressions that match the whole name.
IGNORED: dict[str, tuple[str, ...]] = {"transformer": (), "text_encoder": (), "vae": ()}


def transformer_keys(spec: TransformerSpec) -> dict[str, Target]:
    """Name every tensor of `transformer/` and the leaf of `models.transformer.Transformer` it fills."""
    raise NotImplementedError


def text_keys(spec: TextSpec) -> dict[str, Target]:
    """Name every tensor of `text_encoder/` and the leaf of `models.text_encoder.TextEncoder` it fills."""
    raise NotImplementedError


def vae_keys(spec: VaeSpec) -> dict[str, Target]:
    """Name every tensor of `vae/` and the leaf of `models.vae.Vae` it fills."""
    raise NotImplementedError
