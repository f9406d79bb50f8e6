"""Saves what a run has paid for, atomically: latents with the request they came from."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from svgen import __version__
from svgen.config import Request
from svgen.errors import FileError, SvgenError, UsageError

SCHEMA = "svgen.latents/1"
DISK_FULL = (28, 122)  # ENOSPC, EDQUOT


def latents_path(video: Path, request: Request) -> Path:
    """Where the latents of a video lie: beside it, under a name that only this request has."""
    return video.with_name(f"{video.stem}-{request.fingerprint[:8]}.latents.safetensors")


def save_latents(path: Path, latents: np.ndarray, request: Request) -> None:
    """Write latents [1, F, H, W, Z] and their request; the file appears whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    metadata = {
        "schema": SCHEMA,
        "svgen": __version__,
        "request": json.dumps(request.as_json(), ensure_ascii=True),
    }
    try:
        save_file({"latents": np.ascontiguousarray(latents, np.float32)}, partial, metadata)
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise _not_written(path, error) from error
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def _not_written(path: Path, error: Exception) -> SvgenError:
    full = getattr(error, "errno", None) in DISK_FULL or "No space left" in str(error)
    return FileError(
        "E_DISK_FULL" if full else "E_WRITE",
        f"the latents cannot be written to {path}",
        why=getattr(error, "strerror", None) or str(error),
        hint="free some space, or choose another folder with -o",
    )


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
            latents = file.get_tensor("latents")
    except (OSError, SafetensorError) as error:
        raise _no_latents(path, str(error)) from error
    if latents.ndim != 5 or latents.shape[0] != 1 or latents.dtype != np.float32:
        raise _no_latents(path, f"latents are {latents.dtype}{list(latents.shape)}")
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
    known = {item.name: item.type for item in fields(Request)}
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ValueError(f"unknown field {unknown[0]!r}")
    checked = {name: _typed(name, value, known[name]) for name, value in values.items()}
    try:
        return Request(**checked)
    except TypeError as error:
        raise ValueError(str(error)) from error


def _typed(name: str, value: Any, kind: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool) and kind is float:
        value = float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{name} = {value!r} is not of type {getattr(kind, '__name__', kind)}")
    return value
