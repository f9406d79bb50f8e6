"""Saves what a run has paid for, atomically: latents with the request they came from."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from svgen import __version__
from svgen.config import DENSE, Request, SparsitySchedule
from svgen.errors import SvgenError, UsageError
from svgen.partial import partial_file, sync, write_error

T = TypeVar("T")
SCHEMA = "svgen.latents/1"
LEAST = {  # whole numbers of a request
    **dict.fromkeys(("width_px", "height_px", "frames", "steps"), 1),
    **dict.fromkeys(("seed", "item"), 0),
}
MOST = 2**63 - 1
SHOWN_LETTERS = 100  # of a value in a message


def latents_path(video: Path, request: Request) -> Path:
    """Where the latents of a video lie: beside it, under a name that only this request has."""
    return video.with_name(f"{video.stem}-{request.fingerprint[:8]}.latents.safetensors")


def save_latents(path: Path, latents: np.ndarray, request: Request) -> None:
    """Write latents [1, F, H, W, Z] and their request; the file appears whole or not at all."""
    metadata = {
        "schema": SCHEMA,
        "svgen": __version__,
        "request": json.dumps(request.as_json(), ensure_ascii=True),
    }
    data = save({"latents": np.ascontiguousarray(latents, np.float32)}, metadata)
    with partial_file(path) as partial:
        try:
            partial.write_bytes(data)
            sync(partial)
            os.replace(partial, path)
        except OSError as error:
            raise write_error(path, error) from error


def _no_latents(path: Path, why: str) -> SvgenError:
    return UsageError(
        "E_LATENTS",
        f"{path} holds no latents of svgen",
        why=why,
        hint="give the .latents.safetensors file that a run has named",
    )


def load_latents(path: Path) -> tuple[np.ndarray, Request]:
    """Read latents and their request; raises UsageError for any other file."""
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            if metadata.get("schema") != SCHEMA:
                raise _no_latents(path, f"its header does not say {SCHEMA}")
            if list(file.keys()) != ["latents"]:
                raise _no_latents(path, "it must hold one tensor, named latents")
            part = file.get_slice("latents")
            dtype, shape = part.get_dtype(), part.get_shape()
            if dtype != "F32" or len(shape) != 5 or shape[0] != 1:
                raise _no_latents(path, f"latents are {dtype}{shape}, not F32[1, F, H, W, Z]")
            latents = file.get_tensor("latents")
    except (OSError, SafetensorError) as error:
        raise _no_latents(path, str(error)) from error
    try:
        request = request_from_json(json.loads(metadata.get("request", "")))
    except (ValueError, RecursionError) as error:
        raise _no_latents(path, f"its request cannot be read: {error}") from error
    return latents, request


def request_from_json(values: Any) -> Request:
    """Rebuild a request from untrusted JSON; raises ValueError naming the first field that does not
    fit.
    """
    if not isinstance(values, Mapping):
        raise ValueError("a request is a JSON object")
    if isinstance(values.get("sparsity"), Mapping):
        values = {**values, "sparsity": _build(SparsitySchedule, values["sparsity"])}
    request = _build(Request, values)
    if (request.schedule == DENSE) != (request.sparsity is None):
        raise ValueError(f"the schedule {request.schedule[:SHOWN_LETTERS]!r} and sparsity disagree")
    return request


def _build(kind: type[T], values: Mapping[str, Any]) -> T:
    """Make one dataclass of checked fields; raises ValueError."""
    known = {item.name: item.type for item in fields(kind)}
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ValueError(f"unknown field {repr(unknown[0])[:SHOWN_LETTERS]}")
    checked = {name: _typed(name, value, known[name]) for name, value in values.items()}
    try:
        return kind(**checked)
    except TypeError as error:
        raise ValueError(str(error)) from error


def _typed(name: str, value: Any, kind: Any) -> Any:
    """Check one field's type, and that a number is one that a run could have had."""
    shown = repr(value)[:SHOWN_LETTERS]
    whole = isinstance(value, int) and not isinstance(value, bool)
    if whole and abs(value) > MOST:
        raise ValueError(f"{name} = {shown} is too large")
    if whole and kind is float:
        value = float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{name} = {shown} is not of type {getattr(kind, '__name__', kind)}")
    if kind is float and not math.isfinite(value):
        raise ValueError(f"{name} = {shown} is not finite")
    if name in LEAST and value < LEAST[name]:
        raise ValueError(f"{name} = {shown} is less than {LEAST[name]}")
    return value
