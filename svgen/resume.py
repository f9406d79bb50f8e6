"""Saves what a run has paid for, atomically, with the request it came from.

NAME-HASH.state.safetensors      between two steps: what a run goes on from
NAME-HASH.latents.safetensors    after the last step: what the VAE decodes
"""

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
from svgen.config import DENSE, DTYPES, Request, SparsitySchedule
from svgen.errors import SvgenError, UsageError, shown
from svgen.partial import partial_file, sync, write_error
from svgen.untrusted import check_safetensors

T = TypeVar("T")
SCHEMA = "svgen.latents/1"
STATE_SCHEMA = "svgen.state/1"
STATE = ("step", "latents", "corrected", "estimate", "older_estimate")  # of `DenoiseState`
LEAST = {  # whole numbers of a request
    **dict.fromkeys(("width_px", "height_px", "frames", "steps"), 1),
    **dict.fromkeys(("seed", "item"), 0),
}
MOST = 2**63 - 1
MAX_LATENTS_BYTES = 1 << 29  # 81 frames of 2560x1440 have 77 MB
SHOWN_LETTERS = 100  # of a value in a message
STEM_BYTES = 200  # of the video's name in theirs: a file name has 255, and suffixes are added
SHOWN_WHY = 500  # the library's complaints may quote whole headers


def latents_path(video: Path, request: Request) -> Path:
    """Where the latents of a video lie: beside it, under a name that only this request has."""
    return _beside(video, request, "latents")


def _beside(video: Path, request: Request, kind: str) -> Path:
    stem, letters = video.stem, os.fsencode(video.stem)
    if len(letters) > STEM_BYTES:
        stem = letters[:STEM_BYTES].decode("utf-8", "ignore")
    return video.with_name(f"{stem}-{request.fingerprint[:8]}.{kind}.safetensors")


def save_latents(path: Path, latents: np.ndarray, request: Request) -> None:
    """Write latents [1, F, H, W, Z] and their request; the file appears whole or not at all."""
    tensors = {"latents": np.ascontiguousarray(latents, np.float32)}
    _save(path, tensors, SCHEMA, request)


def state_path(video: Path, request: Request) -> Path:
    """Where the state of an unfinished run lies: beside its video, as `latents_path`."""
    return _beside(video, request, "state")


def save_state(path: Path, state: Mapping[str, np.ndarray], request: Request) -> None:
    """Write the state between two steps, arrays named as in `STATE`; the file appears whole or not
    at all.
    """
    _save(path, {name: np.asarray(state[name], order="C") for name in STATE}, STATE_SCHEMA, request)


def load_state(
    path: Path, request: Request, shape: tuple[int, ...]
) -> dict[str, np.ndarray] | None:
    """Read the state of a run of this request; None if there is no such file.

    Raises UsageError (E_STATE) for a file that is no state of this request, with latents `shape`.
    """
    wanted = {name: ("I32", []) if name == "step" else ("F32", list(shape)) for name in STATE}
    state = _load_own(path, request, STATE_SCHEMA, wanted)
    if state is not None and not 0 < int(state["step"]) <= request.steps:
        raise _no_state(path, f"it has done {int(state['step'])} of {request.steps} steps")
    return state


def load_finished(path: Path, request: Request, shape: tuple[int, ...]) -> np.ndarray | None:
    """Read the latents that a run of this request ended with; None if there is no such file.

    Raises UsageError (E_STATE) for a file that does not hold this request's latents, of `shape`.
    """
    found = _load_own(path, request, SCHEMA, {"latents": ("F32", list(shape))})
    return None if found is None else found["latents"]


def _load_own(
    path: Path, request: Request, schema: str, wanted: Mapping[str, tuple[str, list[int]]]
) -> dict[str, np.ndarray] | None:
    """Read the `wanted` tensors (type, shape) of this request and version; None without a file."""
    if not os.path.lexists(path):
        return None
    try:
        check_safetensors(path)
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            if metadata.get("schema") != schema:
                raise _no_state(path, f"its header does not say {schema}")
            differing = differences(request, metadata)
            if differing:
                raise _no_state(path, f"it is of another request: {'; '.join(differing.values())}")
            _check_header(path, file, wanted)
            found = {name: file.get_tensor(name) for name in wanted}
    except (OSError, SafetensorError) as error:
        raise _no_state(path, str(error)) from error
    if not all(np.isfinite(value).all() for value in found.values()):
        raise _no_state(path, "it holds NaN or infinity")
    return found


def differences(request: Request, metadata: Mapping[str, str]) -> dict[str, str]:
    """Fields in which the request of a file is not this one, each with both values in words."""
    try:
        stored = json.loads(metadata.get("request", ""))
        stored = stored if isinstance(stored, dict) else {}
    except (ValueError, RecursionError):
        stored = {}
    wanted = json.loads(json.dumps(request.as_json()))
    pairs = {name: (stored.get(name), value) for name, value in wanted.items()}
    pairs["svgen's version"] = (metadata.get("svgen"), __version__)
    return {
        name: f"{name} differs ({_shown(there)} there, {_shown(here)} here)"
        for name, (there, here) in pairs.items()
        if there != here
    }


def _shown(value: Any) -> str:
    return shown(value, SHOWN_LETTERS)


def _check_header(path: Path, file: Any, wanted: Mapping[str, tuple[str, list[int]]]) -> None:
    """Hold a header against what it must be, before anything is read."""
    if sorted(file.keys()) != sorted(wanted):
        raise _no_state(path, f"it must hold {', '.join(wanted)}")
    for name, expected in wanted.items():
        part = file.get_slice(name)
        if (part.get_dtype(), part.get_shape()) != expected:
            raise _no_state(path, f"{name} is {part.get_dtype()}{part.get_shape()}, not {expected}")


def _no_state(path: Path, why: str) -> SvgenError:
    hint = f"delete {path} to begin anew, or choose another output with -o"
    return UsageError("E_STATE", f"{path} cannot be gone on from", why=why[:SHOWN_WHY], hint=hint)


def _save(path: Path, tensors: Mapping[str, np.ndarray], schema: str, request: Request) -> None:
    metadata = {
        "schema": schema,
        "svgen": __version__,
        "request": json.dumps(request.as_json(), ensure_ascii=True),
    }
    data = save(dict(tensors), metadata)
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
        why=why[:SHOWN_WHY],
        hint="give the .latents.safetensors file that a run has named",
    )


def load_latents(path: Path) -> tuple[np.ndarray, Request]:
    """Read latents and their request; raises UsageError for any other file."""
    try:
        check_safetensors(path)
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
            if 4 * math.prod(shape) > MAX_LATENTS_BYTES:
                raise _no_latents(path, f"latents have more than {MAX_LATENTS_BYTES} bytes")
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
        raise ValueError(f"unknown field {shown(unknown[0], SHOWN_LETTERS)}")
    checked = {name: _typed(name, value, known[name]) for name, value in values.items()}
    try:
        return kind(**checked)
    except TypeError as error:
        raise ValueError(str(error)) from error


def _typed(name: str, value: Any, kind: Any) -> Any:
    """Check one field's type, and that a number is one that a run could have had."""
    text = shown(value, SHOWN_LETTERS)
    whole = isinstance(value, int) and not isinstance(value, bool)
    if whole and abs(value) > MOST:
        raise ValueError(f"{name} = {text} is too large")
    if whole and kind is float:
        value = float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{name} = {text} is not of type {getattr(kind, '__name__', kind)}")
    if name == "dtype" and value not in DTYPES:
        raise ValueError(f"{name} = {text} is none of {', '.join(DTYPES)}")
    if kind is float and not math.isfinite(value):
        raise ValueError(f"{name} = {text} is not finite")
    if name in LEAST and value < LEAST[name]:
        raise ValueError(f"{name} = {text} is less than {LEAST[name]}")
    return value
