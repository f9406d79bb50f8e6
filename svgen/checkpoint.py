"""Reads a checkpoint folder in the diffusers layout: configs, and safetensors through a key map,
strictly.

Everything is checked from the headers before a byte of weights is read, and all complaints come in
one error: every upstream tensor is used once or on a written list of ignored ones, every leaf is
filled once. Leaves are then built one by one, cast and placed on the device, so host memory stays
near the target plus one leaf. A leaf that is split over chips is read in their parts.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open

from svgen.config import ModelSpecs, TextSpec, TransformerSpec, VaeSpec
from svgen.models.keys import IGNORED, Target
from svgen.sharding import Place
from svgen.tensors import (
    FLOATS,
    Index,
    Stored,
    bad_checkpoint,
    read_numbers,
    read_part,
    stored_shape,
)
from svgen.untrusted import SHARD, check_safetensors, read_start

MAX_JSON_BYTES = 16 << 20
SHOWN = 8  # complaints of one kind that a message spells out
SHOWN_LETTERS = 200  # of one name
CHUNK = 1 << 22  # numbers of two tensors that are compared at a time
STEMS = {"text_encoder": "model"}  # file name without suffix; other parts: DEFAULT_STEM
DEFAULT_STEM = "diffusion_pytorch_model"

Path_ = tuple[str | int, ...]
Read = Callable[[Index], np.ndarray]  # a part of a leaf


def read_json(path: Path) -> dict[str, Any]:
    """Read one JSON object from a checkpoint; raises DownloadError if it is missing, huge or not an
    object.
    """
    try:
        data = read_start(path, MAX_JSON_BYTES + 1)
        if len(data) > MAX_JSON_BYTES:
            why = f"at most {MAX_JSON_BYTES} bytes are read"
            raise bad_checkpoint(f"{path} is too large", why)
        value = json.loads(data)
    except OSError as error:
        raise bad_checkpoint(f"{path} cannot be read", error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise bad_checkpoint(f"{path} is not valid JSON", _shown(str(error))) from error
    if not isinstance(value, dict):
        raise bad_checkpoint(f"{path} holds {type(value).__name__}", "it must hold a JSON object")
    return value


def read_specs(folder: Path) -> ModelSpecs:
    """Read the three configs of a checkpoint folder."""
    return ModelSpecs(
        text=TextSpec.from_config(read_json(folder / "text_encoder" / "config.json")),
        transformer=TransformerSpec.from_config(read_json(folder / "transformer" / "config.json")),
        vae=VaeSpec.from_config(read_json(folder / "vae" / "config.json")),
    )


def _open(path: Path) -> Any:
    try:
        check_safetensors(path)
        return safe_open(path, framework="np")
    except FileNotFoundError as error:
        raise bad_checkpoint(f"{path} is missing", "the checkpoint is incomplete") from error
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size if path.exists() else 0
        why = f"the file is truncated or corrupt ({_shown(str(error))}); it has {size} bytes"
        raise bad_checkpoint(f"{path} cannot be read", why, bytes=size) from error


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


def _weight_map(index: Path) -> dict[str, str]:
    """The index file's tensor name -> file name, with every file name a plain one."""
    mapping = read_json(index).get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise bad_checkpoint(f"{index} has no weight_map", "it must map tensor names to files")
    for file in mapping.values():
        if not isinstance(file, str) or not SHARD.fullmatch(file):
            why = "shards lie beside the index"
            raise bad_checkpoint(f"{index} names the file {_shown(file)}", why)
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
        raise bad_checkpoint(f"{folder / part}: missing {_some(missing)}", why, files=missing)
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
        raise bad_checkpoint(f"{index} is stale for {_some(stale)}", why, tensors=stale)
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


def _put(_: Path_, shape: tuple[int, ...], read: Read) -> jax.Array:
    # jnp.asarray would compile a program for each shape
    return jax.device_put(read((slice(None),) * len(shape)))


def _check_not_zero(name: str, stored: Stored, values: np.ndarray) -> None:
    """An all-zero matrix in the text encoder means a broken conversion: it makes garbage without
    any error. `values` are some of it.
    """
    if len(stored.shape) < 2 or values.any():
        return
    size = math.prod(stored.shape)
    firsts = range(0, size, CHUNK)
    if not any(read_numbers(stored, one, min(CHUNK, size - one)).any() for one in firsts):
        why = "a text encoder without it makes garbage"
        raise bad_checkpoint(f"{name} in {stored.file} is all zeros", why)


def _reader(
    leaf: jax.ShapeDtypeStruct,
    sources: list[tuple[str, Target]],
    stored: Mapping[str, Stored],
    part: str,
) -> Read:
    """Make what builds parts of one leaf on the host from all its tensors, cast to its type."""

    def read(index: Index) -> np.ndarray:
        chosen = [range(size)[one] for size, one in zip(leaf.shape, index, strict=True)]
        out = np.empty([len(places) for places in chosen], leaf.dtype)
        for name, target in sources:
            if target.layer is not None and target.layer not in chosen[0]:
                continue
            inner = index if target.layer is None else index[1:]
            values = read_part(stored[name], target, inner)
            if part == "text_encoder":
                _check_not_zero(name, stored[name], values)
            out[... if target.layer is None else chosen[0].index(target.layer)] = values
        return out

    return read


def _differ(one: Stored, other: Stored, dtype: np.dtype) -> bool:
    """Whether two tensors differ as `dtype`, read a chunk at a time; NaN equals NaN."""
    size = math.prod(one.shape)
    for first in range(0, size, CHUNK):
        count = min(CHUNK, size - first)
        pair = [read_numbers(tensor, first, count).astype(dtype) for tensor in (one, other)]
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
            raise bad_checkpoint(
                message, "they are two names for one tensor", tensors=[first, name]
            )


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
        raise bad_checkpoint(f"{folder / part} does not fit its config.json", "; ".join(complaints))
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

    `part` is "text_encoder", "transformer" or "vae"; `place` puts one leaf on the device, or the
    parts of it that it reads on theirs. Weights are cast to the types of the leaves. Raises
    DownloadError naming everything that is missing, unexpected or of another shape.
    """
    graph, state = nnx.split(abstract)
    flat = dict(nnx.to_flat_state(state))
    leaves = _leaves(abstract)
    stored = _fitting(folder, part, leaves, keys)
    _check_aliases(stored, keys, leaves)
    sources = _sources(stored, keys)
    filled = {}
    for path, variable in flat.items():
        read = _reader(leaves[path], sources[path], stored, part)
        placed = place(path, leaves[path].shape, read)
        filled[path] = variable.replace(jax.block_until_ready(placed))  # the host's copy is free
    return nnx.merge(graph, nnx.from_flat_state(filled))
