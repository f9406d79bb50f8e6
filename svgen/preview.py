"""A small picture of a video that is still being denoised: a sheet of frames, as PNG.

What is shown is the solver's estimate of the video, seen through a linear map from the channels of
a latent position to its colour. The map is fitted by least squares to what the model's own VAE
makes of patches of random colours, so that any VAE has one. It lacks all detail: a latent position
is 8x8 pixels. On the demo model it comes within 23.5 dB of the decoded colours on average (20.5 at
worst, 16 estimates); the best of all linear maps, fitted to those videos themselves, 23.7 and 18.2,
and one made of unit latents, a channel at a time, 20.9 and 18.3 (2026-12-01).

    frames 1, 9, 17 ... of the latents, in reading order:   1 2 3
                                                            4 5 6

The PNG is written here, by zlib: a process of ffmpeg takes longer than a step of a small model.
"""

import math
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from svgen.partial import check_output, write_whole

PATCH = 8  # latent positions along a side: the VAE looks at neighbours
PATCHES = 64  # of random colour; more of them bring no better map
SIDE_MAX = 32  # latent positions decoded at once
RIDGE = 1e-3
SHEETS = ((3, 4), (3, 3), (2, 4), (2, 3), (2, 2), (1, 3), (1, 2), (1, 1))  # rows, columns
WIDTH_PX, MAGNIFIED_MAX = 320, 4  # of a frame on the sheet; and how often a position is repeated
GAP_PX, GAP_LEVEL = 4, 40
SIGNATURE = b"\x89PNG\r\n\x1a\n"
MARK = b"Software\0svgen"  # says that a preview may be replaced
HEAD_BYTES = 64  # the mark lies within


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear map from latents to colours, 0 to 255."""

    matrix: np.ndarray  # float32 [Z, 3]
    offset: np.ndarray  # float32 [3]

    def colours(self, latents: np.ndarray) -> np.ndarray:
        """Map latents [..., Z] to uint8 [..., 3]."""
        return np.rint((latents @ self.matrix + self.offset).clip(0, 255)).astype(np.uint8)


def fit(decode: Callable[[np.ndarray], np.ndarray], shape: tuple[int, ...]) -> Projection:
    """Fit the map of a VAE, whose `decode` turns a latent frame [1, 1, H, W, Z] into uint8 pixels
    [h, w, 3]; `shape` is that of a run's latents.
    """
    rows, columns, channels = (*(min(side, SIDE_MAX) for side in shape[2:4]), shape[4])
    patches = math.ceil(rows / PATCH) * math.ceil(columns / PATCH)
    rng = np.random.default_rng(0)
    given, made = [], []
    for _ in range(math.ceil(PATCHES / patches)):
        frame = _patches(rng, rows, columns, channels)
        given.append(frame.reshape(-1, channels))
        made.append(_averaged(decode(frame[None, None]), rows, columns).reshape(-1, 3))
    return _least_squares(np.concatenate(given), np.concatenate(made))


def _patches(rng: np.random.Generator, rows: int, columns: int, channels: int) -> np.ndarray:
    """Draw a latent frame [H, W, Z] of even patches."""
    shape = (math.ceil(rows / PATCH), math.ceil(columns / PATCH), channels)
    drawn = rng.standard_normal(shape, np.float32)
    return drawn.repeat(PATCH, axis=0).repeat(PATCH, axis=1)[:rows, :columns]


def _averaged(pixels: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Average the pixels of each latent position: float32 [H, W, 3]."""
    height, width = pixels.shape[0] // rows, pixels.shape[1] // columns
    split = pixels.reshape(rows, height, columns, width, 3)
    return split.mean(axis=(1, 3), dtype=np.float32)


def _least_squares(given: np.ndarray, made: np.ndarray) -> Projection:
    """Ridge regression of colours [N, 3] on latents [N, Z], with a free offset."""
    means = given.mean(axis=0), made.mean(axis=0)
    given, made = given - means[0], made - means[1]
    square = given.T @ given + RIDGE * len(given) * np.eye(given.shape[1], dtype=np.float32)
    matrix = np.linalg.solve(square, given.T @ made)
    return Projection(matrix, means[1] - means[0] @ matrix)


def layout(frames: int) -> tuple[int, int]:
    """Rows and columns of a sheet: the fullest that so many latent frames fill."""
    return next((rows, columns) for rows, columns in SHEETS if rows * columns <= frames)


def shown(estimate: np.ndarray) -> np.ndarray:
    """Copy the frames [n, H, W, Z] that a sheet shows of latents [1, F, H, W, Z]: evenly chosen,
    the first and the last among them.
    """
    frames = estimate.shape[1]
    rows, columns = layout(frames)
    return estimate[0][np.linspace(0, frames - 1, rows * columns).round().astype(int)]


def sheet(projection: Projection, frames: np.ndarray) -> np.ndarray:
    """Draw frames [n, H, W, Z] side by side, smoothly enlarged: uint8 [h, w, 3]."""
    _, height, width, _ = frames.shape
    times = min(max(WIDTH_PX // width, 1), MAGNIFIED_MAX)
    tall, wide = _enlarging(height, times), _enlarging(width, times)
    colours = projection.colours(frames).astype(np.float32)
    large = np.rint(np.einsum("yh,nhwc,xw->nyxc", tall, colours, wide, optimize=True))
    rows, columns = layout(len(frames))
    room = ((0, 0), (0, GAP_PX), (0, GAP_PX), (0, 0))
    tiles = np.pad(large.astype(np.uint8), room, constant_values=GAP_LEVEL)
    tiles = tiles.reshape(rows, columns, *tiles.shape[1:]).swapaxes(1, 2)
    whole = tiles.reshape(rows * tiles.shape[1], columns * tiles.shape[3], 3)
    return whole[:-GAP_PX, :-GAP_PX]


def _enlarging(size: int, times: int) -> np.ndarray:
    """Weights [size x times, size] of linear interpolation between the centres of positions."""
    place = ((np.arange(size * times) + 0.5) / times - 0.5).clip(0, size - 1)
    return np.maximum(1 - abs(place[:, None] - np.arange(size)), 0).astype(np.float32)


def png(pixels: np.ndarray, note: str) -> bytes:
    """Write pixels, uint8 [h, w, 3], as a PNG of svgen with a note in it."""
    height, width, _ = pixels.shape
    lines = pixels.reshape(height, -1)
    above = np.concatenate([np.zeros_like(lines[:1]), lines[:-1]])
    filtered = np.pad(lines - above, ((0, 0), (1, 0)), constant_values=2)  # filter 2: less above
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"tEXt", MARK),
        (b"tEXt", b"Description\0" + note.encode("latin-1")),
        (b"IDAT", zlib.compress(filtered.tobytes(), 1)),
        (b"IEND", b""),
    )
    return SIGNATURE + b"".join(_chunk(name, body) for name, body in chunks)


def _chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def preview_path(video: Path) -> Path:
    """Where the preview of a video lies: beside it."""
    return video.with_name(f"{video.stem}.preview.png")


def is_preview(path: Path) -> bool:
    """Whether a file is a preview that svgen has written."""
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError:
        return False
    return head.startswith(SIGNATURE) and MARK in head


def check_preview(video: Path, *, overwrite: bool) -> None:
    """Raise unless the preview of a video can be written; one that was left over may be."""
    path = preview_path(video)
    check_output(path, overwrite=overwrite or is_preview(path))


def write_preview(path: Path, projection: Projection, frames: np.ndarray, note: str) -> None:
    """Write, or replace, the preview that shows latent frames [n, H, W, Z]."""
    write_whole(path, png(sheet(projection, frames), note), overwrite=True)
