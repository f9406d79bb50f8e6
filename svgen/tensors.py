"""Reads tensors out of safetensors files, and of the leaf that they fill only the part asked for.

Chips hold parts of a leaf (`sharding.weight_axis`). Where the split axis runs over the rows of the
stored matrix, a host reads the rows of its own chips and no others; what is stored otherwise is
small, and read whole. Tensors are read, not mapped: mapped pages count as memory, and a file cut
meanwhile would kill the process.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from svgen.errors import DownloadError, SvgenError
from svgen.models.keys import Target

FLOATS = {  # safetensors' names
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "F8_E5M2": np.dtype(jnp.float8_e5m2),
}

Index = tuple[slice, ...]  # one slice an axis


def bad_checkpoint(message: str, why: str, **details: Any) -> SvgenError:
    """Make the error of a checkpoint that cannot be read."""
    return DownloadError(
        "E_CHECKPOINT",
        message,
        why=why,
        hint="`svgen models verify NAME` finds what is damaged and names the command that mends it",
        details=details,
    )


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor as a header describes it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int  # of its bytes in the file


def read_numbers(stored: Stored, first: int, count: int) -> np.ndarray:
    """Read `count` numbers of a tensor from the one at `first` on, flat, in the file's type."""
    dtype = FLOATS[stored.dtype]
    try:
        with open(stored.file, "rb") as file:
            file.seek(stored.start + first * dtype.itemsize)
            numbers = np.fromfile(file, dtype, count)
    except OSError as error:
        why = error.strerror or str(error)
        raise bad_checkpoint(f"{stored.file} cannot be read", why) from error
    if len(numbers) != count:
        why = "it became shorter while it was read"
        raise bad_checkpoint(f"{stored.file} cannot be read", why)
    return numbers


def read_part(stored: Stored, target: Target, index: Index) -> np.ndarray:
    """Read the part `index` of the leaf (of one layer of it) that a tensor becomes."""
    axis, order = _rows(stored.shape, target)
    rows = order[index[axis]] if len(order) else order
    if len(rows) == len(order):
        whole = read_numbers(stored, 0, math.prod(stored.shape)).reshape(stored.shape)
        return arrange(whole, target)[index]
    first, width = int(rows.min()), stored.shape[1]
    count = int(rows.max()) + 1 - first
    block = read_numbers(stored, first * width, count * width).reshape(count, width)
    chosen = block[rows - first]
    return chosen[:, index[1]] if axis == 0 else chosen.T[index[0]]


def _rows(shape: tuple[int, ...], target: Target) -> tuple[int, np.ndarray]:
    """Which axis of a leaf runs over the rows of a stored matrix, and the row at each of its
    places: none where no axis does.
    """
    split = target.split or shape
    if len(shape) == 2 and target.axes is None and target.shape is None:
        return 0, np.arange(shape[0])
    turned = target.axes is not None and target.axes[0] == len(split) - 1
    if len(shape) != 2 or not turned or target.shape not in (None, shape[::-1]):
        return 0, np.arange(0)
    return 1, np.arange(shape[0]).reshape(split[:-1]).transpose(target.axes[1:]).ravel()


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
