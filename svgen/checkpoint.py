"""Reads a checkpoint folder in the diffusers layout: configs, and safetensors through a key map,
strictly.

Everything is checked from the headers before a byte of weights is read, and all complaints come in
one error: every upstream tensor is used once or on a written list of ignored ones, every leaf is
filled once. Leaves are then built one by one, cast and placed on the device, so host memory stays
near the target plus one leaf.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open

from svgen.config import ModelSpecs, TextSpec, TransformerSpec, VaeSpec
from svgen.errors import DownloadError, SvgenError
from svgen.models.keys import IGNORED, Target

MAX_JSON_BYTES = 16 << 20
SHOWN = 8  # complaints of one kind that a message spells out
FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
STEMS = {"text_encoder": "model"}  # file name without suffix; other parts: DEFAULT_STEM
DEFAULT_STEM = "diffusion_pytorch_model"

Path_ = tuple[str | int, ...]
Place = Callable[[Path_, np.ndarray], jax.Array]


def _bad(message: str, why: str, **details: Any) -> SvgenError:
    return DownloadError(
        "E_CHECKPOINT",
        message,
        why=why,
        hint="`svgen models verify NAME` finds what is damaged and names the command that mends it",
        details=details,
    )


def read_json(path: Path) -> dict[str, Any]:
    """Read one JSON object from a checkpoint; raises DownloadError if it is missing, huge or not an
    object.
    """
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise _bad(f"{path} has {size} bytes", f"at most {MAX_JSON_BYTES} are read")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise _bad(f"{path} cannot be read", error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise _bad(f"{path} is not valid JSON", str(error)) from error
    if not isinstance(value, dict):
        raise _bad(f"{path} holds {type(value).__name__}", "it must hold a JSON object")
    return value


def read_specs(folder: Path) -> ModelSpecs:
    """Read the three configs of a checkpoint folder."""
    return ModelSpecs(
        text=TextSpec.from_config(read_json(folder / "text_encoder" / "config.json")),
        transformer=TransformerSpec.from_config(read_json(folder / "transformer" / "config.json")),
        vae=VaeSpec.from_config(read_json(folder / "vae" / "config.json")),
    )


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor as a header describes it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="np")
    except FileNotFoundError as error:
        raise _bad(f"{path} is missing", "the checkpoint is incomplete") from error
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size if path.exists() else 0
        why = f"the file is truncated or corrupt ({error}); it has {size} bytes"
        raise _bad(f"{path} cannot be read", why, bytes=size) from error


def _headers(path: Path) -> dict[str, Stored]:
    with _open(path) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {
            name: Stored(path, part.get_dtype(), tuple(part.get_shape()))
            for name, part in slices.items()
        }


def _weight_map(index: Path) -> dict[str, str]:
    """The index file's tensor name -> file name, with every file name a plain one."""
    mapping = read_json(index).get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise _bad(f"{index} has no weight_map", "it must map tensor names to files")
    for file in mapping.values():
        if (
            not isinstance(file, str)
            or Path(file).name != file
            or not file.endswith(".safetensors")
        ):
            raise _bad(f"{index} names the file {file!r}", "shards lie beside the index")
    return mapping


def _stored(folder: Path, part: str) -> dict[str, Stored]:
    """Every tensor of a part, from the index if there is one, else from the one file. Folders are
    never searched.
    """
    stem = STEMS.get(part, DEFAULT_STEM)
    index = folder / part / f"{stem}.safetensors.index.json"
    single = folder / part / f"{stem}.safetensors"
    if not index.exists():
        return _headers(single)
    mapping = _weight_map(index)
    files = sorted(set(mapping.values()))
    missing = [file for file in files if not (folder / part / file).is_file()]
    if missing:
        why = f"{index.name} lists {len(files)} shards, {len(missing)} of them are not there"
        raise _bad(f"{folder / part}: missing {', '.join(missing[:SHOWN])}", why, files=missing)
    found = {}
    for file in files:
        found.update(_headers(folder / part / file))
    stale = sorted(set(found) ^ set(mapping))
    stale += sorted(
        name for name in set(found) & set(mapping) if found[name].file.name != mapping[name]
    )
    if stale:
        why = "the index belongs to other shards than those beside it"
        raise _bad(f"{index} is stale for {_some(stale)}", why, tensors=stale)
    return found


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _arranged_shape(stored: Stored, target: Target) -> tuple[int, ...] | None:
    """The shape a tensor has once split, transposed and joined; None if it does not fit the target
    at all.
    """
    shape = stored.shape
    if target.split is not None:
        if np.prod(shape) != np.prod(target.split):
            return None
        shape = target.split
    if target.axes is not None:
        if len(target.axes) != len(shape):
            return None
        shape = tuple(shape[axis] for axis in target.axes)
    if target.shape is not None:
        return target.shape if np.prod(shape) == np.prod(target.shape) else None
    return shape


def _arrange(tensor: np.ndarray, target: Target) -> np.ndarray:
    """Split, transpose and join a tensor as its target says."""
    if target.split is not None:
        tensor = tensor.reshape(target.split)
    if target.axes is not None:
        tensor = tensor.transpose(target.axes)
    return tensor if target.shape is None else tensor.reshape(target.shape)


def _leaf_shape(leaf: jax.ShapeDtypeStruct, target: Target) -> tuple[int, ...]:
    return leaf.shape if target.layer is None else leaf.shape[1:]


def _unexpected(stored: Mapping[str, Stored], keys: Mapping[str, Target], part: str) -> list[str]:
    ignored = [re.compile(pattern) for pattern in IGNORED[part]]
    return sorted(
        name
        for name in stored
        if name not in keys and not any(pattern.fullmatch(name) for pattern in ignored)
    )


def _complaints(
    stored: Mapping[str, Stored],
    keys: Mapping[str, Target],
    leaves: Mapping[Path_, jax.ShapeDtypeStruct],
    part: str,
) -> list[str]:
    """Everything that keeps `stored` from filling `leaves`, one line each."""
    filled = {(keys[name].path, keys[name].layer) for name in stored if name in keys}
    missing = sorted(
        name
        for name, target in keys.items()
        if (target.path, target.layer) not in filled and not target.optional
    )
    wrong = []
    for name in sorted(set(stored) & set(keys)):
        want = _leaf_shape(leaves[keys[name].path], keys[name])
        if _arranged_shape(stored[name], keys[name]) != want:
            have = "x".join(map(str, stored[name].shape))
            wrong.append(f"{name} ({have}, for {'x'.join(map(str, want))})")
    types = [f"{name} ({one.dtype})" for name, one in stored.items() if one.dtype not in FLOATS]
    extra = _unexpected(stored, keys, part)
    kinds = (("missing", missing), ("unexpected", extra), ("of another shape", wrong))
    lines = [f"{len(names)} {kind}: {_some(names)}" for kind, names in kinds if names]
    return lines + ([f"{len(types)} of a type that is not float: {_some(types)}"] if types else [])


def _put(_: Path_, array: np.ndarray) -> jax.Array:
    return jnp.asarray(array)


def _check_not_zero(name: str, file: Path, tensor: np.ndarray, part: str) -> None:
    """An all-zero matrix in the text encoder means a broken conversion: it makes garbage without
    any error.
    """
    if part == "text_encoder" and tensor.ndim > 1 and not tensor.any():
        raise _bad(f"{name} in {file} is all zeros", "a text encoder without it makes garbage")


def _read_leaf(
    leaf: jax.ShapeDtypeStruct,
    sources: list[tuple[str, Target]],
    stored: Mapping[str, Stored],
    part: str,
) -> np.ndarray:
    """Build one leaf on the host from all its tensors, cast to the leaf's type."""
    out = np.empty(leaf.shape, leaf.dtype)
    by_file = defaultdict(list)
    for name, target in sources:
        by_file[stored[name].file].append((name, target))
    for path, group in by_file.items():
        with _open(path) as file:  # opened again for each leaf: pages read so far leave memory
            for name, target in group:
                tensor = file.get_tensor(name)
                _check_not_zero(name, path, tensor, part)
                where = ... if target.layer is None else target.layer
                out[where] = _arrange(tensor, target)
    return out


def _sources(
    stored: Mapping[str, Stored], keys: Mapping[str, Target]
) -> dict[Path_, list[tuple[str, Target]]]:
    """The tensors of each leaf. Of two names for one tensor (an alias) the first in the key map is
    read.
    """
    taken: set[tuple[Path_, int | None]] = set()
    sources: dict[Path_, list[tuple[str, Target]]] = defaultdict(list)
    for name, target in keys.items():
        if name in stored and (target.path, target.layer) not in taken:
            taken.add((target.path, target.layer))
            sources[target.path].append((name, target))
    return sources


def load_module(
    folder: Path,
    part: str,
    abstract: nnx.Module,
    keys: Mapping[str, Target],
    place: Place = _put,
) -> nnx.Module:
    """Fill the module `abstract` (from `nnx.eval_shape`) with the weights of `folder/part`.

    `part` is "text_encoder", "transformer" or "vae"; `place` puts one leaf on the device. Weights
    are cast to the types of the leaves. Raises DownloadError naming everything that is missing,
    unexpected or of another shape.
    """
    graph, state = nnx.split(abstract)
    flat = dict(nnx.to_flat_state(state))
    leaves = {path: variable.get_value() for path, variable in flat.items()}
    stored = _stored(folder, part)
    complaints = _complaints(stored, keys, leaves, part)
    if complaints:
        raise _bad(f"{folder / part} does not fit its config.json", "; ".join(complaints))
    sources = _sources(stored, keys)
    filled = {}
    for path, variable in flat.items():
        array = _read_leaf(leaves[path], sources[path], stored, part)
        filled[path] = variable.replace(place(path, array))
    return nnx.merge(graph, nnx.from_flat_state(filled))
