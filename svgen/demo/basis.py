"""Latents that need no training: what most changes between blocks of frames, by principal axes.

A latent cell stands for 8x8 pixels of 4 frames. The demo's world is so plain that the first few
principal axes of such blocks hold nearly all of it. The flow learns on these latents from the first
minute; the VAE is taught to write the same (encoder) and to draw from them (decoder).
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np


class Basis(NamedTuple):
    """Maps blocks of pixels [..., 4*8*8*3] in [-1, 1] to latents of unit deviation [..., Z]."""

    mean: np.ndarray  # float32 [4*8*8*3]
    axes: np.ndarray  # float32 [4*8*8*3, Z]

    def latents(self, frames: np.ndarray) -> np.ndarray:
        """Project uint8 frames [T, h, w, 3] to float32 [F, h/8, w/8, Z], the first frame repeated
        as the VAE's first chunk is one frame.
        """
        return (blocks(frames) - self.mean) @ self.axes

    def save(self, path: Path) -> None:
        """Write both arrays."""
        np.savez(path, **self._asdict())

    @classmethod
    def load(cls, path: Path) -> "Basis":
        """Read what `save` wrote."""
        with np.load(path, allow_pickle=False) as file:
            return cls(file["mean"], file["axes"])

    @classmethod
    def fit(cls, clips: np.ndarray, channels: int) -> "Basis":
        """Find the axes of the greatest variance in uint8 clips [B, T, h, w, 3]."""
        rows = np.concatenate([blocks(clip).reshape(-1, CELL) for clip in clips])
        mean = rows.mean(0)
        rows -= mean
        variance, axes = np.linalg.eigh(rows.T @ rows / len(rows))
        first = slice(None, -channels - 1, -1)
        return cls(mean, (axes[:, first] / np.sqrt(variance[first])).astype(np.float32))


STRIDE, FRAME_STRIDE = 8, 4
CELL = FRAME_STRIDE * STRIDE * STRIDE * 3


def blocks(frames: np.ndarray) -> np.ndarray:
    """Cut uint8 frames [T, h, w, 3] into float32 [F, h/8, w/8, 4*8*8*3] in [-1, 1]."""
    count, height, width, colors = frames.shape
    first = np.repeat(frames[:1], FRAME_STRIDE - 1, axis=0)
    x = np.concatenate([first, frames]).astype(np.float32) / 127.5 - 1
    sides = (FRAME_STRIDE, height // STRIDE, STRIDE, width // STRIDE, STRIDE, colors)
    x = x.reshape((count + FRAME_STRIDE - 1) // FRAME_STRIDE, *sides)
    return x.transpose(0, 2, 4, 1, 3, 5, 6).reshape(len(x), sides[1], sides[3], CELL)
