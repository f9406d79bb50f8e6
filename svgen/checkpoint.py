"""Reads a checkpoint folder in the diffusers layout: configs, and safetensors through a key map,
strictly.

Everything is checked from the headers before a byte of weights is read, and all complaints come in
one error: every upstream tensor is used once or on a written list of ignored ones, every leaf is
filled once. Leaves are then built one by one, cast and placed on the device, so host memory stays
near the target plus one leaf. Tensors are read, not mapped: mapped pages count as memory, and a
file cut meanwhile would kill the process.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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
from svgen.untrusted import SHARD, check_safetensors, read_start

MAX_JSON_BYTES = 16 << 20
SHOWN = 8  # complaints of one kind that a message spells out
SHOWN_LETTERS = 200  # of one name
CHUNK = 1 << 22  # numbers of two tensors that are compared at a time
FLOATS = {  # safetensors' names
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "F8_E5M2": np.dtype(jnp.float8_e5m2),
}
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
        data = read_start(path, MAX_JSON_BYTES + 1)
        if len(data) > MAX_JSON_BYTES:
            raise _bad(f"{path} is too large", f"at most {MAX_JSON_BYTES} bytes are read")
        value = json.loads(data)
    except OSError as error:
        raise _bad(f"{path} cannot be read", error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise _bad(f"{path} is not valid JSON", _shown(str(error))) from error
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
    start: int  # of its bytes in the file


def _open(path: Path) -> Any:
    try:
        check_safetensors(path)
        return safe_open(path, framework="np")
    except FileNotFoundError as error:
        raise _bad(f"{path} is missing", "the checkpoint is incomplete") from error
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size if path.exists() else 0
        why = f"the file is truncated or corrupt ({_shown(str(error))}); it has {size} bytes"
        raise _bad(f"{path} cannot be read", why, bytes=size) from error


def _headers(path: Path) -> dict[str, Stored]:
    """Every tensor of one file. The library checks the header and its offsets; it does not say
    where a tensor lies, so the header is read once more.
    """
    with _open(path):
        pass
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return {
        name: Stored(path, one["dtype"], tuple(one["shape"]), 8 + length + one["data_offsets"][0])
        for name, one in header.items()
        if name != "__metadata__"
    }


def _read(stored: Stored, first: int, count: int) -> np.ndarray:
    """Read `count` numbers of a tensor from the one at `first` on, flat, in the file's type."""
    dtype = FLOATS[stored.dtype]
    try:
        with open(stored.file, "rb") as file:
            file.seek(stored.start + first * dtype.itemsize)
            numbers = np.fromfile(file, dtype, count)
    except OSError as error:
        raise _bad(f"{stored.file} cannot be read", error.strerror or str(error)) from error
    if len(numbers) != count:
        raise _bad(f"{stored.file} cannot be read", "it became shorter while it was read")
    return numbers


def _weight_map(index: Path) -> dict[str, str]:
    """The index file's tensor name -> file name, with every file name a plain one."""
    mapping = read_json(index).get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise _bad(f"{index} has no weight_map", "it must map tensor names to files")
    for file in mapping.values():
        if not isinstance(file, str) or not SHARD.fullmatch(file):
            raise _bad(f"{index} names the file {_shown(file)}", "shards lie beside the index")
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
        raise _bad(f"{folder / part}: missing {_some(missing)}", why, files=missing)
    found, stale = {}, set()
    for file in files:
        for name, one in _headers(folder / part / file).items():
            if mapping.get(name) == file:
                found[name] = one
            else:
                stale.add(name)
    stale = sorted(stale | (set(mapping) - set(found)))
    if stale:
        why = "the index belongs to other shards than those beside it"
        raise _bad(f"{index} is stale for {_some(stale)}", why, tensors=stale)
    return found


def _shown(name: object) -> str:
    """A name out of a file, as text of one line."""
    text = name if isinstance(name, str) and name.isprintable() and name else repr(name)
    return text if len(text) <= SHOWN_LETTERS else f"{text[:SHOWN_LETTERS]}..."


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(map(_shown, names[:SHOWN])) + more


def _fits(stored: Stored, target: Target, want: tuple[int, ...]) -> bool:
    """Whether a tensor has upstream's shape of what becomes `want`."""
    return stored.shape == stored_shape(target, want)


def stored_shape(target: Target, leaf: tuple[int, ...]) -> tuple[int, ...]:
    """Upstream's shape of the tensor that becomes a leaf (one layer of it) of shape `leaf`."""
    if target.stored is not None or target.axes is None:
        return target.stored or leaf
    return tuple(leaf[target.axes.index(axis)] for axis in range(len(leaf)))


def arrange(tensor: np.ndarray, target: Target) -> np.ndarray:
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
        if not _fits(stored[name], keys[name], want):
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
    for name, target in sources:
        one = stored[name]
        tensor = _read(one, 0, math.prod(one.shape)).reshape(one.shape)
        _check_not_zero(name, one.file, tensor, part)
        where = ... if target.layer is None else target.layer
        out[where] = arrange(tensor, target)
    return out


def _differ(one: Stored, other: Stored, dtype: np.dtype) -> bool:
    """Whether two tensors differ as `dtype`, read a chunk at a time; NaN equals NaN."""
    size = math.prod(one.shape)
    for first in range(0, size, CHUNK):
        count = min(CHUNK, size - first)
        pair = [_read(tensor, first, count).astype(dtype) for tensor in (one, other)]
        if not np.array_equal(*pair, equal_nan=True):
            return True
    return False


def _check_aliases(
    stored: Mapping[str, Stored],
    keys: Mapping[str, Target],
    leaves: Mapping[Path_, jax.ShapeDtypeStruct],
) -> None:
    """Two names for one tensor may both be stored; then they must hold the same numbers."""
    read: dict[Target, str] = {}
    for name, target in keys.items():
        if name not in stored:
            continue
        first = read.setdefault(replace(target, optional=False), name)
        if first != name and _differ(stored[first], stored[name], leaves[target.path].dtype):
            files = dict.fromkeys(str(stored[one].file) for one in (first, name))
            message = f"{first} and {name} differ in {' and '.join(files)}"
            raise _bad(message, "they are two names for one tensor", tensors=[first, name])


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


def _leaves(abstract: nnx.Module) -> dict[Path_, jax.ShapeDtypeStruct]:
    flat = nnx.to_flat_state(nnx.split(abstract)[1])
    return {path: variable.get_value() for path, variable in flat}


def _fitting(
    folder: Path,
    part: str,
    leaves: Mapping[Path_, jax.ShapeDtypeStruct],
    keys: Mapping[str, Target],
) -> dict[str, Stored]:
    """The tensors of a part; raises DownloadError unless they fill `leaves`."""
    stored = _stored(folder, part)
    complaints = _complaints(stored, keys, leaves, part)
    if complaints:
        raise _bad(f"{folder / part} does not fit its config.json", "; ".join(complaints))
    return stored


def check_module(folder: Path, part: str, abstract: nnx.Module, keys: Mapping[str, Target]) -> None:
    """Raise what `load_module` would raise for the files' headers. Reads no weights."""
    _fitting(folder, part, _leaves(abstract), keys)


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
    leaves = _leaves(abstract)
    stored = _fitting(folder, part, leaves, keys)
    _check_aliases(stored, keys, leaves)
    sources = _sources(stored, keys)
    filled = {}
    for path, variable in flat.items():
        placed = place(path, _read_leaf(leaves[path], sources[path], stored, part))
        filled[path] = variable.replace(jax.block_until_ready(placed))  # the host's copy is free
    return nnx.merge(graph, nnx.from_flat_state(filled))
